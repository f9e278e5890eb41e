"""The objects of a run: their paths, and messages as raw bytes.

run.json, run.copy.json      what is trained, and by which rules
seat/0002                    a replica that takes part, and since when
event/0000000012/0/oslo      message of a replica: event, turn, name
proposal/0000000012.0        the first list of a turn's messages
manifest/0000000012.0        the same list, once it is decided: all average it
snapshot/0000000064/...      shared state before an event
gone/0000000003, ....copy    say that a block of events was deleted
probe/oslo.1f0c...           an object that a replica creates to test the store

So a replica knows the path of each object that it needs, without listing the
store. A message is a fixed header and then numpy arrays. The header has a
digest of the layout (types and shapes), the weight of the message, and the name
of the shared state that it belongs to: the digest of the manifest before. In
the first turn of an event, the fingerprint of that state follows the header.
All replicas know the layout of a message from the plan. So they know its size
before they ask for it.
"""

import dataclasses
import hashlib
import logging
import math
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.fingerprints import (
  Fingerprint,
  SharedState,
  rows_bytes,
  rows_in,
)
from dilocox_jax.mailbox_protocol.signer import TAG_BYTES, Buffer, Signer

_LOG = logging.getLogger(__name__)
RUN = "run.json"
RUN_COPY = "run.copy.json"
EVENTS = "event"
PROPOSALS = "proposal"
MANIFESTS = "manifest"
SNAPSHOTS = "snapshot"
# Paths, within each folder, of the objects that replicas write for an event.
_PATHS_OF_EVENTS = {
  EVENTS: re.compile(r"([0-9]{10,})/[0-9]+/[a-z0-9][a-z0-9_-]{0,31}"),
  PROPOSALS: re.compile(r"([0-9]{10,})\.[0-9]+"),
  MANIFESTS: re.compile(r"([0-9]{10,})\.[0-9]+"),
  SNAPSHOTS: re.compile(r"([0-9]{10,})/(?:claim|arrays|index)"),
}

# Layout, digest of the manifest before, weight, event of the snapshot that the
# sender began with, and the digest of its integers.
_HEADER = struct.Struct("<32s32sdq8s")
HEADER_BYTES = TAG_BYTES + _HEADER.size  # Before the arrays of a message.

Kind = tuple[np.dtype, tuple[int, ...]]  # Type and shape of an array.


def seat_path(index: int) -> str:
  """Returns the path of a seat."""
  return f"seat/{index:04d}"


def message_path(event: int, turn: int, replica: str) -> str:
  """Returns the path of a replica's message."""
  return f"{EVENTS}/{event:010d}/{turn}/{replica}"


def proposal_path(event: int, turn: int) -> str:
  """Returns the path of the list that is proposed for a turn."""
  return f"{PROPOSALS}/{event:010d}.{turn}"


def manifest_path(event: int, turn: int) -> str:
  """Returns the path of a turn's manifest."""
  return f"{MANIFESTS}/{event:010d}.{turn}"


def snapshot_path(event: int, part: str) -> str:
  """Returns the path of a part of the snapshot before an event."""
  return f"{SNAPSHOTS}/{event:010d}/{part}"


def gone_paths(block: int) -> tuple[str, str]:
  """Returns the paths of the two marks of a deleted block of events."""
  return f"gone/{block:010d}", f"gone/{block:010d}.copy"


def probe_path(replica: str, token: str) -> str:
  """Returns the path of an object that a replica creates to test the store."""
  return f"probe/{replica}.{token}"


def event_of(path: str) -> int:
  """Returns the event of a message, list or snapshot; -1 for other objects.

  Objects of old events are deleted. So the whole path must be one that a
  replica writes: an object with any other name belongs to somebody else.
  """
  folder, _, path_in_folder = path.partition("/")
  if folder not in _PATHS_OF_EVENTS:
    return -1
  match = _PATHS_OF_EVENTS[folder].fullmatch(path_in_folder)
  if match is None:
    return -1
  return int(match.group(1))


def num_bytes(kinds: Iterable[Kind]) -> int:
  """Returns the number of bytes of arrays of some types and shapes."""
  return sum(kind.itemsize * math.prod(shape) for kind, shape in kinds)


def raw_bytes(array: np.ndarray) -> memoryview:
  """Returns the values of an array in little-endian order."""
  little = array.astype(array.dtype.newbyteorder("<"), copy=False)
  return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def arrays_in(content: Buffer, kinds: Iterable[Kind]) -> list[np.ndarray]:
  """Returns the arrays whose raw bytes follow each other in a buffer.

  Args:
    content: The bytes of all arrays.
    kinds: Type and shape of each array.
  """
  arrays = []
  start = 0
  for kind, shape in kinds:
    end = start + kind.itemsize * math.prod(shape)
    flat = np.frombuffer(content[start:end], kind.newbyteorder("<"))
    arrays.append(flat.astype(kind, copy=False).reshape(shape))
    start = end
  return arrays


