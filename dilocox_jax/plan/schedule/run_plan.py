"""A run cut into the stretches that are dispatched as one program each.

A stretch of a method with rounds is a round; data-parallel steps have none
and are cut by a chosen length. The cut depends on the config alone, so a run
that was stopped and one that was not are cut alike.
"""

import dataclasses
from collections.abc import Iterator

from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.plan.schedule.sync_schedule import Window


@dataclasses.dataclass(frozen=True)
class Segment:
  """One dispatch.

  Attributes:
    phase: "local" (rounds), "data_parallel", or "single" (one replica alone).
    start: Inner steps of the run before it.
    num_steps: Inner steps in it.
    windows: What a local segment walks.
    ends_phase: Whether the next segment is of another phase.
    schedule_start: Inner step of the run from which its windows count.
  """

  phase: str
  start: int
  num_steps: int
  windows: tuple[Window, ...] = ()
  ends_phase: bool = False
  schedule_start: int = 0

  @property
  def stop(self) -> int:
    """Inner steps of the run after it."""
    return self.start + self.num_steps

  def crosses(self, interval_steps: int) -> bool:
    """Whether a multiple of an interval lies in (start, stop]; 0: never."""
    if not interval_steps:
      return False
    return self.start // interval_steps < self.stop // interval_steps


@dataclasses.dataclass(frozen=True)
class RunPlan:
  """All segments of a run.

  Attributes:
    method: Schedule and rule of the local phase.
    total_steps: Inner steps, warm start included.
    warm_start: "none", "data_parallel" or "single".
    warm_start_steps: Inner steps before the first round.
    steps_per_dispatch: Steps a segment where there are no rounds.
    schedule_start: Inner step of the run from which the method's schedule
      counts; None: the first of the local phase.
  """

  method: Method
  total_steps: int
  warm_start: str = "none"
  warm_start_steps: int = 0
  steps_per_dispatch: int = 50
  schedule_start: int | None = None

  @property
  def local_start(self) -> int:
    """Inner step from which rounds are counted; the end if there are none."""
    if self.method.exchanged == "gradient":
      return self.total_steps
    return self.warm_start_steps

  def phase(self, step: int) -> str:
    """The phase that the step after `step` finished ones belongs to."""
    if step >= self.local_start and self.local_start < self.total_steps:
      return "local"
    return "single" if self.warm_start == "single" else "data_parallel"

  def segments(self, step: int = 0) -> Iterator[Segment]:
    """Yields the segments from a step on, which must end one."""
    while step < self.total_steps:
      segment = self.segment(step)
      yield segment
      step = segment.stop

  def schedule_step(self, step: int) -> int:
    """Inner steps of the schedule, given those of the run."""
    start = self.schedule_start
    return step - (self.local_start if start is None else start)

  def segment(self, step: int) -> Segment:
    """The segment that begins after a number of inner steps."""
    phase = self.phase(step)
    if phase != "local":
      count = min(self.steps_per_dispatch, self.local_start - step)
      ends = step + count == self.local_start < self.total_steps
      return Segment(phase, step, count, ends_phase=ends)
    interval = self.method.schedule.sync_interval
    count = min(interval, self.total_steps - step)
    done = self.schedule_step(step)
    windows = self.method.schedule.round_windows(done // interval, count)
    return Segment(
      phase, step, count, tuple(windows), schedule_start=step - done
    )
