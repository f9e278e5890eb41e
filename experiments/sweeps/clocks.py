"""Computes the simulated times of a run from its config, without training it.

A *clock* is a simulated cluster on which runs are timed, perhaps with a larger
model than the one that was trained.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from dilocox_jax.api.simulation_setup import Options, Setup, cluster_of, set_up
from dilocox_jax.checks import check_path, flat, in_front, of_type, require
from dilocox_jax.codecs.named import link_names
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.sections import ModelConfig
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.transfer import Transport


@dataclasses.dataclass(frozen=True)
class Times:
  """Simulated times of a run on a clock (a simulated cluster).

  Attributes:
    at_s: Time from the start of the run to the end of each segment (seconds),
      by the number of inner steps up to there. A segment is a round, or several
      data-parallel steps.
    end_s: Time of the whole run (seconds), with the exchanges that are still
      due after its last inner step.
    utilization: Share of `end_s` in which replicas took inner steps, 0 to 1.
  """

  at_s: dict[int, float]
  end_s: float
  utilization: float

  def after(self, step: int) -> float:
    """Returns when the last segment that is complete at a step ended (seconds).

    `step` is a number of inner steps. A segment is a round, or several
    data-parallel steps. The result is 0 if no segment is complete yet.
    """
    ends_s = (end_s for stop, end_s in self.at_s.items() if stop <= step)
    return max(ends_s, default=0.0)


@dataclasses.dataclass(frozen=True)
class SweepClock:
  """A simulated cluster that times runs, with some of their fields replaced.

  Attributes:
    cluster: Name of a cluster preset, or path of a cluster file.
    step_s: Seconds of an inner step; None: derived from the operations of the
      timed model and the devices of the cluster.
    changed: Values by dotted name that replace those of the trained run's
      config, such as a larger model.
    transport: How messages are sent. By default each message waits for a round
      trip, as with gloo.
  """

  cluster: str
  step_s: float | None = None
  changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # With this transport the numbers of steps, H and tau of the committed sweeps
  # were chosen.
  transport: Transport = Transport(rtts_per_message=1.0)

  def timed(self, config: RunConfig) -> RunConfig:
    """Returns the config of the run that is timed in place of a trained run.

    It is the config of the trained run with the values in `changed`. There are
    two special cases:

    - With a `model.preset` in `changed`, the other fields of the trained model
      go back to their defaults.
    - A codec in `changed` is used only if it consists of the same parts as the
      codec of the trained run.

    Example: `changed` has the model `qwen_107b` and the codec
    "low_rank(rank=2048)+int(bits=4)". A run with
    "low_rank(rank=16)+int(bits=4)" is timed with this model and this codec. A
    run with "int(bits=1)" is timed with this model and "int(bits=1)".

    Raises:
      ValueError: If the config is not possible. The message is one line.
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
    """Simulates the run `timed(config)`, and returns its times.

    Raises:
      ValueError: If the config is not possible, if there is no such cluster, or
        if the run does not fit the cluster. The message is one line.
    """
    setup = self._setup(config)
    costs = LinkCosts(setup.link_costs.cluster, self.transport)
    clock = AnalyticClock(costs, setup.work)
    # The clock goes on from segment to segment, so times are from the start.
    at_s = {
      segment.stop: clock.walk(setup.script.segment(segment)).now_s
      for segment in setup.plan.segments()
    }
    # The exchanges that are still due after the last inner step.
    outcome = clock.walk(setup.script.flush(setup.plan))
    return Times(
      at_s=at_s, end_s=outcome.now_s, utilization=outcome.utilization
    )

  def step_s_of(self, config: RunConfig) -> float:
    """Returns the time of an inner step of `timed(config)` (seconds).

    If replicas differ in speed, it is the time of the fastest.

    Raises:
      ValueError: As in `times`.
    """
    return float(min(self._setup(config).work.step_s))

  def _setup(self, config: RunConfig) -> Setup:
    """Prepares the simulation of `timed(config)` on the cluster."""
    options = Options(step_s=self.step_s)
    timed = self.timed(config)
    return set_up(timed, cluster_of(timed, self.cluster), options)


def clocks_of(entries: Iterable[Any]) -> dict[str, SweepClock]:
  """Returns the clocks of a sweep's field `clocks`, by name.

  Raises:
    ValueError: If an entry is no mapping, if its name or cluster is no text, if
      two entries have one name, or if a config has no field of such a name.
    KeyError: If an entry has no `name` or no `cluster`.
  """
  clocks: dict[str, SweepClock] = {}
  for number, entry in enumerate(entries):
    require(
      isinstance(entry, Mapping),
      f"clocks[{number}]={entry!r} must be a mapping with name and cluster",
    )
    with in_front(f"clocks[{number}]: "):
      name = of_type("name", entry["name"], str)
      of_type("cluster", entry["cluster"], str)
      require(name not in clocks, f"another clock is called {name!r}")
      clocks[name] = clock_of(entry)
  return clocks


def clock_of(entry: Mapping[str, Any]) -> SweepClock:
  """Returns the clock (a simulated cluster) of an entry in a sweep's `clocks`.

  The entry has `name` and `cluster`, and may have `step_s`. All other keys are
  fields of a run's config (dotted or nested). Their values replace those of the
  run in the simulation.

  Raises:
    ValueError: If a config has no field of such a name.
    KeyError: If the entry has no `cluster`.
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
