"""A run cut into segments, each of which is dispatched without a pause.

Where a method has rounds, a segment is a round. Data-parallel steps have no
rounds and are cut at a chosen length. The cuts depend on the config alone, so a
run that was stopped and continued has the same segments as one that was not.

With 130 steps, of which the first 60 are data parallel, H = 30 and
steps_per_dispatch = 50, the segments have 50, 10, 30, 30 and 10 steps.
"""

import dataclasses
from collections.abc import Iterator

from dilocox_jax.plan.schedule.membership import Membership, RoundParticipation
from dilocox_jax.plan.schedule.methods import Method, with_interval
from dilocox_jax.plan.schedule.sync_schedule import Window


@dataclasses.dataclass(frozen=True)
class Segment:
  """A stretch of a run that is dispatched without a pause, such as a round.

  Attributes:
    phase: "rounds" or "data_parallel".
    start: Inner steps of the run before the segment.
    num_steps: Inner steps of the segment.
    windows: Windows of a local segment, in order.
    ends_phase: Whether the next segment is of another phase.
    schedule_start: Inner step of the run at which step 0 of its windows lies.
    participation: What each replica does in the windows; None: all the same.
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
    """Inner steps of the run after the segment."""
    return self.start + self.num_steps

  def replica_steps(self, num_replicas: int) -> int:
    """Returns the inner steps of all replicas together."""
    if self.participation:
      return sum(self.participation.num_steps)
    return self.num_steps * num_replicas

  def crosses(self, interval_steps: int) -> bool:
    """Whether a multiple of an interval lies in (start, stop]; 0: never."""
    if not interval_steps:
      return False
    return self.start // interval_steps < self.stop // interval_steps


@dataclasses.dataclass(frozen=True)
class RunPlan:
  """Cuts a run into segments.

  Attributes:
    method: Schedule and apply rule of the rounds.
    total_steps: Inner steps of the run, warm start included.
    warm_start_steps: Inner steps before the first round, data parallel.
    steps_per_dispatch: Inner steps of a segment where there are no rounds.
    schedule_start: Inner step of the run at which step 0 of the schedule
      lies; None: where the rounds begin.
    membership: Rounds and pace of the replicas; None: all take part alike.
  """

  method: Method
  total_steps: int
  warm_start_steps: int = 0
  steps_per_dispatch: int = 50
  schedule_start: int | None = None
  membership: Membership | None = None

  @property
  def local_start(self) -> int:
    """Inner step at which rounds begin; the last one if there are none."""
    if self.method.exchanged == "gradient":
      return self.total_steps
    return self.warm_start_steps

  def phase(self, step: int) -> str:
    """Returns the phase of the step that follows `step` finished steps."""
    if step >= self.local_start and self.local_start < self.total_steps:
      return "rounds"
    return "data_parallel"

  def at_interval(self, sync_interval: int) -> "RunPlan":
    """Returns the plan of a run whose rounds have another H."""
    if sync_interval == self.method.schedule.sync_interval:
      return self
    method = with_interval(self.method, sync_interval)
    return dataclasses.replace(self, method=method)

  def segments(self, step: int = 0) -> Iterator[Segment]:
    """Yields all segments that follow a step at which a segment ends."""
    while step < self.total_steps:
      segment = self.segment(step)
      yield segment
      step = segment.stop

  def repeated_segments(self) -> Iterator[tuple[Segment, int]]:
    """Yields each kind of segment in a row once, with how often it comes.

    Segments are of one kind if they differ only in where in the run they lie. A
    data-parallel phase is one step that comes again and again.

    Example: 100 data-parallel steps and then DiLoCo with H = 30 up to step 1010
    are a segment of 1 step, 100 times; one of 30 steps, 30 times; and one of 10
    steps.

    Yields:
      The first segment of a kind, and the number of these segments.
    """
    step = 0
    while step < self.total_steps:
      segment = self.segment(step)
      if segment.phase == "rounds":
        count = self._num_alike(segment)
      else:
        segment = dataclasses.replace(segment, num_steps=1, ends_phase=False)
        count = self.local_start - step
      yield segment, count
      step += count * segment.num_steps

  def _num_alike(self, segment: Segment) -> int:
    """Returns how many rounds in a row are alike, from this one on."""
    schedule = self.method.schedule
    done = segment.start - segment.schedule_start
    round_index, interval = schedule.round_at(done)
    steady_round = schedule.steady_round
    if steady_round is None or round_index < steady_round:
      return 1
    whole_rounds = (self.total_steps - segment.start) // interval
    if whole_rounds == 0:
      return 1
    if self.membership is None:
      return whole_rounds
    num_alike = self.membership.num_alike(round_index)
    if num_alike is None:
      return whole_rounds
    return min(whole_rounds, num_alike)

  def schedule_step(self, step: int) -> int:
    """Returns the step of the schedule at a step of the run."""
    start = self.schedule_start
    return step - (self.local_start if start is None else start)

  def segment(self, step: int) -> Segment:
    """Returns the segment that begins after `step` inner steps."""
    phase = self.phase(step)
    if phase != "rounds":
      count = min(self.steps_per_dispatch, self.local_start - step)
      ends = step + count == self.local_start < self.total_steps
      return Segment(phase, step, count, ends_phase=ends)
    done = self.schedule_step(step)
    round_index, interval = self.method.schedule.round_at(done)
    count = min(interval, self.total_steps - step)
    windows = self.method.schedule.windows(done, done + count)
    participation = None
    if self.membership:
      participation = self.membership.participation(round_index, windows)
    return Segment(
      phase,
      step,
      count,
      tuple(windows),
      schedule_start=step - done,
      participation=participation,
    )

  def flush_participation(self) -> RoundParticipation | None:
    """Returns who takes part in the flush; None: all replicas alike."""
    if self.membership is None or self.local_start == self.total_steps:
      return None
    step, schedule = self.schedule_step(self.total_steps), self.method.schedule
    last_round, _ = schedule.round_at(step - 1)
    windows = schedule.flush_windows(step)
    return self.membership.participation(last_round, windows)
