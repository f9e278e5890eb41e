"""When fragments leave and come back.

Trainer and simulator both need to know which fragment is sent and applied at
which inner step. They ask this one description, so a predicted second and a
trained step can never speak of different events.

Phase convention (the papers'): fragment p is *sent* after inner step s when
(s - t_p) mod H == 0 and s > 0, with t_p = floor(p H / P), and *applied* at
s + tau. On one step a measurement precedes an apply precedes a send.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, order=True)
class Event:
  """A send or an apply of one fragment.

  Attributes:
    step: Inner step after which it happens.
    kind: "apply" or "send"; applies sort first.
    fragment: Index of the fragment.
    send_step: Inner step at which the fragment's content was measured.
  """

  step: int
  kind: str
  fragment: int
  send_step: int


@dataclasses.dataclass(frozen=True)
class Window:
  """Inner steps around at most one apply, ended by at most one send.

  A round is a list of windows that differ only in numbers, which is what lets
  it compile to a scan.

  Attributes:
    steps_before: Inner steps before the apply.
    applied: The `Event` of the apply, or None where nothing arrives.
    steps_after: Inner steps between the apply and the send.
    sent: The `Event` of the send, or None where a round is cut short.
  """

  steps_before: int
  applied: Event | None
  steps_after: int
  sent: Event | None

  @property
  def num_steps(self) -> int:
    """Inner steps in the window."""
    return self.steps_before + self.steps_after


@dataclasses.dataclass(frozen=True)
class SyncSchedule:
  """H, P and tau, and the events that follow from them.

  Attributes:
    sync_interval: H, inner steps between two sends of one fragment.
    num_fragments: P, parts of the tree that travel separately.
    overlap_steps: tau, inner steps between a send and its apply; 0 waits for
      the exchange, and it may exceed H.
  """

  sync_interval: int
  num_fragments: int = 1
  overlap_steps: int = 0

  def __post_init__(self):
    if self.sync_interval < 1:
      raise ValueError(
        f"sync_interval={self.sync_interval} must be at least 1 inner step"
      )
    if not 1 <= self.num_fragments <= self.sync_interval:
      raise ValueError(
        f"num_fragments={self.num_fragments} must lie between 1 and "
        f"sync_interval={self.sync_interval}"
      )
    if self.overlap_steps < 0:
      raise ValueError(
        f"overlap_steps={self.overlap_steps} must not be negative"
      )

  @property
  def depth(self) -> int:
    """Most pseudo-gradients of one fragment that must be kept in flight."""
    return -(-self.overlap_steps // self.sync_interval)

  @property
  def is_whole_rounds(self) -> bool:
    """Whether a fragment is applied and sent on the same steps."""
    return self.overlap_steps % self.sync_interval == 0

  @property
  def hiding_steps(self) -> int:
    """Inner steps behind which a program hides each exchange, at least.

    An exchange begins with the window in which it arrives: a tau above H / P
    makes it staler and hides no more of it.
    """
    if not self.overlap_steps:
      return 0
    windows = self.round_windows(self.depth + 1)
    return min(window.steps_before for window in windows if window.applied)

  def offset(self, fragment: int) -> int:
    """t_p, the phase of a fragment inside the round (inner steps)."""
    return fragment * self.sync_interval // self.num_fragments

  def slot(self, event: Event) -> int:
    """Place of a pseudo-gradient among the `depth` kept for its fragment."""
    if not self.depth:
      return 0
    sends = (event.send_step - self.offset(event.fragment)) // (
      self.sync_interval
    )
    return sends % self.depth

  def events(self, start: int, stop: int) -> Iterator[Event]:
    """Yields the events of inner steps start < s <= stop, in order."""
    for step in range(start + 1, stop + 1):
      for kind, send_step in (
        ("apply", step - self.overlap_steps),
        ("send", step),
      ):
        if send_step <= 0:
          continue
        for fragment in range(self.num_fragments):
          if (send_step - self.offset(fragment)) % self.sync_interval == 0:
            yield Event(step, kind, fragment, send_step)

  def round_windows(
    self, round_index: int, num_steps: int | None = None
  ) -> list[Window]:
    """The windows of inner steps (round_index H, (round_index + 1) H].

    Window j leads from the send of fragment j to that of fragment j + 1.
    Exactly one apply falls between the two: with q = ceil((tau mod H) P / H)
    - 1 it is fragment (j - q) mod P, because floor keeps the order of the
    phases. Where P does not divide H an apply may fall on the round's very
    last step, after the last send; it then has a window of its own.

    Args:
      round_index: Which round, from 0.
      num_steps: Where to cut the round short (inner steps); all of it if None.

    Returns:
      Windows in order; an apply of something never sent is left out.
    """
    start = round_index * self.sync_interval
    windows = [
      self._window(start, index) for index in range(self.num_fragments)
    ]
    if self._opens_with_apply:
      windows[0] = dataclasses.replace(windows[0], applied=None)
      late = self._window(start + self.sync_interval, 0).applied
      if late:
        windows.append(Window(0, late, 0, None))
    if num_steps is None or num_steps >= self.sync_interval:
      return windows
    return list(_cut(windows, start + num_steps, start))

  @property
  def _opens_with_apply(self) -> bool:
    """Whether an apply falls on the step that ends a round (P < H only)."""
    return not self.is_whole_rounds and self._window(0, 0).steps_before == 0

  def _window(self, start: int, index: int) -> Window:
    interval, parts = self.sync_interval, self.num_fragments
    opened = start + self.offset(index)
    closed = start + self.offset(index + 1)
    sent = Event(closed, "send", (index + 1) % parts, closed)
    if self.is_whole_rounds:
      applied = self._arrival(closed, sent.fragment)
      return Window(closed - opened, applied, 0, sent)
    phase = self.overlap_steps % interval
    lag = -(-phase * parts // interval) - 1
    fragment = (index - lag) % parts
    at = start + (self.offset(fragment) + phase) % interval
    if at < opened:  # Due on the round's last step, which is offset 0.
      at += interval
    return Window(at - opened, self._arrival(at, fragment), closed - at, sent)

  def _arrival(self, step: int, fragment: int) -> Event | None:
    send_step = step - self.overlap_steps
    return Event(step, "apply", fragment, send_step) if send_step > 0 else None

  def flush_windows(self, step: int) -> list[Window]:
    """The end of a run: everything pending and unsent, without inner steps.

    This is the only description of the flush. The trainer runs these windows,
    bytes are counted and simulated times are found from them.

    Fragment after fragment, each window holds one event. Pending exchanges
    are applied oldest first. Progress since the last send is measured (the
    window's `sent`) before them if tau >= H, as it would have been, and after
    them otherwise; its exchange is applied last. Nothing is measured where no
    inner step was done since the last send.

    For example H = 4, P = 1, tau = 6 after step 9: the contents of steps 4
    and 8 are pending and step 9 is unsent, so the windows are send(9),
    apply(4), apply(8), apply(9). With tau = 2 only step 8 is pending: apply(8),
    send(9), apply(9).

    Args:
      step: Inner steps finished, all events of that step done.

    Returns:
      Windows in order. An event keeps the step at which it would have come,
      so a fragment's events may stand in another order than their steps.
    """
    return [
      window
      for fragment in range(self.num_fragments)
      for window in self._flush_fragment(step, fragment)
    ]

  def _flush_fragment(self, step: int, fragment: int) -> Iterator[Window]:
    interval, overlap = self.sync_interval, self.overlap_steps
    offset = self.offset(fragment)
    pending = [
      Window(0, Event(sent + overlap, "apply", fragment, sent), 0, None)
      for sent in range(max(step - overlap, 0) + 1, step + 1)
      if (sent - offset) % interval == 0
    ]
    # A fragment that was never sent has only `step` inner steps to send.
    if not min((step - offset) % interval, step):
      yield from pending
      return
    send = Window(0, None, 0, Event(step, "send", fragment, step))
    measures_first = overlap >= interval
    yield from [send, *pending] if measures_first else [*pending, send]
    yield Window(0, Event(step + overlap, "apply", fragment, step), 0, None)


def _cut(windows: list[Window], stop: int, start: int) -> Iterator[Window]:
  """Yields the part of a round that ends with the events of step `stop`."""
  for window in windows:
    before = min(window.steps_before, stop - start)
    reaches_apply = start + window.steps_before <= stop
    after = min(window.steps_after, stop - start - before)
    reaches_send = reaches_apply and start + window.num_steps <= stop
    applied = window.applied if reaches_apply else None
    sent = window.sent if reaches_send else None
    if before + after or applied or sent:
      yield Window(before, applied, after, sent)
    start += before + after
    if not reaches_send:
      return
