"""Holds the results of a convergence sweep: losses, spreads, gaps and times.

A loss is a mean over seeds. The report shows it together with the losses of the
best and the worst seed, because two methods can be told apart only if their
spreads are apart. Every time is simulated and belongs to a named clock.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from dilocox_jax.report.spread import Spread

TOKENS = "tokens"  # Value of `Claim.at` for a claim about equal tokens.


@dataclasses.dataclass(frozen=True)
class Point:
  """One evaluation of a run.

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
  """A finished run of one method with one seed.

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
    traces: Finished runs, one per seed.
    utilisation: Share of the simulated time spent in inner steps, by clock.
    seconds: Simulated time of the whole run (s), flush included, by clock.
    interval: Inner steps between two sends of a fragment, H.
    overlap_steps: Inner steps between a send and its apply, tau.
    warm_start_steps: Inner steps before the first round.
    ends_round: Whether the last round had all its H steps.
    tuned: Values that tuning chose, by short name of the field.
    tuning_runs: Number of tuning runs.
    tuning_rounds: Number of rounds of each tuning run.
    at_edge: Whether the best inner learning rate, warm-up or outer step is the
      first or last value of its grid, so that a better one may lie outside.
    baseline: Name of the AllReduce method with the same inner optimizer.
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
    """Spread of the final losses over seeds (nats a token)."""
    return Spread(tuple(trace.loss for trace in self.traces))

  @property
  def family(self) -> str:
    """The name without its clock, e.g. "ours" for "ours_1gbit"."""
    return self.name.removesuffix(f"_{self.clock}") if self.clock else self.name

  def is_on(self, clock: str) -> bool:
    """Returns whether the figures of a clock show this method.

    Args:
      clock: Name of the clock; "" for figures that belong to no clock.
    """
    return not clock or self.clock in ("", clock)

  @property
  def sent_bytes(self) -> float:
    """Bytes that one replica sent, mean over seeds; NaN if there are none."""
    sent = [trace.sent_bytes for trace in self.traces]
    return statistics.fmean(sent) if sent else math.nan


@dataclasses.dataclass(frozen=True)
class TimedResult:
  """Results of a method that trains for the time that another method needs.

  The sweep names this other method, the reference, for every clock. If the
  reference takes 100 s for all of its steps, every method gets 100 s, and a
  method with slow exchanges takes fewer steps in that time.

  Attributes:
    name: Name of the method.
    steps: Number of inner steps that fit into the time of the reference.
    used_s: Simulated time of these steps and the flush (s); NaN if
      `is_too_few`.
    is_too_few: Whether `steps` is so small that the sweep has no runs of it.
    losses: Final losses (nats a token), one per seed that has ended.
  """

  name: str
  steps: int
  used_s: float
  is_too_few: bool
  losses: tuple[float, ...]

  @property
  def spread(self) -> Spread:
    """Spread of the final losses over seeds (nats a token)."""
    return Spread(self.losses)


@dataclasses.dataclass(frozen=True)
class EqualTime:
  """Results of all methods that train for the time of the reference.

  Attributes:
    clock: Name of the clock.
    budget_s: Simulated time of the reference, flush included (s).
    methods: Results, one per method.
  """

  clock: str
  budget_s: float
  methods: Sequence[TimedResult]


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim that one method ends with a lower loss than others.

  Attributes:
    better: Name of the method that should end with the lower loss.
    than: Names of the methods that should end with higher losses.
    at: `TOKENS` if all methods see the same number of tokens, or the name of
      the clock on which they have equal time.
    source: Paper or people who make the claim, and how well that is known.
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
    target_loss: Loss (nats a token); the report says when it is reached. 0 if
      there is no target.
    entries: Results at equal tokens, one per method, in the config's order.
    equal_time: Results at equal time, one per clock.
    claims: Claims that the report checks.
    gaps: Largest gap to AllReduce that is expected, as a share of the loss of
      AllReduce, by name of the method.
    tuning: Sentences on the budget of tuning.
    command: Command line that made the report.
    notes: Sentences on how to read the report.
    untuned: Names of methods whose tuning has not ended or has failed. The
      report leaves them out.
    front: Names or families of the methods that figures draw in front, most
      important first. If there is room for more, figures take the methods with
      the lowest losses.
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
    return next((e for e in self.entries if e.name == name), None)

  def gap(self, entry: MethodResult) -> float:
    """Returns mean loss / mean loss of the baseline - 1.

    The result is NaN if the baseline is missing or its loss is not finite.
    """
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
  """Returns the time at which a run first reached a loss.

  The function assumes that the loss falls linearly between two evaluations. For
  example, a run with loss 2 at 10 s and loss 1 at 20 s reaches 1.5 at 15 s.

  Args:
    trace: One run of a method.
    clock: Name of the clock.
    target_loss: Loss to reach (nats a token).

  Returns:
    Seconds since the start; infinity if the run never reached the loss.
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
