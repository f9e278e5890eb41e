"""A run as operations of a replica that cost time: compute, launch, wait.

The plan's segments describe what the trainer does; here they become these
three operations. Both paths of the simulator go through this one script, and
neither counts a step or a byte itself.

For example one round of H = 4, tau = 4 is Launch, Compute(4), Wait, and one of
H = 4, tau = 0 is Compute(4), Launch, Wait.
"""

import dataclasses
import functools
from collections.abc import Iterator

from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.schedule.sync_schedule import Event, Window
from dilocox_jax.plan.wire.collectives import Collective
from dilocox_jax.plan.wire.traffic import Traffic

Key = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Compute:
  """Inner steps.

  Attributes:
    num_steps: Number of inner steps.
    is_alone: Whether only the first replica takes them (a warm start).
  """

  num_steps: int
  is_alone: bool = False


@dataclasses.dataclass(frozen=True)
class Launch:
  """The start of an exchange; the replica goes on at once.

  Attributes:
    key: Name of the exchange.
    operations: Collectives of the exchange, one after the other.
  """

  key: Key
  operations: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True)
class Wait:
  """The replica waits until an exchange has finished.

  Attributes:
    key: Name of the exchange.
  """

  key: Key


Op = Compute | Launch | Wait


@dataclasses.dataclass(frozen=True)
class Script:
  """Turns segments into ops.

  Attributes:
    traffic: Collectives and bytes of every exchange.
    copied_bytes: Size of the state that the other replicas get after a warm
      start on one replica (bytes).
  """

  traffic: Traffic
  copied_bytes: int = 0

  @functools.cached_property
  def _gradient(self) -> tuple[Collective, ...]:
    return tuple(self.traffic.gradient())

  @functools.cached_property
  def _exchanges(self) -> list[tuple[Collective, ...]]:
    """Collectives of every fragment; counting takes long for large models."""
    fragments = range(self.traffic.method.schedule.num_fragments)
    return [tuple(self.traffic.exchange(fragment)) for fragment in fragments]

  def ops(self, plan: RunPlan, stop: int | None = None) -> Iterator[Op]:
    """Yields the ops of a run, flush included.

    Args:
      plan: Segments of the run.
      stop: Inner step of the run at which to end, without a flush; None goes
        to the end of the run, with the flush.
    """
    end = plan.total_steps if stop is None else min(stop, plan.total_steps)
    for segment in plan.segments():
      if segment.start >= end:
        return
      yield from self.segment(segment)
    if stop is None:
      yield from self.flush(plan)

  def segment(self, segment: Segment) -> Iterator[Op]:
    """Yields the ops of one segment."""
    if segment.phase == "local":
      for window in segment.windows:
        yield from self._window(window, segment.schedule_start)
      return
    for step in range(segment.start, segment.stop):
      is_alone = segment.phase == "single"
      yield Compute(1, is_alone)
      if not is_alone:
        gradient = ("gradient", step, 0)
        yield Launch(gradient, self._gradient)
        yield Wait(gradient)
    if segment.phase == "single" and segment.ends_phase:
      copy = ("copy", segment.stop, 0)
      yield Launch(copy, (Collective("broadcast", self.copied_bytes),))
      yield Wait(copy)

  def flush(self, plan: RunPlan) -> Iterator[Op]:
    """Yields the ops of the flush (`SyncSchedule.flush_windows`).

    Args:
      plan: Plan of the run; without rounds there is nothing to flush.
    """
    if plan.local_start >= plan.total_steps:
      return
    step = plan.schedule_step(plan.total_steps)
    for window in self.traffic.method.schedule.flush_windows(step):
      yield from self._window(window, plan.total_steps - step)

  def _window(self, window: Window, start: int) -> Iterator[Op]:
    """Yields the ops of a window in the order of the compiled program.

    What is applied in a window is exchanged from the window's start on.
    """
    hides = bool(self.traffic.method.schedule.overlap_steps)
    if window.applied and hides:
      yield from self._exchange(window.applied, start, window.steps_before)
    elif window.steps_before:
      yield Compute(window.steps_before)
    if window.steps_after:
      yield Compute(window.steps_after)
    # Without overlap the exchange that is applied is the one just measured.
    if window.applied and not hides:
      yield from self._exchange(window.applied, start, 0)

  def _exchange(self, event: Event, start: int, num_steps: int) -> Iterator[Op]:
    """Yields the ops of an exchange that runs behind inner steps.

    Args:
      event: Apply of the exchange.
      start: Inner step of the run from which the schedule counts.
      num_steps: Inner steps between the launch and the wait.
    """
    # Where H changes, the schedule starts again at step 0. The key has the
    # step of the run, so that no two exchanges have the same name.
    key = ("fragment", event.fragment, start + event.send_step)
    yield Launch(key, self._exchanges[event.fragment])
    if num_steps:
      yield Compute(num_steps)
    yield Wait(key)
