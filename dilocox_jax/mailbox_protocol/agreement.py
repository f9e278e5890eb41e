"""How replicas agree on the messages of a turn."""

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from dilocox_jax.mailbox_protocol.decisions import Decisions
from dilocox_jax.mailbox_protocol.manifest import KEPT, Manifest, make_manifest
from dilocox_jax.mailbox_protocol.messages import (
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
# It looks around after the grace time, then after twice as long, and so on up
# to this.
LONGEST_LOOK_S = 60.0
LINE_EVERY_S = 60.0


class ReplicaStaleError(Exception):
  """Means that a replica has to begin again from the newest snapshot.

  It begins as a newcomer does. What it has sent may have been averaged, so it
  drops its residual and what it has in flight: nothing is applied twice.
  """


class StoppedError(Exception):
  """Means that a replica cannot go on, and what to do. It is one line."""


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a replica knows of the events before.

  Attributes:
    event: The next event.
    before: Digest of the manifest of the event before.
    roster: Who takes part, as that manifest says.
    accepted: Median norm of each event's listed messages, by "kind.turn", the
      oldest first.
    sent: Bytes of the messages that one replica has sent since a snapshot was
      due.
  """

  event: int = 0
  before: str = ""
  roster: Roster = Roster()
  accepted: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  sent: int = 0

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "Memory":
    """Returns the memory that `dataclasses.asdict` described."""
    return cls(**{**values, "roster": Roster.from_json(values["roster"])})  # pyright: ignore

  def norms(self, inbox: Inbox) -> list[float]:
    """Returns the usual norms of messages such as those of a turn."""
    return self.accepted.get(f"{inbox.kind}.{inbox.turn}", [])

  def after(self, agreed: Manifest, inbox: Inbox) -> "Memory":
    """Returns the memory after a turn was settled."""
    norms = self.norms(inbox)
    # Messages of replicas that made no progress have a norm of 0. It is not
    # usual, since every other norm would be far larger.
    listed = [each.norm for each in agreed.listed if each.norm > 0]
    if listed:
      norms = [*norms, statistics.median_low(listed)][-KEPT:]
    noted = dataclasses.replace(
      self,
      accepted=self.accepted | {f"{inbox.kind}.{inbox.turn}": norms},
      sent=self.sent + inbox.num_bytes,
    )
    if inbox.turn:
      return noted
    return dataclasses.replace(
      noted,
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
    memory: What this replica knows of the events before.
    first: Manifest of the event's first turn. The replicas that are listed
      there take part in the later turns.
    objects: Manifests and messages by event and path: of all turns of the event
      before, and of the earlier turns of this one. They are written again if
      they vanish, because another replica may still need them.
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

    Raises:
      ReplicaStaleError: If the event was settled and deleted, or if the other
        replicas agreed on another list before than this one knows.
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
    """Waits until every listed message is there. Returns them in order.

    Returns:
      Replica, weight and arrays of each message.

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
          path_of = message_path(inbox.event, inbox.turn, listed.replica)
          objects[path_of] = message.data
          messages.append((listed.replica, listed.weight, message.arrays))
          break
    if inbox.turn == 0:
      self.objects = {inbox.event: {}}
    self.objects.setdefault(inbox.event, {}).update(objects)
    return messages

  def _before(self, inbox: Inbox) -> str:
    """Returns the digest of the manifest before that of a turn."""
    return self.first.digest() if inbox.turn else self.memory.before

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
        # It was decided long ago, so either the decision was lost or this
        # replica is too late.
        decided = self._decisions.complete(path, proposal, check)
        if decided is not None:
          return Manifest.from_json(decided)
      roster = self._due(inbox, is_late)
      if roster is not None:
        drawn = dataclasses.asdict(self._drawn_up(inbox, roster))
        decided = self._decisions.decide(path, proposal, drawn, check)
        return Manifest.from_json(decided)
    raise AssertionError("pauses do not end")

  def _drawn_up(self, inbox: Inbox, roster: Roster) -> Manifest:
    """Returns the manifest that this replica proposes."""
    names = self.first.names if inbox.turn else roster.expected()
    return make_manifest(
      {name: inbox.held[name] for name in names if name in inbox.held},
      before=self._before(inbox),
      accepted=self.memory.norms(inbox),
      max_norm_ratio=self.rules.max_norm_ratio,
      full_weight_ratio=self.rules.full_weight_ratio,
      roster=roster,
    )

  def _due(self, inbox: Inbox, is_late: bool) -> Roster | None:
    """Returns the roster of the manifest that is to be written now, if any."""
    if inbox.is_past:
      return None
    if inbox.turn:
      is_time = _is_time(inbox, self.first.names, is_late)
      return self.first.roster if is_time else None
    roster = self.memory.roster
    if not (is_late or _is_time(inbox, roster.expected(), is_late)):
      return None
    # Whoever came meanwhile is asked for only now: it costs requests.
    roster = roster.renewed(inbox.event, self.seats.read)
    names = roster.names() if is_late else roster.expected()
    is_first_time = inbox.event == 0 and not is_late
    if is_first_time and len(names) < self.rules.replicas:
      return None
    if not _is_time(inbox, names, is_late):
      return None
    present = {name for name in names if inbox.has(name)}
    is_enough = len(present) >= self.rules.quorum
    return roster.after(inbox.event, present) if is_enough else None

  def _pauses(
    self,
    inbox: Inbox,
    waiting: Callable[[], str],
    agreed: Manifest | None = None,
  ) -> Iterator[bool]:
    """Yields before each try whether the grace time is over, then waits.

    A replica that waits for longer than the grace time, or for a listed message
    that is not there, looks around. It does so before it is told that the grace
    time is over: it may have slept, and the others may have gone on.

    Args:
      inbox: The messages of the turn.
      waiting: Returns a line that says what is waited for.
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
    """Returns a line that says what a turn without a manifest waits for."""
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
    """Writes again what has vanished, and sees whether the others went on.

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
        self._restore(path, data)
    digests = {each.digest for each in agreed.listed} if agreed else None
    for name, message in inbox.held.items():
      if digests is None or message.digest in digests:
        path = message_path(inbox.event, inbox.turn, name)
        self._restore(path, message.data)

  def _restore(self, path: str, data: bytes) -> None:
    """Writes an object again if it is missing or damaged."""
    found = self.store.get(path, len(data))
    if found == data:
      return
    if found is None and self.store.create(path, data):
      return
    is_ours = found is not None and (
      self.signer.verify(path, found) is not None
      or self.signer.verify_json(path, found) is not None
    )
    if not is_ours:
      self.store.put(path, data)


def _is_time(inbox: Inbox, names: Iterable[str], is_late: bool) -> bool:
  """Returns whether the turn waits for none of these replicas any more.

  Before the grace time is over, the first replica that has not sent ends the
  search. Afterwards every replica is asked for once more.
  """
  if not is_late:
    return all(inbox.has(name) for name in names)
  for name in names:
    inbox.has(name)
  return True
