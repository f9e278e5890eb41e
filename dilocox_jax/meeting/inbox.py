"""The messages of one turn that a replica has read; each is read once."""

from typing import Any, NamedTuple

from dilocox_jax.meeting.packing import Content, Layout, packed, unpacked
from dilocox_jax.meeting.paths import message_path
from dilocox_jax.meeting.seal import TAG_BYTES, Seal


class Received(NamedTuple):
  """A message that opened.

  Attributes:
    data: The whole object.
    digest: Its keyed digest, which is what it begins with.
    message: What it says.
  """

  data: bytes
  digest: str
  message: Content


class Inbox:
  """Reads the messages of one turn of an event."""

  def __init__(
    self,
    store: Any,
    seal: Seal,
    event: int,
    turn: int,
    layout: Layout,
    is_past: bool = False,
  ):
    """Opens the inbox of a turn.

    Args:
      store: A `Patient` store.
      seal: The seal of the run.
      event: Number of the event.
      turn: Number of the turn.
      layout: What every message of this turn looks like.
      is_past: Whether the turn was settled before the snapshot with which this
        replica began. It is only read.
    """
    self.event, self.turn, self.layout = event, turn, layout
    self.is_past = is_past
    self.held: dict[str, Received] = {}
    self._store, self._seal = store, seal

  def send(self, replica: str, content: Content) -> Received:
    """Writes a message, unless an earlier one of this replica is there.

    Returns:
      What was to be written. What is there is in `held`.
    """
    path = message_path(self.event, self.turn, replica)
    data = self._seal.closed(path, *packed(content))
    own = Received(data, _digest(data), content)
    if self._store.create(path, data):
      self.held[replica] = own
    elif not self.has(replica):  # Only a stranger writes what does not open.
      self._store.put(path, data)
      self.held[replica] = own
    return own

  def has(self, replica: str) -> bool:
    """Returns whether a replica's message has arrived; asks if it is new."""
    if replica not in self.held:
      self._read(replica)
    return replica in self.held

  def listed(self, replica: str, digest: str) -> Received | None:
    """Returns the message that a manifest lists, or None if it is missing."""
    if replica not in self.held or self.held[replica].digest != digest:
      self._read(replica)
    received = self.held.get(replica)
    return received if received and received.digest == digest else None

  def _read(self, replica: str) -> None:
    path = message_path(self.event, self.turn, replica)
    data = self._store.get(path, self.layout.sealed_bytes)
    message = unpacked(self._seal.opened(path, data), self.layout)
    if data is not None and message is not None:
      self.held[replica] = Received(data, _digest(data), message)


def _digest(data: bytes) -> str:
  return data[:TAG_BYTES].hex()
