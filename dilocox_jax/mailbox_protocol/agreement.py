"""Replicas agree on the messages of a turn.

The agreement on one turn is a manifest: the list of the messages that all
replicas average. `Agreement` waits for the manifest, writes it when it is due,
and reads the messages that it lists.
"""

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from dilocox_jax.mailbox_protocol.decisions import Decisions
from dilocox_jax.mailbox_protocol.manifest import (
  NUM_REMEMBERED,
  Manifest,
  make_manifest,
)
from dilocox_jax.mailbox_protocol.messages import (
  EVENTS,
  Inbox,
  manifest_path,
  message_path,
  proposal_path,
)
from dilocox_jax.mailbox_protocol.roster import MailboxRules, Roster, Seats
from dilocox_jax.mailbox_protocol.signer import Signer
from dilocox_jax.mailbox_protocol.snapshots import Snapshots

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
    sent: Bytes of the messages that one replica has sent since a snapshot was
      last due.
  """

  event: int = 0
  before: str = ""
  roster: Roster = Roster()
  accepted: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  sent: int = 0

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "Memory":
    """Returns the memory of which `values` are the `dataclasses.asdict`."""
    fields = {**values, "roster": Roster.from_json(values["roster"])}
    return cls(**fields)  # pyright: ignore

  def norms(self, inbox: Inbox) -> list[float]:
    """Returns the usual norms of earlier messages of the same kind and turn.

    Args:
      inbox: The inbox of a turn.
    """
    return self.accepted.get(f"{inbox.kind}.{inbox.turn}", [])

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
    memory = dataclasses.replace(
      self,
      accepted=self.accepted | {f"{inbox.kind}.{inbox.turn}": norms},
      sent=self.sent + inbox.num_bytes,
    )
    if inbox.turn:
      return memory
    return dataclasses.replace(
      memory,
      event=inbox.event + 1,
      before=agreed.digest(),
      roster=agreed.roster,
    )


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
  """

  store: Any
  signer: Signer
  seats: Seats
  snapshots: Snapshots
  rules: MailboxRules
  run_objects: dict[str, bytes] = dataclasses.field(default_factory=dict)
  memory: Memory = Memory()
  first: Manifest = Manifest()
  objects: dict[int, dict[str, bytes]] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    """Opens the decisions of the run."""
    self._decisions = Decisions(self.store, self.signer)

  def manifest(self, event: int, turn: int) -> Manifest | None:
    """Returns the manifest of a turn, or None if it is not decided yet."""
    values = self._decisions.read(manifest_path(event, turn))
    return None if values is None else Manifest.from_json(values)

  def wait_for_manifest(self, inbox: Inbox) -> Manifest:
    """Waits until a turn is settled. Writes its manifest when it is due.

    Args:
      inbox: The inbox of the turn.

    Returns:
      The manifest of the turn.

    Raises:
      ReplicaStaleError: If the event was settled and deleted, or if the other
        replicas have another manifest of the event before than this replica.
    """
    agreed = self._decided(inbox)
    if self.snapshots.is_gone(inbox.event):
      raise ReplicaStaleError(f"event {inbox.event} was deleted")
    if not inbox.is_past and agreed.before != self._before(inbox):
      raise ReplicaStaleError("the others agreed on another list before")
    if inbox.turn == 0:
      self.first = agreed
    return agreed

  def fetch_messages(
    self, inbox: Inbox, agreed: Manifest
  ) -> list[tuple[str, float, list[np.ndarray]]]:
    """Waits until every listed message is there, and reads it.

    Args:
      inbox: The inbox of the turn.
      agreed: The manifest of the turn.

    Returns:
      Replica, weight and arrays of each message, in the order of the manifest.

    Raises:
      ReplicaStaleError: If a message is missing, and there is a newer snapshot.
    """
    path = manifest_path(inbox.event, inbox.turn)
    objects = {path: self.signer.sign_json(path, dataclasses.asdict(agreed))}
    messages = []
    for listed in agreed.listed:

      def missing(replica: str = listed.replica) -> str:
        return (
          f"event {inbox.event} waits for the message of {replica}, which is"
          " listed and not there: a replica that has it writes it again. If no"
          " such replica lives, and nobody writes a later snapshot, stop all"
          f" replicas, delete {path} and"
          f" {proposal_path(inbox.event, inbox.turn)}, and start them again"
        )

      for _ in self._pauses(inbox, missing, agreed):
        message = inbox.listed(listed.replica, listed.digest)
        if message is not None:
          object_path = message_path(inbox.event, inbox.turn, listed.replica)
          objects[object_path] = message.data
          messages.append((listed.replica, listed.weight, message.arrays))
          break
    if inbox.turn == 0:
      self.objects = {inbox.event: {}}
    self.objects.setdefault(inbox.event, {}).update(objects)
    return messages

  def _before(self, inbox: Inbox) -> str:
    """Returns the digest of the manifest that precedes that of a turn."""
    if inbox.turn:
      return self.first.digest()
    return self.memory.before

  def _decided(self, inbox: Inbox) -> Manifest:
    """Waits for the decision of a turn. Decides when it is due."""
    path = manifest_path(inbox.event, inbox.turn)
    proposal = proposal_path(inbox.event, inbox.turn)

    def check() -> None:
      if self.snapshots.is_gone(inbox.event, thoroughly=True):
        raise ReplicaStaleError(f"event {inbox.event} was deleted")

    for is_late in self._pauses(inbox, lambda: self._awaited_in(inbox)):
      agreed = self.manifest(inbox.event, inbox.turn)
      if agreed is not None:
        return agreed
      if inbox.is_past:
        # The turn was decided long ago. So either the decision was lost, or
        # this replica is too late.
        decided = self._decisions.complete(path, proposal, check)
        if decided is not None:
          return Manifest.from_json(decided)
      roster = self._due(inbox, is_late)
      if roster is not None:
        proposed = dataclasses.asdict(self._proposed(inbox, roster))
        decided = self._decisions.decide(path, proposal, proposed, check)
        return Manifest.from_json(decided)
    raise AssertionError("pauses do not end")

  def _proposed(self, inbox: Inbox, roster: Roster) -> Manifest:
    """Returns the manifest that this replica proposes."""
    if inbox.turn:
      names = self.first.names
    else:
      names = roster.expected()
    return make_manifest(
      {name: inbox.held[name] for name in names if name in inbox.held},
      before=self._before(inbox),
      accepted=self.memory.norms(inbox),
      max_norm_ratio=self.rules.max_norm_ratio,
      full_weight_ratio=self.rules.full_weight_ratio,
      roster=roster,
    )

  def _due(self, inbox: Inbox, is_late: bool) -> Roster | None:
    """Returns the roster of the manifest that is due; None if none is due.

    Args:
      inbox: The inbox of the turn.
      is_late: Whether the grace time is over.
    """
    if inbox.is_past:
      return None
    if inbox.turn:
      if _is_time(inbox, self.first.names, is_late):
        return self.first.roster
      return None
    roster = self.memory.roster
    if not (is_late or _is_time(inbox, roster.expected(), is_late)):
      return None
    # Only now the seats are read for replicas that came meanwhile, because
    # that costs requests.
    roster = roster.renewed(inbox.event, self.seats.read)
    names = roster.names() if is_late else roster.expected()
    is_first_time = inbox.event == 0 and not is_late
    if is_first_time and len(names) < self.rules.replicas:
      return None
    if not _is_time(inbox, names, is_late):
      return None
    present = {name for name in names if inbox.has(name)}
    if len(present) < self.rules.quorum:
      return None
    return roster.after(inbox.event, present)

  def _pauses(
    self,
    inbox: Inbox,
    waiting: Callable[[], str],
    agreed: Manifest | None = None,
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
    """
    clock = self.store.clock
    grace = self.rules.grace_s
    start = clock()
    wait = FIRST_PAUSE_S
    look_after = grace
    next_look = start if agreed else start + grace
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
    for path, data in self.run_objects.items():
      self._restore(path, data)
    for objects in self.objects.values():
      for path, data in objects.items():
        is_message = path.startswith(f"{EVENTS}/")
        self._restore(path, data, is_listed_message=is_message)
    needed = list(inbox.held.items())
    if agreed is not None:
      listed_digests = {listed.digest for listed in agreed.listed}
      needed = [
        (name, message)
        for name, message in needed
        if message.digest in listed_digests
      ]
    for name, message in needed:
      path = message_path(inbox.event, inbox.turn, name)
      self._restore(path, message.data, is_listed_message=agreed is not None)

  def _restore(
    self, path: str, data: bytes, *, is_listed_message: bool = False
  ) -> None:
    """Writes an object again if it is missing or damaged.

    If a listed message was lost, a later life of its sender may have written
    another message in its place. All replicas need the listed one, so it also
    replaces that message.

    Args:
      path: Path of the object.
      data: The object.
      is_listed_message: Whether it is a message that a manifest lists.
    """
    stored = self.store.get(path, len(data))
    if stored == data:
      return
    if stored is None and self.store.create(path, data):
      return
    if stored is not None and not is_listed_message:
      if self.signer.verify(path, stored) is not None:
        return
      if self.signer.verify_json(path, stored) is not None:
        return
    self.store.put(path, data)


def _is_time(inbox: Inbox, names: Iterable[str], is_late: bool) -> bool:
  """Returns whether the turn need not wait for any of these replicas.

  Until the grace time is over, it waits until all of them have sent a message.
  After the grace time, it reads the messages that are there and waits for none.

  Args:
    inbox: The inbox of the turn.
    names: Names of the replicas.
    is_late: Whether the grace time is over.
  """
  if not is_late:
    return all(inbox.has(name) for name in names)
  for name in names:
    inbox.has(name)
  return True