class Message(NamedTuple):
  """The message of one replica in a turn.

  Attributes:
    data: The whole object as it is in the store.
    weight: Weight of the message in the mean; 0 if the sender's values are not
      finite.
    arrays: The arrays that are averaged.
    state: The sender's shared state.
  """

  data: bytes
  weight: float
  arrays: list[np.ndarray]
  state: SharedState = SharedState()

  @property
  def digest(self) -> str:
    """The signature with which the object begins, in hexadecimal digits."""
    return self.data[:TAG_BYTES].hex()


@dataclasses.dataclass
class Inbox:
  """The messages of one turn that a replica has read. Each is read once.

  Attributes:
    store: A `RetryingStore` store.
    signer: The signer of the run.
    event: Number of the event.
    turn: Number of the turn.
    like: Arrays of the types and shapes that every message of this turn has.
    kind: Number that is equal for events with messages of one size, e.g. the
      number of the fragment.
    num_blocks: Blocks of the fingerprint that every message of this turn has.
    is_past: Whether the turn was settled before the snapshot with which this
      replica began. Then the replica only reads the turn's objects.
    held: The messages that this replica has, by name of their sender.
    num_bytes: Bytes of one message.
  """

  store: Any
  signer: Signer
  event: int
  turn: int
  like: Sequence[np.ndarray]
  kind: int = 0
  num_blocks: int = 0
  is_past: bool = False
  held: dict[str, Message] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    """Derives the size and the layout of the messages."""
    self._kinds: list[Kind] = [
      (array.dtype, array.shape) for array in self.like
    ]
    self._arrays_start = _HEADER.size + rows_bytes(self.num_blocks)
    self.num_bytes = TAG_BYTES + self._arrays_start + num_bytes(self._kinds)
    parts = [f"{kind.name}{list(shape)}" for kind, shape in self._kinds]
    text = ";".join([f"fingerprint[{self.num_blocks}]", *parts])
    self._layout = hashlib.sha256(text.encode()).digest()

  def send(
    self,
    replica: str,
    weight: float,
    arrays: Sequence[np.ndarray],
    state: SharedState = SharedState(),  # noqa: B008 - nobody changes it
  ) -> Message:
    """Writes a message, unless an earlier message of this replica is there.

    Args:
      replica: Name of this replica, the sender.
      weight: Weight of the message in the mean.
      arrays: The arrays that are averaged.
      state: The sender's shared state, with a fingerprint of `num_blocks`.

    Returns:
      The new message. The message that is in the store may be an earlier one;
      it is in `held`.
    """
    path = message_path(self.event, self.turn, replica)
    header = _HEADER.pack(
      self._layout,
      bytes.fromhex(state.name),
      weight,
      state.base,
      state.fingerprint.integers,
    )
    content = [raw_bytes(array) for array in (state.fingerprint.rows, *arrays)]
    data = self.signer.sign(path, header, *content)
    message = Message(
      data=data,
      weight=float(weight),
      arrays=list(arrays),
      state=state,
    )
    if self.store.create(path, data):
      self.held[replica] = message
    elif not self.has(replica):
      # The object there has no valid signature, so no replica has written it.
      self.store.put(path, data)
      self.held[replica] = message
    if self.held[replica].digest != message.digest:
      _LOG.info(
        "event %d: %s has sent already, in an earlier life or as another"
        " process of this name: that message counts, and this one does not",
        self.event,
        replica,
      )
    return message

  def has(self, replica: str) -> bool:
    """Returns whether a replica's message has arrived.

    It asks the store unless the message is in `held`.
    """
    if replica not in self.held:
      self._read(replica)
    return replica in self.held

  def listed(self, replica: str, digest: str) -> Message | None:
    """Returns the message that a manifest lists, or None if it is missing."""
    if replica not in self.held or self.held[replica].digest != digest:
      self._read(replica)
    message = self.held.get(replica)
    if message is None or message.digest != digest:
      return None
    return message

  def _read(self, replica: str) -> None:
    """Reads a replica's message into `held`, if it is there and valid."""
    path = message_path(self.event, self.turn, replica)
    data = self.store.get(path, self.num_bytes)
    content = self.signer.verify(path, data)
    if data is None or content is None or len(data) != self.num_bytes:
      return
    layout, name, weight, base, integers = _HEADER.unpack_from(content)
    if layout == self._layout and 0 <= weight < math.inf:
      rows = rows_in(content[_HEADER.size : self._arrays_start])
      self.held[replica] = Message(
        data=data,
        weight=weight,
        arrays=arrays_in(content[self._arrays_start :], self._kinds),
        state=SharedState(
          name=name.hex() if any(name) else "",
          base=base,
          fingerprint=Fingerprint(rows, integers),
        ),
      )
