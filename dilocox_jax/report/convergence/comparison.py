"""Holds the results of a convergence sweep: losses, spreads, gaps and times.

Reports show a mean loss together with the losses of its lowest and highest
seed. Only then can a reader see whether two methods differ by more than their
seeds do. Every time belongs to a named clock.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from dilocox_jax.report import units
from dilocox_jax.report.spread import Spread, standard_error

TOKENS = "tokens"  # Value of `Claim.at` for a claim about equal tokens.


@dataclasses.dataclass(frozen=True)
class Point:
  """Holds the numbers of one evaluation.

  Attributes:
    tokens: Tokens that all replicas together have seen.
    sent_bytes: Bytes that one replica has sent.
    loss: Validation loss of the outer parameters (nats a token).
    seconds: Simulated time since the start (s), by clock.
  """

  tokens: int
  sent_bytes: int
  loss: float
  seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Trace:
  """Holds the results of one run of a method, which has one seed.

  Attributes:
    seed: Integer seed of the run.
    loss: Validation loss after the flush (nats a token); NaN if the run
      diverged.
    sent_bytes: Bytes that one replica sent, flush included.
    points: Evaluations in order. The last one was made after the flush.
  """

  seed: int
  loss: float
  sent_bytes: int
  points: Sequence[Point]


@dataclasses.dataclass(frozen=True)
class MethodResult:
  """Holds the results of a method at equal tokens.

  Attributes:
    name: Name of the method.
    traces: Results of the runs that have ended, one per seed.
    utilisation: Share of the simulated time in which replicas took inner steps,
      by clock.
    seconds: Simulated time of the whole run (s), flush included, by clock.
    interval: H, inner steps between two sends of a fragment.
    overlap_steps: tau, inner steps between a send and its apply.
    warm_start_steps: Inner steps before the first round.
    ends_round: Whether the last round had all its H steps.
    tuned: Values that tuning chose, by the short name of the config field.
    tuning_runs: Number of tuning runs.
    tuning_rounds: Number of rounds of each tuning run.
    edges: Settings whose best value is the lowest or the highest that was
      tried, in words.
    keeps_average: Whether its losses are those of an average of its parameters.
    baseline: Name of the AllReduce method with the same inner optimizer.
    clock: Name of the clock from whose transfer times H was computed; empty if
      the sweep's config gives H.
  """

  name: str
  traces: Sequence[Trace]
  utilisation: Mapping[str, float]
  seconds: Mapping[str, float]
  interval: int
  overlap_steps: int
  warm_start_steps: int
  ends_round: bool
  tuned: Mapping[str, float | int | str]
  tuning_runs: int
  tuning_rounds: int
  edges: Sequence[str] = ()
  keeps_average: bool = False
  baseline: str = "allreduce"
  clock: str = ""

  @property
  def spread(self) -> Spread:
    """Final losses of all seeds, with their mean and range (nats a token)."""
    return Spread(tuple(trace.loss for trace in self.traces))

  @property
  def family(self) -> str:
    """Name of the method without its clock, e.g. "ours" for "ours_1gbit"."""
    return self.name.removesuffix(f"_{self.clock}") if self.clock else self.name

  def is_on(self, clock: str) -> bool:
    """Whether the figures of a clock show the method.

    Args:
      clock: Name of the clock; "" for figures that have no clock.
    """
    return not clock or self.clock in ("", clock)

  @property
  def sent_bytes(self) -> float:
    """Bytes that one replica sent, mean over seeds; NaN without seeds."""
    sizes_bytes = [trace.sent_bytes for trace in self.traces]
    return statistics.fmean(sizes_bytes) if sizes_bytes else math.nan


@dataclasses.dataclass(frozen=True)
class TimedResult:
  """Holds the results of a method that had as much time as the reference.

  Attributes:
    name: Name of the method.
    steps: Number of inner steps that fit into the time.
    used_s: Simulated time of these steps and the flush (s).
    is_too_few: Whether the steps are too few, so that no run was made.
    losses: Final losses (nats a token), one per seed.
  """

  name: str
  steps: int
  used_s: float
  is_too_few: bool
  losses: tuple[float, ...]

  @property
  def spread(self) -> Spread:
    """Final losses of all seeds, with their mean and range (nats a token)."""
    return Spread(self.losses)


@dataclasses.dataclass(frozen=True)
class EqualTime:
  """Holds the results of all methods in the time that the reference takes.

  Attributes:
    clock: Name of the clock.
    budget_s: Simulated time that the reference method takes (s).
    methods: Results, one per method.
  """

  clock: str
  budget_s: float
  methods: Sequence[TimedResult]


@dataclasses.dataclass(frozen=True)
class Claim:
  """Describes an ordering of methods that the sweep checks.

  Attributes:
    better: Name of the method that should have the lower final loss.
    than: Names of the methods that should have a higher final loss.
    at: `TOKENS`, or the name of the clock on which all methods have equal time.
    source: Paper or people who claim the ordering, and whether the claim was
      read in the source.
  """

  better: str
  than: Sequence[str]
  at: str
  source: str


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Holds everything that the report of a sweep says.

  Attributes:
    name: Name of the sweep.
    corpus: Digest (hash) of the text that all methods train on.
    budget: Sentences on steps, tokens, replicas, parameters and machines.
    seeds: Number of seeds that each method should have.
    clocks: Descriptions of the clocks, by name.
    target_loss: Loss (nats a token). The report says when each method reaches
      it; 0 if there is no such loss.
    entries: Results at equal tokens, in the order of the config.
    equal_time: Results at equal time, one entry per clock.
    claims: Orderings to check.
    gaps: Largest gap to AllReduce that the sweep expects, by method name. A gap
      is a share of AllReduce's loss.
    tuning: Sentences on the budget of tuning.
    command: Command line that made the report.
    notes: Sentences on how to read the report.
    untuned: Names of methods whose tuning has not ended or has failed. The
      report leaves them out.
    front: Names or families of the methods to draw in front, most important
      first. If there is room for more, figures take the methods with the lowest
      losses.
  """

  name: str
  corpus: str
  budget: str
  seeds: int
  clocks: Mapping[str, str]
  target_loss: float
  entries: Sequence[MethodResult]
  equal_time: Sequence[EqualTime]
  claims: Sequence[Claim]
  gaps: Mapping[str, float]
  tuning: Sequence[str]
  command: str
  notes: Sequence[str] = ()
  untuned: Sequence[str] = ()
  front: Sequence[str] = ()

  @property
  def baseline(self) -> str:
    """Name of the AllReduce method that figures compare with."""
    return self.entries[0].baseline if self.entries else "allreduce"

  def entry(self, name: str) -> MethodResult | None:
    """Returns the results of a method at equal tokens, or None."""
    return next((entry for entry in self.entries if entry.name == name), None)

  def gap(self, entry: MethodResult) -> float:
    """Returns the gap of a method: mean loss / mean loss of its baseline - 1.

    Both means are over the seeds that both have, since losses differ more from
    seed to seed than between methods. The gap is NaN if they have no seed in
    common or the baseline has diverged.
    """
    pairs = self._paired(entry)
    own = Spread(tuple(loss for loss, _ in pairs))
    baseline = Spread(tuple(loss for _, loss in pairs))
    if not math.isfinite(baseline.mean):
      return math.nan
    return own.mean / baseline.mean - 1

  def gap_error(self, entry: MethodResult) -> float:
    """Returns the standard error of a gap, over the gaps of the seeds.

    A seed's gap compares two runs with the same seed. NaN with fewer than two.
    """
    return standard_error(self.seed_gaps(entry))

  def seed_gaps(self, entry: MethodResult) -> list[float]:
    """Returns the gap of each seed of a method, lowest first.

    Seeds that the baseline does not have are left out. Those that diverged have
    NaN and come last.
    """
    gaps = (own / baseline - 1 for own, baseline in self._paired(entry))
    return sorted(gaps, key=lambda gap: (math.isnan(gap), gap))

  def _paired(self, entry: MethodResult) -> list[tuple[float, float]]:
    """Losses of a method and of its baseline, for each seed that both have."""
    baseline = self.entry(entry.baseline)
    traces = baseline.traces if baseline else ()
    losses = {trace.seed: trace.loss for trace in traces}
    return [
      (trace.loss, losses[trace.seed])
      for trace in entry.traces
      if trace.seed in losses
    ]


