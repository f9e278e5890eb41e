"""Computes after which inner steps fragments are sent and applied.

The trainer and the simulator both use this module. So the simulated events are
the events of the training run. P fragments are each sent every H inner steps,
and the result of a send is applied tau inner steps later.

Fragment p is *sent* after inner step s if (s - t_p) mod H = 0 and s > 0, with
the offset t_p = floor(p H / P), and *applied* after step s + tau. Events of one
step happen in the order measure, apply, send: the pseudo-gradient that is sent
is measured before a result is applied.

The inner steps between two steps with events are a *window*. For example, with
H = 6, P = 3 and tau = 1 (offsets 0, 2, 4) a window ends at each of these steps:

    after step   2       3        4       5        6       7        8
    event        send 1  apply 1  send 2  apply 2  send 0  apply 0  send 1
"""

import dataclasses
import itertools
from collections.abc import Iterator

from dilocox_jax.checks import require


@dataclasses.dataclass(frozen=True, order=True)
class Event:
  """One fragment is sent or applied.

  Attributes:
    step: Inner step after which the event happens.
    kind: "apply" or "send". Applies of a step sort before its sends.
    fragment: Index of the fragment, from 0.
    send_step: Inner step after which the fragment was measured and sent. It
      equals `step` if `kind` is "send".
  """

  step: int
  kind: str
  fragment: int
  send_step: int


@dataclasses.dataclass(frozen=True)
class Window:
  """Inner steps up to the next events, and these events.

  Attributes:
    num_steps: Number of inner steps. The events come after them.
    applied: The `Event` that applies a result; None: nothing is applied. The
      exchange of this result runs during the inner steps, or after them if tau
      is 0.
    sent: The `Event` that sends a fragment; None: nothing is sent. The order of
      events is measure, apply, send.
    follows_send: Whether the window before this one sends, on the same step,
      the fragment that this window applies. `outer.rules.ApplyRule.gradient`
      then gets the measurement of that send as the newest one of the fragment.
  """

  num_steps: int
  applied: Event | None = None
  sent: Event | None = None
  follows_send: bool = False

  @property
  def is_same(self) -> bool:
    """Whether the window applies and sends the same fragment."""
    if self.applied is None or self.sent is None:
      return False
    return self.applied.fragment == self.sent.fragment

  @property
  def parts(self) -> list["Window"]:
    """The inner steps, the apply and the send as one window each, in order.

    If the same fragment is applied and sent, it is sent first, because it is
    measured before the result is applied.
    """
    windows = []
    if self.num_steps:
      windows.append(Window(self.num_steps))
    if self.is_same:
      windows.append(Window(0, sent=self.sent))
      windows.append(Window(0, applied=self.applied, follows_send=True))
      return windows
    if self.applied:
      windows.append(
        Window(0, applied=self.applied, follows_send=self.follows_send)
      )
    if self.sent:
      windows.append(Window(0, sent=self.sent))
    return windows


