"""Lets replicas agree on which messages they average.

An event (exchange) has one turn or several. In a turn, each replica sends one
message. Then one replica writes the turn's manifest: the list of the messages
that all replicas average. `Agreement` waits for the manifest, writes it when it
is due, and reads the listed messages. `Memory` holds what the agreement on the
next event needs of the earlier ones.
"""

import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dilocox_jax.mailbox_protocol.buffers import (
  Buffer,
  Data,
  is_equal,
  num_bytes_of,
)
from dilocox_jax.mailbox_protocol.decisions import (
  DECIDES_WITHIN_S,
  Decisions,
)
from dilocox_jax.mailbox_protocol.manifest import (
  NUM_REMEMBERED,
  Manifest,
  make_manifest,
)
from dilocox_jax.mailbox_protocol.messages import (
  EVENTS,
  FEW,
  MANIFESTS,
  Inbox,
  manifest_path,
  message_path,
  proposal_path,
)
from dilocox_jax.mailbox_protocol.roster import MailboxRules, Roster, Seats
from dilocox_jax.mailbox_protocol.shares import (
  Residual,
  Shares,
  event_bytes,
)
from dilocox_jax.mailbox_protocol.signer import JSON_BYTES, Signer
from dilocox_jax.mailbox_protocol.snapshots import (
  KEPT_MARKS,
  Snapshots,
  interval_of,
)
from dilocox_jax.mailbox_protocol.store_size import StoreLimit, store_limit
from dilocox_jax.mailbox_protocol.votes import vote

_LOG = logging.getLogger(__name__)
# A waiting replica asks the store again and again. The pauses between two
# requests grow from FIRST_PAUSE_S to LONGEST_PAUSE_S. After the grace time they
# grow further, to a sixth of the grace time, but at most to
# LONGEST_LATE_PAUSE_S.
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
LONGEST_LATE_PAUSE_S = 10.0
PAUSE_GROWTH = 1.25
# A waiting replica looks for new seats (entries of replicas that join or come
# back) at its first look, and then at most once in this time. Most looks follow
# each other after a few hundredths of a second, and replicas rarely come.
SEATS_EVERY_S = 1.0
# A waiting replica writes vanished objects again (`Agreement._look_around`)
# after the grace time. The time until it does so again doubles up to this
# number of seconds, or up to the grace time if that is longer.
LONGEST_LOOK_S = 60.0
LINE_EVERY_S = 60.0  # Seconds between two lines of the log about waiting.
# Memory keeps the starts of this many intervals. Whoever writes a snapshot
# deletes the marks that are older than `KEPT_MARKS` intervals. A few snapshots
# in a row may fail, so the starts of 16 more intervals are remembered.
_REMEMBERED_STARTS = KEPT_MARKS + 16


class ReplicaStaleError(Exception):
  """Raised if a replica must begin again from the newest snapshot.

  A snapshot is a copy of the state that all replicas share before an event
  (exchange). The replica must drop its exchanges in flight, and the values that
  it holds back (error feedback): the others may have averaged these values
  already.
  """


