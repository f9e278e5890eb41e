"""Computes after which inner steps fragments are sent and applied.

The trainer and the simulator both use this module. So the simulated events are
the events of the training run.

Fragment p is *sent* after inner step s if (s - t_p) mod H = 0 and s > 0, with
the offset t_p = floor(p H / P), and *applied* at s + tau. Events of one step
happen in the order measure, apply, send.

For example H = 6, P = 3, tau = 1 (offsets 0, 2, 4):

    after step   2       3        4       5        6       7        8
    event        send 1  apply 1  send 2  apply 2  send 0  apply 0  send 1
"""

import dataclasses
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
  """Some inner steps with at most one apply, and at most one send at the end.

  A round is a list of windows. They differ only in numbers, so a round compiles
  to a scan over its windows.

  Attributes:
    steps_before: Number of inner steps before the apply.
    applied: The `Event` of the apply, or None if nothing is applied.
    steps_after: Number of inner steps between the apply and the send.
    sent: The `Event` of the send, or None if nothing is sent.
  """

  steps_before: int
  applied: Event | None
  steps_after: int
  sent: Event | None

  @property
  def num_steps(self) -> int:
    """Number of inner steps in the window."""
    return self.steps_before + self.steps_after


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
    windows = self.round_windows(self.depth + 1)
    return min(window.steps_before for window in windows if window.applied)

  @property
  def is_regular(self) -> bool:
    """Whether all rounds have H steps; schedules of subclasses need not."""
    return type(self) is SyncSchedule

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

  def slot(self, event: Event) -> int:
    """Returns the slot that holds a sent pseudo-gradient, from 0 to depth - 1.

    Sends use the slots in turn. Example: with H = 4 and depth 2, the sends of
    steps 4, 8 and 12 use the slots 1, 0 and 1.

    Args:
      event: The send or the apply of the pseudo-gradient.
    """
    if not self.depth:
      return 0
    since_offset = event.send_step - self.offset(event.fragment)
    return since_offset // self.sync_interval % self.depth

  def events(self, start: int, stop: int) -> Iterator[Event]:
    """Yields the events of inner steps start < s <= stop, in order."""
    for step in range(start + 1, stop + 1):
      applied_send_step = step - self.overlap_steps
      for kind, send_step in (("apply", applied_send_step), ("send", step)):
        if send_step <= 0:
          continue
        for fragment in range(self.num_fragments):
          if (send_step - self.offset(fragment)) % self.sync_interval == 0:
            yield Event(step, kind, fragment, send_step)

  def round_windows(
    self, round_index: int, num_steps: int | None = None
  ) -> list[Window]:
    """Returns the windows of the inner steps of one round.

    Round r has the inner steps r H + 1 to (r + 1) H. Window j starts after the
    send of fragment j and ends with the send of fragment (j + 1) mod P. Exactly
    one apply falls into it. This apply is of fragment (j - q) mod P with
    q = ceil((tau mod H) P / H) - 1, because floor keeps the order of the
    offsets. Example: H = 6, P = 3 and tau = 3 give q = 1. Window j = 1 of round
    1 sends fragment 2 after step 10, and it applies fragment 0 after step 9.

    If P does not divide H, an apply may fall on the last step of the round,
    after the last send. Then it gets its own window.

    Args:
      round_index: Number of the round, from 0.
      num_steps: Number of inner steps after which the round is cut short, or
        None for the whole round.

    Returns:
      Windows in order. In the first rounds a window has no apply if its
      fragment was not sent yet.
    """
    start = round_index * self.sync_interval
    windows = [self._window(start, j) for j in range(self.num_fragments)]
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
    """Whether an apply falls on the last step of a round.

    This is possible only if P < H.
    """
    return not self.is_whole_rounds and self._window(0, 0).steps_before == 0

  def _window(self, start: int, index: int) -> Window:
    """Returns the window that ends with the send of fragment `index` + 1.

    Args:
      start: Number of inner steps before the round.
      index: Number j of the window in the round, from 0.
    """
    interval, num_fragments = self.sync_interval, self.num_fragments
    first = start + self.offset(index)
    last = start + self.offset(index + 1)
    sent = Event(last, "send", (index + 1) % num_fragments, last)
    if self.is_whole_rounds:
      applied = self._apply(last, sent.fragment)
      return Window(last - first, applied, 0, sent)
    # If tau grows by H, the same steps of a round have an apply. So tau mod H
    # decides. `lag` is q in the docstring of `round_windows`.
    delay = self.overlap_steps % interval
    lag = -(-delay * num_fragments // interval) - 1
    fragment = (index - lag) % num_fragments
    apply_step = start + (self.offset(fragment) + delay) % interval
    if apply_step < first:  # Modulo H the round's last step is 0.
      apply_step += interval
    applied = self._apply(apply_step, fragment)
    return Window(apply_step - first, applied, last - apply_step, sent)

  def _apply(self, step: int, fragment: int) -> Event | None:
    """Returns the apply after a step, or None if nothing was sent for it."""
    send_step = step - self.overlap_steps
    return Event(step, "apply", fragment, send_step) if send_step > 0 else None

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
    sends_first = overlap >= interval
    yield from [send, *pending] if sends_first else [*pending, send]
    yield Window(0, Event(step + overlap, "apply", fragment, step), 0, None)


def _cut(windows: list[Window], stop: int, start: int) -> Iterator[Window]:
  """Yields windows up to the events of step `stop`.

  Args:
    windows: Windows of a round.
    stop: Inner step after which the round is cut.
    start: Number of inner steps before the round.
  """
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
