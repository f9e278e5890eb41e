"""How replicas agree on the messages of a turn."""

import dataclasses
import logging
import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dilocox_jax.meeting.manifest import KEPT, Manifest, drawn_up
from dilocox_jax.meeting.members import MailboxRules, Roster, Seats
from dilocox_jax.meeting.messages import (
  MANIFESTS,
  Inbox,
  manifest_path,
  message_path,
)
from dilocox_jax.meeting.seal import JSON_BYTES, Seal
from dilocox_jax.meeting.snapshots import Snapshots

_LOG = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.02, 1.0, 1.25


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
    # A rate of 0 makes norms of 0, of which every other one is a multiple.
    listed = [each.norm for each in agreed.listed if each.norm]
    norms = self.norms(inbox)
    norms = [*norms, statistics.median_low(listed)] if listed else norms
    accepted = self.accepted | {f"{inbox.kind}.{inbox.turn}": norms[-KEPT:]}
    noted = accepted, self.sent + inbox.num_bytes
    if inbox.turn:
      return Memory(self.event, self.before, self.roster, *noted)
    return Memory(inbox.event + 1, agreed.digest(), agreed.roster, *noted)


@dataclasses.dataclass
class Agreement:
  """Reads the manifests of a run, and writes those that are due.

  Attributes:
    store: A `Patient` store.
    seal: The seal of the run.
    seats: The seats of the run.
    snapshots: The snapshots of the run.
    rules: The rules of the exchange.
    memory: What this replica knows of the events before.
    first: Manifest of the event's first turn; who is listed there takes part in
      the later ones.
    kept: Objects of the last turn, which are written again if they vanish.
  """

  store: Any
  seal: Seal
  seats: Seats
  snapshots: Snapshots
  rules: MailboxRules
  memory: Memory = Memory()
  first: Manifest = Manifest()
  kept: dict[str, bytes] = dataclasses.field(default_factory=dict)

  def manifest(self, event: int, turn: int) -> Manifest | None:
    """Returns the manifest of a turn, or None if it is not written yet."""
    path = manifest_path(event, turn)
    data = self.store.get(path, JSON_BYTES)
    values = self.seal.opened_json(path, data)
    if data is not None and values is None:
      self.store.delete([path])  # Only a stranger writes what does not open.
    return None if values is None else Manifest.from_json(values)

  def reached(self, inbox: Inbox) -> Manifest:
    """Waits until the manifest of a turn is there; writes it when it is due.

    Raises:
      LostError: If the event was settled and deleted, or if the replicas
        before agreed on another list than this one knows.
    """
    agreed = self._awaited(inbox)
    if self.snapshots.is_gone(inbox.event):
      raise LostError(f"event {inbox.event} was deleted")
    if not inbox.is_past and agreed.before != self._before(inbox):
      raise LostError("the others agreed on another list before")
    if inbox.turn == 0:
      self.first = agreed
    return agreed

  def collected(
    self, inbox: Inbox, agreed: Manifest
  ) -> list[tuple[str, float, list[np.ndarray]]]:
    """Waits until every listed message is there; returns them in order.

    Raises:
      LostError: If one is missing, and there is a newer snapshot.
    """
    messages = []
    path = manifest_path(inbox.event, inbox.turn)
    kept = {path: self.seal.closed_json(path, dataclasses.asdict(agreed))}
    for each in agreed.listed:
      for _ in self._pauses(inbox, agreed):
        if message := inbox.listed(each.replica, each.digest):
          path = message_path(inbox.event, inbox.turn, each.replica)
          kept[path] = message.data
          messages.append((each.replica, each.weight, message.arrays))
          break
    self.kept = kept
    return messages

  def _before(self, inbox: Inbox) -> str:
    """Returns the digest of the manifest before that of a turn."""
    return self.first.digest() if inbox.turn else self.memory.before

  def _awaited(self, inbox: Inbox) -> Manifest:
    path = manifest_path(inbox.event, inbox.turn)
    for is_late in self._pauses(inbox):
      if agreed := self.manifest(inbox.event, inbox.turn):
        return agreed
      if roster := self._due(inbox, is_late):
        names = self.first.names if inbox.turn else roster.expected()
        drawn = drawn_up(
          {name: inbox.held[name] for name in names if name in inbox.held},
          before=self._before(inbox),
          accepted=self.memory.norms(inbox),
          max_norm_ratio=self.rules.max_norm_ratio,
          roster=roster,
        )
        data = self.seal.closed_json(path, dataclasses.asdict(drawn))
        if self.store.create(path, data):
          return drawn
    raise AssertionError("pauses do not end")

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
    names = roster.seats if is_late else roster.expected()
    is_first_time = inbox.event == 0 and not is_late
    if is_first_time and len(names) < self.rules.replicas:
      return None
    if not _is_time(inbox, names, is_late):
      return None
    present = {name for name in names if inbox.has(name)}
    is_enough = len(present) >= self.rules.quorum
    return roster.after(inbox.event, present) if is_enough else None

  def _pauses(
    self, inbox: Inbox, agreed: Manifest | None = None
  ) -> Iterator[bool]:
    """Yields before each try whether the grace time is over, then waits.

    What takes longer than the grace time, and a listed message that is not
    there, is a reason to look around.
    """
    clock, grace = self.store.clock, self.rules.grace_s
    start, wait = clock(), FIRST_PAUSE_S
    looked = start if agreed is None else -math.inf
    while True:
      yield clock() - start > grace
      if clock() - looked > grace:
        looked = clock()
        self._look_around(inbox, agreed)
      self.store.pause(wait)
      wait = min(PAUSE_GROWTH * wait, LONGEST_PAUSE_S)

  def _look_around(self, inbox: Inbox, agreed: Manifest | None) -> None:
    """Writes again what may have vanished; sees whether the others went on.

    Raises:
      LostError: If there is a newer snapshot than this replica knows.
    """
    known = self.memory.event if inbox.is_past else inbox.event
    if max(self.snapshots.events(), default=0) > known:
      raise LostError(f"the others have gone on from event {inbox.event}")
    lacks = not inbox.turn and len(inbox.held) < self.rules.quorum
    if lacks and agreed is None and not inbox.is_past:
      sent = ", ".join(inbox.held) or "nobody"
      said = "event %d waits for a quorum of %d: there are messages of %s"
      _LOG.info(said, inbox.event, self.rules.quorum, sent)
    for path, data in self.kept.items():
      if path.startswith(MANIFESTS):
        self.store.create(path, data)
      else:
        self.store.put(path, data)
    digests = {each.digest for each in agreed.listed} if agreed else set()
    for name, message in inbox.held.items():
      path = message_path(inbox.event, inbox.turn, name)
      if message.digest in digests:
        self.store.put(path, message.data)
      elif agreed is None:
        self.store.create(path, message.data)


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
