"""Replicas agree on which messages they average.

An exchange (an event) has one or several turns. In each turn, every replica
sends one message. Then the replicas agree on the turn's manifest: the list of
the messages that all of them average. `Agreement` waits for the manifest,
writes it when it is due, and reads the messages that it lists. A turn is
*settled* once its manifest is written.
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
from dilocox_jax.mailbox_protocol.signer import Signer
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
# It looks for new seats at its first look, and then when the last look for
# seats is so long ago. Most further looks come after a few hundredths of a
# second, and replicas rarely come.
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

  A snapshot is the state that all replicas share before an event (exchange).
  The replica then begins as a newcomer does: it drops its residual (what its
  codec has lost, and it holds back) and its exchanges in flight. The other
  replicas may have averaged its messages already, so keeping these values could
  apply them twice.
  """


class StoppedError(Exception):
  """Raised if a replica cannot go on. The message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a replica remembers of the events (exchanges) that are settled.

  An event consists of *turns*: with a low-rank codec each replica sends two
  messages one after the other, so there are two turns. The *manifest* of a turn
  lists the messages that all replicas average. A turn is *settled* once it has
  a manifest. An *interval* is the events from one due snapshot (the state that
  all replicas share before an event) to the next one. A mean is made in
  *shares* if each replica averages one slice of all messages. Events have the
  same *kind* if their messages have the same size; the kind is the number of
  the fragment, for example.

  Attributes:
    event: Number of the next event.
    before: Digest of the manifest of the event before, as hexadecimal digits;
      "" before the first event.
    roster: The replicas that take part, according to that manifest.
    accepted: The median norm of the listed messages of each of the last
      `NUM_REMEMBERED` turns, the oldest first. Norms of 0 do not count. The key
      is "KIND.TURN", or "KIND.TURN.slices" if messages are cut into slices.
    starts: First event of each of the newest intervals, the oldest first.
    sent: Bytes of the messages that one replica has sent in this interval.
    stored: Bytes of all messages, shares and manifests of this interval.
    stored_in_event: Bytes of the messages, shares and manifests of the newest
      event.
    largest_event: Largest `stored_in_event` so far.
    was_split: Whether, at an event of this interval, two different shared
      states were equally frequent among the senders (`votes`).
    base: Event of the snapshot with which this replica began; 0 if it began
      with the initial parameters.
    shared: By "KIND.TURN", the newest event whose mean was made in shares, and
      the number of slices into which its messages were cut.
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
    """Builds a memory from its fields as values of JSON.

    Args:
      values: The fields, as `dataclasses.asdict` returns them.
    """
    roster = Roster.from_json(values["roster"])
    starts = tuple(values["starts"])
    shared = {
      key: (int(event), int(num_slices))
      for key, (event, num_slices) in values["shared"].items()
    }
    fields = {**values, "roster": roster, "starts": starts, "shared": shared}
    return cls(**fields)  # pyright: ignore

  def begin_interval(self, event: int) -> "Memory":
    """Returns a copy of the memory in which a new interval begins.

    An interval is the events from one due snapshot to the next one. Its counts
    (`sent`, `stored`, `was_split`) begin at 0 again.

    Args:
      event: The first event of the new interval, which is not settled yet.
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
    """Returns the median norms of the messages of earlier, similar turns.

    Similar turns are those of events of the same kind (fragment), with the same
    number within the event. Their messages are cut into slices if those of this
    turn are.

    Args:
      inbox: The messages of the turn that this replica has so far.

    Returns:
      A median for each of the last turns, the oldest first; [] if there was no
      similar turn.
    """
    return self.accepted.get(_norms_key(inbox), [])

  def residual_event(self, inbox: Inbox) -> int:
    """Returns the event whose residuals are added to the mean of a turn.

    If a mean is made in shares, each replica encodes the mean of one slice.
    What this encoding loses is a residual, which is added to the mean of the
    same slice in the next event of the same kind and turn.

    Args:
      inbox: The messages of the turn that this replica has so far.

    Returns:
      The newest event of the same kind and turn whose mean was made in shares.
      -1 if no residuals can be added: there was no such event, it had another
      number of slices, or it is older than the interval before this one, so its
      objects may be deleted at any time.
    """
    event, num_slices = self.shared.get(f"{inbox.kind}.{inbox.turn}", (-1, 0))
    if num_slices != inbox.num_slices:
      return -1
    return event if event >= self.starts[-2:][0] else -1

  @property
  def num_kinds(self) -> int:
    """Number of kinds of events (fragments) settled so far, at least 1."""
    kinds = {key.partition(".")[0] for key in self.accepted}
    return max(len(kinds), 1)

  def after(self, agreed: Manifest, inbox: Inbox) -> "Memory":
    """Returns a copy of the memory to which a settled turn was added.

    A settled turn has a manifest, which lists the messages that all replicas
    average. After the first turn of an event, `event` is the next event, and
    `before` and `roster` are the manifest's digest and roster. Later turns only
    change norms, sizes and `shared`.

    Args:
      agreed: The manifest of the turn, which lists the messages to average.
      inbox: The messages of the turn that this replica has so far.
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
  """Returns the key in `Memory.accepted` for the norms of a turn's messages.

  A message that is cut into slices declares the norm of its decoded values. The
  norm of any other message is computed from its encoded floating-point arrays.
  The two are not comparable, so they have different keys.

  Args:
    inbox: The messages of the turn that this replica has so far.
  """
  key = f"{inbox.kind}.{inbox.turn}"
  return f"{key}.slices" if inbox.num_slices else key


@dataclasses.dataclass
class Agreement:
  """Reads the manifests of a run, and writes each manifest that is due.

  The manifest of a turn lists the messages that all replicas average. An event
  (exchange) has one turn for each message that a replica sends in it. A turn is
  settled once it has a manifest. The shared state is the outer parameters and
  the outer optimizer, a snapshot is this state before an event, and an interval
  is the events from one snapshot to the next one. A share is the mean of one
  slice of all messages, and its residual is what encoding it has lost.

  Attributes:
    store: The folder or bucket, as a `RetryingStore`.
    signer: Signs and verifies the objects of the run.
    seats: Reads and takes seats: the entries with which replicas join the run
      or come back.
    snapshots: Reads and writes snapshots: the shared state before an event.
    rules: The grace time, the quorum and the limits of norms and of the store.
    run_objects: The two objects that describe the run, by path. A waiting
      replica writes them again if they have vanished.
    memory: What this replica remembers of the events that were settled.
    first: Manifest of the first turn of the event that is exchanged now. Only
      the replicas in its list take part in the later turns.
    objects: Objects that a waiting replica writes again if they have vanished,
      by event and then by path: manifests, and the messages or shares that this
      replica holds. Those of an event are kept until this replica has read the
      messages or shares of the next event's first turn.
    most_were_here: Whether all but a few (`FEW`) of the expected messages were
      in the store at the first look of the last turn. Then this replica asks
      for every message in the next turn. Else it first lists the folder, if
      many messages are missing.
    announced: At most one entry: an event, and the manifest of its first turn,
      if it was already there when this replica announced itself for the event.
    snapshot_bytes: Bytes of a snapshot of the shared state; 0 if this replica
      does not know them. It then proposes no snapshot, so no new interval (the
      events from one snapshot to the next), except at event 0.
    residuals: What was lost in encoding the shares (means of one slice) that
      this replica has made, by the keys of `Shares.remembered`.
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
    """Reads the manifest of an event's first turn into `announced`.

    The manifest lists the messages that all replicas average.

    Args:
      event: Number of the event, whose messages are exchanged next.

    Returns:
      The manifest; None if the turn is not settled yet, or its manifest is
      lost.
    """
    manifest = self.manifest(event, turn=0)
    self.announced = {} if manifest is None else {event: manifest}
    return manifest

  def before(self, inbox: Inbox) -> str:
    """Returns the digest that a turn's manifest must name as its predecessor.

    In the first turn this is the digest of the manifest of the event before. In
    later turns it is the digest of the event's first manifest.

    Args:
      inbox: The messages of the turn that this replica has so far.
    """
    if inbox.turn:
      return self.first.digest()
    return self.memory.before

  def manifest(self, event: int, turn: int) -> Manifest | None:
    """Reads the manifest of a turn: the list of the messages to average.

    Args:
      event: Number of the event (exchange).
      turn: Number of the turn: of the message within the event, from 0.

    Returns:
      The manifest; None if it is missing or damaged.
    """
    values = self._decisions.read(manifest_path(event, turn))
    return None if values is None else Manifest.from_json(values)

  def expected(self, event: int, turn: int, is_past: bool) -> list[str]:
    """Returns the names of the replicas whose messages a turn waits for.

    Replicas that have read the same manifests get the same names, in the same
    order.

    Args:
      event: Number of the event (exchange).
      turn: Number of the turn: of the message within the event, from 0.
      is_past: Whether the turn was settled before the snapshot with which this
        replica began. Then the result is [].
    """
    if is_past:
      return []
    if turn:
      return self.first.names
    return self.memory.roster.renewed(event).expected()

  def open(self, inbox: Inbox) -> None:
    """Sets `inbox.expected` to the replicas whose messages the turn waits for.

    If most messages of the turn before were in the store at the first look, it
    also assumes so for this turn, and sets `inbox.there`. If the turn was
    settled before the snapshot with which this replica began (`Inbox.is_past`),
    nothing happens.

    Args:
      inbox: The inbox of a turn, before this replica sends its message.
    """
    if inbox.is_past:
      return
    inbox.expected = self.expected(inbox.event, inbox.turn, is_past=False)
    if self.most_were_here:
      inbox.there = set(inbox.expected)

  def wait_for_manifest(self, inbox: Inbox) -> Manifest:
    """Waits until a turn has its manifest, and writes it when it is due.

    The manifest lists the messages that all replicas average.

    If this process has slept, the other replicas may have deleted the event
    meanwhile. Then the returned manifest may be a second one for the same turn.
    The caller must not follow it before `fetch_messages` or `fetch_shares` has
    checked that the event still exists.

    Args:
      inbox: The inbox of the turn, after `open`.

    Returns:
      The manifest of the turn.

    Raises:
      ReplicaStaleError: If the manifest names another predecessor than the one
        that this replica has followed, or if a newer snapshot appears while
        this replica waits.
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

    At the same time it checks that the event was not deleted. This process may
    have slept while the other replicas went on and deleted the event. The
    manifest that it holds may then be a second one, which nobody may follow.
    Replicas put marks of a deletion into the store before they delete anything,
    so this check finds the marks in this case.

    Args:
      inbox: The messages of the turn that this replica has so far.
      agreed: The manifest of the turn, which lists the messages to average.
      beside: More functions without arguments, which are called at the same
        time.

    Returns:
      Name of the replica, weight and arrays of each message, in the order of
      the manifest.

    Raises:
      ReplicaStaleError: If the event was deleted, or if a newer snapshot
        appears while this replica waits for a message.
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

    def check() -> None:
      if self.is_gone(inbox.event):
        raise ReplicaStaleError(f"event {inbox.event} was deleted")

    calls: list[Callable] = [check, *beside]
    for _ in self._pauses(inbox, waiting, agreed):
      calls += [functools.partial(inbox.read, name) for name in missing()]
      self.store.at_once(calls)
      if not missing():
        break
      calls = []
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

    A share is the mean of one slice of all messages. The method waits for the
    shares that other replicas make. At the same time it checks that the event
    was not deleted (`fetch_messages` says why). Shares that this replica has
    written for a deleted event do no harm: they carry the digest of a manifest
    that nobody follows.

    Args:
      shares: The shares of the turn. Afterwards it holds all of them.
      beside: More functions without arguments, which are called at the same
        time.

    Raises:
      ReplicaStaleError: If the event was deleted, or if a newer snapshot
        appears while this replica waits for a share.
    """
    inbox = shares.inbox

    def waiting() -> str:
      number = shares.missing()[0]
      return (
        f"event {inbox.event} waits for share {number} of"
        f" {shares.num_slices} of the mean, and cannot make it: a replica that"
        " has this share, or its own message, writes it again"
      )

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
      calls = []
      is_first = False
    self.store.at_once(shares.writes_of_residuals())
    path = manifest_path(inbox.event, inbox.turn)
    objects: dict[str, Data] = {
      path: self.signer.sign_json(path, dataclasses.asdict(shares.agreed)),
      **shares.objects(),
    }
    self._remember(inbox, objects)

  def _remember(self, inbox: Inbox, objects: dict[str, Data]) -> None:
    """Adds a turn's objects to `self.objects`.

    In the first turn of an event, the objects of the event before are dropped.

    Args:
      inbox: The messages of the turn that this replica has so far.
      objects: Contents of the turn's manifest, and of the messages or shares
        that this replica holds, by path.
    """
    if inbox.turn == 0:
      self.objects = {inbox.event: {}}
    self.objects.setdefault(inbox.event, {}).update(objects)

  def is_gone(self, event: int, thoroughly: bool = True) -> bool:
    """Returns whether an event was deleted, or soon will be.

    Events (exchanges) are deleted by intervals, i.e. all events from one
    snapshot of the shared state to the next one together.

    Args:
      event: The event that this replica handles next. It counts as an event of
        the newest known interval that does not begin after it.
      thoroughly: Whether to read both marks of the deletion, and not only the
        first one (`Snapshots.is_gone`).
    """
    start = interval_of(event, self.memory.starts)
    return self.snapshots.is_gone(start, thoroughly)

  def limit(self) -> StoreLimit:
    """Returns how many bytes the store and one interval may have.

    An interval is the exchanges from one snapshot of the shared state to the
    next one. If the size of a snapshot is not known yet, it counts as 0 bytes.
    """
    num_replicas = max(self.rules.replicas, len(self.memory.roster.expected()))
    return store_limit(
      self.rules.store_bytes, self.snapshot_bytes, num_replicas
    )

  def _decided(self, inbox: Inbox) -> Manifest:
    """Waits for the manifest of a turn, writes it if it is due, and returns it.

    If the turn was settled before the snapshot with which this replica began,
    the replica only waits. If the manifest was lost, the replica writes it
    again from the proposal.

    Args:
      inbox: The messages of the turn that this replica has so far.
    """
    if inbox.turn == 0 and inbox.event in self.announced:
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
    """Reads once whatever may settle a turn: manifest, messages, new seats.

    The manifest is the list of the messages to average. A seat is the entry of
    a replica that joins or comes back. To save requests, the first look reads
    no manifest if this replica has sent its message and the other expected
    messages are probably there.

    Args:
      inbox: The inbox of the turn. The messages and the seats are added to it.
      is_late: Whether the grace time (`MailboxRules.grace_s`) is over. Then
        messages of replicas that nobody waits for are also read.

    Returns:
      The manifest; None if it was not read or is not there.
    """
    is_first_look = inbox.num_looks == 0
    inbox.num_looks += 1
    missing = inbox.missing(inbox.expected)
    are_few = len(missing) <= FEW
    # A replica that holds no message has sent none: it only follows events that
    # other replicas have settled. So it reads the manifest at its first look.
    may_be_complete = bool(inbox.held) and (are_few or inbox.covers(missing))
    if is_first_look and may_be_complete:
      agreed = None
      self._read_with_seats(inbox, missing)
    elif are_few and not is_late:
      agreed = self._read_with_seats(inbox, missing, with_manifest=True)
    else:
      agreed = self._list_and_read(inbox, missing, is_late)
    if is_first_look:
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
    """Reads a turn's manifest, and its messages if all expected ones are there.

    A listing of the turn's folder says which messages are there.

    Args:
      inbox: The inbox of the turn. The messages are added to it.
      missing: Names of the expected replicas whose messages were not read yet.
      is_late: Whether the grace time (`MailboxRules.grace_s`) is over. Then all
        messages that are there are read, even if some expected ones are
        missing. The expected ones are asked for even if the listing does not
        show them.

    Returns:
      The manifest (the list of the messages to average); None if it is not
      there.
    """
    if is_late:
      reads = [functools.partial(inbox.read, name) for name in missing]
    else:
      reads = inbox.reads(missing)
    read_manifest = functools.partial(self.manifest, inbox.event, inbox.turn)
    agreed, *_ = self.store.at_once([read_manifest, inbox.look, *reads])
    if agreed is not None:
      return agreed
    if is_late:
      listed = [name for name in self._names(inbox) if name in inbox.there]
      self._read_with_seats(inbox, inbox.missing(listed))
    elif inbox.covers(missing):
      self._read_with_seats(inbox, inbox.missing(missing))
    return None

  def _read_with_seats(
    self, inbox: Inbox, names: Sequence[str], with_manifest: bool = False
  ) -> Manifest | None:
    """Reads some messages and, in an event's first turn, the new seats.

    All requests are made at the same time. A seat is the entry of a replica
    that joins the run or comes back.

    Args:
      inbox: The inbox of the turn. The messages and the seats are added to it.
      names: Names of the messages' senders.
      with_manifest: Whether to read the manifest, too.

    Returns:
      The manifest; None if it was not read or is not there.
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

    In the first turn these are all replicas that ever took part. In later turns
    they are the replicas whose first message was listed.

    Args:
      inbox: The messages of the turn that this replica has so far.
    """
    if inbox.turn:
      return self.first.names
    return self.memory.roster.names()

  def _is_time_for_seats(self, inbox: Inbox) -> bool:
    """Returns whether this replica looks for new seats now.

    A seat is the entry of a replica that joins the run or comes back.

    Args:
      inbox: The messages of the turn that this replica has so far.
    """
    if inbox.event == 0 or inbox.seats_read_s is None:
      return True  # The first event waits for all replicas to take seats.
    return self.store.clock() - inbox.seats_read_s >= SEATS_EVERY_S

  def _read_seats(self, inbox: Inbox) -> None:
    """Adds the newly taken seats to `inbox.taken`.

    A seat is the entry of a replica that joins the run or comes back. Seats are
    new if they were taken since the event before.

    Args:
      inbox: The inbox of the event's first turn.
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
    """Returns the manifest (list of messages) that this replica proposes.

    Args:
      inbox: The inbox of the turn. Only messages that it holds can be listed.
      roster: The replicas that take part after this event.
    """
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

    The snapshot has the outer parameters and the outer optimizer. If it is due,
    a new interval begins with the turn's event: the events up to the next
    snapshot, which are deleted together. There are three reasons:

    - The event is the first one of the run.
    - With the event's messages, the interval would have more bytes than the
      limit of the store allows.
    - The interval has `rules.snapshot_every` events, and each replica has sent
      at least as many bytes in it as a snapshot has. The snapshot uses the same
      link as the messages, so it should not cost more than they do.

    A replica that does not know the size of a snapshot only knows the first
    reason.

    Args:
      inbox: The inbox of the turn. Only a first turn can begin an interval.
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
    is_paid_for = memory.sent >= self.snapshot_bytes
    return num_events >= self.rules.snapshot_every and is_paid_for

  def _due(self, inbox: Inbox, is_late: bool) -> Roster | None:
    """Returns which replicas take part after an event, if its manifest is due.

    The manifest is due if the messages of all expected replicas were read, or
    if the grace time is over. It lists the messages to average. The first turn
    of an event (exchange) always needs `rules.quorum` messages. The first event
    of a run also waits until `rules.replicas` replicas have come, or until the
    grace time is over.

    Args:
      inbox: The messages of the turn that this replica has so far.
      is_late: Whether the grace time (`MailboxRules.grace_s`) is over.

    Returns:
      The replicas that take part after the event; None if no manifest is due.
    """
    if inbox.turn:
      is_due = is_late or self._has_all(inbox, inbox.expected)
      return self.first.roster if is_due else None
    if not (is_late or self._has_all(inbox, inbox.expected)):
      return None
    roster = self.memory.roster.renewed(inbox.event, inbox.taken)
    names = roster.names() if is_late else roster.expected()
    is_first_time = inbox.event == 0 and not is_late
    if is_first_time and len(names) < self.rules.replicas:
      return None
    newcomers = [
      name
      for name in inbox.missing(roster.expected())
      if name not in inbox.expected
    ]
    self.store.at_once(
      [functools.partial(inbox.read, name) for name in newcomers]
    )
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
    """Makes pauses between the tries of a caller that waits for something.

    It yields before each try, without end, and pauses after the try. If the
    caller waits for longer than `rules.grace_s`, this generator writes vanished
    objects again (`_look_around`), and says in the log once a minute what the
    caller waits for. It calls `_look_around` before it first yields True: this
    process may have slept, and the other replicas may have gone on.

    Args:
      inbox: The messages of the turn that this replica has so far.
      waiting: Returns a line for the log that says what the replica waits for.
      agreed: The manifest (the list of messages to average); None if the turn
        is not settled yet.
      looks_at_once: Whether `_look_around` is called after the first pause if
        `agreed` is given. Else it is first called after the grace time.

    Yields:
      Whether the grace time is over. It is counted from the first try.

    Raises:
      ReplicaStaleError: If there is a newer snapshot (`_look_around`).
    """
    clock = self.store.clock
    grace = self.rules.grace_s
    start = clock()
    wait = FIRST_PAUSE_S
    look_after = grace
    next_look = start + grace
    if agreed and looks_at_once:
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
      if clock() > next_look:
        self._look_around(inbox, agreed)
        next_look = clock() + look_after
        look_after = min(2 * look_after, max(grace, LONGEST_LOOK_S))
      is_late = clock() - start > grace

  def _awaited_in(self, inbox: Inbox) -> str:
    """Returns a line for the log: what a turn that is not settled waits for."""
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
    """Writes objects again that were lost or damaged while this replica waits.

    First it checks that the other replicas have not gone on without this one.

    Args:
      inbox: The messages of the turn that this replica has so far.
      agreed: The manifest (the list of messages to average); None if the turn
        is not settled yet. If it is given, only the messages that it lists are
        written again.

    Raises:
      ReplicaStaleError: If there is a snapshot of a later event than the one
        that this replica handles.
    """
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
    """Writes an object again if it is missing or damaged.

    A valid object with another content is left alone, except in place of a
    message that a manifest lists: after a restart, the sender may have written
    another message there. All replicas need the listed message, so it replaces
    the other one.

    Args:
      path: Path of the object.
      data: The right content of the object.
      replaces: Whether the object is a message that a manifest lists, so that
        it replaces any other content.
      is_ours: Function of a path and the bytes that were read there. It returns
        whether a replica of this run wrote them (`Inbox.is_ours`). None: they
        are valid if they have one signature for the whole object, or are signed
        JSON.
    """
    stored = self.store.get(path, num_bytes_of(data))
    if stored is not None and is_equal(stored, data):
      return
    if stored is None and self.store.create(path, data):
      return
    if stored is not None and not replaces:
      if is_ours is not None and is_ours(path, stored):
        return
      if self.signer.verify(path, stored) is not None:
        return
      if self.signer.verify_json(path, stored) is not None:
        return
    self.store.put(path, data)
