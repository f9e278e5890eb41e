"""Replicas agree on the messages of a turn.

The agreement on one turn is a manifest: the list of the messages that all
replicas average. `Agreement` waits for the manifest, writes it when it is due,
and reads the messages that it lists.
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
# A waiting replica asks again after pauses that grow from the first to the
# longest. After the grace time they grow further, to a sixth of the grace time
# and at most to the last of these numbers.
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
LONGEST_LATE_PAUSE_S = 10.0
PAUSE_GROWTH = 1.25
# It looks around (`Agreement._look_around`) after the grace time, then after
# twice as long, and so on. The times between grow up to this.
LONGEST_LOOK_S = 60.0
LINE_EVERY_S = 60.0
# Marks that are older than `KEPT_MARKS` intervals are deleted with a snapshot,
# of which a few in a row may fail.
_REMEMBERED_STARTS = KEPT_MARKS + 16


class ReplicaStaleError(Exception):
  """Means that a replica has to begin again from the newest snapshot.

  It begins as a newcomer does. The other replicas may have averaged what it has
  sent. So it drops its residual and its exchanges in flight, and nothing is
  applied twice.
  """


class StoppedError(Exception):
  """Means that a replica cannot go on. One line says what to do."""


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a replica knows of the earlier events.

  Attributes:
    event: Number of the next event.
    before: Digest of the manifest of the event before.
    roster: The replicas that take part, according to that manifest.
    accepted: Median norm of each event's listed messages, by "kind.turn", the
      oldest first.
    starts: First events of the newest intervals (`store_size`), the oldest
      first.
    sent: Bytes of the messages that one replica has sent in this interval.
    stored: Bytes of all messages and manifests of this interval.
    stored_in_event: Bytes of those of the newest event.
    largest_event: Largest `stored_in_event` so far.
    was_split: Whether the shared states were split since then (`votes`).
    base: Event of the snapshot with which this replica began; 0: it began with
      the first state.
    shared: The newest event whose mean was made in shares, and its number of
      slices, by "kind.turn".
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
    """Returns the memory of which `values` are the `dataclasses.asdict`."""
    roster = Roster.from_json(values["roster"])
    starts = tuple(values["starts"])
    shared = {
      key: (int(event), int(num_slices))
      for key, (event, num_slices) in values["shared"].items()
    }
    fields = {**values, "roster": roster, "starts": starts, "shared": shared}
    return cls(**fields)  # pyright: ignore

  def begin_interval(self, event: int) -> "Memory":
    """Returns the memory at the start of a new interval of events.

    Args:
      event: The first event of the interval, which is not settled yet.
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
    """Returns the usual norms of earlier messages of the same kind and turn.

    Args:
      inbox: The inbox of a turn.
    """
    return self.accepted.get(_norms_key(inbox), [])

  def residual_event(self, inbox: Inbox) -> int:
    """Returns the event whose residuals a mean in shares adds; -1: none.

    The residuals must be of the same slices. They must also be of this interval
    or the one before: objects of earlier intervals may be deleted at any time.

    Args:
      inbox: The inbox of a turn.
    """
    event, num_slices = self.shared.get(f"{inbox.kind}.{inbox.turn}", (-1, 0))
    if num_slices != inbox.num_slices:
      return -1
    return event if event >= self.starts[-2:][0] else -1

  @property
  def num_kinds(self) -> int:
    """Number of kinds of events that replicas have settled, at least 1."""
    kinds = {key.partition(".")[0] for key in self.accepted}
    return max(len(kinds), 1)

  def after(self, agreed: Manifest, inbox: Inbox) -> "Memory":
    """Returns the memory after a turn was settled.

    Args:
      agreed: The manifest of the turn.
      inbox: The inbox of the turn.
    """
    norms = self.norms(inbox)
    # Messages of replicas that made no progress have a norm of 0. It is not
    # usual, since every other norm would be far larger.
    positive_norms = [
      message.norm for message in agreed.listed if message.norm > 0
    ]
    if positive_norms:
      norms = [*norms, statistics.median_low(positive_norms)]
      norms = norms[-NUM_REMEMBERED:]
    # Messages that came too late are in the store, too.
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
  """Returns the key of the usual norms of a turn's messages.

  Messages in slices declare the norm of their decoded values, and the norm of
  other messages is that of their floating-point arrays. So they are remembered
  apart.

  Args:
    inbox: The inbox of the turn.
  """
  key = f"{inbox.kind}.{inbox.turn}"
  return f"{key}.slices" if inbox.num_slices else key


