"""Holds the runs of a report, grouped into settings, and compares the settings.

A *setting* is a method with all its hyper-parameters. It has one run for every
seed that has been trained. A *clock* is a simulated cluster on which the time
of a run is computed.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dilocox_jax.report.run import LoadedRun

_NEAR = 0.1  # Largest gap at which a loss is near the loss of the baseline.


def standard_error(values: Sequence[float]) -> float:
  """Returns the standard error of a mean.

  It is NaN if there are fewer than two values, or if one is not finite.
  """
  if len(values) < 2 or not all(map(math.isfinite, values)):
    return math.nan
  return statistics.stdev(values) / math.sqrt(len(values))


def mean(values: Sequence[float]) -> float:
  """Returns the mean; infinity if a value is not finite, NaN without values."""
  if not values:
    return math.nan
  if not all(map(math.isfinite, values)):
    return math.inf
  return statistics.fmean(values)


@dataclasses.dataclass(frozen=True)
class Point:
  """One evaluation of a run.

  Attributes:
    tokens: Tokens that all replicas have seen. With a mailbox (replicas
      exchange through files in a store) only those of one replica count.
    sent_bytes: Bytes that one replica has sent.
    loss: Validation loss (nats a token) of the outer parameters, or of their
      average if the run keeps one.
    seconds: Simulated time since the start (s), by the name of the simulated
      cluster (clock).
  """

  tokens: int
  sent_bytes: int
  loss: float
  seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SeedRun:
  """The run of a setting with one seed, up to its end or its last written row.

  Attributes:
    seed: Seed of the run.
    loss: Loss that the report shows (nats a token): the last validation loss,
      or the loss on the judge text (held-out files by which nothing is chosen).
      It is not finite if the run diverged, and NaN before the first validation.
    sent_bytes: Bytes that one replica has sent so far.
    steps: Number of inner steps so far.
    tokens: Tokens that all replicas have seen. With a mailbox (replicas
      exchange through files in a store) only those of one replica count.
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
  """A setting (a method with all its hyper-parameters), and its runs.

  Attributes:
    name: Name of the setting.
    seed_runs: Runs of the setting, one for each seed; may be empty.
    baseline: Name of the setting with which this one is compared: its own name
      for a baseline, "" for none.
    seconds: Simulated time of the whole run, or of the part that is recorded
      (s), by the name of the simulated cluster (clock).
    utilization: Share of this time in which replicas take inner steps, from 0
      to 1, by the clock's name; empty if it is not known.
    fp32_bytes: Bytes that a replica would have sent so far if it had sent fp32
      gradients in every step; NaN if this is not known.
    changed: Text that lists the hyper-parameters in which this setting differs
      from others; may be empty.
    note: Text after the name, such as " (not finished)".
    uses_mailbox: Whether replicas exchange through a mailbox (files in a
      store). Then a run is a single replica, and only its own tokens count.
  """

  name: str
  seed_runs: Sequence[SeedRun]
  baseline: str = ""
  seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  utilization: Mapping[str, float] = dataclasses.field(default_factory=dict)
  fp32_bytes: float = math.nan
  changed: str = ""
  note: str = ""
  uses_mailbox: bool = False

  @property
  def label(self) -> str:
    """Name with its note."""
    return self.name + self.note

  @property
  def losses(self) -> list[float]:
    """Last loss of every seed (nats a token)."""
    return [seed_run.loss for seed_run in self.seed_runs]

  @property
  def loss(self) -> float:
    """Mean of the last losses (nats a token); NaN without seeds.

    It is infinity if a seed diverged, or has no validation yet.
    """
    return mean(self.losses)

  @property
  def tokens(self) -> int:
    """Largest number of tokens that one of the runs has seen; 0: no run."""
    return max((seed_run.tokens for seed_run in self.seed_runs), default=0)

  @property
  def sent_bytes(self) -> float:
    """Bytes that one replica sent, mean over seeds; NaN without seeds."""
    return mean([seed_run.sent_bytes for seed_run in self.seed_runs])

  @property
  def curves(self) -> list[Sequence[Point]]:
    """Evaluations in order, a list for every seed that has some.

    Seeds that diverged end early. They are left out if at least one seed did
    not diverge.
    """
    with_points = [seed_run for seed_run in self.seed_runs if seed_run.points]
    finite = [
      seed_run for seed_run in with_points if math.isfinite(seed_run.loss)
    ]
    return [seed_run.points for seed_run in finite or with_points]

  def after(self, clock: str, time_s: float) -> tuple[int, float]:
    """Returns the steps and the loss of the first seed after a simulated time.

    Steps and loss are interpolated between evaluations. The loss is NaN before
    the first evaluation. After the last evaluation, the result is the steps and
    the loss at the end of the run.

    Args:
      clock: Name of a simulated cluster. All evaluations of the seed must have
        a time on it.
      time_s: Simulated time since the start (s).

    Raises:
      IndexError: If the setting has no run.
    """
    seed_run = self.seed_runs[0]
    # The start has no loss, so losses up to the first evaluation become NaN.
    points = [Point(0, 0, math.nan, {clock: 0.0}), *seed_run.points]
    times_s = [point.seconds[clock] for point in points]
    if time_s >= times_s[-1]:
      return seed_run.steps, seed_run.loss
    tokens_of_points = [point.tokens for point in points]
    losses_of_points = [point.loss for point in points]
    tokens = float(np.interp(time_s, times_s, tokens_of_points))
    loss = float(np.interp(time_s, times_s, losses_of_points))
    return int(seed_run.steps * tokens / seed_run.tokens), loss

  def seconds_to(self, clock: str, target: float) -> list[float]:
    """Returns the simulated times at which the seeds first reached a loss (s).

    There is one for each seed that has evaluations; infinity: the seed never
    reached it. `clock` is the name of a simulated cluster.
    """
    return [
      _seconds_to(seed_run.points, clock, target)
      for seed_run in self.seed_runs
      if seed_run.points
    ]


