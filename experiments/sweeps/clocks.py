"""Computes the simulated time of a run from its config.

The simulator goes through the same segments as the trainer. It needs only the
config, so the time of a run can be computed long after the training, and also
for a larger model than the trained one. So can tau, the number of inner steps
that hide an exchange.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from dilocox_jax.api.simulation_setup import Options, Setup, set_up
from dilocox_jax.checks import check_path, flat
from dilocox_jax.codecs.named import link_names
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.sections import ModelConfig
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Launch, Wait
from dilocox_jax.simulate.transfer import Transport
from experiments.sweeps.runs import nested


@dataclasses.dataclass(frozen=True)
class SweepClock:
  """A clock: a cluster and the model that is timed on it.

  Attributes:
    cluster: Preset or file of the cluster.
    step_s: Seconds of an inner step; None: derived from operations.
    changed: Fields of the run that is timed, where it is not the one that is
      trained.
    transport: How messages are sent. Steps, H and tau of the committed sweeps
      follow from messages that wait a round trip each, as gloo's do.
  """

  cluster: str
  step_s: float | None = None
  changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  transport: Transport = Transport(rtts_per_message=1.0)

  def timed(self, config: RunConfig) -> RunConfig:
    """Returns the config of the run that is timed in place of a trained one.

    Example: a run of `tiny` with "low_rank(rank=16)+int(bits=4)" is timed as
    one of `qwen_107b` with rank 2048. A codec of other links stays.

    Args:
      config: Config of the run that is trained.
    """
    values = flat(config.to_mapping())
    if "model.preset" in self.changed:
      # The other model replaces this one whole, sizes that were set included.
      values |= flat({"model": dataclasses.asdict(ModelConfig())})
    applies = {
      path: value
      for path, value in self.changed.items()
      if path != "exchange.codec"
      or link_names(value) == link_names(values[path])
    }
    return from_mapping(nested(values | applies))


def clock_of(given: Mapping[str, Any]) -> SweepClock:
  """Returns a clock from its entry in a sweep's config (`clocks`)."""
  own = ("name", "cluster", "step_s")
  changed = flat({k: v for k, v in given.items() if k not in own})
  for path in changed:
    check_path(RunConfig, path)
  return SweepClock(given["cluster"], given.get("step_s"), changed)


@dataclasses.dataclass(frozen=True)
class Times:
  """Simulated times of a run on a clock.

  Attributes:
    at_s: Time from the start to the end of every segment (seconds), by the
      segment's last inner step. The flush is not included.
    end_s: Time of the whole run with its flush (seconds).
    utilisation: Share of `end_s` in which replicas took inner steps.
  """

  at_s: dict[int, float]
  end_s: float
  utilisation: float

  def after(self, step: int) -> float:
    """Returns the time at which the last segment up to a step ended (seconds).

    Args:
      step: Number of inner steps. A segment counts if it ends at or before it.
    """
    ends_s = (end_s for stop, end_s in self.at_s.items() if stop <= step)
    return max(ends_s, default=0.0)


class PlannedTime:
  """Computes simulated times of one config on one clock."""

  def __init__(self, config: RunConfig, clock: SweepClock):
    """Prepares the simulation of the run on the clock's cluster.

    Args:
      config: Config of the run that is trained.
      clock: Cluster of the simulation. The clock also says which run is timed
        in place of the trained one (`SweepClock.timed`).

    Raises:
      ValueError: If the run does not fit the cluster. The message is one line.
    """
    options = Options(step_s=clock.step_s)
    setup = set_up(clock.timed(config), clock.cluster, options)
    costs = LinkCosts(setup.link_costs.cluster, clock.transport)
    self._setup: Setup = dataclasses.replace(setup, link_costs=costs)

  @property
  def step_s(self) -> float:
    """Time of an inner step on the fastest replica (seconds)."""
    return float(min(self._setup.work.step_s))

  def exchange_s(self, fragments: Iterable[int]) -> float:
    """Returns the time to exchange some fragments (seconds).

    A fragment is sent when the exchange of the previous fragment has ended.

    Args:
      fragments: Indices of the fragments, in order.
    """
    setup = self._setup
    clock = AnalyticClock(setup.link_costs, setup.work)
    for fragment in fragments:
      key = ("whole", fragment, 0, 0)
      operations = tuple(setup.script.traffic.exchange(fragment))
      clock.walk([Launch(key, operations), Wait(key)])
    return clock.walk([]).now_s

  @functools.cache  # noqa: B019 - it lives as long as the sweep.
  def times(self) -> Times:
    """Returns the times of all segments and of the run, and its utilisation."""
    setup = self._setup
    clock = AnalyticClock(setup.link_costs, setup.work)
    at_s = {
      segment.stop: clock.walk(setup.script.segment(segment)).now_s
      for segment in setup.plan.segments()
    }
    outcome = clock.walk(setup.script.flush(setup.plan))
    return Times(at_s, outcome.now_s, outcome.utilisation)


def rounds_from(clock: SweepClock, config: RunConfig) -> dict[str, int]:
  """Returns the tau and H with which inner steps just hide an exchange.

  Source: DiLoCoX, arXiv 2506.21263 (recalled). Its rule chooses H such that the
  local steps just hide the transfer.

  Example: an exchange takes 0.5 s and an inner step takes 0.03 s, so 17 steps
  (0.51 s) hide the exchange. The run has 2000 steps. A method whose tau differs
  from H gets tau = 17 and H = 40, the smallest divisor of 2000 that is at least
  2 tau = 34. A method with tau = H gets H = 20. A method with tau = H / P,
  whose fragments take turns on the link, gets H = w P with the smallest w such
  that w steps hide the largest fragment.

  Args:
    clock: Clock on which an exchange is timed.
    config: Config of the run.

  Returns:
    Config fields by dotted name: tau and H, or H alone for a method that has
    tau = H.
  """
  planned = PlannedTime(config, clock)
  schedule = config.sync.named.schedule
  interval, count = schedule.sync_interval, schedule.num_fragments
  tau = overlap_steps(planned.exchange_s(range(count)), planned.step_s)
  if count > 1 and schedule.overlap_steps == max(interval // count, 1):
    longest_s = max(planned.exchange_s([index]) for index in range(count))
    window = overlap_steps(longest_s, planned.step_s)
    return {"sync.sync_interval": window * count}
  if schedule.overlap_steps == interval:
    return {"sync.sync_interval": fitting_interval(tau, config.total_steps)}
  interval = fitting_interval(2 * tau, config.total_steps)
  return {"sync.overlap_steps": tau, "sync.sync_interval": interval}


def overlap_steps(exchange_s: float, step_s: float) -> int:
  """Returns tau: the fewest inner steps (at least 1) that hide an exchange.

  Args:
    exchange_s: Time of an exchange (seconds).
    step_s: Time of an inner step (seconds).
  """
  # In floating point, a quotient such as 0.3 / 0.1 may be slightly more than
  # the whole number. That must not add a step.
  return max(1, math.ceil(exchange_s / step_s - 1e-9))


def fitting_interval(least: int, total_steps: int) -> int:
  """Returns an H with which the run ends with a whole round, if there is one.

  Args:
    least: Fewest inner steps of a round.
    total_steps: Inner steps of the run.

  Returns:
    The smallest divisor of `total_steps` from `least` to 1.5 `least`; `least`
    itself if there is none. For 2000 steps, 34 becomes 40; for 1999, a prime
    number, it stays 34.
  """
  near = range(least, least + least // 2 + 1)
  return next((h for h in near if total_steps % h == 0), least)
