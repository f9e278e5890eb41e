"""Results of a convergence sweep as numbers: losses, spreads, gaps and times.

A loss is a mean over seeds and stands beside its lowest and highest seed,
because an ordering of two methods is only as good as the distance between
their spreads. Every time belongs to a named clock.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from dilocox_jax.report.spread import Spread

TOKENS = "tokens"  # Value of `Claim.at` for a claim about equal tokens.


@dataclasses.dataclass(frozen=True)
class Point:
  """One evaluation.

  Attributes:
    step: Inner steps finished.
    tokens: Tokens that all replicas together have seen.
    sent_bytes: Bytes that one replica has sent.
    loss: Validation loss of the outer parameters (nats a token).
    seconds: Simulated time since the start (s), by clock.
  """

  step: int
  tokens: int
  sent_bytes: int
  loss: float
  seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Trace:
  """One seed of a method, trained to the end.

  Attributes:
    seed: Integer seed of the run.
    loss: Loss after the flush (nats a token); NaN if the run diverged.
    sent_bytes: Bytes that one replica sent, flush included.
    points: Evaluations in order; the last one follows the flush.
  """

  seed: int
  loss: float
  sent_bytes: int
  points: Sequence[Point]


@dataclasses.dataclass(frozen=True)
class MethodResult:
  """Results of a method at equal tokens.

  Attributes:
    name: Name of the method.
    traces: Seeds that have ended.
    utilisation: Share of the simulated time spent in inner steps, by clock.
    seconds: Simulated time of the whole run (s), flush included, by clock.
    interval: H (inner steps).
    overlap_steps: tau (inner steps).
    warm_start_steps: Inner steps before the first round.
    ends_round: Whether the last round had all its H steps.
    tuned: Values that tuning chose, by short name of their field.
    tuning_runs: Number of tuning runs.
    tuning_rounds: Number of rounds of each tuning run.
    at_edge: Whether the best inner learning rate, warm-up or outer step is an
      end of its grid.
    baseline: Name of AllReduce with the same inner optimizer.
    clock: Clock whose transfer times gave H; empty if H was given.
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
  at_edge: bool
  baseline: str = "allreduce"
  clock: str = ""

  @property
  def spread(self) -> Spread:
    """Final losses."""
    return Spread(tuple(trace.loss for trace in self.traces))

  @property
  def family(self) -> str:
    """The name without its clock, e.g. "ours" for "ours_1gbit"."""
    return self.name.removesuffix(f"_{self.clock}") if self.clock else self.name

  def is_on(self, clock: str) -> bool:
    """Whether figures of a clock show the method; "" stands for no clock."""
    return not clock or self.clock in ("", clock)

  @property
  def sent_bytes(self) -> float:
    """Bytes that one replica sent, mean over seeds; NaN without seeds."""
    sent = [trace.sent_bytes for trace in self.traces]
    return statistics.fmean(sent) if sent else math.nan


@dataclasses.dataclass(frozen=True)
class TimedResult:
  """Results of a method that had as much time as the reference.

  Attributes:
    name: Name of the method.
    steps: Inner steps that fit into the time.
    used_s: Simulated time of these steps and the flush (s).
    is_too_few: Whether the steps are too few to train.
    losses: Final losses (nats a token), one per seed.
  """

  name: str
  steps: int
  used_s: float
  is_too_few: bool
  losses: tuple[float, ...]

  @property
  def spread(self) -> Spread:
    """Final losses."""
    return Spread(self.losses)


@dataclasses.dataclass(frozen=True)
class EqualTime:
  """Results of all methods in the time that the reference takes.

  Attributes:
    clock: Name of the clock.
    budget_s: Time of the reference (s).
    methods: Results, one per method.
  """

  clock: str
  budget_s: float
  methods: Sequence[TimedResult]


@dataclasses.dataclass(frozen=True)
class Claim:
  """An ordering that the sweep checks.

  Attributes:
    better: Method that should end lower.
    than: Methods that should end higher.
    at: `TOKENS`, or the clock on which all methods have equal time.
    source: Paper or people who claim it, and how well that is known.
  """

  better: str
  than: Sequence[str]
  at: str
  source: str


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Everything that the report of a sweep says.

  Attributes:
    name: Name of the sweep.
    corpus: Digest of the text.
    budget: Sentences on steps, tokens, replicas, parameters and machines.
    seeds: Number of seeds that each method should have.
    clocks: Descriptions of the clocks, by name.
    target_loss: Loss (nats a token) whose time is reported; 0 for none.
    entries: Results at equal tokens, in the order of the config.
    equal_time: Results at equal time, one entry per clock.
    claims: Orderings to check.
    gaps: Largest gap to AllReduce (share of its loss) that is expected of a
      method, by name.
    tuning: Sentences on the budget of tuning.
    command: Command line that made the report.
    notes: Sentences on how to read the report.
    untuned: Names of methods whose tuning has not ended or has failed. The
      report leaves them out.
    front: Methods to draw in front, most important first, by name or family.
      Figures fill the rest with the lowest losses.
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
    """Name of the AllReduce that figures compare with."""
    return self.entries[0].baseline if self.entries else "allreduce"

  def entry(self, name: str) -> MethodResult | None:
    """Returns the results of a method at equal tokens, or None."""
    return next((e for e in self.entries if e.name == name), None)

  def gap(self, entry: MethodResult) -> float:
    """Returns mean loss / mean loss of the baseline - 1; NaN without one."""
    base = self.entry(entry.baseline)
    if not base or not math.isfinite(base.spread.mean):
      return math.nan
    return entry.spread.mean / base.spread.mean - 1

  def seed_gaps(self, entry: MethodResult) -> list[float]:
    """Returns the gap of each seed that both methods have, lowest first."""
    baseline = self.entry(entry.baseline)
    traces = baseline.traces if baseline else ()
    base = {trace.seed: trace.loss for trace in traces}
    return sorted(
      trace.loss / base[trace.seed] - 1
      for trace in entry.traces
      if trace.seed in base
    )


def seconds_to(trace: Trace, clock: str, target_loss: float) -> float:
  """Returns when a seed first reached a loss.

  Between two evaluations the loss is taken to fall linearly. Example: loss 2
  at 10 s and 1 at 20 s reach 1.5 at 15 s.

  Args:
    trace: One seed of a method.
    clock: Name of the clock.
    target_loss: Loss to reach (nats a token).

  Returns:
    Seconds since the start; infinity if the seed never reached the loss.
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


def mean_seconds_to(
  entry: MethodResult, clock: str, target_loss: float
) -> float:
  """Returns the mean of `seconds_to` over seeds; NaN without seeds."""
  times = [seconds_to(trace, clock, target_loss) for trace in entry.traces]
  return statistics.fmean(times) if times else math.nan
