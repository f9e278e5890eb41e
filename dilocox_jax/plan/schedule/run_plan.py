"""Divides a run into segments: each is a round or some data-parallel steps.

The trainer evaluates, saves and stops only between two segments.

For example, a run has 130 steps, and the first 60 are data parallel. With
rounds of H = 30 steps and steps_per_dispatch = 50, the segments have 50, 10,
30, 30 and 10 steps.
"""

import dataclasses
from collections.abc import Iterator

from dilocox_jax.plan.schedule.membership import Membership, RoundParticipation
from dilocox_jax.plan.schedule.methods import Method, with_interval
from dilocox_jax.plan.schedule.sync_schedule import Window


@dataclasses.dataclass(frozen=True)
class Segment:
  """A round, or some data-parallel steps, of a run.

  Attributes:
    phase: "rounds" or "data_parallel".
    start: Number of inner steps of the run before the segment.
    num_steps: Number of inner steps of the segment.
    windows: The round in parts. A part is some inner steps, then at most one
      mean to apply, and at most one fragment (part of the parameters) to
      measure for an exchange. Empty if `phase` is "data_parallel".
    ends_phase: Whether this is the last data-parallel segment and the first
      round comes next.
    schedule_start: Number of inner steps of the run before step 0 of the
      schedule. `windows` has steps of the schedule. 0 if `phase` is
      "data_parallel".
    participation: What each replica does in the windows. None: all replicas
      take all inner steps and have equal weights.
  """

  phase: str
  start: int
  num_steps: int
  windows: tuple[Window, ...] = ()
  ends_phase: bool = False
  schedule_start: int = 0
  participation: RoundParticipation | None = None

  @property
  def stop(self) -> int:
    """Number of inner steps of the run before the end of the segment."""
    return self.start + self.num_steps

  def replica_steps(self, num_replicas: int) -> int:
    """Returns the inner steps of the segment, summed over all replicas."""
    if self.participation:
      return sum(self.participation.num_steps)
    return self.num_steps * num_replicas

  def crosses(self, interval_steps: int) -> bool:
    """Returns whether a multiple of an interval lies in (start, stop].

    If it does, an event that recurs every `interval_steps` inner steps, such as
    an evaluation, is due. For 0 the result is False.
    """
    if not interval_steps:
      return False
    return self.start // interval_steps < self.stop // interval_steps


