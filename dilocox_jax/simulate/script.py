"""A run as operations of a replica that cost time: compute, launch, wait.

The plan's segments describe what the trainer does; here they become these
three operations, so the simulator itself counts no step and no byte.

For example one round of H = 4, tau = 4 is Launch, Compute(4), Wait, and one of
H = 4, tau = 0 is Compute(4), Launch, Wait. Low rank has two messages, of which
the second needs the first: Launch, Compute(2), Wait, Launch, Compute(2), Wait.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from dilocox_jax.aggregators.collectives import Traffic
from dilocox_jax.plan.collective import Collective, stretch_ends, stretches
from dilocox_jax.plan.schedule.membership import RoundAttendance
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.schedule.sync_schedule import Event, Window

# Name, number, step, and turn of what is sent.
Key = tuple[str, int, int, int]


@dataclasses.dataclass(frozen=True)
class Compute:
  """Inner steps.

  Attributes:
    num_steps: Number of inner steps.
    taken: Number of them that each replica takes, [M]; empty: all of them.
      Where a round is cut into stretches, a slow replica may have a step in a
      stretch that has none of the run's.
  """

  num_steps: int
  taken: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Launch:
  """The start of an exchange; the replica goes on at once.

  Attributes:
    key: Name of the exchange.
    operations: Collectives that are sent one after the other.
    members: Replicas of the ring, in order; None: all.
    codec_share: Share of the exchange's encoding that is done before it.
  """

  key: Key
  operations: tuple[Collective, ...]
  members: tuple[int, ...] | None = None
  codec_share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Wait:
  """The replica waits until an exchange has finished.

  Attributes:
    key: Name of the exchange.
    members: Replicas that wait; None: all.
    codec_share: Share of the exchange's decoding that is done after it.
  """

  key: Key
  members: tuple[int, ...] | None = None
  codec_share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Join:
  """Replicas that were away are there again, at the donor's time.

  Attributes:
    returning: Indices of the replicas.
    donor: Index of the replica that they copy.
  """

  returning: tuple[int, ...]
  donor: int


Op = Compute | Launch | Wait | Join


@dataclasses.dataclass(frozen=True)
class Script:
  """Turns segments into ops.

  Attributes:
    traffic: Collectives and bytes of every exchange.
    copied_bytes: Size of the state that a replica gets which comes back
      (bytes).
  """

  traffic: Traffic
  copied_bytes: int = 0

  @functools.cached_property
  def _gradient(self) -> tuple[Collective, ...]:
    return tuple(self.traffic.gradient())

  @functools.cached_property
  def _exchanges(self) -> Callable[[int], list[tuple[Collective, ...]]]:
    """Function from M to the collectives of every fragment.

    It keeps its results, since counting takes long for large models.
    """
    fragments = range(self.traffic.method.schedule.num_fragments)

    def exchanges(num_replicas: int) -> list[tuple[Collective, ...]]:
      traffic = dataclasses.replace(self.traffic, num_replicas=num_replicas)
      return [tuple(traffic.exchange(fragment)) for fragment in fragments]

    return functools.cache(exchanges)

  def ops(self, plan: RunPlan) -> Iterator[Op]:
    """Yields the ops of a run, flush included."""
    for segment in plan.segments():
      yield from self.segment(segment)
    yield from self.flush(plan)

  def repeated_ops(self, plan: RunPlan) -> Iterator[tuple[list[Op], int]]:
    """Yields the ops of a run, flush included; ops that repeat come once.

    The keys of exchanges that repeat are those of the first time.

    Args:
      plan: Plan of the run.

    Yields:
      Ops, and how often they come in a row.
    """
    for segment, count in plan.repeated_segments():
      yield list(self.segment(segment)), count
    yield list(self.flush(plan)), 1

  def segment(self, segment: Segment) -> Iterator[Op]:
    """Yields the ops of one segment."""
    if segment.phase == "rounds":
      start, attendance = segment.schedule_start, segment.attendance
      yield from self._joins(segment)
      yield from self._windows(segment.windows, start, attendance)
      return
    for step in range(segment.start, segment.stop):
      yield Compute(1)
      # A warm start sends plain sums, which no codec encodes.
      share = float(self.traffic.method.exchanged == "gradient")
      gradient = ("gradient", step, 0, 0)
      yield Launch(gradient, self._gradient, codec_share=share)
      yield Wait(gradient, codec_share=share)

  def flush(self, plan: RunPlan) -> Iterator[Op]:
    """Yields the ops of the flush (`SyncSchedule.flush_windows`).

    Args:
      plan: Plan of the run; without rounds there is nothing to flush.
    """
    if plan.local_start >= plan.total_steps:
      return
    step = plan.schedule_step(plan.total_steps)
    windows = self.traffic.method.schedule.flush_windows(step)
    start, attendance = plan.total_steps - step, plan.flush_attendance()
    yield from self._windows(windows, start, attendance)

  def _joins(self, segment: Segment) -> Iterator[Op]:
    """Yields the ops by which replicas come back: they copy the donor."""
    attendance = segment.attendance
    if attendance is None or not attendance.returning:
      return
    yield Join(attendance.returning, attendance.donor)
    ring = (attendance.donor, *attendance.returning)
    key, copy = ("join", segment.start, 0, 0), self.copied_bytes
    # The state goes as it is, without a codec.
    yield Launch(key, (Collective("broadcast", copy),), ring, codec_share=0.0)
    yield Wait(key, ring, codec_share=0.0)

  def _windows(
    self,
    windows: Sequence[Window],
    start: int,
    attendance: RoundAttendance | None,
  ) -> Iterator[Op]:
    """Yields the ops of windows in the order of the compiled program.

    What is applied in a window is exchanged from the window's start on.
    """
    hides = bool(self.traffic.method.schedule.overlap_steps)
    shares = attendance.windows if attendance else [None] * len(windows)
    members = attendance.members if attendance else None
    for window, share in zip(windows, shares, strict=True):
      steps = Compute(window.num_steps, taken=share.num_steps if share else ())
      if window.applied and hides:
        yield from self._exchange(window.applied, start, steps, members)
        continue
      if window.num_steps:
        yield steps
      # Without overlap the exchange that is applied is the one just measured.
      if window.applied:
        yield from self._exchange(window.applied, start, Compute(0), members)

  def _exchange(
    self,
    event: Event,
    start: int,
    behind: Compute,
    members: tuple[int, ...] | None,
  ) -> Iterator[Op]:
    """Yields the ops of an exchange and of the inner steps behind it.

    What needs the result of a message is sent behind a stretch of its own, as
    in the compiled program. The turns share the time of the codec evenly.

    Args:
      event: Apply of the exchange.
      start: Inner step of the run from which the schedule counts.
      behind: Inner steps between the launch and the wait; if there are none,
        all messages are sent at once.
      members: Replicas of the ring; None: all.
    """
    # Where H changes, the schedule starts again at step 0. The key has the
    # step of the run, so that no two exchanges have the same name.
    key = ("fragment", event.fragment, start + event.send_step)
    count = len(members) if members else self.traffic.num_replicas
    operations = self._exchanges(count)[event.fragment]
    if not behind.num_steps:
      yield Launch((*key, 0), operations, members)
      yield Wait((*key, 0), members)
      return
    ends = stretch_ends(operations, count)
    taken = zip(*(stretches(each, ends) for each in behind.taken), strict=True)
    for turn, num_steps in enumerate(stretches(behind.num_steps, ends)):
      own = tuple(each for each in operations if each.turn == turn)
      yield Launch((*key, turn), own, members, 1 / len(ends))
      of_replicas = next(taken, ())
      if num_steps or any(of_replicas):
        yield dataclasses.replace(
          behind, num_steps=num_steps, taken=of_replicas
        )
      yield Wait((*key, turn), members, 1 / len(ends))
