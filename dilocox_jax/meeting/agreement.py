"""How replicas agree on the messages of a turn."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dilocox_jax.meeting.inbox import Inbox
from dilocox_jax.meeting.manifest import (
  Manifest,
  Sent,
  drawn_up,
  roster_from_json,
)
from dilocox_jax.meeting.norms import KEPT
from dilocox_jax.meeting.paths import MANIFESTS, manifest_path, message_path
from dilocox_jax.meeting.roster import Roster
from dilocox_jax.meeting.rules import MailboxRules
from dilocox_jax.meeting.seal import JSON_BYTES, Seal
from dilocox_jax.meeting.seats import Seats
from dilocox_jax.meeting.snapshots import Snapshots

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.02, 1.0, 1.25

NormOf = Callable[[Sequence[np.ndarray]], float]


class LostError(Exception):
  """Means that a replica has to begin again from the newest snapshot.

  It begins as a newcomer does. What it has sent may have been averaged, so it
  drops its residual and what it has in flight: nothing is applied twice.
  """


class StoppedError(Exception):
  """Means that a replica must not go on. The message is one line."""


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a replica knows of the events before.

  Attributes:
    event: The next event.
    before: Digest of the manifest of the event before.
    roster: Who takes part, as that manifest says.
    accepted: Norms of accepted messages, by "kind.turn", the oldest first.
  """

  event: int = 0
  before: str = ""
  roster: Roster = Roster()
  accepted: dict[str, list[float]] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    """Returns the memory as values of JSON."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "Memory":
    """Returns the memory that `to_json` described."""
    roster = roster_from_json(values["roster"])
    return cls(values["event"], values["before"], roster, values["accepted"])

  def after(
    self, agreed: Manifest, event: int, turn: int, kind: int
  ) -> "Memory":
    """Returns the memory after a turn was settled."""
    key = f"{kind}.{turn}"
    norms = self.accepted.get(key, []) + [each.norm for each in agreed.listed]
    accepted = self.accepted | {key: norms[-KEPT:]}
    if turn:
      return dataclasses.replace(self, accepted=accepted)
    return Memory(event + 1, agreed.digest(), agreed.roster, accepted)


class Agreement:
  """Reads the manifests of a run, and writes those that are due."""

  def __init__(
    self,
    store: Any,
    seal: Seal,
    seats: Seats,
    snapshots: Snapshots,
    rules: MailboxRules,
  ):
    """Binds the parts of a run together.

    Args:
      store: A `Patient` store.
      seal: The seal of the run.
      seats: The seats of the run.
      snapshots: The snapshots of the run.
      rules: The rules of the exchange.
    """
    self._store, self._seal, self._seats = store, seal, seats
    self._snapshots, self._rules = snapshots, rules
    self._first = Manifest("", "", (), {}, Roster())
    # Objects of the last turn, which are written again if they vanish.
    self._kept: dict[str, bytes] = {}

  def is_listed(self, replica: str) -> bool:
    """Returns whether a replica takes part in the later turns of an event."""
    return any(each.replica == replica for each in self._first.listed)

  def manifest(self, event: int, turn: int) -> Manifest | None:
    """Returns the manifest of a turn, or None if it is not written yet."""
    path = manifest_path(event, turn)
    data = self._store.get(path, JSON_BYTES)
    values = self._seal.opened_json(path, data)
    if data is not None and values is None:
      self._store.delete([path])  # Only a stranger writes what does not open.
    return None if values is None else Manifest.from_json(values)

  def reached(
    self, inbox: Inbox, memory: Memory, kind: int, norm: NormOf
  ) -> Manifest:
    """Waits until the manifest of a turn is there; writes it when it is due.

    Raises:
      LostError: If the event was settled and deleted, or if the replicas
        before agreed on another list than this one knows.
    """
    agreed = self._awaited(inbox, memory, kind, norm)
    if self._snapshots.is_gone(inbox.event):
      raise LostError(f"event {inbox.event} was deleted")
    before = memory.before if inbox.turn == 0 else self._first.digest()
    if not inbox.is_past and agreed.before != before:
      raise LostError("the others agreed on another list before")
    if inbox.turn == 0:
      self._first = agreed
    return agreed

  def collected(
    self, inbox: Inbox, memory: Memory, agreed: Manifest
  ) -> list[tuple[str, float, list[np.ndarray]]]:
    """Waits until every listed message is there; returns them in order.

    Raises:
      LostError: If one is missing, and there is a newer snapshot.
    """
    messages = []
    path = manifest_path(inbox.event, inbox.turn)
    kept = {path: self._seal.closed_json(path, agreed.to_json())}
    for each in agreed.listed:
      path = message_path(inbox.event, inbox.turn, each.replica)
      for _ in self._pauses(inbox, memory, agreed):
        received = inbox.listed(each.replica, each.digest)
        if received is not None:
          kept[path] = received.data
          arrays = received.message.arrays
          messages.append((each.replica, each.weight, arrays))
          break
    self._kept = kept
    return messages

  def _awaited(
    self, inbox: Inbox, memory: Memory, kind: int, norm: NormOf
  ) -> Manifest:
    path = manifest_path(inbox.event, inbox.turn)
    pauses = self._pauses(inbox, memory)
    while True:
      is_late = next(pauses)
      agreed = self.manifest(inbox.event, inbox.turn)
      if agreed is not None:
        return agreed
      roster = self._due(inbox, memory, is_late)
      if roster is not None:
        drawn = self._drawn_up(inbox, memory, roster, kind, norm)
        data = self._seal.closed_json(path, drawn.to_json())
        if self._store.create(path, data):
          return drawn

  def _due(self, inbox: Inbox, memory: Memory, is_late: bool) -> Roster | None:
    """Returns the roster of the manifest that is to be written now, if any."""
    if inbox.is_past:
      return None
    if inbox.turn:
      names = [each.replica for each in self._first.listed]
      return self._first.roster if _is_time(inbox, names, is_late) else None
    roster = memory.roster
    if not (is_late or _is_time(inbox, roster.expected(), is_late)):
      return None
    # Whoever came meanwhile is asked for only now: it costs requests.
    roster = roster.renewed(inbox.event, self._seats.read)
    names = roster.seats if is_late else roster.expected()
    is_first_time = inbox.event == 0 and not is_late
    if is_first_time and len(names) < self._rules.replicas:
      return None
    if not _is_time(inbox, names, is_late):
      return None
    present = [name for name in names if inbox.has(name)]
    is_enough = len(present) >= self._rules.quorum
    return roster.after(inbox.event, present) if is_enough else None

  def _drawn_up(
    self,
    inbox: Inbox,
    memory: Memory,
    roster: Roster,
    kind: int,
    norm: NormOf,
  ) -> Manifest:
    firsts = [each.replica for each in self._first.listed]
    sent = {
      name: Sent(
        inbox.held[name].digest,
        inbox.held[name].message.state.hex(),
        inbox.held[name].message.weight,
        norm(inbox.held[name].message.arrays),
      )
      for name in (firsts if inbox.turn else roster.expected())
      if name in inbox.held
    }
    return drawn_up(
      sent,
      before=self._first.digest() if inbox.turn else memory.before,
      accepted=memory.accepted.get(f"{kind}.{inbox.turn}", []),
      max_norm_ratio=self._rules.max_norm_ratio,
      roster=roster,
    )

  def _pauses(
    self, inbox: Inbox, memory: Memory, agreed: Manifest | None = None
  ) -> Iterator[bool]:
    """Yields before each try whether the grace time is over, then waits.

    What takes longer than the grace time, and a listed message that is not
    there, is a reason to look around.
    """
    clock, grace = self._store.clock, self._rules.grace_s
    start, wait = clock(), FIRST_PAUSE_S
    looked = start if agreed is None else -math.inf
    while True:
      yield clock() - start > grace
      if clock() - looked > grace:
        looked = clock()
        self._look_around(inbox, memory, agreed)
      self._store.pause(wait)
      wait = min(PAUSE_GROWTH * wait, LONGEST_PAUSE_S)

  def _look_around(
    self, inbox: Inbox, memory: Memory, agreed: Manifest | None
  ) -> None:
    """Writes again what may have vanished; sees whether the others went on.

    Raises:
      LostError: If there is a newer snapshot than this replica knows.
    """
    known = memory.event if inbox.is_past else inbox.event
    if max(self._snapshots.events(), default=0) > known:
      raise LostError(f"the others have gone on from event {inbox.event}")
    for path, data in self._kept.items():
      if path.startswith(MANIFESTS):
        self._store.create(path, data)
      else:
        self._store.put(path, data)
    digests = {each.digest for each in agreed.listed} if agreed else set()
    for name, received in inbox.held.items():
      path = message_path(inbox.event, inbox.turn, name)
      if received.digest in digests:
        self._store.put(path, received.data)
      elif agreed is None:
        self._store.create(path, received.data)


def _is_time(inbox: Inbox, names: Iterable[str], is_late: bool) -> bool:
  """Returns whether nobody of these is waited for any more.

  Before the grace time is over, the first who has not sent ends the search.
  Afterwards everybody is asked for once more.
  """
  if not is_late:
    return all(inbox.has(name) for name in names)
  for name in names:
    inbox.has(name)
  return True
