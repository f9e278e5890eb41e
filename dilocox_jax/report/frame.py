"""The frame of every report: evaluations of runs, by setting and seed.

A setting is a method with all its hyper-parameters, and has one run for every
seed. A run's page, a comparison and a sweep make the same tables and pictures
of a frame. A mean of three seeds without its error invites readers to believe
noise, so a mean and its standard error always come together here.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dilocox_jax.report.run import LoadedRun

_NEAR = 0.1  # A loss at most a tenth above the baseline's counts as near it.


def standard_error(values: Sequence[float]) -> float:
  """Returns the standard error of a mean.

  Args:
    values: The values; the result is NaN if they are fewer than two, or if one
      is not finite.
  """
  if len(values) < 2 or not all(map(math.isfinite, values)):
    return math.nan
  return statistics.stdev(values) / math.sqrt(len(values))


def mean(values: Sequence[float]) -> float:
  """Returns the mean; infinity if a value is not finite, NaN without values."""
  if not all(map(math.isfinite, values)):
    return math.inf
  return statistics.fmean(values) if values else math.nan


@dataclasses.dataclass(frozen=True)
class Point:
  """One evaluation.

  Attributes:
    tokens: Tokens that all replicas together have seen.
    sent_bytes: Bytes that one replica has sent.
    loss: Validation loss of the outer parameters (nats a token).
    seconds: Simulated time since the start (s), by clock.
  """

  tokens: int
  sent_bytes: int
  loss: float
  seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trace:
  """One run of a setting.

  Attributes:
    seed: Seed of the run.
    loss: Last validation loss (nats a token); NaN if the run diverged.
    sent_bytes: Bytes that one replica sent in all.
    steps: Inner steps.
    tokens: Tokens of all replicas together.
    points: Evaluations in order; may be empty.
    wall_s: Wall time (s); NaN if it is not known.
  """

  seed: int
  loss: float
  sent_bytes: int
  steps: int
  tokens: int
  points: Sequence[Point] = ()
  wall_s: float = math.nan


@dataclasses.dataclass(frozen=True)
class Setting:
  """All runs of one setting.

  Attributes:
    name: Name of the setting.
    traces: Its runs, one a seed.
    baseline: Name of the setting that it is compared with.
    seconds: Simulated time of the whole run (s), by clock.
    utilization: Share of that time in which replicas take inner steps.
    fp32_bytes: What a replica would send as fp32 gradients in every step.
    changed: What tells it from the other settings, in words.
    note: End of the name, such as " (not finished)".
  """

  name: str
  traces: Sequence[Trace]
  baseline: str = ""
  seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  utilization: Mapping[str, float] = dataclasses.field(default_factory=dict)
  fp32_bytes: float = math.nan
  changed: str = ""
  note: str = ""

  @property
  def label(self) -> str:
    """Name with its note."""
    return self.name + self.note

  @property
  def losses(self) -> list[float]:
    """Last loss of every seed."""
    return [trace.loss for trace in self.traces]

  @property
  def loss(self) -> float:
    """Mean loss; infinity if a seed diverged, NaN without seeds."""
    return mean(self.losses)

  @property
  def tokens(self) -> int:
    """Tokens that a run was trained on; 0 where none has ended."""
    return max((each.tokens for each in self.traces), default=0)

  @property
  def sent_bytes(self) -> float:
    """Bytes that one replica sent, mean over seeds; NaN without seeds."""
    return mean([trace.sent_bytes for trace in self.traces])

  @property
  def curves(self) -> list[Sequence[Point]]:
    """Evaluations of every seed that has some.

    Seeds that diverged are left out if others did not, since they end early.
    """
    begun = [trace for trace in self.traces if trace.points]
    ended = [trace for trace in begun if math.isfinite(trace.loss)]
    return [trace.points for trace in ended or begun]

  def after(self, clock: str, time_s: float) -> tuple[int, float]:
    """Returns the steps and the loss of the first seed after a simulated time.

    Steps and loss are taken to change linearly between two evaluations. The
    loss is NaN before the first one.

    Args:
      clock: Name of the clock.
      time_s: Time since the start (s).
    """
    trace = self.traces[0]
    points = [Point(0, 0, math.nan, {clock: 0.0}), *trace.points]
    times_s = [point.seconds[clock] for point in points]
    if time_s >= times_s[-1]:
      return trace.steps, trace.loss
    tokens, loss = (
      float(np.interp(time_s, times_s, [getattr(p, field) for p in points]))
      for field in ("tokens", "loss")
    )
    return int(trace.steps * tokens / trace.tokens), loss

  def seconds_to(self, clock: str, target: float) -> list[float]:
    """Returns when each seed with a curve reached a loss; infinity if never."""
    found = (trace.points for trace in self.traces if trace.points)
    return [_seconds_to(points, clock, target) for points in found]


@dataclasses.dataclass(frozen=True)
class Frame:
  """What a report is about.

  Attributes:
    settings: In the order of tables.
    num_seeds: How many runs each setting should have.
    clocks: What each clock times, by its name.
    target: Loss whose time tables and pictures show (nats a token); 0: none.
    front: Names of settings that pictures show in color, the most important
      first; the lowest losses come after them.
  """

  settings: Sequence[Setting]
  num_seeds: int = 1
  clocks: Mapping[str, str] = dataclasses.field(default_factory=dict)
  target: float = 0.0
  front: Sequence[str] = ()

  def base(self, setting: Setting) -> Setting | None:
    """Returns what a setting is compared with; None for a baseline itself.

    Losses after different numbers of tokens are not compared.
    """
    if setting.baseline in ("", setting.name):
      return None
    wanted = setting.baseline, setting.tokens
    named = (
      each for each in self.settings if (each.name, each.tokens) == wanted
    )
    return next(named, None)

  def pairs(self, setting: Setting) -> list[tuple[float, float]]:
    """Losses of a setting and of its baseline, for each seed of both."""
    base = self.base(setting)
    losses = {trace.seed: trace.loss for trace in base.traces} if base else {}
    return [
      (trace.loss, losses[trace.seed])
      for trace in setting.traces
      if trace.seed in losses
    ]

  def gap(self, setting: Setting) -> tuple[float, float]:
    """Returns mean loss / mean loss of the baseline - 1, and its error.

    Both means are over the seeds that both have, since losses differ more from
    seed to seed than between methods. The error is that of the gaps of the
    seeds. Both are NaN without a baseline, or if it diverged.
    """
    pairs = self.pairs(setting)
    own, base = mean([a for a, _ in pairs]), mean([b for _, b in pairs])
    if not math.isfinite(base) or not base:
      return math.nan, math.nan
    return own / base - 1, standard_error([a / b - 1 for a, b in pairs])

  def fewer_bytes(self, setting: Setting) -> float:
    """Returns bytes of the baseline over the setting's own; NaN for neither."""
    is_base = setting.name == setting.baseline
    base = setting if is_base else self.base(setting)
    most = base.sent_bytes if base else setting.fp32_bytes
    return most / setting.sent_bytes if setting.sent_bytes else math.nan

  def cheapest(self) -> Setting | None:
    """Returns what sends least among what ends near its baseline, if any."""
    gaps = [self.gap(each)[0] for each in self.settings]
    whole = [
      (each, gap)
      for each, gap in zip(self.settings, gaps, strict=True)
      if len(each.traces) == self.num_seeds and math.isfinite(gap)
    ]
    near = [each for each, gap in whole if gap <= _NEAR]
    found = near or [each for each, _ in whole]
    return min(found, key=lambda each: each.sent_bytes, default=None)

  def pareto_front(self) -> list[Setting]:
    """Returns the settings that no other one beats in both loss and bytes.

    Fewest bytes come first, so losses fall along the front.
    """
    front: list[Setting] = []
    whole = [x for x in self.settings if len(x.traces) == self.num_seeds]
    finite = [each for each in whole if math.isfinite(each.loss)]
    for each in sorted(finite, key=lambda s: (s.sent_bytes, s.loss)):
      if not front or each.loss < front[-1].loss:
        front.append(each)
    return front

  def records(self) -> list[dict[str, Any]]:
    """Returns all numbers of the settings at full precision, for a CSV."""
    return [self._record(each) for each in self.settings]

  def _record(self, setting: Setting) -> dict[str, Any]:
    gap, gap_error = self.gap(setting)
    base, first = self.base(setting), (*setting.traces, None)[0]
    values = {
      "run": setting.name,
      "changed": setting.changed,
      "seeds": len(setting.traces),
      "loss": setting.loss,
      "standard_error": standard_error(setting.losses),
      "baseline": base.name if base else "",
      "gap": gap,
      "gap_standard_error": gap_error,
      "sent_bytes": setting.sent_bytes,
      "fewer_bytes": self.fewer_bytes(setting),
      "steps": first.steps if first else 0,
      "tokens": first.tokens if first else 0,
      "wall_s": mean([t.wall_s for t in setting.traces]),
      "is_on_pareto_front": setting in self.pareto_front(),
    }
    for clock in self.clocks:
      values[f"seconds:{clock}"] = setting.seconds.get(clock, math.nan)
      values[f"utilization:{clock}"] = setting.utilization.get(clock, math.nan)
      if self.target:
        to = mean(setting.seconds_to(clock, self.target))
        values[f"seconds_to_target:{clock}"] = to
    return values


