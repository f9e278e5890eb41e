"""Computes the simulated time of a run from its config.

The simulator goes through the same segments as the trainer. It needs only the
config. So the time of a run can be computed long after the training, and the
time of the same run with a larger model, too.

A *clock* is a simulated cluster on which runs are timed, perhaps with a larger
model than the one that was trained. The *flush* of a run is the exchanges that
are still due after its last inner step.
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
    at_s: Time from the start of the run to the end of each segment (seconds),
      by the segment's last inner step. A segment is a round, or several
      data-parallel steps. The flush is not included.
    end_s: Time of the whole run with its flush (seconds).
    utilization: Share of `end_s` in which replicas took inner steps, 0 to 1.
  """

  at_s: dict[int, float]
  end_s: float
  utilization: float

  def after(self, step: int) -> float:
    """Returns the simulated time after an inner step (seconds).

    Times are known only at the ends of segments (rounds, or several
    data-parallel steps). So the result is the end of the last segment that ends
    at or before this step; 0 if there is none.

    Args:
      step: Number of inner steps.
    """
    ends_s = (end_s for stop, end_s in self.at_s.items() if stop <= step)
    return max(ends_s, default=0.0)


@dataclasses.dataclass(frozen=True)
class SweepClock:
  """A clock: a cluster, and what differs in the run that is timed on it.

  The *timed* run is the trained run with some fields changed, such as a larger
  model.

  Attributes:
    cluster: Name of a preset, or path of a file, of the cluster.
    step_s: Seconds of an inner step; None: derived from the operations of the
      timed model and the devices of the cluster.
    changed: Values of the fields in which the timed run differs from the
      trained run, by dotted name.
    transport: How messages are sent. By default each message waits for a round
      trip, as with gloo. The numbers of steps, H and tau of the committed
      sweeps were chosen with this default.
  """

  cluster: str
  step_s: float | None = None
  changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  transport: Transport = Transport(rtts_per_message=1.0)

  def timed(self, config: RunConfig) -> RunConfig:
    """Returns the config of the run that is timed in place of a trained run.

    `exchange.codec` is changed only if the codec of the trained run consists of
    the same parts ("low_rank" and "int", for example), whatever their settings.

    Example: `changed` has the model `qwen_107b` and the codec
    "low_rank(rank=2048)+int(bits=4)". A run of `tiny` with
    "low_rank(rank=16)+int(bits=4)" is timed with both. A run of `tiny` with
    "int(bits=1)" is timed as `qwen_107b` with "int(bits=1)".

    Args:
      config: Config of the trained run.
    """
    values = flat(config.to_mapping())
    if "model.preset" in self.changed:
      # The other preset decides all fields of the model, so fields that were
      # set for the trained model go back to their defaults.
      values |= flat({"model": dataclasses.asdict(ModelConfig())})
    changed = dict(self.changed)
    codec = changed.get("exchange.codec")
    if codec is not None:
      trained_codec = values["exchange.codec"]
      if link_names(codec) != link_names(trained_codec):
        del changed["exchange.codec"]
    return from_mapping(values | changed)

  def times(self, config: RunConfig) -> Times:
    """Simulates the times of the run that is timed in place of a trained run.

    Args:
      config: Config of the trained run.

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
    return Times(
      at_s=at_s, end_s=outcome.now_s, utilization=outcome.utilization
    )

  def step_s_of(self, config: RunConfig) -> float:
    """Returns the time of an inner step on the fastest replica (seconds).

    Args:
      config: Config of the trained run.
    """
    return float(min(self._setup(config).work.step_s))

  def _setup(self, config: RunConfig) -> Setup:
    """Combines the timed run of a trained run with the cluster.

    Args:
      config: Config of the trained run.
    """
    options = Options(step_s=self.step_s)
    timed = self.timed(config)
    return set_up(timed, cluster_of(timed, self.cluster), options)


def clock_of(entry: Mapping[str, Any]) -> SweepClock:
  """Returns the clock that an entry of `clocks` in a sweep's config describes.

  Args:
    entry: Mapping with `name`, `cluster`, and perhaps `step_s`. All other keys
      are fields that the clock changes (dotted or nested), with their values.

  Raises:
    ValueError: If there is no such field of a config.
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
