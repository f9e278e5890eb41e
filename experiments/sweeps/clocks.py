"""Computes the simulated time of a run from its config.

The simulator goes through the same segments as the trainer. It needs only the
config, so the time of a run can be computed long after the training, and also
for a larger model than the trained one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dilocox_jax.api.simulation_setup import Options, Setup, cluster_of, set_up
from dilocox_jax.checks import check_path, flat
from dilocox_jax.codecs.named import link_names
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.sections import ModelConfig
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.transfer import Transport


@dataclasses.dataclass(frozen=True)
class Times:
  """Simulated times of a run on a clock.

  Attributes:
    at_s: Time from the start of the run to the end of every segment (seconds),
      by the segment's last inner step. The flush is not included.
    end_s: Time of the whole run with its flush (seconds).
    utilization: Share of `end_s` in which replicas took inner steps.
  """

  at_s: dict[int, float]
  end_s: float
  utilization: float

  def after(self, step: int) -> float:
    """Returns the time at which the last segment up to a step ended (seconds).

    Args:
      step: Number of inner steps. A segment counts if it ends at or before it.
    """
    ends_s = (end_s for stop, end_s in self.at_s.items() if stop <= step)
    return max(ends_s, default=0.0)


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
      # The other model replaces all fields of this one, also those that were
      # set.
      values |= flat({"model": dataclasses.asdict(ModelConfig())})
    applies = {
      path: value
      for path, value in self.changed.items()
      if path != "exchange.codec"
      or link_names(value) == link_names(values[path])
    }
    return from_mapping(values | applies)

  def times(self, config: RunConfig) -> Times:
    """Returns the times of all segments and of the run, and its utilization.

    Args:
      config: Config of the run that is trained.

    Raises:
      ValueError: If the run does not fit the cluster. The message is one line.
    """
    setup = self._setup(config)
    costs = LinkCosts(setup.link_costs.cluster, self.transport)
    clock = AnalyticClock(costs, setup.work)
    at_s = {
      segment.stop: clock.walk(setup.script.segment(segment)).now_s
      for segment in setup.plan.segments()
    }
    outcome = clock.walk(setup.script.flush(setup.plan))
    return Times(at_s, outcome.now_s, outcome.utilization)

  def step_s_of(self, config: RunConfig) -> float:
    """Returns the time of an inner step on the fastest replica (seconds)."""
    return float(min(self._setup(config).work.step_s))

  def _setup(self, config: RunConfig) -> Setup:
    options = Options(step_s=self.step_s)
    timed = self.timed(config)
    return set_up(timed, cluster_of(timed, self.cluster), options)


def clock_of(entry: Mapping[str, Any]) -> SweepClock:
  """Returns the clock that an entry of `clocks` in a sweep's config describes.

  Args:
    entry: Has a `cluster`, may have a `step_s`, and may change fields of the
      run that is timed.

  Raises:
    ValueError: If a field does not exist.
  """
  fields = {
    key: value
    for key, value in entry.items()
    if key not in ("name", "cluster", "step_s")
  }
  changed = flat(fields)
  for path in changed:
    check_path(RunConfig, path)
  return SweepClock(
    cluster=entry["cluster"], step_s=entry.get("step_s"), changed=changed
  )