def _seconds_to(points: Sequence[Point], clock: str, target: float) -> float:
  """Returns when a run first reached a loss; infinity if it never did.

  The loss is taken to fall linearly between two evaluations: if it is 2 at 10 s
  and 1 at 20 s, it reaches 1.5 at 15 s.
  """
  first = next((n for n, p in enumerate(points) if p.loss <= target), None)
  if first is None:
    return math.inf
  before, point = points[max(first - 1, 0)], points[first]
  start_s, end_s = before.seconds[clock], point.seconds[clock]
  fall = before.loss - point.loss
  share = (before.loss - target) / fall if fall else 1.0
  return start_s + share * (end_s - start_s)


def clock_of(run: LoadedRun) -> str:
  """Names the clock of a run such that equal names stand for equal clocks.

  Two clocks of one cluster may have steps of different length.
  """
  digest = run.record.get("clock_digest", "")
  return f"{run.clock}, {digest}" if digest else run.clock


def frame_of(runs: Mapping[str, LoadedRun], baseline: str = "") -> Frame:
  """Returns runs side by side; with clocks if all have the same one.

  Args:
    runs: The runs by label, finished or not.
    baseline: Label of the one that the others are compared with.
  """
  names = {clock_of(run): run.clock for run in runs.values() if run.simulated_s}
  is_timed = len(names) == 1 and all(map(_is_timed, runs.values()))
  settings = [_setting(run, k, baseline) for k, run in runs.items()]
  return Frame(settings, clocks=names if is_timed else {})


def _is_timed(run: LoadedRun) -> bool:
  """Whether there is a simulated time of each evaluation of a run."""
  steps = {each.step for each in run.evaluations}
  return bool(steps) and steps <= run.simulated_s.keys()


def _setting(run: LoadedRun, name: str, baseline: str) -> Setting:
  """Returns a run as a setting with one seed."""
  clock, at_s = clock_of(run), run.simulated_s
  points = []
  for each in run.evaluations:
    seconds = {clock: at_s[each.step]} if each.step in at_s else {}
    sent = each.total_sent_bytes
    points.append(Point(each.tokens, sent, each.outer_loss, seconds))
  trace = Trace(
    *(run.config.get("seed", 0), run.validation_loss, run.total_sent_bytes),
    *(run.steps, run.tokens, points, run.wall_s),
  )
  return Setting(
    name,
    [trace],
    baseline,
    {clock: max(at_s.values())} if at_s else {},
    fp32_bytes=run.fp32_bytes,
    note="" if run.finished else " (not finished)",
  )
