"""Proposes schedules that average more often early in a run, and times them."""

import dataclasses
from typing import Any

import numpy as np

from dilocox_jax.api.method_plans import changed
from dilocox_jax.api.simulation_setup import Options, cluster_of, set_up
from dilocox_jax.checks import require
from dilocox_jax.config import RunConfig
from dilocox_jax.config.run import check_config
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.simulate.equal_time import (
  TimedSchedule,
  constant_rounds,
  schedules_within,
)

_DERIVED = Options()  # Everything follows from config and cluster.


@dataclasses.dataclass(frozen=True)
class GrowingPlan:
  """A schedule of rounds, and what the run costs with it (simulated).

  Attributes:
    config: Config of the run with this schedule.
    total_s: Time of the whole run, with the exchanges that end it (seconds).
    sent_bytes: Bytes that one replica sends in the whole run.
    utilization: Share of the time that replicas spend in inner steps (0 to 1).
  """

  config: RunConfig
  total_s: float
  sent_bytes: int
  utilization: float


def growing_plans(
  config: RunConfig,
  cluster: str,
  options: Options = _DERIVED,
  utilization: float | None = None,
) -> list[GrowingPlan]:
  """Proposes schedules that average more often early in a run, and times them.

  Rounds of the config have H inner steps. The last rounds of a proposal have H,
  2 H or 4 H steps. There are two kinds of proposals:

  - Rounds grow from short ones (`sync.first_interval`), about as slowly as the
    time permits.
  - The run begins with data-parallel steps (`sync.warm_start_steps`), with
    about as many as the time permits. Replicas that meet in a mailbox have no
    such start.

  `utilization` says how long a run may take. The losses are not predicted.

  Args:
    config: Config of the run. Its method must not average gradients. All its
      rounds must have the same length, so `adaptive.mode` must not be
      "rank_and_interval". It must have no data-parallel start and no
      `membership`.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: Durations and transport, which neither config nor cluster states.
    utilization: Least share of a run's time that is spent in inner steps (above
      0, at most 1). None: a run may take as long as the config's own run.

  Returns:
    The plan of the config itself, then the proposals.

  Raises:
    TypeError: If the config is no `RunConfig`.
    ValueError: One line, if the cluster is unknown, if the run does not fit on
      it, if the config is not as required, or if `utilization` is out of its
      range.
  """
  check_config(config)
  require(
    utilization is None or 0 < utilization <= 1,
    f"utilization={utilization} must be above 0 and at most 1",
  )
  require(
    config.adaptive.mode != "rank_and_interval",
    "adaptive.mode='rank_and_interval' chooses H during the run: take 'rank'",
  )
  setup = set_up(config, cluster_of(config, cluster), options)
  run = setup.link_costs, setup.work, setup.script, setup.plan
  # The costs of the config's own run, whose rounds have one length.
  constant = constant_rounds(*run)
  most_s = constant.outcome.total_s
  if utilization is not None:
    # Inner steps take the same time in every schedule.
    most_s = float(np.mean(constant.outcome.compute_s)) / utilization

  def method_of(
    interval: int, first: int | None, per_doubling: int | None
  ) -> Method:
    return _with_rounds(config, interval, first, per_doubling).sync.named

  plans = [_plan(config, constant)]
  for schedule in schedules_within(most_s, *run, method_of):
    if config.uses_mailbox and schedule.warm_start_steps:
      continue
    plans.append(_plan(_with_schedule(config, schedule), schedule))
  return plans


def _plan(config: RunConfig, schedule: TimedSchedule) -> GrowingPlan:
  """Returns the plan of a config whose schedule was timed."""
  return GrowingPlan(
    config=config,
    total_s=schedule.outcome.total_s,
    sent_bytes=schedule.outcome.sent_bytes,
    utilization=schedule.outcome.utilization,
  )


def _with_schedule(config: RunConfig, schedule: TimedSchedule) -> RunConfig:
  """Returns a config with a schedule's rounds and data-parallel start."""
  with_rounds = _with_rounds(
    config,
    schedule.sync_interval,
    schedule.first_interval,
    schedule.steps_per_doubling,
  )
  start = {"sync.warm_start_steps": schedule.warm_start_steps}
  return changed(with_rounds, start)


def _with_rounds(
  config: RunConfig,
  interval: int,
  first_interval: int | None,
  steps_per_doubling: int | None,
) -> RunConfig:
  """Returns a config with rounds of given lengths, and no other changes.

  Args:
    config: Config of the run.
    interval: Number of inner steps of the last rounds.
    first_interval: Number of inner steps of the first rounds; None: `interval`.
    steps_per_doubling: Inner steps after which the length of a round doubles;
      None if `first_interval` is None.
  """
  changes: dict[str, Any] = {
    "sync.sync_interval": interval,
    "sync.first_interval": first_interval,
    "sync.steps_per_doubling": steps_per_doubling,
  }
  num_fragments = config.sync.named.schedule.num_fragments
  if num_fragments > 1:
    # The default number may depend on the lengths of rounds.
    changes["sync.num_fragments"] = num_fragments
  return changed(config, changes)
