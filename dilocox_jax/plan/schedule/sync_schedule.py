"""Computes after which inner steps fragments are sent and applied.

The trainer and the simulator both use this module. So the simulated events are
the events of the training run.

Fragment p is *sent* after inner step s if (s - t_p) mod H = 0 and s > 0, with
the offset t_p = floor(p H / P), and *applied* at s + tau. Events of one step
happen in the order measure, apply, send.

What lies between two steps with events is a *window*. For example H = 6, P = 3,
tau = 1 (offsets 0, 2, 4) has a window before each of these steps:

    after step   2       3        4       5        6       7        8
    event        send 1  apply 1  send 2  apply 2  send 0  apply 0  send 1
"""

import dataclasses
import itertools
from collections.abc import Iterator

from dilocox_jax.checks import require


@dataclasses.dataclass(frozen=True, order=True)
class Event:
  """A send or an apply of one fragment.

  Attributes:
    step: Inner step after which the event happens.
    kind: "apply" or "send". Applies of a step sort before its sends.
    fragment: Index of the fragment, from 0.
    send_step: Inner step after which the fragment was measured.
  """

  step: int
  kind: str
  fragment: int
  send_step: int


@dataclasses.dataclass(frozen=True)
class Window:
  """Inner steps up to the next events, and these events.

  Attributes:
    num_steps: Number of inner steps, which come first.
    applied: The `Event` of the apply after them, or None. What it applies is
      exchanged beside these steps, unless it is measured after them (tau = 0).
    sent: The `Event` of the send after them, or None. The order is measure,
      apply, send.
    follows_send: Whether the window before it sends the fragment that is
      applied here, on the same step. That measurement is then the newest one
      of the fragment (`outer.rules.ApplyRule.gradient` is given it).
  """

  num_steps: int
  applied: Event | None = None
  sent: Event | None = None
  follows_send: bool = False

  @property
  def is_same(self) -> bool:
    """Whether one fragment is applied and sent."""
    events = self.applied, self.sent
    return all(events) and len({e and e.fragment for e in events}) == 1

  @property
  def parts(self) -> list["Window"]:
    """Its steps, its apply and its send as windows of their own, in order.

    A fragment that is applied and sent is measured first.
    """
    parts = [Window(self.num_steps)] if self.num_steps else []
    send = [Window(0, sent=self.sent)] if self.sent else []
    if self.is_same:
      return [*parts, *send, Window(0, self.applied, follows_send=True)]
    if self.applied:
      parts.append(Window(0, self.applied, follows_send=self.follows_send))
    return [*parts, *send]