@dataclasses.dataclass(frozen=True)
class Frame:
  """All settings of a report (methods with all their hyper-parameters).

  Attributes:
    settings: Settings in the order of the tables.
    num_seeds: Number of runs that each setting should have.
    clocks: Description of each clock (simulated cluster), by its name.
    target: A loss (nats a token). The report shows the time that each setting
      takes to reach it. 0: no such times are shown.
    front: Names of settings that pictures should show in color, the most
      important first. Pictures have room for six (`panels`).
  """

  settings: Sequence[Setting]
  num_seeds: int = 1
  clocks: Mapping[str, str] = dataclasses.field(default_factory=dict)
  target: float = 0.0
  front: Sequence[str] = ()

  @property
  def counted_replicas(self) -> str:
    """Whose tokens are counted, e.g. "all replicas"."""
    with_mailbox = {setting.uses_mailbox for setting in self.settings}
    if with_mailbox == {True}:
      return "one replica"
    if True in with_mailbox:
      return "all replicas (with a mailbox: one)"
    return "all replicas"

  def base(self, setting: Setting) -> Setting | None:
    """Returns the setting with which another setting is compared.

    The result is None for a baseline itself, without a baseline, and if the
    baseline has another number of tokens.
    """
    if setting.baseline in ("", setting.name):
      return None
    for other in self.settings:
      if other.name == setting.baseline and other.tokens == setting.tokens:
        return other
    return None

  def pairs(self, setting: Setting) -> list[tuple[float, float]]:
    """Returns pairs (loss, loss of the baseline), one for each common seed.

    There are none if `base` returns None for the setting.
    """
    base = self.base(setting)
    if base is None:
      return []
    base_losses = {seed_run.seed: seed_run.loss for seed_run in base.seed_runs}
    return [
      (seed_run.loss, base_losses[seed_run.seed])
      for seed_run in setting.seed_runs
      if seed_run.seed in base_losses
    ]

  def gap(self, setting: Setting) -> tuple[float, float]:
    """Returns the gap of a setting to its baseline, and its standard error.

    The gap is (mean loss / mean loss of the baseline) - 1 over the common
    seeds: losses of 2.02 and 2.00 give 0.01. The error is the standard error of
    the gaps of the seeds.

    Returns:
      The gap and its error. If a loss of the setting is not finite, the gap is
      infinity and the error is NaN. With fewer than two common seeds the error
      is NaN. Both are NaN if `base` returns None for the setting, if there is
      no common seed, or if a loss of the baseline is not finite.
    """
    pairs = self.pairs(setting)
    mean_loss = mean([loss for loss, _ in pairs])
    mean_base_loss = mean([base_loss for _, base_loss in pairs])
    if not math.isfinite(mean_base_loss) or not mean_base_loss:
      return math.nan, math.nan
    gaps = [loss / base_loss - 1 for loss, base_loss in pairs]
    return mean_loss / mean_base_loss - 1, standard_error(gaps)

  def fewer_bytes(self, setting: Setting) -> float:
    """Returns the bytes of the baseline divided by the bytes of a setting.

    If no baseline has the same number of tokens, the bytes of fp32 gradients in
    every step take its place. The result is 1 for a baseline itself. It is NaN
    if the setting sends nothing or has no run. It is also NaN if the bytes of
    fp32 gradients take the place of a baseline and are not known.
    """
    if not setting.sent_bytes:
      return math.nan
    base = self.base(setting)
    if setting.name == setting.baseline:
      base = setting
    base_bytes = base.sent_bytes if base else setting.fp32_bytes
    return base_bytes / setting.sent_bytes

  def cheapest(self) -> Setting | None:
    """Returns the setting that sends fewest bytes at about its baseline's loss.

    Settings with all seeds and a finite gap are compared. If some of them have
    a gap of at most 10 %, only these are compared. The result is None if there
    is no setting to compare.
    """
    compared = []
    near = []
    for setting in self.settings:
      gap, _ = self.gap(setting)
      if len(setting.seed_runs) == self.num_seeds and math.isfinite(gap):
        compared.append(setting)
        if gap <= _NEAR:
          near.append(setting)
    return min(
      near or compared, key=lambda setting: setting.sent_bytes, default=None
    )

  def pareto_front(self) -> list[Setting]:
    """Returns the Pareto front of loss and bytes, the fewest bytes first.

    A setting is on it if every other setting sends more bytes or has a higher
    loss. Of settings with equal bytes and losses, only the first is on it.
    Settings that lack a seed or a finite loss do not count.
    """
    complete = [
      setting
      for setting in self.settings
      if len(setting.seed_runs) == self.num_seeds
      and math.isfinite(setting.loss)
    ]
    front: list[Setting] = []
    for setting in sorted(complete, key=lambda s: (s.sent_bytes, s.loss)):
      if not front or setting.loss < front[-1].loss:
        front.append(setting)
    return front

  def records(self) -> list[dict[str, Any]]:
    """Returns a row of numbers for each setting, at full precision, for CSV.

    Losses are in nats a token, times in seconds. Columns of a clock (simulated
    cluster) end with ":" and its name.
    """
    return [self._record(setting) for setting in self.settings]

  def _record(self, setting: Setting) -> dict[str, Any]:
    """Returns the values of a setting in the rows of `records`, by column."""
    gap, gap_error = self.gap(setting)
    base = self.base(setting)
    steps = 0
    tokens = 0
    if setting.seed_runs:
      steps = setting.seed_runs[0].steps
      tokens = setting.seed_runs[0].tokens
    values = {
      "run": setting.name,
      "changed": setting.changed,
      "seeds": len(setting.seed_runs),
      "loss": setting.loss,
      "standard_error": standard_error(setting.losses),
      "baseline": base.name if base else "",
      "gap": gap,
      "gap_standard_error": gap_error,
      "sent_bytes": setting.sent_bytes,
      "fewer_bytes": self.fewer_bytes(setting),
      "steps": steps,
      "tokens": tokens,
      "wall_s": mean([seed_run.wall_s for seed_run in setting.seed_runs]),
      "is_on_pareto_front": setting in self.pareto_front(),
    }
    for clock in self.clocks:
      values[f"seconds:{clock}"] = setting.seconds.get(clock, math.nan)
      values[f"utilization:{clock}"] = setting.utilization.get(clock, math.nan)
      if self.target:
        times_s = setting.seconds_to(clock, self.target)
        values[f"seconds_to_target:{clock}"] = mean(times_s)
    return values


