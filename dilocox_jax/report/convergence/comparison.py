"""Methods under one budget, as numbers: losses, spreads, gaps, hours.

A loss is a mean over seeds and stands beside its spread, the lowest and the
highest of them, because an ordering is only as good as the distance between
two spreads. A time is always that of a named clock.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

TOKENS = "tokens"  # Where a claim is about equal tokens.


@dataclasses.dataclass(frozen=True)
class Point:
  """One evaluation.

  Attributes:
    step: Inner steps finished.
    tokens: Of all replicas.
    sent_bytes: What one replica had sent.
    loss: Of the outer parameters (nats a token).
    seconds: Simulated time, by clock.
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
    seed: The seed.
    loss: After the flush; NaN if the run diverged.
    sent_bytes: What one replica sent, flush included.
    points: Its evaluations in order, that after the flush last.
  """

  seed: int
  loss: float
  sent_bytes: int
  points: Sequence[Point]


@dataclasses.dataclass(frozen=True)
class Spread:
  """Losses of several seeds."""

  losses: tuple[float, ...]

  @property
  def mean(self) -> float:
    """Over the seeds; infinity if one diverged, NaN without any."""
    if not self.losses:
      return math.nan
    if not all(map(math.isfinite, self.losses)):
      return math.inf
    return statistics.fmean(self.losses)

  @property
  def low(self) -> float:
    """The lowest."""
    return min(self._finite, default=math.nan)

  @property
  def high(self) -> float:
    """The highest; infinity if one diverged."""
    return max(self._finite, default=math.nan)

  @property
  def _finite(self) -> list[float]:
    return [x if math.isfinite(x) else math.inf for x in self.losses]


@dataclasses.dataclass(frozen=True)
class MethodResult:
  """A method at equal tokens.

  Attributes:
    name: Of the method.
    traces: Seeds that have ended.
    utilisation: Share of the time in inner steps, by clock.
    seconds: Of the whole run, flush included, by clock.
    interval: H (inner steps).
    overlap_steps: tau (inner steps).
    warm_start_steps: Inner steps before the first round.
    ends_round: Whether the last round was a whole one.
    tuned: Fields that tuning changed, short names.
    tuning_runs: How many tuning runs were made.
    tuning_rounds: Rounds of each of them.
    at_edge: Whether the best inner learning rate, warm-up or outer step is an
      end of its grid.
    baseline: Name of AllReduce with the same inner optimizer.
    clock: Of whose transfer times H is made; empty: of none.
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
  def sent_bytes(self) -> float:
    """What one replica sent, mean over seeds; NaN without any."""
    sent = [trace.sent_bytes for trace in self.traces]
    return statistics.fmean(sent) if sent else math.nan


@dataclasses.dataclass(frozen=True)
class TimedResult:
  """A method in the reference's time.

  Attributes:
    name: Of the method.
    steps: Inner steps that it got.
    used_s: Time that they and the flush take (seconds).
    is_too_few: Whether they are too few to train.
    losses: Final losses, one a seed.
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
  """All methods in the time that the reference takes.

  Attributes:
    clock: Which clock.
    budget_s: That time (seconds).
    methods: What they made of it.
  """

  clock: str
  budget_s: float
  methods: Sequence[TimedResult]


@dataclasses.dataclass(frozen=True)
class Claim:
  """An ordering that is looked for.

  Attributes:
    better: Method that should end lower.
    than: Those that should end higher.
    at: `TOKENS`, or the clock on which all have equal time.
    source: Who says so, and how well that is known.
  """

  better: str
  than: Sequence[str]
  at: str
  source: str


@dataclasses.dataclass(frozen=True)
class Comparison:
  """All that a report says.

  Attributes:
    name: Of the sweep.
    corpus: Digest of the text.
    budget: One sentence: steps, tokens, replicas, parameters.
    seeds: How many a method should have.
    clocks: Name to what it is.
    target_loss: Of which it is said when it is reached.
    entries: At equal tokens, in the order of the config.
    equal_time: At equal time, one a clock.
    claims: What is looked for.
    gaps: Most that a method may be above AllReduce (share of its loss).
    tuning: Sentences on the budget of tuning.
    command: The command line.
    notes: Sentences on how to read it.
    untuned: Methods of which nothing is said: tuning is not over, or in vain.
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

  def gap(self, entry: MethodResult) -> float:
    """Mean loss over that of its baseline, less one; NaN without it."""
    base = [e.spread.mean for e in self.entries if e.name == entry.baseline]
    if not base or not math.isfinite(base[0]):
      return math.nan
    return entry.spread.mean / base[0] - 1

  def seed_gaps(self, entry: MethodResult) -> list[float]:
    """The same seed by seed, lowest first, where both have a seed."""
    base = {
      trace.seed: trace.loss
      for each in self.entries
      if each.name == entry.baseline
      for trace in each.traces
    }
    return sorted(
      trace.loss / base[trace.seed] - 1
      for trace in entry.traces
      if trace.seed in base
    )


def seconds_to(trace: Trace, clock: str, target_loss: float) -> float:
  """When a seed first reached a loss, between two evaluations linearly.

  Args:
    trace: The seed.
    clock: Which clock.
    target_loss: Nats a token.

  Returns:
    Seconds; infinity if it never did.
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
  """Mean over seeds; infinity if one never did, NaN without any."""
  times = [seconds_to(trace, clock, target_loss) for trace in entry.traces]
  return statistics.fmean(times) if times else math.nan