def seconds_to(trace: Trace, clock: str, target_loss: float) -> float:
  """Returns the time at which a run first reached a loss.

  The function assumes that the loss falls linearly between two evaluations.
  Example: if the loss is 2 at 10 s and 1 at 20 s, it reaches 1.5 at 15 s.

  Args:
    trace: Results of the run.
    clock: Name of the clock.
    target_loss: Loss to reach (nats a token).

  Returns:
    Simulated time since the start (s); infinity if the run never reached the
    loss.
  """
  before: Point | None = None
  for point in trace.points:
    if point.loss <= target_loss:
      end_s = point.seconds[clock]
      if before is None or before.loss <= point.loss:
        return end_s
      share = (before.loss - target_loss) / (before.loss - point.loss)
      start_s = before.seconds[clock]
      return start_s + share * (end_s - start_s)
    before = point
  return math.inf


def seed_seconds_to(
  entry: MethodResult, clock: str, target_loss: float
) -> list[float]:
  """Returns `seconds_to` of every seed whose losses on the way are known."""
  return [
    seconds_to(trace, clock, target_loss)
    for trace in entry.traces
    if trace.points
  ]


def mean_seconds_to(
  entry: MethodResult, clock: str, target_loss: float
) -> float:
  """Returns the mean of `seed_seconds_to`; NaN without seeds."""
  times_s = seed_seconds_to(entry, clock, target_loss)
  return statistics.fmean(times_s) if times_s else math.nan


def human_seconds_to(
  entry: MethodResult, clock: str, target_loss: float
) -> str:
  """Formats `mean_seconds_to` with its standard error and missing seeds."""
  times_s = seed_seconds_to(entry, clock, target_loss)
  mean_s = mean_seconds_to(entry, clock, target_loss)
  some = units.human_missing(len(times_s), len(entry.traces))
  return units.human_time(mean_s, standard_error(times_s)) + some
