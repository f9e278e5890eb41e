"""Carries the exchanges of one replica's rounds through a mailbox.

Rounds ask it for one exchange after the other: what one turn sends goes in,
and what has come of all who are listed comes out (`rounds.lone_exchange`).
"""

import atexit
import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from dilocox_jax.mailbox_protocol.agreement import StoppedError
from dilocox_jax.mailbox_protocol.mailbox import Exchanged, Mailbox
from dilocox_jax.mailbox_protocol.messages import raw_bytes
from dilocox_jax.mailbox_protocol.step_counts import StepCounts
from dilocox_jax.threads import in_thread

NEVER, LOOK_EVERY_S = 2**62, 0.5


@dataclasses.dataclass(eq=False)
class MailboxClient:
  """The mailbox of a run, and how far the run has come.

  A request that a server takes and never answers is under way for minutes, and
  an exchange without a quorum for longer. So the mailbox is called in threads:
  Ctrl-C need not wait for it, nor does a run that was asked to stop, beyond
  the grace time and as long as the last exchange took.

  Attributes:
    open_mailbox: Function from `config`, what must be equal in all replicas, to
      the mailbox.
    terms: The part of `config` that is known before the run is entered.
    step_weight: Weight of one inner step of this replica in the mean.
    keeps: Whether what was not sent is kept by feedback, or as progress that
      was not sent; the aggregator then makes up for a message that came late.
    grace_s: Grace time of the run's rules.
    event: Number of the next exchange.
    settled: What became of the events since this list was emptied last: of
      each "event", its number, "members", the replicas whose messages were
      averaged, and "left_out", other messages that were there, with the reason.
    writes_snapshots: Whether this replica may write a snapshot.
    first_own: The first exchange with something of this replica.
    stop: Set, perhaps in another thread, to ask the run to stop.
    last_s: Seconds that the last exchange took.
    written: The newest snapshot that was or is being written, after all others.
    steps: The inner steps behind this replica's messages.
    mailbox: The mailbox, once the run was entered.
  """

  open_mailbox: Callable[..., Mailbox]
  terms: Mapping[str, Any]
  step_weight: float
  keeps: bool
  grace_s: float
  event: int = 0
  settled: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  writes_snapshots: bool = True
  first_own: int = 0
  stop: threading.Event = dataclasses.field(default_factory=threading.Event)
  last_s: float = 0.0
  written: list[Future] = dataclasses.field(default_factory=list)
  steps: StepCounts = dataclasses.field(default_factory=StepCounts)
  mailbox: Mailbox = dataclasses.field(init=False)

  def enter(self, terms: Mapping[str, Any]) -> None:
    """Enters the run.

    Args:
      terms: What must be equal in all replicas beside `self.terms`.
    """
    config = {**self.terms, **terms}
    self.mailbox = self._awaited(self.open_mailbox, config=config)
    self.mailbox.beside = self._beside
    atexit.register(self._end)

  def _awaited(self, call: Callable, *given: Any, **named: Any) -> Any:
    """Returns what a call that asks the store comes to.

    Raises:
      StoppedError: If it does not end although the run was asked to stop.
    """
    found = in_thread(call, *given, **named)
    while wait([found], LOOK_EVERY_S).not_done:
      most_s = self.grace_s + self.last_s
      if self.stop.is_set() and wait([found], most_s).not_done:
        said = f"{most_s:.0f} s after the run was asked to stop"
        raise StoppedError(f"gave up on the store, {said}")
    return found.result()

  def _beside(self, write: Callable[[], None]) -> None:
    """Writes a snapshot in a thread, after those before it."""
    before = self.written
    self.written = [in_thread(lambda: (wait(before), write()))]

  def _end(self) -> None:
    """Grants snapshots a while at the end of the program."""
    if wait(self.written, self.grace_s).not_done:
      said = "gave up a snapshot that was not written %g s after the run"
      logging.getLogger(__name__).warning(said, self.grace_s)

  def newest(self) -> list[np.ndarray] | None:
    """Goes back to the newest snapshot; returns it, or None if there is none.

    The next exchange is that of the first event whose result it does not have.
    """
    snapshot = self._awaited(self.mailbox.newest)
    self.event = snapshot.first if snapshot else 0
    self.first_own = NEVER  # What this replica has in flight is not its own.
    return snapshot.arrays if snapshot else None

  def get_state(self) -> dict[str, Any]:
    """Returns what `set_state` needs, as values of JSON."""
    return {
      "event": self.event,
      "first_own": self.first_own,
      "steps": self.steps.get_state(),
      **self.mailbox.get_state(),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on where `get_state` was called, perhaps in an earlier life."""
    self.event = state["event"]
    self.first_own = state["first_own"]
    self.steps.set_state(state["steps"])
    self.mailbox.set_state(state)

  def take_part(self, num_in_flight: int) -> bool:
    """Takes part with what is measured from now on, if that may still count.

    Args:
      num_in_flight: Number of exchanges before the first one of that.

    Returns:
      Whether this replica has followed far enough.
    """
    if not self.announce(self.event + num_in_flight):
      return False
    self.first_own = self.event + num_in_flight
    return True

  def announce(self, event: int) -> bool:
    """Announces this replica for an event (`Mailbox.announce`)."""
    return self._awaited(self.mailbox.announce, event)

  def exchange(
    self, kind: int, num_steps: int, shared: Iterable[np.ndarray]
  ) -> "ExchangeSession":
    """Begins the next exchange.

    Args:
      kind: Number of the fragment, or of its group of fragments alike.
      num_steps: Inner steps behind this replica's message. One that has taken
        none counts as if it had taken one step: its message may carry what it
        has held back.
      shared: Arrays that are equal in all replicas, for a digest.
    """
    event, self.event = self.event, self.event + 1
    attends = event >= self.first_own and self.announce(event)
    digest = hashlib.sha256()
    for array in shared:
      digest.update(raw_bytes(array))
    return ExchangeSession(
      client=self,
      event=event,
      kind=kind,
      attends=attends,
      weight=self.step_weight * max(num_steps, 1),
      state=digest.digest(),
    )

  def turn(self, *given: Any, **named: Any) -> Exchanged:
    """Exchanges the messages of a turn (`Mailbox.exchange`)."""
    start_s = time.monotonic()
    exchanged = self._awaited(self.mailbox.exchange, *given, **named)
    self.last_s = time.monotonic() - start_s
    return exchanged


class ExchangeSession:
  """One exchange.

  Attributes:
    is_counted: Whether this replica's messages were listed in all turns.
    drops_all: Whether this replica must drop all that it sends or holds back
      of the fragment: because a message of it was left out for its values, or
      because a message of an earlier life counts in its place.
  """

  def __init__(
    self,
    client: MailboxClient,
    *,
    event: int,
    kind: int,
    attends: bool,
    weight: float,
    state: bytes,
  ):
    """Sends nothing yet; see `MailboxClient.exchange`."""
    self._carrier = client
    self._event = event
    self._kind = kind
    self._attends = attends
    self._weight = weight
    self._state = state
    self._turn = 0
    self.is_counted = True
    self.drops_all = False

  def send(
    self,
    arrays: Sequence[np.ndarray],
    is_finite: bool,
    shared: Callable[[], Sequence[np.ndarray]],
  ) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Sends the next turn's arrays, and returns what all average.

    Args:
      arrays: The message.
      is_finite: Whether the replica's values are; if not, the message has no
        weight, so that it is left out and nobody waits for another one.
      shared: Returns all that the replicas share, for a snapshot.

    Returns:
      Arrays [K, ...] of the K replicas that are listed, their weights in the
      mean [K], which add up to K, and whether this replica is one of them.
    """
    turn, self._turn = self._turn, self._turn + 1
    exchanged = self._carrier.turn(
      self._event,
      turn,
      arrays,
      weight=self._weight if is_finite else 0.0,
      send=self._attends,
      state=self._state,
      kind=self._kind,
      snapshot=(lambda: (self._event, shared()))
      if self._carrier.writes_snapshots
      else None,
    )
    self.is_counted &= exchanged.is_own_listed
    self.drops_all |= exchanged.is_superseded
    self.drops_all |= self._carrier.mailbox.name in exchanged.left_out
    if turn == 0:
      members = [name for name, *_ in exchanged.messages]
      found = {"event": self._event, "members": members}
      self._carrier.settled.append(found | {"left_out": exchanged.left_out})
    messages = [own for _, _, own in exchanged.messages]
    weights = np.array([each[1] for each in exchanged.messages], np.float64)
    if messages:
      weights *= len(weights) / weights.sum()
    else:  # Zeros with weight 0, so that the mean is zero.
      messages, weights = [list(map(np.zeros_like, arrays))], np.zeros(1)
    stacked = tuple(map(np.stack, zip(*messages, strict=True)))
    is_counted = np.asarray(exchanged.is_own_listed)
    return stacked, weights.astype(np.float32), is_counted
