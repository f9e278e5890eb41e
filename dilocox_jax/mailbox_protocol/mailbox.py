"""Lets replicas exchange messages through a store, a folder or a bucket.

In an event (exchange), each replica writes a message into the store. Then one
replica writes the manifest: the list of the messages that all replicas average.
It waits for missing messages at most for some seconds (the grace time), and
longer only while there are fewer messages than the quorum. So the others go on
if a replica has ended. docs/mailbox/guarantees.md says what the mailbox
guarantees.
"""

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.agreement import (
  Agreement,
  Memory,
  ReplicaStaleError,
  StoppedError,
)
from dilocox_jax.mailbox_protocol.answers import StoreUnavailableError
from dilocox_jax.mailbox_protocol.costs import (
  num_requests,
  storage_usd,
  traffic_usd,
)
from dilocox_jax.mailbox_protocol.fingerprints import (
  NOTHING,
  Fingerprint,
  SharedState,
  fingerprint_of,
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
from dilocox_jax.mailbox_protocol.shares import Check, Shares, event_bytes
from dilocox_jax.mailbox_protocol.signer import JSON_BYTES, Signer
from dilocox_jax.mailbox_protocol.sliced import SlicedInbox
from dilocox_jax.mailbox_protocol.snapshots import (
  KEPT_SNAPSHOTS,
  Snapshot,
  Snapshots,
)
from dilocox_jax.mailbox_protocol.store import RetryingStore, Store
from dilocox_jax.mailbox_protocol.store_size import check_store_bytes
from dilocox_jax.plan.collectives import num_slices
from dilocox_jax.reference.fingerprint import BLOCK_VALUES, random_signs
from dilocox_jax.reference.shares import Tables

_LOG = logging.getLogger(__name__)
# A replica gives up if its shared state has differed from that of the others
# more often than this since the last snapshot was due. So it can try each of
# the snapshots that a store keeps.
_MOST_DIFFERENCES = KEPT_SNAPSHOTS
# A replica ends if so many others have found wrong shares of it. If it is only
# one, nobody knows which of the two computes wrong results.
_ENOUGH_ACCUSERS = 2
_LONGEST_START_PAUSE_S = 60.0  # Of `Mailbox._pause_before_start`.
# Returns the first event whose result the shared state does not have yet, and
# the arrays of the shared state.
TakeSnapshot = Callable[[], tuple[int, Sequence[np.ndarray]]]


class Exchanged(NamedTuple):
  """The result of a turn: the messages that all replicas average.

  In a turn, each replica sends one message. Most codecs have one turn in each
  exchange (event).

  Attributes:
    messages: Name of the replica, weight and arrays of each message, in the
      order in which all replicas add them up. If `mean` is given, the lists of
      arrays are empty.
    is_own_listed: Whether one of these messages is from this replica. If not,
      and `left_out` does not name this replica, it may send its values later.
    left_out: For each replica whose message came in time and does not count,
      the reason. Such a replica should drop the values of its message.
    is_superseded: Whether this replica's averaged message is one that it sent
      before a restart. This replica must then drop the values that it holds
      back, because its earlier process may have sent them.
    mean: The weighted mean of the messages, encoded like a message: arrays of
      the same types and shapes. None: the caller averages `messages`.
    wrong_shares: Shares (means of one slice of all messages) that this replica
      has found to be wrong since the last turn, as tuples: event, number of the
      share, and name of the replica that had to make it.
  """

  messages: list[tuple[str, float, list[np.ndarray]]]
  is_own_listed: bool
  left_out: dict[str, str]
  is_superseded: bool = False
  mean: list[np.ndarray] | None = None
  wrong_shares: Sequence[tuple[int, int, str]] = ()


class Mailbox:
  """One replica's access to a run in a store: sends and reads messages.

  Events (exchanges) are numbered from 0, and every replica goes through them in
  order. A replica begins with the initial parameters, or with the snapshot that
  `newest` returns. Then it runs::

    while event < num_events:
      takes_part = mailbox.announce(event)  # False: it is settled already.
      if takes_part:
        ... inner steps ...
      state = mailbox.fingerprint(event, arrays_of_state)
      exchanged = mailbox.exchange(
        event, 0, arrays, state=state, send=takes_part
      )
      ... apply the mean of exchanged.messages, or exchanged.mean ...
      event += 1

  After a `ReplicaStaleError` the replica begins again with `newest`.

  Words of the methods (the package's docstring has more):

  - *Turn*: one message of each replica. Most codecs need one turn in an event.
  - *Settled*: a turn whose manifest (list of messages) is written, or an event
    whose first turn is settled.
  - *Shared state*: the outer parameters, the outer optimizer and the codec's
    common state, which should be equal in all replicas. A *fingerprint* is a
    few random sums of it. A *snapshot* is a copy of it in the store.
  - *Share*: the mean of one slice of all messages, which one replica makes.

  Attributes:
    beside: Function that runs a task (a function without arguments) at once, as
      the default does, or in a thread. Tasks are, for example, to write a
      snapshot and to check a share.
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
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
  ):
    """Joins the run that is in the store, or begins one if there is none.

    Args:
      where: Folder or URL of the run, such as "/mnt/share/run" or
        "s3://bucket/run", or an object with the methods and counters of
        `Store`.
      name: Name of this replica, which no other replica has: 1 to 32 of the
        characters a-z, 0-9, "_" and "-", the first one a letter or a digit.
      secret: Path of the file with the secret that all replicas share (see
        `experiments.make_secret`), or the secret itself as bytes.
      config: All settings that the result depends on, as nested mappings with
        values of JSON, equal in all replicas.
      text_digest: Digest of the training text, equal in all replicas; "" if
        none is compared.
      rules: The rules of the run, equal in all replicas.
      clock: Returns a time in seconds that never goes back.
      pause: Waits for a number of seconds.

    Raises:
      RunMismatchError: If `config`, `text_digest`, `rules`, the secret or the
        version of the protocol differ from those of the run, or if the store
        does not say which run it holds.
      UnfitStoreError: If the store does not exist, denies access, or overwrites
        objects that were to be created once.
      ValueError: If another argument is wrong. Each message is one line.
    """
    self.name = checked_name(name)
    self.rules = rules
    if not isinstance(secret, bytes):
      secret = read_secret(secret)
    if isinstance(where, (str, os.PathLike)):
      store = Store(where)
    else:
      store = where
    self._store = RetryingStore(store, clock, pause)
    # Until the run is joined, a store that refuses is an error. Later this
    # replica waits for the store.
    entering = RetryingStore(store, clock, pause, is_entering=True)
    prove(entering, name)
    entry = join_run(
      entering,
      secret,
      run_terms(config, text_digest, rules),
      where=store.where,
    )
    self._run = entry.run
    self._signer = Signer(secret, self._run)
    self._seats = Seats(self._store, self._signer, name)
    self._snapshots = Snapshots(self._store, self._signer)
    # A failed write of a snapshot is not repeated. The next snapshot replaces
    # it, and the end of a run must not wait for a store that is away.
    self._writer = Snapshots(store, self._signer)
    self._agreement = Agreement(
      store=self._store,
      signer=self._signer,
      seats=self._seats,
      snapshots=self._snapshots,
      rules=rules,
      run_objects=entry.objects,
    )
    # Whether the others wait for this replica at the next event.
    self._is_present = False
    # Whether the event that is exchanged now was settled before the snapshot
    # with which this replica began.
    self._is_past = False
    # Whether this replica repeats its work since the checkpoint from which it
    # was restarted.
    self._repeats = False
    self._loaded = -1  # Event of the snapshot that was loaded last.
    # Whether this replica has announced nothing since it loaded the snapshot.
    self._is_just_loaded = False
    # Kinds of events at which, since the snapshot was loaded, another replica
    # had the same state as this one.
    self._confirmed: set[int] = set()
    # How often this replica's state differed from that of the others since the
    # last snapshot was due.
    self._num_differences = 0
    self._bad: set[int] = set()  # Events of snapshots with a wrong state.
    # Largest number of events that were settled when `newest` was called.
    self._furthest = -1
    # Calls of `newest` since that number last grew.
    self._starts_in_place = 0
    # Wrong shares that were found and not returned yet.
    self._wrong_shares: list[tuple[int, int, str]] = []
    # Checks of shares that this replica has made, and that it does not know the
    # result of.
    self._unread_checks: list[Check] = []
    # Replicas that have found a wrong share of this replica.
    self._accusers: set[str] = set()
    self._entered_s = self._store.clock()
    self._num_events = 0  # Events since this replica entered the run.
    self.beside: Callable[[Callable[[], None]], Any] = lambda write: write()

  def newest(self) -> Snapshot | None:
    """Reads the newest complete snapshot, and sets this mailbox back to it.

    A snapshot is the state that all replicas share before an event (exchange).
    If this replica has come to no further event since the previous call, the
    method first waits up to a minute.

    Returns:
      The snapshot. The caller takes over its arrays, and goes on with event
      `Snapshot.first`. None if no snapshot can be read: the caller begins with
      the initial parameters and event 0.

    Raises:
      StoppedError: If no snapshot can be read although the first events are
        deleted. This is only checked if this replica has come to no further
        event since the previous call.
    """
    self._pause_before_start()
    self._go_on(Memory())
    snapshot = self._read_newest()
    if snapshot is None:
      # At the first start `announce` finds out whether event 0 was deleted.
      is_repeated = self._starts_in_place > 0
      if not (is_repeated and self._snapshots.is_gone(0)):
        return None
      # The first events may have been deleted after the snapshots were listed.
      # Then there is a snapshot by now.
      snapshot = self._read_newest()
    if snapshot is None:
      raise StoppedError(
        f"no snapshot of the run at {self._store.store.where} can be read, and"
        " its first events are deleted: wait until a replica has written one,"
        " or begin the run anew in another place"
      )
    memory = Memory.from_json(snapshot.memory)
    memory = dataclasses.replace(memory, base=snapshot.event)
    self._go_on(memory, loaded=snapshot.event)
    _LOG.info(
      "%s takes the snapshot before event %d", self.name, snapshot.event
    )
    return snapshot

  def _read_newest(self) -> Snapshot | None:
    """Returns the newest snapshot that can be read; None if there is none.

    Snapshots that have led to a wrong state (`_bad`) are passed over.
    """
    passed_over: set[int] = set()
    while True:
      events = set(self._snapshots.listed()) - self._bad - passed_over
      if not events:
        return None
      event = max(events)
      # Meanwhile others may write newer snapshots and delete this one. So the
      # snapshots are listed again after each one that cannot be read.
      snapshot = self._snapshots.read(event)
      if snapshot is not None:
        return snapshot
      _LOG.info(
        "the snapshot before event %d is damaged or deleted: passed over", event
      )
      passed_over.add(event)

  def _pause_before_start(self) -> None:
    """Waits 2 to 60 s before a new start if the last one led to no progress."""
    settled = self._agreement.memory.event
    if settled > self._furthest:
      self._furthest = settled
      self._starts_in_place = 0
      return
    # A replica that fails again and again at the same event needs a newer
    # snapshot from another replica. Until then it must not send the store
    # thousands of requests.
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
    """Sets the event from which this replica goes on after a start or restart.

    Args:
      memory: What this replica remembers of the earlier events.
      loaded: Event of the snapshot that was loaded; -1: none was.
      repeats: Whether this replica was restarted from a checkpoint, so that it
        repeats work whose messages it may have sent already.
    """
    self._agreement.memory = memory
    self._agreement.announced = {}
    # Without a checkpoint, this replica has to announce itself first.
    self._is_present = repeats and self.name in memory.roster.expected()
    self._repeats = repeats
    self._loaded = loaded
    self._is_just_loaded = loaded >= 0
    self._confirmed = set()

  def signs(self, event: int) -> np.ndarray:
    """Returns the random signs for fingerprints of the state before an event.

    They are float32 [2^20] of +1 and -1, equal in all replicas of the run. A
    fingerprint is a few random sums of the state.
    """
    return random_signs(self._run, event)

  def fingerprint(
    self, event: int, arrays: Iterable[np.ndarray]
  ) -> Fingerprint:
    """Returns the fingerprint (a few random sums) of the state before an event.

    Args:
      event: Number of the event (exchange).
      arrays: All arrays of the state that the event changes, in the same order
        in all replicas.
    """
    arrays = list(arrays)
    largest = max((array.size for array in arrays), default=0)
    num_values = min(largest, BLOCK_VALUES)
    return fingerprint_of(arrays, random_signs(self._run, event, num_values))

  @property
  def run(self) -> str:
    """Random identifier of the run, equal in all its replicas."""
    return self._run

  @property
  def seat(self) -> int:
    """Place of this replica in the order of joining, from 0.

    It is 0 if it is not known yet.
    """
    return self._seats.index or 0

  @property
  def usage(self) -> dict[str, int]:
    """Requests and bytes of this replica since its store was opened.

    The keys are "get", "put", "list" and "delete" (a kind without requests may
    be missing), "bytes_up" and "bytes_down".
    """
    store = self._store.store
    return {
      **store.requests,
      "bytes_up": store.bytes_up,
      "bytes_down": store.bytes_down,
    }

  def get_state(self) -> dict[str, Any]:
    """Returns the state of this mailbox for a checkpoint, as values of JSON."""
    memory = dataclasses.asdict(self._agreement.memory)
    return {"run": self._run, "memory": memory, "seat": self._seats.index}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Restores the state of an earlier process of this replica.

    This replica then repeats its work since the checkpoint. If the earlier
    process has sent a message for an event, that message counts, and not the
    new one (`Exchanged.is_superseded`).

    Args:
      state: The result of `get_state` in the checkpoint.

    Raises:
      ValueError: If the state is that of another run. The message is one line.
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

    If the others wait for this replica anyway, the method returns True without
    a request. After a restart from a checkpoint, it looks in the store first.

    Args:
      event: Number of the event (exchange).

    Returns:
      Whether this replica should do its inner steps, because its message for
      the event may count. False in two cases:

      - The event is older than the snapshot (copy of the shared state) with
        which this replica began.
      - The list of the event's messages is decided, and has no message that
        this replica sent before a restart.

    Raises:
      ReplicaStaleError: If the event was deleted.
    """
    if self._is_present and not self._repeats:
      return True  # The others wait for this replica anyway.
    if event < self._agreement.memory.event:
      return False  # The list of the event's messages was decided before.
    agreed = self._agreement.announced_manifest(event)
    if agreed is not None:
      return self._repeats and self.name in agreed.names
    self._repeats = False
    # This check only avoids inner steps for an event that was deleted. For
    # safety, `exchange` checks again. A snapshot that was just read is not
    # deleted yet, and neither are the events after it.
    was_just_loaded = self._is_just_loaded
    self._is_just_loaded = False
    if not was_just_loaded and self._agreement.is_gone(event, thoroughly=False):
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
    state: Fingerprint | None = None,
    kind: int = 0,
    snapshot: TakeSnapshot | None = None,
    tables: Tables | None = None,
  ) -> Exchanged:
    """Sends a message, and returns the messages that all replicas average.

    The method waits up to `rules.grace_s` seconds for the messages of the
    others, or longer if there are fewer than `rules.quorum`, if a message to
    average has vanished, or if the store cannot be reached.

    Args:
      event: Number of the event. It is the one after the last event, or an
        earlier one whose result this replica has not applied yet.
      turn: Number of the message within the event, from 0. After turn 0, only
        replicas whose first message is averaged send messages.
      arrays: The arrays of the message. Do not change them in place before the
        call for the next event has returned. If `send` is False, only types and
        shapes matter.
      weight: Weight of the message in the mean; 0 leaves the message out.
      send: Whether this replica sends a message. If not, it only reads.
      state: Fingerprint of the shared state before the event (`fingerprint`).
        None: nothing is compared, and this replica writes no snapshot. Give a
        fingerprint in all replicas or in none. It is not needed after turn 0.
      kind: Number of the fragment that is exchanged. All events of one kind
        have messages of one size.
      snapshot: Function that returns the first event whose result the shared
        state does not have yet, and the arrays of the state. It is called if
        this replica has to write a snapshot, and in the first exchange, to find
        out the size of a snapshot. None: this replica writes no snapshot.
      tables: How the arrays are encoded, equal in all replicas. Then each
        replica may average one slice of all messages (`MailboxRules.shares`).
        None: each averages whole messages.

    Raises:
      ReplicaStaleError: If this replica must begin again with `newest`. For
        example, the event was deleted, or this replica's shared state differs
        from that of most others.
      StoppedError: If beginning again would not help. For example, this
        replica's message has other types or shapes than the averaged messages,
        or `rules.store_bytes` is too low.
      ValueError: If an event or its turn 0 was skipped. Also if `tables` is
        None and the messages of an event are in slices; this is found only for
        events before this replica's snapshot.
    """
    self._check_order(event, turn)
    self._check_accusers()
    if turn == 0:
      self._is_past = event < self._agreement.memory.event
    # The later turns of an event belong to the same state.
    fingerprint = NOTHING if state is None or turn else state
    expected = self._agreement.expected(event, turn, self._is_past)
    # The inboxes that are made below differ in their number of slices.
    new_inbox = functools.partial(
      self._new_inbox,
      event=event,
      turn=turn,
      like=arrays,
      kind=kind,
      num_blocks=len(fingerprint.rows),
      expected=expected,
      tables=tables,
    )
    inbox = new_inbox(num_slices=self._num_slices(len(expected), tables))
    # In its first exchange, this process notes the size of a snapshot.
    if snapshot and not self._agreement.snapshot_bytes:
      most_slices = self._num_slices(self.rules.replicas, tables)
      self._note_sizes(new_inbox(num_slices=most_slices), snapshot)
    self._agreement.open(inbox)
    shared = SharedState(
      name=self._agreement.before(inbox),
      base=self._agreement.memory.base,
      fingerprint=fingerprint,
    )
    sent_digest = ""  # It stays empty if this replica only reads.
    if send and (turn == 0 or self.name in self._agreement.first.names):
      message = inbox.send(
        self.name,
        weight=weight,
        arrays=arrays,
        state=shared,
      )
      sent_digest = message.digest
    agreed = self._agreement.wait_for_manifest(inbox)
    # In a turn that was settled earlier, messages may have another number of
    # slices than they would have now.
    if inbox.is_past and agreed.num_slices:
      inbox = new_inbox(num_slices=agreed.num_slices)
    digests = {listed.replica: listed.digest for listed in agreed.listed}
    # If this replica's message is listed, the writer of the manifest has found
    # that this replica's state is that of the other listed ones.
    is_confirmed = state is not None and sent_digest in digests.values()
    # The confirmed replica whose claim succeeds writes the snapshot.
    claims: list[bool] = []
    beside = []
    if snapshot and agreed.begins_interval and is_confirmed:
      beside.append(lambda: claims.append(self._snapshots.claim(event)))
    messages, mean = self._fetch(inbox, agreed, beside)
    if not inbox.is_past:
      if turn == 0:
        self._compare(agreed, inbox, shared, sent_digest)
        self._num_events += 1
      self._settle(agreed, inbox, snapshot if any(claims) else None)
      if turn == 0:
        self._note_presence(event, agreed, send)
    is_own_listed = self.name in digests
    return Exchanged(
      messages=messages,
      is_own_listed=is_own_listed,
      left_out=dict(agreed.left_out),
      is_superseded=is_own_listed and digests[self.name] != sent_digest,
      mean=mean,
      wrong_shares=self._taken_wrong_shares(),
    )

  def _taken_wrong_shares(self) -> list[tuple[int, int, str]]:
    """Returns and removes the wrong means of slices that were found so far."""
    # A check in another thread may add one meanwhile.
    found = list(self._wrong_shares)
    del self._wrong_shares[: len(found)]
    return found

  def _check_accusers(self) -> None:
    """Raises StoppedError if two replicas have found wrong shares of this one.

    A share is the mean of one slice of all messages, made by one replica.
    """
    if len(self._accusers) >= _ENOUGH_ACCUSERS:
      raise StoppedError(
        f"{self.name} makes wrong shares of means, as"
        f" {' and '.join(sorted(self._accusers))} have found: look for a broken"
        " device or a bad memory on its machine, and start it again on another"
      )

  def _check_order(self, event: int, turn: int) -> None:
    """Raises ValueError if an event or its first turn is skipped."""
    next_event = self._agreement.memory.event
    # The first turn of an event settles it, so `memory` then names the next.
    is_in_order = event <= next_event if turn == 0 else event < next_event
    if not is_in_order:
      raise ValueError(
        f"event {event}, turn {turn} is not after {next_event - 1}"
      )

  def _num_slices(self, num_replicas: int, tables: Tables | None) -> int:
    """Returns into how many slices messages are cut; 0: they are not.

    `num_replicas` is the number of replicas that are expected in the turn.
    """
    if tables is None:
      return 0
    return num_slices(self.rules.shares, num_replicas, tables.codec.is_coarse)

  def _settle(
    self, agreed: Manifest, inbox: Inbox, snapshot: TakeSnapshot | None
  ) -> None:
    """Remembers what was agreed in a turn; writes a snapshot if one is given.

    `snapshot` returns the first event whose result the shared state does not
    have yet, and the arrays of the state.
    """
    memory = self._agreement.memory
    if agreed.begins_interval:
      # A replica's first event may begin an interval, too. The requests of one
      # event, with those of entering, say little about the usual usage.
      if self._num_events > 1:
        self._log_usage(inbox.event)
      memory = memory.begin_interval(inbox.event)
      self._num_differences = 0
    # A snapshot has the state before the event, so its memory ends before this
    # turn, too.
    if snapshot:
      self._write_snapshot(inbox.event, memory, snapshot)
    self._agreement.memory = memory.after(agreed, inbox)

  def _fetch(
    self,
    inbox: Inbox,
    agreed: Manifest,
    beside: Sequence[Callable[[], Any]],
  ) -> tuple[
    list[tuple[str, float, list[np.ndarray]]], list[np.ndarray] | None
  ]:
    """Returns the messages that `agreed` lists, and perhaps their mean.

    If each replica averages one slice of all messages, the result has the mean,
    and its messages have no arrays. Else the mean is None. The functions in
    `beside` are called with the first requests.
    """
    if not isinstance(inbox, SlicedInbox) or not agreed.listed:
      return self._agreement.fetch_messages(inbox, agreed, beside), None
    mean = self._fetch_mean(inbox, agreed, beside)
    messages = [(listed.replica, listed.weight, []) for listed in agreed.listed]
    return messages, mean

  def _new_inbox(
    self,
    *,
    event: int,
    turn: int,
    like: Sequence[np.ndarray],
    kind: int,
    num_blocks: int,
    expected: Sequence[str],
    num_slices: int,
    tables: Tables | None,
  ) -> Inbox:
    """Returns an inbox, which will hold the messages of a turn.

    A message has the types and shapes of the arrays `like`, and is cut into
    `num_slices` slices; 0: it is not cut.

    Raises:
      ValueError: If messages are cut and `tables` is None.
    """
    common: dict[str, Any] = {
      "store": self._store,
      "signer": self._signer,
      "event": event,
      "turn": turn,
      "like": like,
      "kind": kind,
      "num_blocks": num_blocks,
      "is_past": self._is_past,
      "expected": expected,
    }
    if not num_slices:
      return Inbox(**common)
    if tables is None:
      raise ValueError(
        f"event {event}: the other replicas make the mean in shares, and this"
        " replica gives no tables= for its messages"
      )
    # Each expected replica makes the share of one slice, in their order.
    first_slice = 0
    if self.name in expected:
      first_slice = list(expected).index(self.name)
    return SlicedInbox(
      **common,
      num_slices=num_slices,
      tables=tables,
      first_slice=first_slice,
    )

  def _fetch_mean(
    self,
    inbox: SlicedInbox,
    agreed: Manifest,
    beside: Sequence[Callable[[], Any]],
  ) -> list[np.ndarray]:
    """Returns the mean of a turn, of which each replica computes one slice.

    The functions in `beside` are called with the first requests.
    """
    shares = Shares(
      store=self._store,
      signer=self._signer,
      inbox=inbox,
      agreed=agreed,
      name=self.name,
      remembered=self._agreement.residuals,
      residual_event=self._agreement.memory.residual_event(inbox),
    )
    self._agreement.fetch_shares(shares, beside)
    if not inbox.is_past:
      self._check_one_share(shares)
    return shares.mean()

  def _check_one_share(self, shares: Shares) -> None:
    """Checks a share (the mean of one slice) if this replica is chosen.

    In about one of eight turns, a hash chooses a share, and a replica other
    than its maker to check it. In these turns every replica also reads the
    results of earlier checks of its own shares.
    """
    check = shares.check(self._run)
    if check is None:
      return
    # These are checks of earlier turns. That of this turn has not ended yet.
    unread = list(self._unread_checks)
    if unread:
      self.beside(lambda: self._read_checks(unread))
    if check.checker == self.name:
      # The check uses the store without retries: it is not repeated if the
      # store is away.
      shares.store = self._store.store
      self.beside(lambda: self._check_share(shares, check))
    elif shares.is_made_here(check.number):
      self._unread_checks.append(check)

  def _check_share(self, shares: Shares, check: Check) -> None:
    """Computes another replica's share again, and reports a difference.

    The report is a line in the log, and an object in the store for the maker of
    the share (the mean of one slice). Nothing is reported if the store is away.
    """
    maker = shares.maker(check.number)
    try:
      difference = shares.difference(check.number)
      if not difference:
        return
      values = {"found_by": self.name}
      data = self._signer.sign_json(check.path, values)
      shares.store.create(check.path, data)
    except StoreUnavailableError:
      return
    self._wrong_shares.append((check.event, check.number, maker))
    _LOG.warning(
      "event %d: share %d of the mean, made by %s, differs %s from the one"
      " that %s computes from the same messages: look for a broken device or"
      " a bad memory on both machines",
      check.event,
      check.number,
      maker,
      difference,
      self.name,
    )

  def _read_checks(self, checks: Sequence[Check]) -> None:
    """Reads the results of other replicas' checks of this replica's shares.

    Replicas that have found a wrong share are added to `_accusers`.
    """
    for check in checks:
      try:
        data = self._store.store.get(check.path, JSON_BYTES)
      except StoreUnavailableError:
        return  # It tries again at the next check.
      self._unread_checks.remove(check)
      found = self._signer.verify_json(check.path, data)
      if found is None or found.get("found_by") != check.checker:
        continue
      self._accusers.add(check.checker)
      _LOG.warning(
        "event %d: %s has found that share %d of the mean, which %s has made,"
        " is wrong: look for a broken device or a bad memory on both machines",
        check.event,
        check.checker,
        check.number,
        self.name,
      )

  def _compare(
    self,
    agreed: Manifest,
    inbox: Inbox,
    shared: SharedState,
    sent_digest: str,
  ) -> None:
    """Checks that this replica's shared state is that of the listed senders.

    If this replica's message is listed, the writer of the list (`agreed`) has
    checked this. Else the state is compared with that of the first listed
    sender, if this replica has its message.

    Raises:
      ReplicaStaleError: If the states differ, or if this replica has sent a
        message and several states tied for the most frequent one.
      StoppedError: If they have differed too often.
    """
    if agreed.is_split:
      if sent_digest and self.name in agreed.left_out:
        self._begin_again(inbox, agreed.left_out[self.name])
      return
    if not agreed.listed:
      return
    is_listed = any(each.digest == sent_digest for each in agreed.listed)
    # The mean in shares does not need whole messages. So the first listed
    # message may have been lost before this replica could read it.
    first = inbox.held.get(agreed.listed[0].replica)
    if not is_listed:
      if first is None:
        return
      text = shared.difference_from(
        first.state,
        inbox.event,
        self._agreement.memory.num_kinds,
      )
      if text:
        self._begin_again(inbox, f"its shared state differs: {text}")
    # Another replica has had the same state at an event of this kind. But a
    # list of only this replica's message compares its state with no other.
    if not is_listed or len(agreed.listed) > 1:
      self._confirmed.add(inbox.kind)

  def _begin_again(self, inbox: Inbox, reason: str) -> None:
    """Raises the error for a replica whose state differs from the others'.

    If the snapshot with which it began may be wrong, the next call of `newest`
    passes over it.

    Raises:
      ReplicaStaleError: Normally. The replica must begin again with `newest`.
      StoppedError: If its state has differed more than three times since the
        last snapshot was due.
    """
    if inbox.kind not in self._confirmed and self._loaded >= 0:
      # This fragment was wrong in the snapshot, or soon after it.
      self._bad.add(self._loaded)
    self._num_differences += 1
    if self._num_differences > _MOST_DIFFERENCES:
      raise StoppedError(
        f"{self.name} computes another shared state than the others up to"
        f" event {inbox.event}, from the same messages ({reason}): look for a"
        " broken device or a changed computation on its machine"
      )
    raise ReplicaStaleError(reason)

  def _note_sizes(self, inbox: Inbox, take: TakeSnapshot) -> None:
    """Notes how many bytes a snapshot has, and checks the limit of the store.

    Raises:
      StoppedError: If `rules.store_bytes` is too low for the snapshots and
        messages that the protocol keeps.
    """
    _, arrays = take()
    snapshot_bytes = sum(array.nbytes for array in arrays)
    self._agreement.snapshot_bytes = snapshot_bytes
    try:
      check_store_bytes(
        self.rules.store_bytes,
        snapshot_bytes,
        event_bytes=event_bytes(inbox, self.rules.replicas),
      )
    except ValueError as error:
      raise StoppedError(str(error)) from None

  def _log_usage(self, event: int) -> None:
    """Logs the mean requests and bytes of an event, and estimated costs."""
    usage = self.usage
    num_events = self._num_events
    limit = self._agreement.limit()
    seconds = self._store.clock() - self._entered_s
    _LOG.info(
      "event %d: %.1f requests, %.3g MB up and %.3g MB down an event; the store"
      " has at most %.3g GB; in a bucket of S3 about %.2f USD a month for this"
      " replica's requests and downloads, and at most %.2f USD for the store",
      event,
      num_requests(usage) / num_events,
      usage["bytes_up"] / num_events / 1e6,
      usage["bytes_down"] / num_events / 1e6,
      limit.store_bytes / 1e9,
      traffic_usd(usage, seconds),
      storage_usd(limit.store_bytes),
    )

  def _write_snapshot(
    self, event: int, memory: Memory, take: TakeSnapshot
  ) -> None:
    """Copies the shared state before an event, and lets `beside` write it.

    `take` returns the first event whose result the state does not have yet, and
    the arrays of the state.
    """
    first, arrays = take()
    snapshot = Snapshot(
      event=event,
      first=first,
      memory=dataclasses.asdict(memory),
      # Copies, because the caller may change the arrays before the write.
      arrays=[np.array(array) for array in arrays],
    )
    self.beside(lambda: self._write(snapshot, memory.starts))

  def _write(self, snapshot: Snapshot, starts: Sequence[int]) -> None:
    """Writes a snapshot, and deletes old objects. A failure is only logged."""
    try:
      self._writer.write(snapshot, starts)
    except Exception as error:  # The next snapshot will replace this one.
      _LOG.warning("snapshot before event %d failed: %s", snapshot.event, error)

  def _note_presence(self, event: int, agreed: Manifest, sent: bool) -> None:
    """Notes whether the others wait for this replica at the next event.

    It also logs whose messages were left out, and whether this replica's
    message was too late.
    """
    # A replica that only reads may still be expected because of a message that
    # it sent before a restart. Such a replica is not present.
    was_here = sent or self._is_present
    self._is_present = was_here and self.name in agreed.roster.expected()
    if sent and not self._is_present:
      _LOG.info("%s was too late for event %d", self.name, event)
    for replica, reason in agreed.left_out.items():
      _LOG.info("event %d: %s is left out: %s", event, replica, reason)