@dataclasses.dataclass
class Agreement:
  """Reads the manifests of a run, and writes those that are due.

  Attributes:
    store: A `RetryingStore` store.
    signer: The signer of the run.
    seats: The seats of the run.
    snapshots: The snapshots of the run.
    rules: The rules of the exchange.
    run_objects: Objects that every replica of the run has, by path. They are
      written again if they vanish.
    memory: What this replica knows of the earlier events.
    first: Manifest of the event's first turn. The replicas that are listed
      there take part in the later turns.
    objects: Manifests and messages, by event and path. They are those of all
      turns of the event before, and of the earlier turns of this event. They
      are written again if they vanish, because another replica may still need
      them.
    most_were_here: Whether most of the expected messages were there when this
      replica looked for the first time in the last turn. Then it asks for all
      of them in the next turn. Else it lists them first, if they are many.
    announced: The manifest that was read when this replica announced itself,
      by event.
    snapshot_bytes: Bytes of a snapshot; 0: this replica does not know them, and
      begins no interval.
    residuals: Residuals of the shares that this replica has made, as
      `Shares.remembered`.
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
    """Opens the decisions of the run."""
    self._decisions = Decisions(self.store, self.signer)

  def announced_manifest(self, event: int) -> Manifest | None:
    """Returns the manifest of an event's first turn, and remembers it.

    Args:
      event: The event, whose messages are exchanged next.
    """
    manifest = self.manifest(event, turn=0)
    self.announced = {} if manifest is None else {event: manifest}
    return manifest

  def before(self, inbox: Inbox) -> str:
    """Returns the digest of the manifest that precedes that of a turn."""
    if inbox.turn:
      return self.first.digest()
    return self.memory.before

  def manifest(self, event: int, turn: int) -> Manifest | None:
    """Returns the manifest of a turn, or None if it is not decided yet."""
    values = self._decisions.read(manifest_path(event, turn))
    return None if values is None else Manifest.from_json(values)

  def expected(self, event: int, turn: int, is_past: bool) -> list[str]:
    """Returns the replicas whose messages a turn waits for.

    All replicas with the same manifests expect the same ones.

    Args:
      event: Number of the event.
      turn: Number of the turn.
      is_past: Whether the turn was settled before the snapshot with which this
        replica began. Then it waits for nobody.
    """
    if is_past:
      return []
    if turn:
      return self.first.names
    return self.memory.roster.renewed(event).expected()

  def open(self, inbox: Inbox) -> None:
    """Notes in an inbox whose messages its turn waits for.

    Args:
      inbox: The inbox of a turn, before this replica sends its message.
    """
    if inbox.is_past:
      return
    inbox.expected = self.expected(inbox.event, inbox.turn, is_past=False)
    if self.most_were_here:
      inbox.there = set(inbox.expected)

  def wait_for_manifest(self, inbox: Inbox) -> Manifest:
    """Waits until a turn is settled. Writes its manifest when it is due.

    The event may be deleted, and this may be a second manifest for it.
    `fetch_messages` finds out.

    Args:
      inbox: The inbox of the turn (`open`).

    Returns:
      The manifest of the turn.

    Raises:
      ReplicaStaleError: If the other replicas have another manifest of the
        event before than this replica.
    """
    agreed = self._decided(inbox)
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
    """Waits until every listed message is there, and reads it.

    At the same time it makes sure that the event was not deleted. A replica may
    have slept while the others went on and deleted the event's manifest. The
    manifest that it has read or written afterwards is another one, which nobody
    may follow. The marks of a deletion are written before anything is deleted,
    so they are there.

    Args:
      inbox: The inbox of the turn.
      agreed: The manifest of the turn.
      beside: Other functions to call at the same time.

    Returns:
      Replica, weight and arrays of each message, in the order of the manifest.

    Raises:
      ReplicaStaleError: If the event was deleted, or if a message is missing,
        and there is a newer snapshot.
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
    """Waits until every share of a turn's mean is there, and reads it.

    Makes the shares that this replica has to make. At the same time it makes
    sure that the event was not deleted, as `fetch_messages` does. If the event
    was deleted, the shares that are written here belong to a list that nobody
    follows, and carry its digest.

    Args:
      shares: The shares of the turn. Afterwards it holds all of them.
      beside: Other functions to call at the same time.

    Raises:
      ReplicaStaleError: If the event was deleted, or if a share is missing, and
        there is a newer snapshot.
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
        # The others have learned of the list later, so their shares are later.
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
    """Remembers objects of a turn, to write them again if they vanish.

    Args:
      inbox: The inbox of the turn.
      objects: The objects by path.
    """
    if inbox.turn == 0:
      self.objects = {inbox.event: {}}
    self.objects.setdefault(inbox.event, {}).update(objects)

  def is_gone(self, event: int, thoroughly: bool = True) -> bool:
    """Returns whether the interval of an event was deleted, or is about to be.

    Args:
      event: The event that this replica handles next. If the event is later
        than all intervals that this replica knows, the newest known interval
        is looked up.
      thoroughly: As for `Snapshots.is_gone`.
    """
    start = interval_of(event, self.memory.starts)
    return self.snapshots.is_gone(start, thoroughly)

  def limit(self) -> StoreLimit:
    """Returns the limit of the store, as far as sizes are known."""
    num_replicas = max(self.rules.replicas, len(self.memory.roster.expected()))
    return store_limit(
      self.rules.store_bytes, self.snapshot_bytes, num_replicas
    )

  def _decided(self, inbox: Inbox) -> Manifest:
    """Waits for the decision of a turn. Decides when it is due."""
    if inbox.turn == 0 and inbox.event in self.announced:
      return self.announced[inbox.event]
    path = manifest_path(inbox.event, inbox.turn)
    proposal = proposal_path(inbox.event, inbox.turn)
    for is_late in self._pauses(inbox, lambda: self._awaited_in(inbox)):
      if inbox.is_past:
        agreed = self.manifest(inbox.event, inbox.turn)
        if agreed is not None:
          return agreed
        # The turn was decided long ago. So either the decision was lost, or
        # this replica is too late.
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
    """Looks for the manifest of a turn and for messages and new seats.

    Args:
      inbox: The inbox of the turn.
      is_late: Whether the grace time is over. Then it also reads messages of
        replicas that nobody waits for.

    Returns:
      The manifest; None if the turn is not decided, as far as it has looked.
    """
    is_first_look = inbox.num_looks == 0
    inbox.num_looks += 1
    missing = inbox.missing(inbox.expected)
    are_few = len(missing) <= FEW
    # A replica that sends nothing follows events that others have settled, so
    # it reads the manifest first.
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
    """Lists the messages that are there, and reads them if they are complete.

    Args:
      inbox: The inbox of the turn.
      missing: Expected replicas whose messages are not held.
      is_late: Whether the grace time is over. Then the messages are read even
        if they are not complete, and expected ones even if they are not listed.

    Returns:
      The manifest; None if the turn is not decided.
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
    """Reads messages, and at the same time the seats that were taken meanwhile.

    Args:
      inbox: The inbox of the turn.
      names: Senders of the messages.
      with_manifest: Whether to read the manifest, too.

    Returns:
      The manifest; None if it was not read, or is not there.
    """
    calls: list[Callable] = [
      functools.partial(inbox.read, name) for name in names
    ]
    if inbox.turn == 0:
      calls.append(functools.partial(self._read_seats, inbox))
    if not with_manifest:
      self.store.at_once(calls)
      return None
    read_manifest = functools.partial(self.manifest, inbox.event, inbox.turn)
    agreed, *_ = self.store.at_once([read_manifest, *calls])
    return agreed

  def _names(self, inbox: Inbox) -> list[str]:
    """Returns all replicas whose messages in a turn may count."""
    if inbox.turn:
      return self.first.names
    return self.memory.roster.names()

  def _read_seats(self, inbox: Inbox) -> None:
    """Reads the seats that were taken since the event before."""
    number = self.memory.roster.num_seats + len(inbox.taken)
    seat = self.seats.read(number)
    if seat is not None:
      inbox.taken.append(seat)
      inbox.taken += self.seats.read_from(number + 1)

  def _has_all(self, inbox: Inbox, names: Sequence[str]) -> bool:
    """Returns whether messages of all these replicas were read."""
    return all(name in inbox.held for name in names)

  def _proposed(self, inbox: Inbox, roster: Roster) -> Manifest:
    """Returns the manifest that this replica proposes."""
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
    # Without a listed message, no replica's state is confirmed.
    begins_interval = bool(manifest.listed) and self._begins_interval(inbox)
    return dataclasses.replace(
      manifest,
      begins_interval=begins_interval,
      num_slices=inbox.num_slices,
    )

  def _begins_interval(self, inbox: Inbox) -> bool:
    """Returns whether a snapshot of the state before a turn is due.

    A snapshot is due before the messages of the interval are more than the
    limit of the store allows. It is also due after `rules.snapshot_every`
    events, once each replica has sent at least as many bytes of messages as the
    snapshot has, because it travels on the same link as messages.

    Args:
      inbox: The inbox of the turn.
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
    """Returns the roster of the manifest that is due; None if none is due.

    Args:
      inbox: The inbox of the turn.
      is_late: Whether the grace time is over.
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
    """Yields before each try whether the grace time is over, and then waits.

    A replica that waits for longer than the grace time, or for a listed message
    that is missing, looks around (`_look_around`). It does so before it learns
    that the grace time is over: this process may have slept, and the other
    replicas may have gone on.

    Args:
      inbox: The inbox of the turn.
      waiting: Returns a line for the log that says what the replica waits for.
      agreed: The manifest, if it is decided.
      looks_at_once: Whether a replica that knows the manifest looks around at
        once. Else it looks around after the grace time.
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
    """Writes vanished objects again, and checks whether the others went on.

    Args:
      inbox: The inbox of the turn.
      agreed: The manifest, if it is decided. Then only the messages that it
        lists are written again.

    Raises:
      ReplicaStaleError: If there is a newer snapshot than this replica knows.
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

    If a listed message was lost, a later life of its sender may have written
    another message in its place. All replicas need the listed one, so it also
    replaces that message.

    Args:
      path: Path of the object.
      data: The object.
      replaces: Whether it is a message that a manifest lists. Then it also
        replaces another object of a replica.
      is_ours: Function from a path and the bytes that were read there to
        whether a replica wrote them (`Inbox.is_ours`). None: the object is
        signed as a whole, or JSON.
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
