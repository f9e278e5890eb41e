"""The objects of a run: their paths, and messages as raw bytes.

run.json, run.copy.json      what is trained, and by which rules
seat/0002                    a replica that takes part from an event on
event/0000000012/0/oslo      message of a replica: event, turn, name
proposal/0000000012.0        the first list of a turn's messages
manifest/0000000012.0        the same list, once it is decided: all average it
share/0000000012/0/5         share 5 of a turn's mean, if it is made in shares
share/0000000012/0/5.rest    the residual of this share
snapshot/0000000064/...      shared state before an event
gone/0000000064, ....copy    say that the events from this one up to the next
                             snapshot were deleted
probe/oslo.1f0c...           an object that a replica creates to test the store

So a replica knows the path of each object that it needs. It asks for several
objects at the same time. If it waits for the messages of many replicas, it
lists the folder of the turn, so a message that is missing costs no request.

A message is the tags of its signature (`signer.py`), a fixed header and then
numpy arrays. The header has a digest of the layout (types and shapes), the
weight of the message, and the name of the shared state that it belongs to: the
digest of the manifest before. In the first turn of an event, the fingerprint of
that state follows the header. All replicas know the layout of a message from
the plan. So they know its size before they ask for it.
"""

import dataclasses
import functools
import hashlib
import logging
import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.buffers import Buffer, Data, parts_of
from dilocox_jax.mailbox_protocol.fingerprints import (
  Fingerprint,
  SharedState,
  rows_bytes,
  rows_in,
)
from dilocox_jax.mailbox_protocol.signer import (
  TAG_BYTES,
  Signer,
  signed_bytes,
)

_LOG = logging.getLogger(__name__)
RUN = "run.json"
RUN_COPY = "run.copy.json"
SEATS = "seat"
EVENTS = "event"
PROPOSALS = "proposal"
MANIFESTS = "manifest"
SHARES = "share"
SNAPSHOTS = "snapshot"
# Paths, within each folder, of the objects that replicas write for an event.
_PATHS_OF_EVENTS = {
  EVENTS: re.compile(r"([0-9]{10,})/[0-9]+/[a-z0-9][a-z0-9_-]{0,31}"),
  PROPOSALS: re.compile(r"([0-9]{10,})\.[0-9]+"),
  MANIFESTS: re.compile(r"([0-9]{10,})\.[0-9]+"),
  SHARES: re.compile(r"([0-9]{10,})/[0-9]+/[0-9]+(?:\.rest)?"),
  SNAPSHOTS: re.compile(r"([0-9]{10,})/(?:claim|arrays|index)"),
}

# Layout, digest of the manifest before, weight, event of the snapshot that the
# sender began with, and `Fingerprint.exact_digest`.
_HEADER = struct.Struct("<32s32sdq8s")
# If messages of so few replicas are missing, each of them is asked for. A
# listing costs as much as twelve such requests in a bucket of S3, and it does
# not bring the message.
FEW = 3
HEADER_BYTES = _HEADER.size  # Before the fingerprint and the arrays.

Kind = tuple[np.dtype, tuple[int, ...]]  # Type and shape of an array.


def seat_path(index: int) -> str:
  """Returns the path of a seat."""
  return f"{SEATS}/{index:04d}"


def messages_folder(event: int, turn: int) -> str:
  """Returns the folder of a turn's messages."""
  return f"{EVENTS}/{event:010d}/{turn}"


def message_path(event: int, turn: int, replica: str) -> str:
  """Returns the path of a replica's message."""
  return f"{messages_folder(event, turn)}/{replica}"


def proposal_path(event: int, turn: int) -> str:
  """Returns the path of the list that is proposed for a turn."""
  return f"{PROPOSALS}/{event:010d}.{turn}"


def manifest_path(event: int, turn: int) -> str:
  """Returns the path of a turn's manifest."""
  return f"{MANIFESTS}/{event:010d}.{turn}"


def shares_folder(event: int, turn: int) -> str:
  """Returns the folder of the shares of a turn's mean."""
  return f"{SHARES}/{event:010d}/{turn}"


def share_path(event: int, turn: int, number: int) -> str:
  """Returns the path of a share of a turn's mean."""
  return f"{shares_folder(event, turn)}/{number}"


def residual_path(event: int, turn: int, number: int) -> str:
  """Returns the path of the residual of a share."""
  return f"{share_path(event, turn, number)}.rest"


def snapshot_path(event: int, part: str) -> str:
  """Returns the path of a part of the snapshot before an event."""
  return f"{SNAPSHOTS}/{event:010d}/{part}"


def gone_paths(start: int) -> tuple[str, str]:
  """Returns the paths of the two marks of a deleted interval of events.

  Args:
    start: The first event of the interval.
  """
  return f"gone/{start:010d}", f"gone/{start:010d}.copy"


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


