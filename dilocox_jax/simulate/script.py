"""A run as every replica lives it: compute, launch, wait.

The plan's segments say what the trainer does; here they become the few verbs
that cost time. Both paths of the simulator walk this one script, and neither
counts a step or a byte itself.
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
    num_steps: How many.
    is_alone: Whether only the first replica takes them (a warm start).
  """

  num_steps: int
  is_alone: bool = False


@dataclasses.dataclass(frozen=True)
class Launch:
  """The start of an exchange; the replica goes on at once.

  Attributes:
    key: Names the exchange.
    operations: Its collectives, one after the other.
  """

  key: Key
  operations: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True)
class Wait:
  """The replica goes on when an exchange has come back.

  Attributes:
    key: Names the exchange.
  """

  key: Key


Op = Compute | Launch | Wait


@dataclasses.dataclass(frozen=True)
class Script:
  """Turns segments into ops.

  Attributes:
    traffic: What every exchange puts on the wire.
    copied_bytes: State that a lone warm start hands to the other replicas.
  """

  traffic: Traffic
  copied_bytes: int = 0

  @functools.cached_property
  def _gradient(self) -> tuple[Collective, ...]:
    return tuple(self.traffic.gradient())

  @functools.cached_property
  def _exchanges(self) -> list[tuple[Collective, ...]]:
    """The operations of every fragment: a large model's take long to count."""
    fragments = range(self.traffic.method.schedule.num_fragments)
    return [tuple(self.traffic.exchange(each)) for each in fragments]

  def ops(self, plan: RunPlan, stop: int | None = None) -> Iterator[Op]:
    """The ops of a run, flush included.

    Args:
      plan: Its segments.
      stop: Inner step of the run at whose segment to end; None: the end, with
        the flush.
    """
    end = plan.total_steps if stop is None else min(stop, plan.total_steps)
    for segment in plan.segments():
      if segment.start >= end:
        return
      yield from self.segment(segment)
    if stop is None:
      yield from self.flush(plan)

  def segment(self, segment: Segment) -> Iterator[Op]:
    """The ops of one segment."""
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
    """The end of a run: what is in flight arrives, what is unsent is sent.

    Args:
      plan: The run; without rounds there is nothing to flush.
    """
    if plan.local_start >= plan.total_steps:
      return
    step = plan.schedule_step(plan.total_steps)
    for window in self.traffic.method.schedule.flush_windows(step):
      yield from self._window(window, plan.total_steps - step)

  def _window(self, window: Window, start: int) -> Iterator[Op]:
    """As the program walks it: what arrives is exchanged from its start on."""
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
    """An exchange behind inner steps."""
    # By the run's own step: a schedule begins anew where H changes.
    key = ("fragment", event.fragment, start + event.send_step)
    yield Launch(key, self._exchanges[event.fragment])
    if num_steps:
      yield Compute(num_steps)
    yield Wait(key)