@dataclasses.dataclass(frozen=True)
class RunPlan:
  """Divides a run into segments: each is a round or some data-parallel steps.

  Attributes:
    method: What the run averages, when, and how replicas go on with a mean.
    total_steps: Number of inner steps of the run, warm start included.
    warm_start_steps: Number of data-parallel steps before the first round.
    steps_per_dispatch: Largest number of steps of a data-parallel segment.
    schedule_start: Number of inner steps of the run before step 0 of the
      schedule. It is set if H (inner steps of a round) has changed during the
      run, as the schedule then starts again. None: the schedule starts with the
      first round.
    membership: The rounds in which each replica takes part, and its number of
      steps. None: all replicas take all inner steps of all rounds.
  """

  method: Method
  total_steps: int
  warm_start_steps: int = 0
  steps_per_dispatch: int = 50
  schedule_start: int | None = None
  membership: Membership | None = None

  @property
  def local_start(self) -> int:
    """Number of inner steps before the first round.

    If the method has no rounds, this is `total_steps`.
    """
    if self.method.exchanged == "gradient":
      return self.total_steps
    return self.warm_start_steps

  def phase(self, step: int) -> str:
    """Returns "rounds" or "data_parallel", the phase of the next inner step.

    Args:
      step: Number of finished inner steps.
    """
    if step >= self.local_start and self.local_start < self.total_steps:
      return "rounds"
    return "data_parallel"

  def at_interval(self, sync_interval: int) -> "RunPlan":
    """Returns the same plan with another H (inner steps).

    H can change if the method has one fragment, rounds of equal length, and a
    delay of 0 or one round. With any other method, a new H raises ValueError.
    """
    if sync_interval == self.method.schedule.sync_interval:
      return self
    method = with_interval(self.method, sync_interval)
    return dataclasses.replace(self, method=method)

  def segments(self, step: int = 0) -> Iterator[Segment]:
    """Yields all segments after a step, in order.

    Args:
      step: Number of finished inner steps: 0, or the end of a segment.
    """
    while step < self.total_steps:
      segment = self.segment(step)
      yield segment
      step = segment.stop

  def repeated_segments(self) -> Iterator[tuple[Segment, int]]:
    """Yields all segments as pairs (segment, how often it repeats in a row).

    Repetitions differ only in their position in the run. Here, data-parallel
    segments have one step each.

    Example: 100 data-parallel steps and then DiLoCo with H = 30 up to step 1010
    are 100 segments of 1 step, 30 segments of 30 steps, and 1 segment of 10
    steps.
    """
    step = 0
    while step < self.total_steps:
      segment = self.segment(step)
      if segment.phase == "rounds":
        num_segments = self._num_equal_rounds(segment)
      else:
        # One pair stands for all data-parallel steps, and only the last of them
        # ends the phase.
        segment = dataclasses.replace(segment, num_steps=1, ends_phase=False)
        num_segments = self.local_start - step
      yield segment, num_segments
      step += num_segments * segment.num_steps

  def _num_equal_rounds(self, segment: Segment) -> int:
    """Returns how many rounds, from a given one on, are known to be equal."""
    schedule = self.method.schedule
    done = segment.start - segment.schedule_start
    round_index, interval = schedule.round_at(done)
    num_rounds = (self.total_steps - segment.start) // interval
    if num_rounds == 0:  # The run ends within this round.
      return 1
    num_alike = schedule.num_alike(round_index)
    if num_alike is not None:
      num_rounds = min(num_rounds, num_alike)
    if self.membership is None:
      return num_rounds
    num_alike = self.membership.num_alike(round_index)
    if num_alike is None:
      return num_rounds
    return min(num_rounds, num_alike)

  def round_starts(self) -> list[float]:
    """Returns, for each round, the fraction of training before it, 0 to 1.

    The fraction counts the inner steps of rounds, without data-parallel steps.
    Example: 20 data-parallel steps and then rounds of 4, 4 and 8 steps give 0,
    0.25 and 0.5.
    """
    num_steps = self.total_steps - self.local_start
    starts = []
    for segment, count in self.repeated_segments():
      if segment.phase == "rounds":
        first = segment.start - self.local_start
        for number in range(count):
          starts.append((first + number * segment.num_steps) / num_steps)
    return starts

  def schedule_step(self, step: int) -> int:
    """Converts a step of the run into a step of the schedule.

    The schedule counts from its own start (`schedule_start`).

    Args:
      step: Number of finished inner steps of the run.
    """
    if self.schedule_start is None:
      return step - self.local_start
    return step - self.schedule_start

  def segment(self, step: int) -> Segment:
    """Returns the segment that begins after `step` finished inner steps."""
    if self.phase(step) == "data_parallel":
      num_steps = min(self.steps_per_dispatch, self.local_start - step)
      is_last = step + num_steps == self.local_start
      return Segment(
        phase="data_parallel",
        start=step,
        num_steps=num_steps,
        ends_phase=is_last and self.local_start < self.total_steps,
      )
    done = self.schedule_step(step)
    round_index, interval = self.method.schedule.round_at(done)
    num_steps = min(interval, self.total_steps - step)
    windows = self.method.schedule.windows(done, done + num_steps)
    participation = None
    if self.membership:
      participation = self.membership.participation(round_index, windows)
    return Segment(
      phase="rounds",
      start=step,
      num_steps=num_steps,
      windows=tuple(windows),
      schedule_start=step - done,
      participation=participation,
    )

  def flush_participation(self) -> RoundParticipation | None:
    """Returns what each replica does in the flush at the end of the run.

    The flush sends and applies what is left over after the last round
    (`SyncSchedule.flush_windows`). None: all replicas have equal weights, or
    the run has no rounds.
    """
    if self.membership is None or self.local_start == self.total_steps:
      return None
    schedule = self.method.schedule
    step = self.schedule_step(self.total_steps)
    last_round, _ = schedule.round_at(step - 1)
    windows = schedule.flush_windows(step)
    return self.membership.participation(last_round, windows)