class StoppedError(Exception):
  """Raised if a replica has to end. The message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a replica remembers of earlier events (exchanges).

  In each *turn* of an event, every replica sends one message. The *manifest* of
  a turn lists the messages that all replicas average, and *settles* the turn.
  An *interval* is the events from one due snapshot (copy of the state that all
  replicas share) to the next one. Events have the same *kind* if they exchange
  the same fragment.

  Attributes:
    event: Number of the next event.
    before: Digest of the manifest of turn 0 of the previous event; "" if no
      event was settled yet.
    roster: The replicas that take part after the previous event.
    accepted: For each key, the median norms of up to 6 turns, the oldest first.
      The key of a turn is "KIND.TURN", or "KIND.TURN.slices" if its messages
      are cut into slices. The median norm of a turn is the median of the norms
      of its listed messages. Norms of 0 do not count.
    starts: First event of each of the newest intervals, the oldest first.
    sent: Bytes of the messages that a replica has sent in this interval if it
      has missed no turn.
    stored: Bytes that the events of this interval have added to the store.
    stored_in_event: Bytes that the newest event has added to the store.
    largest_event: Largest `stored_in_event` so far.
    was_split: Whether the senders' states were split (`votes`) at an event of
      this interval: several states tied for the most frequent one.
    base: Event of the snapshot with which this replica last began; 0 if it
      began with the initial parameters.
    shared: For each key "KIND.TURN", a tuple of an event and a number of
      slices. The event is the newest one whose messages were cut into slices,
      and each replica averaged one of these slices.
  """

  event: int = 0
  before: str = ""
  roster: Roster = Roster()
  accepted: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  starts: tuple[int, ...] = (0,)
  sent: int = 0
  stored: int = 0
  stored_in_event: int = 0
  largest_event: int = 0
  was_split: bool = False
  base: int = 0
  shared: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "Memory":
    """Builds a memory from the fields that `dataclasses.asdict` returns."""
    roster = Roster.from_json(values["roster"])
    starts = tuple(values["starts"])
    shared = {
      key: (int(event), int(num_slices))
      for key, (event, num_slices) in values["shared"].items()
    }
    fields = {**values, "roster": roster, "starts": starts, "shared": shared}
    return cls(**fields)  # pyright: ignore

  def begin_interval(self, event: int) -> "Memory":
    """Returns a copy in which a new interval begins with `event`.

    An interval is the events from one due snapshot to the next one. The values
    that belong to it (`sent`, `stored`, `was_split`) are reset.
    """
    starts = self.starts
    if event != starts[-1]:
      starts = (*starts, event)
    return dataclasses.replace(
      self,
      starts=starts[-_REMEMBERED_STARTS:],
      sent=0,
      stored=0,
      was_split=False,
    )

  def norms(self, inbox: Inbox) -> list[float]:
    """Returns the median norms of up to six earlier turns, the oldest first.

    In a turn of an event, each replica sends one message. A turn counts if it
    is like the turn of `inbox` in three points:

    - the fragment that is exchanged;
    - the number of the turn within its event;
    - whether messages are cut into slices.
    """
    return self.accepted.get(_norms_key(inbox), [])

  def residual_event(self, inbox: Inbox) -> int:
    """Returns the event whose residuals are added to the mean of a turn.

    In a turn of an event, each replica sends one message. If messages are cut
    into slices, each replica averages one slice of all messages, and encodes
    the mean. What the encoding loses is the residual. It is added to the next
    mean of this slice.

    Returns:
      Number of the newest event that exchanged the fragment of `inbox`, and
      averaged the messages of turn `inbox.turn` in slices. The result is -1 in
      three cases:

      - There is no such event.
      - Its messages were cut into more or fewer slices than those of `inbox`.
      - Two snapshots (copies of the shared state) were due since this event.
        So its residuals may be deleted.
    """
    event, num_slices = self.shared.get(f"{inbox.kind}.{inbox.turn}", (-1, 0))
    if num_slices != inbox.num_slices:
      return -1
    # First event of the last interval but one, or of the only interval.
    first_kept = self.starts[-2:][0]
    return event if event >= first_kept else -1

  @property
  def num_kinds(self) -> int:
    """Number of fragments that were exchanged so far, at least 1."""
    kinds = {key.partition(".")[0] for key in self.accepted}
    return max(len(kinds), 1)

  def after(self, agreed: Manifest, inbox: Inbox) -> "Memory":
    """Returns a copy of the memory to which a turn was added.

    In a turn of an event, each replica sends one message. `inbox` says which
    turn it is, and `agreed` is its manifest: the list of the messages that are
    averaged. Only the first turn of an event changes `event`, `before`,
    `roster` and `was_split`.
    """
    norms = self.norms(inbox)
    # A replica that made no progress sends a message of norm 0. Such norms are
    # left out: beside a usual norm of 0, every other message would look too
    # large.
    positive_norms = [
      message.norm for message in agreed.listed if message.norm > 0
    ]
    if positive_norms:
      norms = [*norms, statistics.median_low(positive_norms)]
      norms = norms[-NUM_REMEMBERED:]
    # Count the messages that came too late: they are in the store, too.
    expected = self.roster.renewed(inbox.event).expected()
    senders = {*expected, *agreed.names, *agreed.left_out}
    num_stored = event_bytes(inbox, len(senders)) + agreed.num_bytes
    shared = self.shared
    if agreed.num_slices and agreed.listed:
      event_and_slices = inbox.event, agreed.num_slices
      shared = shared | {f"{inbox.kind}.{inbox.turn}": event_and_slices}
    stored_in_event = num_stored
    if inbox.turn:
      stored_in_event += self.stored_in_event
    memory = dataclasses.replace(
      self,
      accepted=self.accepted | {_norms_key(inbox): norms},
      shared=shared,
      sent=self.sent + inbox.num_bytes,
      stored=self.stored + num_stored,
      stored_in_event=stored_in_event,
      largest_event=max(self.largest_event, stored_in_event),
    )
    if inbox.turn:
      return memory
    return dataclasses.replace(
      memory,
      event=inbox.event + 1,
      before=agreed.digest(),
      roster=agreed.roster,
      was_split=self.was_split or agreed.is_split,
    )