def message_bytes(num_array_bytes: int) -> int:
  """Returns the number of bytes of a message, with its tags and its header.

  Args:
    num_array_bytes: Bytes of its arrays.
  """
  return signed_bytes(HEADER_BYTES + num_array_bytes)


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
    data: The whole object as it is in the store, in one or several parts.
    weight: Weight of the message in the mean; 0 if the sender's values are not
      finite.
    arrays: The arrays that are averaged.
    state: The sender's shared state.
    norm: Norm of the decoded values, as the sender of a message in slices
      declares it (`sliced.py`); None: it is computed from `arrays`.
    is_whole: Whether `data` is the whole object, and not just one section.
  """

  data: Data
  weight: float
  arrays: list[np.ndarray]
  state: SharedState = SharedState()
  norm: float | None = None
  is_whole: bool = True

  @property
  def digest(self) -> str:
    """The signature with which the object begins, in hexadecimal digits."""
    return bytes(parts_of(self.data)[0][:TAG_BYTES]).hex()


@dataclasses.dataclass
class Inbox:
  """The messages of one turn that a replica has read. Each is read once.

  Threads may read messages at the same time.

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
    expected: Replicas whose messages the turn waits for up to the grace time.
    there: Replicas whose messages are in the store, as far as this replica
      knows. It may be wrong, as messages come and vanish.
    held: The messages that this replica has, by name of their sender.
    taken: The seats that were taken since the event before, as their holders
      wrote them.
    num_looks: How often this replica has looked whether the turn is settled.
    num_slices: Number of slices into which messages are cut, S
      (`sliced.SlicedInbox`); 0: they are not cut.
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
  expected: Sequence[str] = ()
  there: set[str] = dataclasses.field(default_factory=set)
  held: dict[str, Message] = dataclasses.field(default_factory=dict)
  taken: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  num_looks: int = 0
  num_slices: int = 0

  def __post_init__(self) -> None:
    """Derives the size and the layout of the messages."""
    self._kinds: list[Kind] = [
      (array.dtype, array.shape) for array in self.like
    ]
    self._arrays_start = _HEADER.size + rows_bytes(self.num_blocks)
    self.num_bytes = signed_bytes(self._arrays_start + num_bytes(self._kinds))
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

    At the same time it looks for the messages of the expected replicas, unless
    they are known to be there.

    Args:
      replica: Name of this replica, the sender.
      weight: Weight of the message in the mean.
      arrays: The arrays that are averaged. They are not copied, so nobody may
        change them before the event after next.
      state: The sender's shared state, with a fingerprint of `num_blocks`.

    Returns:
      The new message. The message that is in the store may be an earlier one;
      it is in `held`.
    """
    path = message_path(self.event, self.turn, replica)
    message = self._sealed(path, weight, arrays, state)
    data = message.data
    calls: list[Callable] = [functools.partial(self.store.create, path, data)]
    others = [name for name in self.expected if name != replica]
    if len(others) > FEW and not self.covers(others):
      calls.append(self.look)
    is_created, *_ = self.store.at_once(calls)
    if is_created:
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

  def _sealed(
    self,
    path: str,
    weight: float,
    arrays: Sequence[np.ndarray],
    state: SharedState,
  ) -> Message:
    """Returns a new message of this replica, which is not written yet.

    Args:
      path: Path of the message.
      weight: As for `send`.
      arrays: As for `send`.
      state: As for `send`.
    """
    header = _HEADER.pack(
      self._layout,
      bytes.fromhex(state.name),
      weight,
      state.base,
      state.fingerprint.exact_digest,
    )
    content = [raw_bytes(array) for array in (state.fingerprint.rows, *arrays)]
    return Message(
      data=self.signer.sign(path, header, *content),
      weight=float(weight),
      arrays=list(arrays),
      state=state,
    )

  def is_ours(self, path: str, stored: Buffer) -> bool:
    """Returns whether a replica of this run has written a whole message.

    Args:
      path: Path of the message.
      stored: The bytes that were read there.
    """
    return self.signer.verify(path, stored) is not None

  def look(self) -> None:
    """Lists the messages that are in the store."""
    folder = messages_folder(self.event, self.turn)
    self.there = {
      path.rpartition("/")[2]
      for path, size in self.store.sizes(folder).items()
      if size == self.num_bytes
    }

  def covers(self, replicas: Iterable[str]) -> bool:
    """Returns whether messages of all these replicas should be there."""
    return all(name in self.held or name in self.there for name in replicas)

  def reads(self, replicas: Iterable[str]) -> list[Callable[[], None]]:
    """Returns functions that read the messages that should be there.

    Args:
      replicas: Names of the senders. Messages that are held are not read again.
    """
    return [
      functools.partial(self.read, name)
      for name in replicas
      if name in self.there and name not in self.held
    ]

  def missing(self, replicas: Iterable[str]) -> list[str]:
    """Returns those of some replicas whose messages are not held."""
    return [name for name in replicas if name not in self.held]

  def has(self, replica: str) -> bool:
    """Returns whether a replica's message has arrived.

    It asks the store unless the message is in `held`.
    """
    if replica not in self.held:
      self.read(replica)
    return replica in self.held

  def has_listed(self, replica: str, digest: str) -> bool:
    """Returns whether the message that a manifest lists is in `held`."""
    message = self.held.get(replica)
    return message is not None and message.digest == digest

  def read(self, replica: str) -> None:
    """Reads a replica's message into `held`, if it is there and valid."""
    self.there.discard(replica)
    path = message_path(self.event, self.turn, replica)
    data = self.store.get(path, self.num_bytes)
    content = self.signer.verify(path, data)
    if data is None or content is None or len(data) != self.num_bytes:
      return
    layout, name, weight, base, exact_digest = _HEADER.unpack_from(content)
    if layout == self._layout and 0 <= weight < math.inf:
      rows = rows_in(content[_HEADER.size : self._arrays_start])
      self.held[replica] = Message(
        data=data,
        weight=weight,
        arrays=arrays_in(content[self._arrays_start :], self._kinds),
        state=SharedState(
          name=name.hex() if any(name) else "",
          base=base,
          fingerprint=Fingerprint(rows, exact_digest),
        ),
      )