@dataclasses.dataclass(frozen=True)
class SyncSchedule:
  """Computes the sends and applies of a run from H, P and tau.

  Attributes:
    sync_interval: H, the number of inner steps between two sends of a fragment.
    num_fragments: P, the number of fragments.
    overlap_steps: tau, the number of inner steps between a send and its apply.
      If it is 0, the replica waits for the exchange. It may exceed H.
  """

  sync_interval: int
  num_fragments: int = 1
  overlap_steps: int = 0

  def __post_init__(self):
    interval, fragments = self.sync_interval, self.num_fragments
    require(
      interval >= 1, f"sync_interval={interval} must be at least 1 inner step"
    )
    require(
      1 <= fragments <= interval,
      f"num_fragments={fragments} must lie between 1 and "
      f"sync_interval={interval}",
    )
    overlap = self.overlap_steps
    require(overlap >= 0, f"overlap_steps={overlap} must not be negative")

  @property
  def depth(self) -> int:
    """Largest number of one fragment's exchanges in flight: ceil(tau / H).

    Example: with H = 4 and tau = 6, the pseudo-gradient that is sent after step
    4 is applied after step 10. The next one is sent after step 8. So two of
    them are in flight between steps 8 and 10, and the depth is 2.
    """
    return -(-self.overlap_steps // self.sync_interval)

  @property
  def is_whole_rounds(self) -> bool:
    """Whether a fragment is applied on the steps on which it is sent."""
    return self.overlap_steps % self.sync_interval == 0

  @property
  def hiding_steps(self) -> int:
    """Smallest number of inner steps that run at the same time as an exchange.

    A program begins an exchange in the window that applies its result. So a tau
    above H / P makes the result older, but hides no more of the exchange.
    Example: with H = 6, P = 1 and tau = 8, only two of the eight steps hide it.
    """
    if not self.overlap_steps:
      return 0
    start = (self.depth + 1) * self.sync_interval
    windows = self.windows(start, start + self.sync_interval)
    return min(window.num_steps for window in windows if window.applied)

  @property
  def is_regular(self) -> bool:
    """Whether all rounds have H steps; schedules of subclasses need not."""
    return type(self) is SyncSchedule

  @property
  def steady_round(self) -> int | None:
    """Index of the round from which on all rounds have the same windows.

    Rounds before it apply less, because less was sent before them. With H = 4
    and tau = 6 the send of step 4 is applied after step 10. So rounds 0 and 1
    apply nothing, and round 2 is the first of equal rounds.

    None means that no such round is known, as for a subclass that does not
    state one. The simulator then goes through every round of a run.
    """
    return self.depth if self.is_regular else None

  def round_at(self, step: int) -> tuple[int, int]:
    """Returns the index and the number of inner steps of a round.

    Args:
      step: Inner steps before the round.
    """
    return step // self.sync_interval, self.sync_interval

  def offset(self, fragment: int) -> int:
    """Returns t_p, the number of inner steps of a round before a send.

    Args:
      fragment: Index p of the fragment that is sent.
    """
    return fragment * self.sync_interval // self.num_fragments

  def events(self, start: int, stop: int) -> list[Event]:
    """Returns the events of inner steps start < s <= stop, in order.

    Args:
      start: Inner step before the first of them.
      stop: Last of them.
    """
    interval = self.sync_interval
    found = []
    for fragment in range(self.num_fragments):
      for kind, delay in (("apply", self.overlap_steps), ("send", 0)):
        lowest = max(start - delay + 1, 1)
        first = lowest + (self.offset(fragment) - lowest) % interval
        found += [
          Event(sent + delay, kind, fragment, sent)
          for sent in range(first, stop - delay + 1, interval)
        ]
    return sorted(found)

  def windows(self, start: int, stop: int) -> list[Window]:
    """Returns the windows of inner steps start < s <= stop, in order.

    A window is what lies between two steps with events. Where fewer steps
    follow the last event than the next one needs, they are a window without
    events.

    Args:
      start: Inner step before the first of them.
      stop: Last of them.
    """
    windows, done = [], start
    events = itertools.groupby(self.events(start, stop), lambda e: e.step)
    for step, of_step in events:
      kinds: dict[str, list[Event]] = {"apply": [], "send": []}
      for event in of_step:
        kinds[event.kind].append(event)
      for pair in itertools.zip_longest(kinds["apply"], kinds["send"]):
        windows.append(Window(step - done, *pair))
        done = step
    return windows + [Window(stop - done)] * (done < stop)

  def num_in_flight(self, step: int) -> list[int]:
    """Returns how many exchanges of every fragment are in flight after a step.

    Args:
      step: Inner steps done, with all events of the last one.
    """
    counts = [0] * self.num_fragments
    for event in self._pending(step):
      counts[event.fragment] += 1
    return counts

  def _pending(self, step: int) -> list[Event]:
    """Returns the applies of what is in flight after a step, in order."""
    return [
      event
      for event in self.events(step, step + self.overlap_steps)
      if event.kind == "apply" and event.send_step <= step
    ]

  def flush_windows(self, step: int) -> list[Window]:
    """Returns the windows of the flush, which ends a run.

    The flush applies all pending exchanges. It also sends and applies the
    progress that was not sent yet. Its windows have no inner steps. The trainer
    runs these windows, and bytes and simulated times are computed from them.

    The fragments come one after the other, and each window holds one event.
    Pending exchanges of a fragment are applied, the oldest first. The progress
    since the last send is sent before these applies if tau >= H, as in the
    rounds, and after them otherwise. Its exchange is applied last. If there was
    no inner step since the last send of the fragment, nothing is sent.

    Example: H = 4, P = 1 and tau = 6, after step 9. The sends of steps 4 and 8
    are pending and the progress of step 9 is unsent. So the windows are
    send(9), apply(4), apply(8), apply(9). With tau = 2 only the send of step 8
    is pending, so the windows are apply(8), send(9), apply(9).

    Args:
      step: Number of finished inner steps. All events of the last step must be
        done.

    Returns:
      Windows in order. An event keeps the step at which it would happen in a
      longer run. So the steps of a fragment's events may not be ascending.
    """
    return [
      window
      for fragment in range(self.num_fragments)
      for window in self._flush_fragment(step, fragment)
    ]

  def _flush_fragment(self, step: int, fragment: int) -> Iterator[Window]:
    overlap = self.overlap_steps
    pending = [
      Window(0, event)
      for event in self._pending(step)
      if event.fragment == fragment
    ]
    is_sent = any(
      event.kind == "send" and event.fragment == fragment
      for event in self.events(step - 1, step)
    )
    if not step or is_sent:
      yield from pending
      return
    send = Window(0, sent=Event(step, "send", fragment, step))
    last = Window(0, Event(step + overlap, "apply", fragment, step))
    if overlap < self.sync_interval:
      yield from [*pending, send]
      # With tau = 0 a round measures and applies on the same step.
      yield dataclasses.replace(last, follows_send=not overlap)
      return
    yield send
    for number, window in enumerate([*pending, last]):
      is_next = number == 0 and self.is_whole_rounds
      yield dataclasses.replace(window, follows_send=is_next)