@dataclasses.dataclass(frozen=True)
class SyncSchedule:
  """Computes when a run sends and applies fragments, from H, P and tau.

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
    """Raises ValueError if the settings contradict each other."""
    interval = self.sync_interval
    fragments = self.num_fragments
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
    """Whether tau is a multiple of H.

    A fragment is then applied on the same steps on which it is sent.
    """
    return self.overlap_steps % self.sync_interval == 0

  @property
  def hiding_steps(self) -> int:
    """Smallest number of inner steps that run at the same time as an exchange.

    A compiled program begins an exchange in the window that applies its result,
    not at the send. So a tau above H / P makes the result older, but hides no
    more of the exchange. Example: with H = 6, P = 1 and tau = 8 a send after
    step 6 is applied after step 14. The exchange begins after step 12, where
    the window begins, and only steps 13 and 14 hide the exchange.
    """
    if not self.overlap_steps:
      return 0
    start = self.steady_step + self.sync_interval
    windows = self.windows(start, start + self.sync_interval)
    return min(window.num_steps for window in windows if window.applied)

  @property
  def is_regular(self) -> bool:
    """Whether all rounds have H steps. False for every subclass."""
    return type(self) is SyncSchedule

  @property
  def steady_round(self) -> int | None:
    """Index of the round from which on all rounds have the same windows.

    Earlier rounds apply fewer results, because less was sent before them. With
    H = 4 and tau = 6 the pseudo-gradient that is sent after step 4 is applied
    after step 10. So rounds 0 and 1 apply nothing, and round 2 is the first of
    equal rounds.

    None: no such round is known. This is the case for a subclass that does not
    override this property. The simulator then goes through every round of a
    run.
    """
    if not self.is_regular:
      return None
    return self.depth

  @property
  def steady_step(self) -> int:
    """Inner step at which round `steady_round` begins.

    If no such round is known, it is the step after `depth` rounds of H steps.
    """
    if self.is_regular or self.steady_round is None:
      return self.depth * self.sync_interval
    step = 0
    index, num_steps = self.round_at(step)
    while index < self.steady_round:
      step += num_steps
      index, num_steps = self.round_at(step)
    return step

  @property
  def interval_label(self) -> str:
    """Text for people: the number of inner steps of a round, such as "30"."""
    return f"{self.sync_interval}"

  def num_alike(self, round_index: int) -> int | None:
    """Returns how many rounds in a row have the same windows.

    Args:
      round_index: Index of the first of these rounds.

    Returns:
      Number of rounds, at least 1; None if all later rounds are alike.
    """
    if self.steady_round is None or round_index < self.steady_round:
      return 1
    return None

  def delay(self, send_step: int) -> int:
    """Returns after how many inner steps the result of a send is applied.

    Args:
      send_step: Inner step after which a fragment is sent.
    """
    del send_step
    return self.overlap_steps

  def round_at(self, step: int) -> tuple[int, int]:
    """Returns the index and the number of inner steps of a round.

    Args:
      step: Number of inner steps of the schedule before the round, or before a
        step of the round.
    """
    return step // self.sync_interval, self.sync_interval

  def offset(self, fragment: int) -> int:
    """Returns t_p, the inner step of a round after which a fragment is sent.

    Args:
      fragment: Index p of the fragment that is sent.
    """
    return fragment * self.sync_interval // self.num_fragments

  def events(self, start: int, stop: int) -> list[Event]:
    """Returns the events of inner steps start < s <= stop, in order.

    Args:
      start: Inner step before the first of these steps.
      stop: Last of these steps.
    """
    interval = self.sync_interval
    events = []
    for fragment in range(self.num_fragments):
      for kind, delay in (("apply", self.overlap_steps), ("send", 0)):
        # The events come `delay` steps after these sends.
        lowest = max(start - delay + 1, 1)
        first = lowest + (self.offset(fragment) - lowest) % interval
        for send_step in range(first, stop - delay + 1, interval):
          event = Event(
            step=send_step + delay,
            kind=kind,
            fragment=fragment,
            send_step=send_step,
          )
          events.append(event)
    return sorted(events)

  def windows(self, start: int, stop: int) -> list[Window]:
    """Returns the windows of inner steps start < s <= stop, in order.

    A window ends at a step with events. If inner steps are left after the last
    event, they are a window without events. A window has at most one apply and
    one send. If a step has several of them, it has several windows, of which
    only the first one has inner steps.

    Args:
      start: Inner step before the first of these steps.
      stop: Last of these steps.
    """
    windows = []
    done = start
    events = self.events(start, stop)
    for step, events_of_step in itertools.groupby(events, lambda e: e.step):
      applies = []
      sends = []
      for event in events_of_step:
        if event.kind == "apply":
          applies.append(event)
        else:
          sends.append(event)
      for applied, sent in itertools.zip_longest(applies, sends):
        windows.append(Window(step - done, applied=applied, sent=sent))
        done = step
    if done < stop:
      windows.append(Window(stop - done))
    return windows

  def num_in_flight(self, step: int) -> list[int]:
    """Returns how many exchanges of every fragment are in flight after a step.

    Args:
      step: Number of finished inner steps. All events of the last step must be
        done.

    Returns:
      Number of exchanges by fragment, [P].
    """
    counts = [0] * self.num_fragments
    for event in self._pending(step):
      counts[event.fragment] += 1
    return counts

  def _pending(self, step: int) -> list[Event]:
    """Returns the events that will apply the exchanges in flight after a step.

    Args:
      step: Number of finished inner steps. All events of the last step must be
        done.
    """
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
    """Yields the windows that flush one fragment; see `flush_windows`."""
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
    if step == 0 or is_sent:
      yield from pending
      return
    send_event = Event(step, "send", fragment=fragment, send_step=step)
    apply_event = Event(
      step + self.delay(step), "apply", fragment=fragment, send_step=step
    )
    send = Window(0, sent=send_event)
    apply = Window(0, applied=apply_event)
    if overlap < self.sync_interval:
      yield from pending
      yield send
      # With tau = 0 a round measures and applies on the same step.
      yield dataclasses.replace(apply, follows_send=overlap == 0)
      return
    yield send
    for index, window in enumerate([*pending, apply]):
      is_after_send = index == 0 and self.is_whole_rounds
      yield dataclasses.replace(window, follows_send=is_after_send)
