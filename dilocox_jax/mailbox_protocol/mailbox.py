"""Replicas exchange messages through a store, and agree on who was there.

For every event of a run's schedule, each replica writes a message. Whoever sees
first that all who are expected have written, or that the grace time is over and
a quorum has, writes the manifest, once: the list of messages that all average.
docs/mailbox.md says what it guarantees.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.agreement import (
  Agreement,
  Memory,
  ReplicaStaleError,
  StoppedError,
)
from dilocox_jax.mailbox_protocol.manifest import Manifest
from dilocox_jax.mailbox_protocol.messages import Inbox
from dilocox_jax.mailbox_protocol.proof import prove
from dilocox_jax.mailbox_protocol.roster import (
  MailboxRules,
  Seats,
  checked_name,
  join_run,
  read_secret,
  run_terms,
)
from dilocox_jax.mailbox_protocol.signer import Signer
from dilocox_jax.mailbox_protocol.snapshots import Snapshot, Snapshots
from dilocox_jax.mailbox_protocol.store import RetryingStore, Store

_LOG = logging.getLogger(__name__)
STATE_BYTES = 32
_LONGEST_START_PAUSE_S = 60.0
TakeSnapshot = Callable[[], tuple[int, Sequence[np.ndarray]]]


class Exchanged(NamedTuple):
  """What all replicas average in a turn.

  Attributes:
    messages: Replica, weight and arrays of each message, in the order in which
      everybody adds them up. It may be empty: then nothing is applied.
    is_own_listed: Whether a message of this replica is one of them. If none
      is, its content stays with this replica.
    left_out: Messages that were there and do not count, with the reason. A
      replica whose values were wrong should keep nothing of them.
    is_superseded: Whether the message of this replica that is listed is not the
      one that it sent now, but one of an earlier life. That life may have sent
      all that this one holds back. So this replica must drop everything that it
      holds back, or its work would count twice.
  """

  messages: list[tuple[str, float, list[np.ndarray]]]
  is_own_listed: bool
  left_out: dict[str, str]
  is_superseded: bool = False


class Mailbox:
  """The place where one replica meets the others.

  Events are numbered from 0, and every replica goes through them in order. A
  replica calls, for the state that it has or that `newest` returned,

      while event < events:
        if mailbox.announce(event):  # Else the others have settled it already.
          ... inner steps ...
        exchanged = mailbox.exchange(event, 0, arrays, send=...)

  and begins again with `newest` when a `ReplicaStaleError` says so. What a
  message did not carry, or what came too late, the replica holds back and adds
  to its next message, as long as no message of it is listed (`Exchanged`).

  Attributes:
    beside: Calls a function that writes a snapshot; at once, or in a thread
      that messages do not wait for.
  """

  def __init__(
    self,
    where: Any,
    *,
    name: str,
    secret: bytes | str | os.PathLike[str],
    config: Mapping[str, Any],
    text_digest: str = "",
    rules: MailboxRules = MailboxRules(),  # noqa: B008 - it is frozen
    accept_version: bool = False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
  ):
    """Enters a run, or begins it.

    Args:
      where: Folder or URL of the run, or an object with the methods of
        `Store`.
      name: Name of this replica.
      secret: File of the secret that all replicas share (see
        `experiments.make_secret`), or the secret itself as bytes.
      config: All that the result depends on, as nested mappings of JSON.
      text_digest: Digest of the training text.
      rules: The rules of the exchange.
      accept_version: Whether this replica may have other code or versions than
        the run. Its user vouches for it that they compute the same.
      clock: Seconds that never go back.
      pause: Waits for a number of seconds.

    Raises:
      RunMismatchError: If this replica must not take part.
      UnfitStoreError: If the place is missing or closed, or does not keep what
        a store has to promise (`proof.prove`).
      ValueError: If an argument is wrong. Each message is one line.
    """
    self.name = checked_name(name)
    self.rules = rules
    if not isinstance(secret, bytes):
      secret = read_secret(secret)
    is_place = isinstance(where, (str, os.PathLike))
    store = Store(where) if is_place else where
    self._store = RetryingStore(store, clock, pause)
    entering = RetryingStore(store, clock, pause, is_entering=True)
    prove(entering, name)
    entry = join_run(
      entering,
      secret,
      run_terms(config, text_digest, rules),
      where=store.where,
      accept_version=accept_version,
    )
    self._run = entry.run
    self._signer = Signer(secret, self._run)
    self._seats = Seats(self._store, self._signer, name)
    self._snapshots = Snapshots(self._store, self._signer, rules.snapshot_every)
    # Without patience: nobody waits for a snapshot, least of all a run's end.
    self._writer = Snapshots(store, self._signer, rules.snapshot_every)
    self._agreement = Agreement(
      store=self._store,
      signer=self._signer,
      seats=self._seats,
      snapshots=self._snapshots,
      rules=rules,
      run_objects=entry.objects,
    )
    self._is_present = False
    self._is_past = False
    self._repeats = False
    self._loaded = -1  # Event of the snapshot that was taken last.
    self._differed = -1  # Event at which the shared state differed last.
    self._bad: set[int] = set()  # Snapshots of a wrong state.
    self._furthest = -1  # Most events that were settled at a new start.
    self._starts_in_place = 0  # New starts since then.
    self.beside: Callable[[Callable[[], None]], Any] = lambda write: write()

  def newest(self) -> Snapshot | None:
    """Returns the newest snapshot that is whole, and goes on from there.

    Returns:
      The snapshot: the caller takes its arrays, and goes on with the event
      `first`. None if there is none: the caller begins with event 0.

    Raises:
      StoppedError: If the run has gone on, and no snapshot can be used.
    """
    self._pause_before_start()
    self._go_on(Memory())
    snapshot = self._read_newest()
    if snapshot is not None:
      memory = Memory.from_json(snapshot.meeting)
      self._go_on(memory, loaded=snapshot.event)
      _LOG.info(
        "%s takes the snapshot before event %d", self.name, snapshot.event
      )
      return snapshot
    if self._snapshots.is_gone(0, thoroughly=True):
      raise StoppedError(
        f"no snapshot of the run at {self._store.store.where} can be read, and"
        " its first events are deleted: wait until a replica has written one,"
        " or begin the run anew in another place"
      )
    return None

  def _read_newest(self) -> Snapshot | None:
    """Returns the newest snapshot that is whole, or None.

    While it is read, other replicas may write newer ones and delete it. So the
    snapshots are listed again after each one that could not be read.
    """
    passed_over: set[int] = set()
    while True:
      events = set(self._snapshots.events()) - self._bad - passed_over
      if not events:
        return None
      event = max(events)
      snapshot = self._snapshots.read(event)
      if snapshot is not None:
        return snapshot
      _LOG.info(
        "the snapshot before event %d is damaged or deleted: passed over", event
      )
      passed_over.add(event)

  def _pause_before_start(self) -> None:
    """Waits before a new start that follows another one without progress.

    If replicas begin again and again from the same snapshot and fail at the
    same event, they wait for somebody else's next snapshot. The store must not
    be asked thousands of times meanwhile.
    """
    settled = self._agreement.memory.event
    if settled > self._furthest:
      self._furthest = settled
      self._starts_in_place = 0
      return
    self._starts_in_place += 1
    wait = min(2.0**self._starts_in_place, _LONGEST_START_PAUSE_S)
    _LOG.warning(
      "%s has begun again %d times and never got further than event %d: the"
      " objects of that event disagree or are lost; it tries again in %.0f s,"
      " in case another replica writes a newer snapshot",
      self.name,
      self._starts_in_place,
      settled,
      wait,
    )
    self._store.pause(wait)

  def _go_on(
    self, memory: Memory, *, loaded: int = -1, repeats: bool = False
  ) -> None:
    """Goes on from what is known of the events before."""
    self._agreement.memory = memory
    self._is_present = repeats and self.name in memory.roster.expected()
    self._repeats, self._loaded = repeats, loaded

  @property
  def seat(self) -> int:
    """Number of this replica's seat; 0 before it has announced itself."""
    return self._seats.index or 0

  @property
  def usage(self) -> dict[str, int]:
    """Requests and bytes of this replica since it entered, by kind."""
    store = self._store.store
    counted = {"bytes_up": store.bytes_up, "bytes_down": store.bytes_down}
    return dict(store.requests) | counted

  def get_state(self) -> dict[str, Any]:
    """Returns what `set_state` needs, as values of JSON."""
    memory = dataclasses.asdict(self._agreement.memory)
    return {"run": self._run, "memory": memory, "seat": self._seats.index}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on where an earlier life of this replica was.

    It then repeats its work for the events that were settled with a message
    of its earlier life. If the new message differs, `Exchanged` says so.

    Args:
      state: What `get_state` returned before the next event.

    Raises:
      ValueError: If it is the state of another run. The message is one line.
    """
    if state["run"] != self._run:
      raise ValueError(
        f"{self._store.store.where} holds another run than the one in which"
        f" {self.name} was: go on where that one is, or begin anew in another"
        " work directory"
      )
    self._seats.index = state["seat"]
    self._go_on(Memory.from_json(state["memory"]), repeats=True)

  def announce(self, event: int) -> bool:
    """Announces this replica for an event, so that the others wait for it.

    One that is here already is not announced again.

    Returns:
      Whether its message for the event may still count.

    Raises:
      ReplicaStaleError: If the event was deleted.
    """
    if self._is_present and not self._repeats:
      return True
    if event < self._agreement.memory.event:
      return False
    if agreed := self._agreement.manifest(event, 0):
      return self._repeats and self.name in agreed.names
    self._repeats = False
    if self._snapshots.is_gone(event):
      raise ReplicaStaleError(f"event {event} was deleted")
    if not self._is_present:
      self._seats.announce(event, self._agreement.memory.roster)
    return True

  def exchange(
    self,
    event: int,
    turn: int,
    arrays: Sequence[np.ndarray],
    *,
    weight: float = 1.0,
    send: bool = True,
    state: bytes = b"",
    kind: int = 0,
    snapshot: TakeSnapshot | None = None,
  ) -> Exchanged:
    """Sends a message, and returns those that all replicas average.

    Args:
      event: Number of the event: the one after the last.
      turn: Number of the message within the event. Turns after the first
        belong to those whose first message is listed.
      arrays: The message. With `send` off they say what messages look like.
      weight: Weight of the message.
      send: Whether this replica has something to send.
      state: Digest of the shared state that the message belongs to, at most 32
        bytes; equal in all replicas, if all is well. With b"" nothing is
        compared, and no snapshot is written.
      kind: Which events have messages of a like size, e.g. the fragment.
      snapshot: Returns the first event whose result the shared state does not
        have yet, and the state; called when a snapshot may be due.

    Raises:
      ReplicaStaleError: If this replica cannot go on from its state: it has to
        begin again with `newest`.
      StoppedError: If it must not go on at all.
    """
    memory = self._agreement.memory
    if (event > memory.event) if turn == 0 else (event >= memory.event):
      raise ValueError(
        f"event {event}, turn {turn} is not after {memory.event - 1}"
      )
    if turn == 0:
      self._is_past = event < memory.event
    inbox = Inbox(
      self._store, self._signer, event, turn, arrays, kind, self._is_past
    )
    state = state.ljust(STATE_BYTES, b"\0") if state else b""
    sent_digest = ""
    if send and (turn == 0 or self.name in self._agreement.first.names):
      own_state = state or bytes(STATE_BYTES)
      sent_digest = inbox.send(self.name, own_state, weight, arrays).digest
    agreed = self._agreement.wait_for_manifest(inbox)
    if not inbox.is_past:
      self._compare(agreed, event, state)
    messages = self._agreement.fetch_messages(inbox, agreed)
    if not inbox.is_past:
      may_be_due = turn == 0 and event % self.rules.snapshot_every == 0
      if snapshot and may_be_due and agreed.state == state.hex():
        memory = self._after_snapshot(event, agreed, snapshot)
      self._agreement.memory = memory.after(agreed, inbox)
      if turn == 0:
        self._note_presence(event, agreed, send)
    digests = {each.replica: each.digest for each in agreed.listed}
    is_own_listed = self.name in digests
    return Exchanged(
      messages=messages,
      is_own_listed=is_own_listed,
      left_out=dict(agreed.left_out),
      is_superseded=is_own_listed and digests[self.name] != sent_digest,
    )

  def _compare(self, agreed: Manifest, event: int, state: bytes) -> None:
    """Raises an error if this replica has another state than the others."""
    if not state or not agreed.listed or agreed.state == state.hex():
      return
    if event == self._loaded:
      self._bad.add(event)
    if event == self._differed:
      raise StoppedError(
        f"{self.name} computes another shared state than the others up to"
        f" event {event}, from the same messages"
      )
    self._differed = event
    raise ReplicaStaleError("its shared state differs from that of the others")

  def _after_snapshot(
    self, event: int, agreed: Manifest, take: TakeSnapshot
  ) -> Memory:
    """Writes a snapshot if it is due and nobody else does.

    It travels on the same link as messages, so it is due when it has no more
    bytes than those that each replica has sent since the last was due. All
    replicas know that from the same events.

    Returns:
      The memory before the event, which counts from here if it is due.
    """
    memory, (first, arrays) = self._agreement.memory, take()
    if event and memory.sent < sum(array.nbytes for array in arrays):
      return memory
    memory = dataclasses.replace(memory, sent=0)
    if self._snapshots.claim(event):
      copies = list(map(np.array, arrays))  # The caller goes on meanwhile.
      known = dataclasses.asdict(memory)
      taken = Snapshot(event, first, agreed.state, known, copies)
      self.beside(lambda: self._write(taken))
    return memory

  def _write(self, taken: Snapshot) -> None:
    """Writes a snapshot; if it fails, the one that is due next replaces it."""
    try:
      self._writer.write(taken)
    except Exception as error:
      _LOG.warning("snapshot before event %d failed: %s", taken.event, error)

  def _note_presence(self, event: int, agreed: Manifest, sent: bool) -> None:
    # Who only reads on may be expected there from an earlier life.
    was_here = sent or self._is_present
    self._is_present = was_here and self.name in agreed.roster.expected()
    if sent and not self._is_present:
      _LOG.info("%s was too late for event %d", self.name, event)
    for replica, reason in agreed.left_out.items():
      _LOG.info("event %d: %s is left out: %s", event, replica, reason)