def _norms_key(inbox: Inbox) -> str:
  """Returns a turn's key in `Memory.accepted`, e.g. "3.0" or "3.0.slices".

  It has the number of the fragment, not of the event, so many events share it.
  """
  # A message in slices declares the norm of its decoded values. Other norms are
  # of the encoded values, so the two cannot be compared.
  key = f"{inbox.kind}.{inbox.turn}"
  return f"{key}.slices" if inbox.num_slices else key


@dataclasses.dataclass
class Agreement:
  """Reads and writes manifests: lists of messages that all replicas average.

  An event (exchange) has one turn for each message that a replica sends in it.
  Each turn has a manifest, which settles it.

  Attributes:
    store: The folder or bucket, as a `RetryingStore`.
    signer: Signs and verifies the objects of the run.
    seats: Reads and takes seats: entries of replicas that join or come back.
    snapshots: Reads and writes copies of the state that all replicas share.
    rules: The grace time, the quorum and the limits of norms and of the store.
    run_objects: The two objects that describe the run, by path. A waiting
      replica writes them again if they have vanished.
    memory: What this replica remembers of the events that were settled.
    first: Manifest of the first turn of the event that is exchanged now. Only
      the replicas in its list take part in the later turns.
    objects: By event and then by path, objects that a waiting replica writes
      again if they have vanished: manifests, and the messages or shares that it
      holds.
    most_were_here: Whether at most 3 (`FEW`) messages of the last turn were
      missing in the store when this replica first looked for them.
    announced: The manifest that `announced_manifest` has read last, by the
      number of its event. It is empty if the manifest was not there.
    snapshot_bytes: Bytes of a snapshot; 0 if this replica does not know them.
      It then proposes no snapshot, except at event 0.
    residuals: What was lost in encoding the shares (means of one slice) that
      this replica has made, by (number of the fragment, turn, number of
      slices, number of the share).
  """

  store: Any
  signer: Signer
  seats: Seats
  snapshots: Snapshots
  rules: MailboxRules
  run_objects: dict[str, bytes] = dataclasses.field(default_factory=dict)
  memory: Memory = Memory()
  first: Manifest = Manifest()
  objects: dict[int, dict[str, Data]] = dataclasses.field(default_factory=dict)
  most_were_here: bool = False
  announced: dict[int, Manifest] = dataclasses.field(default_factory=dict)
  snapshot_bytes: int = 0
  residuals: dict[tuple[int, int, int, int], Residual] = dataclasses.field(
    default_factory=dict
  )

  def __post_init__(self) -> None:
    """Creates the `Decisions` of the run."""
    self._decisions = Decisions(self.store, self.signer)

  def announced_manifest(self, event: int) -> Manifest | None:
    """Reads the manifest of an event's first turn, and keeps it in `announced`.

    In a turn of an event (exchange), each replica sends one message. The result
    is None if the manifest is not written yet, damaged or lost.
    """
    manifest = self.manifest(event, turn=0)
    self.announced = {} if manifest is None else {event: manifest}
    return manifest

  def before(self, inbox: Inbox) -> str:
    """Returns the digest that a turn's manifest must name as its predecessor.

    In a turn of an event (exchange), each replica sends one message. In turn 0,
    the predecessor is the manifest of turn 0 of the event before; at event 0
    there is none, and the result is "". In later turns, it is the manifest of
    turn 0 of the same event.
    """
    if inbox.turn:
      return self.first.digest()
    return self.memory.before

  def manifest(self, event: int, turn: int) -> Manifest | None:
    """Reads the manifest of a turn; None if it is missing or damaged.

    In a turn of an event (exchange), each replica sends one message.
    """
    values = self._decisions.read(manifest_path(event, turn))
    return None if values is None else Manifest.from_json(values)

  def expected(self, event: int, turn: int, is_past: bool) -> list[str]:
    """Returns the names of the replicas whose messages a turn waits for.

    In a turn of an event (exchange), each replica sends one message. The names
    are in the same order in all replicas. The result is [] if `is_past`: the
    event is before the snapshot with which this replica began.
    """
    if is_past:
      return []
    if turn:
      return self.first.names
    return self.memory.roster.renewed(event).expected()

  def open(self, inbox: Inbox) -> None:
    """Sets the replicas whose messages a new inbox (of one turn) waits for.

    In a turn, each replica sends one message. If most messages of the last turn
    were there at once (`most_were_here`), the messages of this turn count as
    probably there, too (`Inbox.there`).

    The inbox is not changed if its event is before the snapshot with which this
    replica began (`Inbox.is_past`).
    """
    if inbox.is_past:
      return
    inbox.expected = self.expected(inbox.event, inbox.turn, is_past=False)
    if self.most_were_here:
      inbox.there = set(inbox.expected)

  def wait_for_manifest(self, inbox: Inbox) -> Manifest:
    """Waits for the manifest of a turn, and writes it when it is due.

    In a turn of an event (exchange), each replica sends one message. The
    manifest is due once enough of the messages were read (`_due`). Before the
    grace time is over, all expected messages must be among them.

    Call `open(inbox)` before this method. Call `fetch_messages` or
    `fetch_shares` after it, and do not use the manifest before that: these
    methods check that the event was not deleted while this process slept.

    Raises:
      ReplicaStaleError: If a snapshot of a later event appears while this
        replica waits. Also if the manifest names another predecessor than the
        one that this replica has followed. The predecessor is not checked if
        `inbox.is_past`.
      StoppedError: If the listed messages have arrays of other types or shapes
        than this replica's.
    """
    agreed = self._decided(inbox)
    if agreed.listed and agreed.layout != inbox.layout:
      raise StoppedError(
        f"event {inbox.event}: the messages of {', '.join(agreed.names)} have"
        " other arrays than this replica's: give all replicas a model of the"
        " same shapes and the same codec"
      )
    if not inbox.is_past and agreed.before != self.before(inbox):
      raise ReplicaStaleError("the others agreed on another list before")
    if inbox.turn == 0:
      self.first = agreed
    return agreed

  def fetch_messages(
    self,
    inbox: Inbox,
    agreed: Manifest,
    beside: Sequence[Callable[[], Any]] = (),
  ) -> list[tuple[str, float, list[np.ndarray]]]:
    """Reads every message that a manifest lists, and waits for missing ones.

    The functions in `beside` are called at the same time as the first reads.

    Returns:
      Name of the replica, weight and arrays of each message, in the order of
      the manifest.

    Raises:
      ReplicaStaleError: If the event was deleted, or if a snapshot of a later
        event appears while this replica waits.
    """
    path = manifest_path(inbox.event, inbox.turn)

    def missing() -> list[str]:
      return [
        listed.replica
        for listed in agreed.listed
        if not inbox.has_listed(listed.replica, listed.digest)
      ]

    def waiting() -> str:
      return (
        f"event {inbox.event} waits for the message of {missing()[0]}, which is"
        " listed and not there: a replica that has it writes it again. If no"
        " such replica lives, and nobody writes a later snapshot, stop all"
        f" replicas, delete {path} and"
        f" {proposal_path(inbox.event, inbox.turn)}, and start them again"
      )

    # If the others have deleted the event while this process slept, the
    # manifest may be a second one, which nobody may follow. They write marks of
    # the deletion first, which `is_gone` reads.
    def check() -> None:
      if self.is_gone(inbox.event):
        raise ReplicaStaleError(f"event {inbox.event} was deleted")

    calls: list[Callable] = [check, *beside]
    for _ in self._pauses(inbox, waiting, agreed):
      calls += [functools.partial(inbox.read, name) for name in missing()]
      self.store.at_once(calls)
      if not missing():
        break
      calls = []  # `check` and `beside` are called only at the first try.
    objects: dict[str, Data] = {
      path: self.signer.sign_json(path, dataclasses.asdict(agreed))
    }
    messages = []
    for listed in agreed.listed:
      message = inbox.held[listed.replica]
      object_path = message_path(inbox.event, inbox.turn, listed.replica)
      objects[object_path] = message.data
      messages.append((listed.replica, listed.weight, message.arrays))
    self._remember(inbox, objects)
    return messages

  def fetch_shares(
    self,
    shares: Shares,
    beside: Sequence[Callable[[], Any]] = (),
  ) -> None:
    """Reads every share of a turn's mean, and makes this replica's own shares.

    A share is the mean of one slice of all messages of a turn. In a turn of an
    event (exchange), each replica sends one message. After the grace time, this
    replica also makes the missing shares of others if it can read the slices.
    It makes no share for an event before the snapshot with which it began
    (`Inbox.is_past`). The functions in `beside` are called at the same time as
    the first reads.

    Raises:
      ReplicaStaleError: If the event was deleted, or if a snapshot of a later
        event appears while this replica waits for a share.
    """
    inbox = shares.inbox

    def waiting() -> str:
      number = shares.missing()[0]
      return (
        f"event {inbox.event} waits for share {number} of"
        f" {shares.num_slices} of the mean, and cannot make it: a replica that"
        " has this share, or its own message, writes it again"
      )

    # If the others have deleted the event while this process slept, the
    # manifest may be a second one, which nobody may follow.
    def check() -> None:
      if self.is_gone(inbox.event):
        raise ReplicaStaleError(f"event {inbox.event} was deleted")

    calls = [check, *beside, *shares.reads_for_comparison()]
    is_first = True
    for is_late in self._pauses(
      inbox, waiting, shares.agreed, looks_at_once=False
    ):
      self.store.at_once([*calls, *shares.first_calls(is_late)])
      if is_first and self._decisions.has_proposed:
        # The other replicas learn of the manifest a moment later than this
        # one, so their shares also come later.
        self.store.pause(DECIDES_WITHIN_S)
      self.store.at_once(shares.last_calls(is_late, lists=not is_first))
      if not shares.missing():
        break
      calls = []  # These are called only at the first try.
      is_first = False
    self.store.at_once(shares.writes_of_residuals())
    path = manifest_path(inbox.event, inbox.turn)
    objects: dict[str, Data] = {
      path: self.signer.sign_json(path, dataclasses.asdict(shares.agreed)),
      **shares.objects(),
    }
    self._remember(inbox, objects)

  def _remember(self, inbox: Inbox, objects: dict[str, Data]) -> None:
    """Keeps a turn's objects, by path, to write them again if they vanish.

    In the first turn of an event, the objects of the event before are dropped.
    """
    if inbox.turn == 0:
      self.objects = {inbox.event: {}}
    self.objects.setdefault(inbox.event, {}).update(objects)

  def is_gone(self, event: int, thoroughly: bool = True) -> bool:
    """Returns whether an event (exchange) was deleted, or soon will be.

    Two objects in the store say that events are deleted. Both are read if
    `thoroughly`, in case one is lost; else only one.
    """
    start = interval_of(event, self.memory.starts)
    return self.snapshots.is_gone(start, thoroughly)

  def limit(self) -> StoreLimit:
    """Returns how many bytes the store and one interval may have.

    An interval is the events (exchanges) from one snapshot to the next one. A
    snapshot of unknown size counts as 0 bytes.
    """
    num_replicas = max(self.rules.replicas, len(self.memory.roster.expected()))
    return store_limit(
      self.rules.store_bytes, self.snapshot_bytes, num_replicas
    )

  def _decided(self, inbox: Inbox) -> Manifest:
    """Waits for the manifest of a turn, writes it if it is due, and returns it.

    If the turn was settled before the snapshot with which this replica began
    (`Inbox.is_past`), a lost manifest is written again from its copy (the
    proposal), and no new one is made.
    """
    if inbox.turn == 0 and inbox.event in self.announced:
      # `announced_manifest` has read it before.
      return self.announced[inbox.event]
    path = manifest_path(inbox.event, inbox.turn)
    proposal = proposal_path(inbox.event, inbox.turn)
    for is_late in self._pauses(inbox, lambda: self._awaited_in(inbox)):
      if inbox.is_past:
        agreed = self.manifest(inbox.event, inbox.turn)
        if agreed is not None:
          return agreed
        # The turn was settled long ago. So either the manifest was lost, or
        # the whole event was deleted.
        decided = self._decisions.complete(path, proposal)
        if decided is not None:
          return Manifest.from_json(decided)
        continue
      agreed = self._look(inbox, is_late)
      if agreed is not None:
        return agreed
      roster = self._due(inbox, is_late)
      if roster is not None:
        proposed = dataclasses.asdict(self._proposed(inbox, roster))
        decided = self._decisions.decide(path, proposal, proposed)
        return Manifest.from_json(decided)
    raise AssertionError("pauses do not end")

  def _look(self, inbox: Inbox, is_late: bool) -> Manifest | None:
    """Looks for a turn's manifest, messages and new seats.

    The messages and seats (replicas that join or come back) are added to
    `inbox`. The first look does not ask for the manifest if all missing
    messages may arrive in this look: then this replica can write the manifest
    itself.

    Args:
      inbox: The messages of the turn so far.
      is_late: Whether the grace time is over.

    Returns:
      The manifest; None if it is not there, or if this look did not ask for it.
    """
    is_first_look = inbox.num_looks == 0
    inbox.num_looks += 1
    missing = inbox.missing(inbox.expected)
    are_few = len(missing) <= FEW
    # A replica that holds no message has sent none: it only follows events that
    # other replicas have settled. So it reads the manifest at its first look.
    # `covers` says that all missing messages are probably in the store.
    may_be_complete = bool(inbox.held) and (are_few or inbox.covers(missing))
    if is_first_look and may_be_complete:
      agreed = None
      self._read_with_seats(inbox, missing)
    elif are_few and not is_late:
      # A few reads cost less than a listing.
      agreed = self._read_with_seats(inbox, missing, with_manifest=True)
    else:
      # Many messages are missing, or the grace time is over.
      agreed = self._list_and_read(inbox, missing, is_late)
    if is_first_look:
      # Messages that were neither read nor listed in the store.
      absent = [
        name
        for name in inbox.missing(inbox.expected)
        if name not in inbox.there
      ]
      self.most_were_here = len(absent) <= FEW
    return agreed

  def _list_and_read(
    self, inbox: Inbox, missing: Sequence[str], is_late: bool
  ) -> Manifest | None:
    """Lists a turn's messages in the store, and reads the turn's manifest.

    Without a manifest, messages in the listing are read, too: now or at the
    next look. `is_late` says whether the grace time is over. Returns the
    manifest; None if there is none.
    """
    if is_late:
      # Now every missing message is asked for, not only those that were listed.
      reads = [functools.partial(inbox.read, name) for name in missing]
    else:
      reads = inbox.reads(missing)
    read_manifest = functools.partial(self.manifest, inbox.event, inbox.turn)
    agreed, *_ = self.store.at_once([read_manifest, inbox.look, *reads])
    if agreed is not None:
      return agreed
    if is_late:
      # Now messages of replicas that were away count, too.
      listed = [name for name in self._names(inbox) if name in inbox.there]
      self._read_with_seats(inbox, inbox.missing(listed))
    elif inbox.covers(missing):
      self._read_with_seats(inbox, inbox.missing(missing))
    return None

  def _read_with_seats(
    self, inbox: Inbox, names: Sequence[str], with_manifest: bool = False
  ) -> Manifest | None:
    """Reads some messages and, if it is time to look for them, new seats.

    A seat is the entry of a replica that joins or comes back. If
    `with_manifest`, the turn's manifest is also read, and returned if it is
    there; else the result is None.
    """
    calls: list[Callable] = [
      functools.partial(inbox.read, name) for name in names
    ]
    if inbox.turn == 0 and self._is_time_for_seats(inbox):
      calls.append(functools.partial(self._read_seats, inbox))
    if not with_manifest:
      self.store.at_once(calls)
      return None
    read_manifest = functools.partial(self.manifest, inbox.event, inbox.turn)
    agreed, *_ = self.store.at_once([read_manifest, *calls])
    return agreed

  def _names(self, inbox: Inbox) -> list[str]:
    """Returns the names of all replicas whose messages in a turn may count.

    In an event's first turn they are all replicas that ever joined; in later
    turns, those whose first message is averaged.
    """
    if inbox.turn:
      return self.first.names
    return self.memory.roster.names()

  def _is_time_for_seats(self, inbox: Inbox) -> bool:
    """Returns whether to look now for replicas that join or come back."""
    if inbox.event == 0 or inbox.seats_read_s is None:
      return True  # The first event waits for all replicas to take seats.
    return self.store.clock() - inbox.seats_read_s >= SEATS_EVERY_S

  def _read_seats(self, inbox: Inbox) -> None:
    """Adds the seats that were taken since the event before to `inbox.taken`.

    A seat is the entry of a replica that joins the run or comes back.
    """
    inbox.seats_read_s = self.store.clock()
    number = self.memory.roster.num_seats + len(inbox.taken)
    seat = self.seats.read(number)
    if seat is not None:
      inbox.taken.append(seat)
      inbox.taken += self.seats.read_from(number + 1)

  def _has_all(self, inbox: Inbox, names: Sequence[str]) -> bool:
    """Returns whether `inbox` holds the messages of all these replicas."""
    return all(name in inbox.held for name in names)

  def _proposed(self, inbox: Inbox, roster: Roster) -> Manifest:
    """Returns this replica's proposal: a manifest of messages in `inbox`."""
    if inbox.turn:
      names = self.first.names
    else:
      names = roster.expected()
    sent = {name: inbox.held[name] for name in names if name in inbox.held}
    before = self.before(inbox)
    manifest = make_manifest(
      sent,
      states=vote(
        sent,
        before=before,
        event=inbox.event,
        num_kinds=self.memory.num_kinds,
        breaks_ties=self.memory.was_split,
      ),
      before=before,
      accepted=self.memory.norms(inbox),
      max_norm_ratio=self.rules.max_norm_ratio,
      full_weight_ratio=self.rules.full_weight_ratio,
      roster=roster,
    )
    # If no message is listed, no replica's state agrees with another one's, so
    # nobody should write a snapshot of it.
    begins_interval = bool(manifest.listed) and self._begins_interval(inbox)
    return dataclasses.replace(
      manifest,
      begins_interval=begins_interval,
      num_slices=inbox.num_slices,
      layout=inbox.layout,
    )

  def _begins_interval(self, inbox: Inbox) -> bool:
    """Returns whether a snapshot of the state before a turn is due.

    It is due only in the first turn of an event, in any of these cases:

    - The event is event 0 (the only case while a snapshot's size is unknown).
    - The messages since the last due snapshot, with those of this event, would
      take more bytes than `limit` allows.
    - Since the last due snapshot, `rules.snapshot_every` events have passed,
      and each replica has sent as many bytes as a snapshot has.
    """
    if inbox.turn:
      return False
    if inbox.event == 0:
      return True
    if not self.snapshot_bytes:
      return False
    memory = self.memory
    num_bytes = event_bytes(inbox, len(inbox.held))
    next_bytes = max(memory.largest_event, num_bytes)
    if memory.stored + next_bytes > self.limit().interval_bytes:
      return True
    num_events = inbox.event - memory.starts[-1]
    # A snapshot uses the same link as the messages, and should not cost more.
    is_paid_for = memory.sent >= self.snapshot_bytes
    return num_events >= self.rules.snapshot_every and is_paid_for

  def _due(self, inbox: Inbox, is_late: bool) -> Roster | None:
    """Returns the roster after an event if a turn's manifest is due, else None.

    The roster says which replicas take part. The manifest is due if all these
    conditions hold:

    - All expected messages were read, or `is_late` (the grace time is over).
    - In an event's first turn, at least `rules.quorum` messages were read.
    - In the first turn of event 0, `rules.replicas` replicas have joined, or
      `is_late`.
    """
    if inbox.turn:
      is_due = is_late or self._has_all(inbox, inbox.expected)
      return self.first.roster if is_due else None
    if not (is_late or self._has_all(inbox, inbox.expected)):
      return None
    roster = self.memory.roster.renewed(inbox.event, inbox.taken)
    # After the grace time, messages of replicas that were away count, too.
    names = roster.names() if is_late else roster.expected()
    is_first_time = inbox.event == 0 and not is_late
    if is_first_time and len(names) < self.rules.replicas:
      return None
    # Replicas whose seats were found in this turn may have sent already.
    newcomers = [
      name
      for name in inbox.missing(roster.expected())
      if name not in inbox.expected
    ]
    self.store.at_once(
      [functools.partial(inbox.read, name) for name in newcomers]
    )
    # Now the messages of the newcomers are needed, too.
    if not (is_late or self._has_all(inbox, names)):
      return None
    present = {name for name in names if name in inbox.held}
    if len(present) < self.rules.quorum:
      return None
    return roster.after(inbox.event, present)

  def _pauses(
    self,
    inbox: Inbox,
    waiting: Callable[[], str],
    agreed: Manifest | None = None,
    looks_at_once: bool = True,
  ) -> Iterator[bool]:
    """Yields before each try of a caller, and pauses after the try.

    It yields whether the grace time is over. After the grace time, it also
    writes vanished objects again (`_look_around`), and once a minute logs the
    line that `waiting` returns. If `agreed` (the turn's manifest) is given and
    `looks_at_once` is True, it also writes them again after the first pause.

    Raises:
      ReplicaStaleError: If `_look_around` finds a snapshot of a later event.
    """
    clock = self.store.clock
    grace = self.rules.grace_s
    start = clock()
    wait = FIRST_PAUSE_S
    look_after = grace
    next_look = start + grace
    if agreed and looks_at_once:
      # Others may wait for a listed message that only this replica holds.
      next_look = start
    next_line = start + grace
    is_late = False
    while True:
      yield is_late
      if is_late and clock() > next_line:
        _LOG.info("%s", waiting())
        next_line = clock() + LINE_EVERY_S
      self.store.pause(wait)
      longest = LONGEST_PAUSE_S
      if is_late:
        longest = max(longest, min(grace / 6, LONGEST_LATE_PAUSE_S))
      wait = min(PAUSE_GROWTH * wait, longest)
      # Look before `is_late` becomes True: this process may have slept, and the
      # others may have gone on.
      if clock() > next_look:
        self._look_around(inbox, agreed)
        next_look = clock() + look_after
        look_after = min(2 * look_after, max(grace, LONGEST_LOOK_S))
      is_late = clock() - start > grace

  def _awaited_in(self, inbox: Inbox) -> str:
    """Returns a line for the log: what a turn without a manifest waits for."""
    there = ", ".join(inbox.held) or "nobody"
    if inbox.is_past:
      return (
        f"event {inbox.event} waits for its manifest, which is not there: a"
        " replica that has it writes it again"
      )
    if inbox.turn or len(inbox.held) >= self.rules.quorum:
      return f"event {inbox.event} waits: there are messages of {there}"
    return (
      f"event {inbox.event} waits for a quorum of {self.rules.quorum}: there"
      f" are messages of {there}"
    )

  def _look_around(self, inbox: Inbox, agreed: Manifest | None) -> None:
    """Writes objects again that this replica holds and the store has lost.

    A damaged object counts as lost. If `agreed` (the list of the messages that
    are averaged in the turn) is given, the turn's other messages are left out.

    Raises:
      ReplicaStaleError: If the store has a snapshot of a later event.
    """
    # The newest event of which this replica may find a snapshot and go on.
    known = self.memory.event if inbox.is_past else inbox.event
    if max(self.snapshots.events(), default=0) > known:
      raise ReplicaStaleError(
        f"the others have gone on from event {inbox.event}"
      )
    self.seats.look_after(self.memory.roster)
    calls: list[Callable] = []
    for path, data in self.run_objects.items():
      calls.append(functools.partial(self._restore, path, data))
    for objects_of_event in self.objects.values():
      for path, data in objects_of_event.items():
        # After a restart, a sender may have replaced the listed message, which
        # all replicas need.
        is_message = path.startswith(f"{EVENTS}/")
        calls.append(
          functools.partial(self._restore, path, data, replaces=is_message)
        )
    listed_digests = set()
    if agreed is not None:
      listed_digests = {listed.digest for listed in agreed.listed}
    for name, message in inbox.held.items():
      is_listed = message.digest in listed_digests
      if message.is_whole and (agreed is None or is_listed):
        path = message_path(inbox.event, inbox.turn, name)
        calls.append(
          functools.partial(
            self._restore,
            path,
            message.data,
            replaces=is_listed,
            is_ours=inbox.is_ours,
          )
        )
    self.store.at_once(calls)

  def _restore(
    self,
    path: str,
    data: Data,
    *,
    replaces: bool = False,
    is_ours: Callable[[str, Buffer], bool] | None = None,
  ) -> None:
    """Writes an object again if it is missing, damaged, or to be replaced.

    If `replaces` is False, a valid object stays as it is (`_is_valid`, which
    gets `is_ours`). An object that is larger than `data` counts as damaged.
    Exception: a manifest may have up to 1 MiB.
    """
    # All messages of a turn have one size, and so have all versions of a share.
    # So nobody reads a larger one. Manifests of one turn may differ in size.
    at_most = num_bytes_of(data)
    if path.startswith(f"{MANIFESTS}/"):
      at_most = JSON_BYTES
    stored = self.store.get(path, at_most)
    if stored is None:
      if self.store.create(path, data):
        return
      # Perhaps another replica has created it since it was read.
      stored = self.store.get(path, at_most)
    if stored is not None:
      if is_equal(stored, data):
        return
      if not replaces and self._is_valid(path, stored, is_ours):
        return
    self.store.put(path, data)

  def _is_valid(
    self,
    path: str,
    stored: Buffer,
    is_ours: Callable[[str, Buffer], bool] | None,
  ) -> bool:
    """Returns whether the bytes at a path are signed for it in this run.

    The result is True if they are signed as a whole, or if they are signed
    JSON. It is also True if `is_ours` returns True for the path and the bytes.
    """
    if is_ours is not None and is_ours(path, stored):
      return True
    if self.signer.verify(path, stored) is not None:
      return True
    return self.signer.verify_json(path, stored) is not None
