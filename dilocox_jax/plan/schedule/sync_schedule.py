"""Plans when replicas send pseudo-gradients of fragments and apply the means.

A *fragment* is one of the P parts into which the parameters are divided. To
*send* a fragment means that each replica measures its pseudo-gradient of the
fragment, for an exchange. To *apply* the fragment means that the replicas go on
with the mean of these pseudo-gradients. Both are called *events*.

Fragment p has the offset t_p = floor(p H / P). It is sent after each inner step
s > 0 with (s - t_p) mod H = 0, and its mean is applied after step s + tau. With
tau = 0 the mean is computed and applied at once. Otherwise it is computed while
further inner steps run. If the same fragment is sent and applied after the same
step, the new pseudo-gradient is measured before the older mean is applied.

A *window* is some inner steps and the event after them. For example, with
H = 6, P = 3 and tau = 1 (offsets 0, 2 and 4) a window ends at each of these
steps:

    after step   2       3        4       5        6       7        8
    event        send 1  apply 1  send 2  apply 2  send 0  apply 0  send 1

A window can have two events, one of each kind, if they come after the same
step.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from dilocox_jax.checks import of_type, require


@dataclasses.dataclass(frozen=True, order=True)
class Event:
  """A fragment (a part of the parameters) is sent, or its mean is applied.

  Events are sorted by step. Of one step, those of the kind "apply" come first.

  Attributes:
    step: Inner step after which the event happens, from 1.
    kind: "send": each replica measures its pseudo-gradient of the fragment, for
      an exchange. "apply": replicas go on with the mean of pseudo-gradients
      that were measured before.
    fragment: Index of the fragment, from 0.
    send_step: Inner step after which these pseudo-gradients were measured. If
      `kind` is "send", it equals `step`.
  """

  step: int
  kind: str
  fragment: int
  send_step: int


@dataclasses.dataclass(frozen=True)
class Window:
  """Some inner steps, then at most one fragment to apply and one to send.

  A fragment is a part of the parameters. To send it means to measure its
  pseudo-gradient, for an exchange. To apply it means to go on with the mean of
  such pseudo-gradients.

  Attributes:
    num_steps: Number of inner steps, 0 or more.
    applied: Event after the inner steps that applies a fragment. None: nothing
      is applied.
    sent: Event after the inner steps that sends a fragment. If it is the
      fragment of `applied`, it is measured before the mean is applied. None:
      nothing is sent.
    follows_send: Whether the window before this one has sent the fragment that
      this window applies, with no inner step in between.
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
    """This window divided into windows that do one thing each, in order.

    First come the inner steps, then the apply, then the send. If apply and send
    are of the same fragment, the send comes before the apply, because the
    pseudo-gradient has to be measured before the older mean is applied.
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
    num_fragments: P, the number of fragments (parts of the parameters), 1 to H.
    overlap_steps: tau, the number of inner steps from the send of a fragment to
      the apply of its mean. With 0, replicas wait for the mean. It may exceed
      H.
  """

  sync_interval: int
  num_fragments: int = 1
  overlap_steps: int = 0

  def __post_init__(self):
    """Raises ValueError if the settings contradict each other.

    It also does so if one is no whole number.
    """
    interval = self.sync_interval
    fragments = self.num_fragments
    for name in ("sync_interval", "num_fragments", "overlap_steps"):
      of_type(name, getattr(self, name), int)
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
    """Largest number of sends of one fragment that are pending at once.

    A send is pending until its mean is applied. The number is ceil(tau / H).
    Example: with H = 4 and tau = 6, the mean of the send after step 4 is
    applied after step 10. The next send is after step 8. So two sends are
    pending after step 8, and the depth is 2.
    """
    return -(-self.overlap_steps // self.sync_interval)

  @property
  def is_whole_rounds(self) -> bool:
    """Whether tau (`overlap_steps`) is a multiple of H (`sync_interval`).

    Then a fragment is sent and applied after the same steps.
    """
    return self.overlap_steps % self.sync_interval == 0

  @property
  def hiding_steps(self) -> int:
    """Smallest number of inner steps that run at the same time as an exchange.

    It is 0 if the delay (tau) is 0. It may be less than tau, because a compiled
    program does not begin an exchange at the send. It begins the exchange after
    the last event (send or apply) before the mean of the exchange is applied.

    Example: with H = 6, P = 1 and tau = 8, the fragment is sent after steps 6
    and 12, and the mean of the first send is applied after step 14. The
    exchange of this mean begins after step 12, and only steps 13 and 14 hide
    it.
    """
    if not self.overlap_steps:
      return 0
    # A round in which everything is sent and applied as in all later rounds.
    start = self.steady_step + self.sync_interval
    windows = self.windows(start, start + self.sync_interval)
    return min(window.num_steps for window in windows if window.applied)

  @property
  def is_regular(self) -> bool:
    """Whether this is a plain `SyncSchedule`: all rounds have H inner steps."""
    return type(self) is SyncSchedule

  @property
  def steady_round(self) -> int | None:
    """Index of the round from which on all rounds are alike.

    Rounds are alike if they send and apply the same fragments at the same steps
    within the round. The first rounds apply less, because less was sent before
    them. Example: with H = 4 and tau = 6 the first send, after step 4, is
    applied after step 10. So rounds 0 and 1 (steps 1 to 8) apply nothing, and
    round 2 is the first of the equal rounds.

    None: the schedule is of a subclass that does not override this property.
    """
    if not self.is_regular:
      return None
    return self.depth

  @property
  def steady_step(self) -> int:
    """Number of inner steps before round `steady_round`, the first steady one.

    If `steady_round` is None, it is the number of steps in `depth` rounds of H
    steps each.
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
    """The number of inner steps of a round as a text for people: "30"."""
    return f"{self.sync_interval}"

  def num_alike(self, round_index: int) -> int | None:
    """Returns how many rounds, from a given one on, are known to be alike.

    Rounds are alike if they have equally many inner steps, and send and apply
    the same fragments at the same steps within the round.

    Args:
      round_index: Index of the given round, from 0.

    Returns:
      Number of rounds, the given one included, so at least 1. None: all later
      rounds are like the given one.
    """
    if self.steady_round is None or round_index < self.steady_round:
      return 1
    return None

  def delay(self, send_step: int) -> int:
    """Returns how many inner steps lie between a send and its apply: tau.

    Args:
      send_step: Inner step of the send. Here all sends have the same delay. In
        a subclass the delay may depend on this step.
    """
    del send_step
    return self.overlap_steps

  def round_at(self, step: int) -> tuple[int, int]:
    """Returns the round of the next inner step, after `step` finished ones.

    The result is the index of the round, from 0, and its number of inner steps.
    """
    return step // self.sync_interval, self.sync_interval

  def offset(self, fragment: int) -> int:
    """Returns t_p: fragment p is sent after the steps t_p + k H for k = 0, 1...

    Step 0 is left out, so fragment 0, with t_0 = 0, is first sent after step H.
    """
    return fragment * self.sync_interval // self.num_fragments

  def events(self, start: int, stop: int) -> list[Event]:
    """Returns the sends and applies after inner steps `start` + 1 to `stop`.

    The events have ascending steps. The applies of a step come before its
    sends.
    """
    interval = self.sync_interval
    events = []
    for fragment in range(self.num_fragments):
      for kind, delay in (("apply", self.overlap_steps), ("send", 0)):
        # An event comes `delay` steps after a send. So the sends that matter
        # lie between start - delay + 1 and stop - delay. The first of them is
        # the first step from there on that equals the offset modulo H.
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
    """Divides the inner steps `start` + 1 to `stop` into windows.

    A window is some inner steps, then at most one apply and one send of a
    fragment. If a step has more applies or sends, windows without inner steps
    follow. Inner steps after the last apply or send are a window, too.

    Returns:
      Windows in order. Their numbers of inner steps add up to `stop` - `start`.
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
        done = step  # The other windows at this step have no inner steps.
    if done < stop:
      windows.append(Window(stop - done))
    return windows

  def num_in_flight(self, step: int) -> list[int]:
    """Returns, for every fragment, how many sends are not applied yet, [P].

    Args:
      step: Number of finished inner steps. The sends and applies that are due
        after this step are finished, too.
    """
    counts = [0] * self.num_fragments
    for event in self._pending(step):
      counts[event.fragment] += 1
    return counts

  def _pending(self, step: int) -> list[Event]:
    """Returns the applies after step `step` of what was sent up to this step.

    They have ascending steps.
    """
    return [
      event
      for event in self.events(step, step + self.overlap_steps)
      if event.kind == "apply" and event.send_step <= step
    ]

  def flush_windows(self, step: int) -> list[Window]:
    """Returns the sends and applies of the flush, which ends a run.

    The flush treats one fragment after the other. A send is pending if its mean
    is not applied yet. If the fragment has made progress since its last send,
    the flush sends the progress, and applies its mean last. The means of the
    pending sends are applied from the oldest on. If the delay (tau) is at least
    H, they are applied after this new send, and otherwise before it.

    Example: H = 4, P = 1 and tau = 6, after step 9. The sends of steps 4 and 8
    are pending and the progress of step 9 is unsent. So the order is send(9),
    apply(4), apply(8), apply(9). With tau = 2 only the send of step 8 is
    pending, so the order is apply(8), send(9), apply(9).

    Args:
      step: Number of finished inner steps. The sends and applies that are due
        after this step are finished, too.

    Returns:
      Windows in order, each with one send or one apply and no inner steps. An
      apply keeps the step at which it would be due if the run went on.
    """
    return [
      window
      for fragment in range(self.num_fragments)
      for window in self._flush_fragment(step, fragment)
    ]

  def _flush_fragment(self, step: int, fragment: int) -> Iterator[Window]:
    """Yields the windows of `flush_windows` for one fragment, in order."""
    overlap = self.overlap_steps
    pending = [
      Window(0, event)
      for event in self._pending(step)
      if event.fragment == fragment
    ]
    was_just_sent = any(
      event.kind == "send" and event.fragment == fragment
      for event in self.events(step - 1, step)
    )
    if step == 0 or was_just_sent:  # There is no unsent progress.
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
    # With tau >= H, the next send of a longer run would also come before the
    # applies that are pending.
    yield send
    for index, window in enumerate([*pending, apply]):
      # As in a round: if tau is a multiple of H, an apply comes right after the
      # send of the same fragment.
      is_after_send = index == 0 and self.is_whole_rounds
      yield dataclasses.replace(window, follows_send=is_after_send)