def _seconds_to(points: Sequence[Point], clock: str, target: float) -> float:
  """Returns the simulated time at which a run first reached a loss (s).

  The result is infinity if the run never did. Between evaluations the loss is
  interpolated.
  """
  before = points[0]
  for point in points:
    if point.loss <= target:
      break
    before = point
  else:
    return math.inf
  start_s = before.seconds[clock]
  end_s = point.seconds[clock]
  # The fall is 0 if the first evaluation has already reached the loss.
  fall = before.loss - point.loss
  share = (before.loss - target) / fall if fall else 1.0
  return start_s + share * (end_s - start_s)


def frame_of(runs: Mapping[str, LoadedRun], baseline: str = "") -> Frame:
  """Returns a frame in which each run is a setting, named by its label.

  The frame has a clock (simulated cluster) only if all runs have the same
  clock, and each of their evaluations has a simulated time. `baseline` is the
  label of the run with which the others are compared; "" means none.
  """
  # Two clocks of one cluster may differ, for example in the duration of a step.
  # Their digests differ then.
  different_clocks = {
    (run.clock, run.record.get("clock_digest", ""))
    for run in runs.values()
    if run.simulated_s
  }
  clocks = {}
  if len(different_clocks) == 1 and all(map(_is_timed, runs.values())):
    clocks = {clock: clock for clock, _ in different_clocks}
  settings = [_setting(run, label, baseline) for label, run in runs.items()]
  return Frame(settings, clocks=clocks)


def _is_timed(run: LoadedRun) -> bool:
  """Whether a run has evaluations, and a simulated time for each of them."""
  steps = {evaluation.step for evaluation in run.evaluations}
  return bool(steps) and steps <= run.simulated_s.keys()


def _setting(run: LoadedRun, name: str, baseline: str) -> Setting:
  """Returns a run as a setting with one seed."""
  clock = run.clock
  simulated_s = run.simulated_s
  points = []
  for evaluation in run.evaluations:
    seconds = {}
    if evaluation.step in simulated_s:
      seconds[clock] = simulated_s[evaluation.step]
    point = Point(
      tokens=evaluation.tokens,
      sent_bytes=evaluation.total_sent_bytes,
      loss=evaluation.outer_loss,
      seconds=seconds,
    )
    points.append(point)
  seed_run = SeedRun(
    seed=run.config.get("seed", 0),
    loss=run.validation_loss,
    sent_bytes=run.total_sent_bytes,
    steps=run.steps,
    tokens=run.tokens,
    points=points,
    wall_s=run.wall_s,
  )
  end_s = {}
  if simulated_s:
    end_s[clock] = max(simulated_s.values())
  note = ""
  if not run.finished:
    note = " (not finished)"
  return Setting(
    name=name,
    seed_runs=[seed_run],
    baseline=baseline,
    seconds=end_s,
    fp32_bytes=run.fp32_bytes,
    note=note,
    uses_mailbox=run.uses_mailbox,
  )
