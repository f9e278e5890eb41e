"""A run as a *script*: a sequence of ops, such as inner steps, that cost time.

The ops are inner steps (`Compute`), the start of an exchange (`Launch`), the
wait for its end (`Wait`), and the return of absent replicas (`Join`). This file
makes them from the plan that the trainer follows.

Example: a round has H = 4 inner steps. If tau = 4 of them hide the exchange,
the round is Launch, Compute(4), Wait. If none does (tau = 0), the round is
Compute(4), Launch, Wait. With a low-rank codec a replica sends two messages,
and the second needs the result of the first. If both have equally many bytes
and tau = 4, the round is Launch, Compute(2), Wait, Launch, Compute(2), Wait.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.plan.operations import Broadcast, Operation
from dilocox_jax.plan.overlap import stretch_ends, stretches
from dilocox_jax.plan.schedule.membership import (
  RoundParticipation,
  WindowParticipation,
)
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.schedule.sync_schedule import Event, Window

# What names an exchange: "fragment", "gradient" or "join"; the index of the
# fragment; the inner step at which it is measured; the turn of the message: 0
# for the first one, 1 for a message that needs the result of the first one.
Key = tuple[str, int, int, int]


@dataclasses.dataclass(frozen=True)
class Compute:
  """An op: inner steps.

  Attributes:
    num_steps: Number of inner steps.
    taken: Number of inner steps that each replica takes, [M]; empty: every
      replica takes `num_steps`.
  """

  num_steps: int
  taken: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Launch:
  """An op: the start of an exchange. The replicas go on at once.

  Attributes:
    key: Name of the exchange (`Key`).
    operations: Operations that run one after the other.
    members: Replicas that exchange, in the order of the ring; None: all.
    codec_share: Share of the exchange's encoding that is done just before this
      launch.
  """

  key: Key
  operations: tuple[Operation, ...]
  members: tuple[int, ...] | None = None
  codec_share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Wait:
  """An op: the replicas wait until an exchange has finished.

  Attributes:
    key: Name of the exchange (`Key`).
    members: Replicas that wait; None: all.
    codec_share: Share of the exchange's decoding that is done just after this
      wait.
  """

  key: Key
  members: tuple[int, ...] | None = None
  codec_share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Join:
  """An op: replicas come back from an absence, as copies of another replica.

  The returning replicas go on at the time that the source replica has reached.

  Attributes:
    returning: Indices of the replicas that come back.
    source_replica: Index of the replica that they copy.
  """

  returning: tuple[int, ...]
  source_replica: int


Op = Compute | Launch | Wait | Join


@dataclasses.dataclass(frozen=True)
class Script:
  """Turns the segments of a plan into ops.

  A segment is a round, or several data-parallel steps. After the last segment
  comes the *flush*: the exchanges that are still due.

  Attributes:
    traffic: Gives the collectives of every exchange, with their bytes.
    copied_bytes: Size of the state that a returning replica gets (bytes).
  """

  traffic: Traffic
  copied_bytes: int = 0

  @functools.cached_property
  def _gradient(self) -> tuple[Operation, ...]:
    """Operations that average the gradients of one inner step."""
    return tuple(self.traffic.gradient())

  @functools.cached_property
  def _exchanges(self) -> Callable[[int], list[tuple[Operation, ...]]]:
    """Function from a number of replicas to the operations of all exchanges.

    There is one exchange for each fragment (part of the parameters).
    """
    fragments = range(self.traffic.method.schedule.num_fragments)

    def exchanges(num_replicas: int) -> list[tuple[Operation, ...]]:
      traffic = dataclasses.replace(self.traffic, num_replicas=num_replicas)
      return [tuple(traffic.exchange(fragment)) for fragment in fragments]

    # Counting takes long for large models.
    return functools.cache(exchanges)

  def ops(self, plan: RunPlan) -> Iterator[Op]:
    """Yields all ops of a run, with the exchanges that are due at its end."""
    for segment in plan.segments():
      yield from self.segment(segment)
    yield from self.flush(plan)

  def repeated_ops(self, plan: RunPlan) -> Iterator[tuple[list[Op], int]]:
    """Yields the ops of a run, but those of a repeated segment only once.

    A segment is a round, or several data-parallel steps. All its repetitions
    have the keys (`Key`) of the first one. The ops end with the exchanges that
    are due at the end of the run.

    Args:
      plan: Plan of the run.

    Yields:
      A list of ops, and how many times in a row it occurs.
    """
    for segment, count in plan.repeated_segments():
      yield list(self.segment(segment)), count
    yield list(self.flush(plan)), 1

  def segment(self, segment: Segment) -> Iterator[Op]:
    """Yields the ops of one segment: a round, or data-parallel steps."""
    if segment.phase == "rounds":
      yield from self._joins(segment)
      yield from self._windows(
        windows=segment.windows,
        start=segment.schedule_start,
        participation=segment.participation,
      )
      return
    for step in range(segment.start, segment.stop):
      yield Compute(1)
      # A warm start sends plain sums, which no codec encodes.
      codec_share = float(self.traffic.method.exchanged == "gradient")
      key = ("gradient", step, 0, 0)
      yield Launch(key, self._gradient, codec_share=codec_share)
      yield Wait(key, codec_share=codec_share)

  def flush(self, plan: RunPlan) -> Iterator[Op]:
    """Yields the ops of the exchanges that are due after the last inner step.

    If all steps of the plan average gradients, there are none.
    """
    if plan.local_start >= plan.total_steps:
      return
    step = plan.schedule_step(plan.total_steps)
    yield from self._windows(
      windows=self.traffic.method.schedule.flush_windows(step),
      start=plan.total_steps - step,
      participation=plan.flush_participation(),
    )

  def _joins(self, segment: Segment) -> Iterator[Op]:
    """Yields the ops of replicas that come back before a segment."""
    participation = segment.participation
    if participation is None or not participation.returning:
      return
    yield Join(participation.returning, participation.source_replica)
    ring = (participation.source_replica, *participation.returning)
    key = ("join", segment.start, 0, 0)
    broadcast = Broadcast(self.copied_bytes)
    # The state goes as it is, without a codec.
    yield Launch(key, operations=(broadcast,), members=ring, codec_share=0.0)
    yield Wait(key, members=ring, codec_share=0.0)

  def _windows(
    self,
    windows: Sequence[Window],
    start: int,
    participation: RoundParticipation | None,
  ) -> Iterator[Op]:
    """Yields the ops of the windows of a round or a flush.

    A window is some inner steps, then at most one apply of a mean, and one send
    of a fragment (part of the parameters). An exchange begins in the
    window that applies its mean: before the window's inner steps, or after them
    if tau = 0.

    Args:
      windows: The windows, in order.
      start: Inner step of the run from which the schedule counts.
      participation: Which replicas take part, and with how many steps; None:
        all replicas take all steps.
    """
    hides = bool(self.traffic.method.schedule.overlap_steps)
    by_window: Sequence[WindowParticipation | None] = [None] * len(windows)
    members = None
    if participation:
      by_window = participation.windows
      members = participation.members
    for window, each in zip(windows, by_window, strict=True):
      steps = Compute(window.num_steps, taken=each.num_steps if each else ())
      if window.applied and hides:
        yield from self._exchange(window.applied, start, steps, members)
        continue
      if window.num_steps:
        yield steps
      if window.applied:
        yield from self._exchange(window.applied, start, Compute(0), members)

  def _exchange(
    self,
    event: Event,
    start: int,
    behind: Compute,
    members: tuple[int, ...] | None,
  ) -> Iterator[Op]:
    """Yields the ops of an exchange and of the inner steps that hide it.

    The first messages have the *turn* 0, messages that need their result the
    turn 1, and so on. The turns share the inner steps in proportion to their
    bytes, and the codec's time evenly. The messages of a turn are launched
    before its inner steps, and waited for after them.

    Args:
      event: Fragment of the exchange, and the steps of its send and its apply.
      start: Inner step of the run from which the schedule counts.
      behind: Inner steps between the launch and the wait; if there are none,
        one launch has the messages of all turns, in order.
      members: Replicas that exchange, in the order of the ring; None: all.
    """
    # A schedule starts again at step 0 when H changes. So the key has the step
    # of the run, and no two exchanges have the same key.
    key = ("fragment", event.fragment, start + event.send_step)
    count = len(members) if members else self.traffic.num_replicas
    operations = self._exchanges(count)[event.fragment]
    if not behind.num_steps:
      yield Launch((*key, 0), operations, members)
      yield Wait((*key, 0), members)
      return
    # Where the inner steps of each turn end, in 1024ths of all steps.
    ends = stretch_ends(operations, count)
    # For each turn, the number of its steps that each replica takes. Example:
    # of 4 steps, replica 0 takes 4 and replica 1 takes 2. If each of two turns
    # gets half of the steps, this yields (2, 1) for both.
    taken_by_turn = zip(
      *(stretches(num_taken, ends) for num_taken in behind.taken), strict=True
    )
    for turn, num_steps in enumerate(stretches(behind.num_steps, ends)):
      sent = tuple(each for each in operations if each.turn == turn)
      yield Launch((*key, turn), sent, members, 1 / len(ends))
      # If all replicas take all steps, `behind.taken` is empty.
      taken = next(taken_by_turn, ())
      if num_steps or any(taken):
        yield dataclasses.replace(behind, num_steps=num_steps, taken=taken)
      yield Wait((*key, turn), members, 1 / len(ends))
