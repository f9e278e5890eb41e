"""The objects of a run: their paths in the store, and messages as raw bytes.

An event is one exchange. It has one turn or several, and in a turn a replica
sends one message. The shared state is the outer parameters, the outer
optimizer and the codec's common state. If messages are cut into slices, a share
is the mean of one slice of all messages.

run.json, run.copy.json      what is trained, and by which rules
seat/0002                    a replica, and the event from which it takes part
event/0000000012/0/oslo      message of a replica: event, turn, name
proposal/0000000012.0        the list of a turn's messages that is proposed
manifest/0000000012.0        the same list after the decision: all average it
share/0000000012/0/5         mean of slice 5 of a turn's messages
share/0000000012/0/5.rest    the residual of this share: what encoding lost
share/0000000012/0/5.wrong   says which replica has found that share 5 is wrong
snapshot/0000000064/...      the shared state before event 64
gone/0000000064              mark: the events from 64 up to the next snapshot
                             are deleted, or soon will be
gone/0000000064.copy         a second mark, in case the first one is lost
probe/oslo.1f0c...           an object that a replica creates to test the store

A message that is not cut consists of its signature (`signer.py`), a fixed
header, a fingerprint (a few random sums of the sender's shared state, only in
the first turn of an event), and the bytes of numpy arrays. `sliced.py` has the
form of a message that is cut.
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
# Patterns of the paths, within each folder, of the objects of an event.
_PATHS_OF_EVENTS = {
  EVENTS: re.compile(r"([0-9]{10,})/[0-9]+/[a-z0-9][a-z0-9_-]{0,31}"),
  PROPOSALS: re.compile(r"([0-9]{10,})\.[0-9]+"),
  MANIFESTS: re.compile(r"([0-9]{10,})\.[0-9]+"),
  SHARES: re.compile(r"([0-9]{10,})/[0-9]+/[0-9]+(?:\.rest|\.wrong)?"),
  SNAPSHOTS: re.compile(r"([0-9]{10,})/(?:claim|arrays|index)"),
}

# The header: digest of the layout, digest of the manifest of the event before,
# weight, event of the snapshot that the sender began with, and
# `Fingerprint.exact_digest`.
_HEADER = struct.Struct("<32s32sdq8s")
# If at most this many messages are missing, a replica asks for each of them
# without a listing of the folder. In a bucket of S3, a listing costs as much as
# twelve such requests, and it does not bring the messages.
FEW = 3
# Bytes of the header, which comes before the fingerprint and the arrays.
HEADER_BYTES = _HEADER.size

# Type and shape of an array. (The kind of an event is another thing.)
Kind = tuple[np.dtype, tuple[int, ...]]


def seat_path(index: int) -> str:
  """Returns the path of a seat by its number, e.g. "seat/0002".

  A seat is the entry of a replica that joins the run or comes back.
  """
  return f"{SEATS}/{index:04d}"


def messages_folder(event: int, turn: int) -> str:
  """Returns the folder of a turn's messages, e.g. "event/0000000012/0".

  `event` is the number of an exchange. `turn` is the number of a replica's
  message within the exchange, from 0.
  """
  return f"{EVENTS}/{event:010d}/{turn}"


def message_path(event: int, turn: int, replica: str) -> str:
  """Returns the path of a message, e.g. "event/0000000012/0/oslo".

  The parts are the event (exchange), the turn in it, and the sender's name.
  """
  return f"{messages_folder(event, turn)}/{replica}"


def proposal_path(event: int, turn: int) -> str:
  """Returns the path of a proposed manifest, e.g. "proposal/0000000012.0".

  A manifest lists the messages to average in a turn (one message of each
  replica) of an event (exchange).
  """
  return f"{PROPOSALS}/{event:010d}.{turn}"


def manifest_path(event: int, turn: int) -> str:
  """Returns the path of a turn's manifest, e.g. "manifest/0000000012.0".

  A manifest lists the messages to average in a turn (one message of each
  replica) of an event (exchange).
  """
  return f"{MANIFESTS}/{event:010d}.{turn}"


def shares_folder(event: int, turn: int) -> str:
  """Returns the folder of a turn's shares, e.g. "share/0000000012/0".

  A share is the mean of one slice of all messages in a turn. In a turn of an
  event (exchange), each replica sends one message.
  """
  return f"{SHARES}/{event:010d}/{turn}"


def share_path(event: int, turn: int, number: int) -> str:
  """Returns the path of a turn's share, e.g. "share/0000000012/0/5".

  In a turn of an event (exchange), each replica sends one message. This share
  is the mean of slice 5 of all messages in turn 0 of event 12.
  """
  return f"{shares_folder(event, turn)}/{number}"


def residual_path(event: int, turn: int, number: int) -> str:
  """Returns the path of a residual, e.g. "share/0000000012/0/5.rest".

  In a turn of an event (exchange), each replica sends one message. Share 5 is
  the mean of slice 5 of all messages in turn 0 of event 12. The residual is
  what encoding lost in this share.
  """
  return f"{share_path(event, turn, number)}.rest"


def wrong_share_path(event: int, turn: int, number: int) -> str:
  """Returns the path of the object which says that a share is wrong.

  A share is the mean of one slice of all messages in a turn. In a turn of an
  event (exchange), each replica sends one message. The object exists only if a
  replica has found the share to be wrong.
  """
  return f"{share_path(event, turn, number)}.wrong"


def snapshot_path(event: int, part: str) -> str:
  """Returns the path of a part of a snapshot, e.g. "snapshot/0000000064/index".

  A snapshot is the state that all replicas share before an event (exchange).
  Its parts are "claim", "arrays" and "index".
  """
  return f"{SNAPSHOTS}/{event:010d}/{part}"


def gone_paths(start: int) -> tuple[str, str]:
  """Returns the paths of the two objects that mark an interval as deleted.

  An interval is the events (exchanges) from one snapshot (copy of the shared
  state) to the next one. `start` is the first of them.
  """
  return f"gone/{start:010d}", f"gone/{start:010d}.copy"


def probe_path(replica: str, token: str) -> str:
  """Returns the path of an object that a replica creates to test the store.

  `token` is random text, so that no other process uses the same path.
  """
  return f"probe/{replica}.{token}"


def event_of(path: str) -> int:
  """Returns the number of the event (exchange) that an object belongs to.

  The result is -1 if the path does not have the form of a message, proposal,
  manifest, share or snapshot.

  Args:
    path: Path of the object, e.g. "manifest/0000000012.0".
  """
  folder, _, path_in_folder = path.partition("/")
  if folder not in _PATHS_OF_EVENTS:
    return -1
  match = _PATHS_OF_EVENTS[folder].fullmatch(path_in_folder)
  if match is None:
    return -1  # Perhaps somebody else's object: it must not be deleted.
  return int(match.group(1))


def num_bytes(kinds: Iterable[Kind]) -> int:
  """Returns how many bytes arrays of the given types and shapes have in all."""
  return sum(kind.itemsize * math.prod(shape) for kind, shape in kinds)


def message_bytes(num_array_bytes: int) -> int:
  """Returns the number of bytes of a message, with its signature and header.

  The random sums of the sender's state (fingerprint) are not counted.
  """
  return signed_bytes(HEADER_BYTES + num_array_bytes)


def _kind_text(kind: np.dtype, shape: tuple[int, ...]) -> str:
  """Returns dtype and shape of an array as a text, e.g. "uint8[12, 16]".

  All axes but the last count as one.
  """
  # A replica on one device may have rows [layers, rows, width]. On several
  # devices the same rows are [1, layers * rows, width].
  if len(shape) > 1:
    shape = math.prod(shape[:-1]), shape[-1]
  return f"{kind.name}{list(shape)}"


def raw_bytes(array: np.ndarray) -> memoryview:
  """Returns the bytes of an array's values, little-endian and in C order.

  The result may share its memory with the array.
  """
  little = array.astype(array.dtype.newbyteorder("<"), copy=False)
  return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def arrays_in(content: Buffer, kinds: Iterable[Kind]) -> list[np.ndarray]:
  """Returns the arrays whose raw bytes follow each other in `content`.

  `kinds` has the type and shape of each array. The arrays may share their
  memory with `content`, and may be read-only.
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
  """The message of one replica in one turn of an exchange.

  Attributes:
    data: The whole object as it is in the store, in one or several parts; one
      slice of it if not `is_whole`.
    weight: Weight of the message in the mean; 0 if the sender's values are not
      finite.
    arrays: The arrays that are averaged; [] if only one slice was read.
    state: Name and fingerprint (a few random sums) of the sender's shared
      state: outer parameters, outer optimizer and the codec's common state.
    norm: Euclidean norm of the decoded values, as the sender declares it if
      messages are cut into slices. None: it is computed from `arrays`.
    is_whole: Whether `data` is the whole object.
  """

  data: Data
  weight: float
  arrays: list[np.ndarray]
  state: SharedState = SharedState()
  norm: float | None = None
  is_whole: bool = True

  @property
  def digest(self) -> str:
    """First 32 bytes of the object, which sign it, as hexadecimal digits."""
    return bytes(parts_of(self.data)[0][:TAG_BYTES]).hex()


@dataclasses.dataclass
class Inbox:
  """The messages of one turn, as one replica sends and reads them.

  In a turn of an event (exchange), each replica sends one message. Threads may
  read different messages at the same time.

  Attributes:
    store: The folder or bucket, as a `RetryingStore`.
    signer: Signs and verifies the objects of the run.
    event: Number of the event (exchange).
    turn: Number of the message within the event, from 0.
    like: Arrays with the types and shapes of every message of this turn. Their
      values are not read.
    kind: Number of the fragment that is exchanged.
    num_blocks: Number of blocks in the fingerprint (random sums of the sender's
      state) of every message of this turn; 0 if messages have none.
    is_past: Whether the turn's event is before the snapshot with which this
      replica began. Then the replica only reads the turn's objects.
    expected: Names of the replicas whose messages the turn waits for, up to the
      grace time (`MailboxRules.grace_s`).
    there: Names of the replicas whose messages are probably in the store. When
      a message is asked for, its sender's name is removed. `look` lists the
      store again.
    held: The messages that this replica has, by name of their sender.
    taken: Contents of the seats that were taken since the event before, by
      replicas that join or come back: dicts with the replica's "name", and
      "since", the first event in which it takes part.
    num_looks: How often this replica has looked for the messages or the
      manifest (list of averaged messages) of this turn.
    seats_read_s: Time of the last look for new seats in this turn, by the clock
      of the store (seconds); None: there was none yet.
    num_slices: Number of slices into which messages are cut, S, so that each
      replica averages one of them (`sliced.SlicedInbox`); 0: they are not cut.
    num_bytes: Bytes of one message, with its signature.
    layout: Digest of types and shapes of a whole message, in hexadecimal
      digits.
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
  seats_read_s: float | None = None
  num_slices: int = 0

  def __post_init__(self) -> None:
    """Derives the size and the layout of the messages."""
    self._kinds: list[Kind] = [
      (array.dtype, array.shape) for array in self.like
    ]
    self._arrays_start = _HEADER.size + rows_bytes(self.num_blocks)
    self.num_bytes = signed_bytes(self._arrays_start + num_bytes(self._kinds))
    parts = [_kind_text(kind, shape) for kind, shape in self._kinds]
    text = ";".join([f"fingerprint[{self.num_blocks}]", *parts])
    self._layout = hashlib.sha256(text.encode()).digest()
    # That of whole messages, also if they are cut into slices.
    self.layout = self._layout.hex()

  def send(
    self,
    replica: str,
    weight: float,
    arrays: Sequence[np.ndarray],
    state: SharedState = SharedState(),  # noqa: B008 - nobody changes it
  ) -> Message:
    """Writes a message, unless an earlier message of this replica is there.

    An earlier message is there if this replica was restarted, or if a second
    process has the same name. Then the earlier message counts.

    Args:
      replica: Name of this replica, the sender.
      weight: Weight of the message in the mean.
      arrays: The arrays that are averaged. Do not change them in place before
        the next exchange has ended.
      state: The sender's shared state. Its fingerprint has `num_blocks` blocks.

    Returns:
      The message that was made from the arguments. `held[replica]` is the
      message that is in the store, which may be the earlier one.
    """
    path = message_path(self.event, self.turn, replica)
    message = self._sealed(path, weight, arrays, state)
    data = message.data
    calls: list[Callable] = [functools.partial(self.store.create, path, data)]
    # Beside the write, a listing finds out which of many messages are there.
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
        "event %d: %s has sent already, before a restart or as another process"
        " of this name: that message counts, and this one does not",
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
    """Returns a signed message of this replica, without writing it."""
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
    """Returns whether the bytes at a path are a whole message of this run."""
    return self.signer.verify(path, stored) is not None

  def look(self) -> None:
    """Lists the turn's folder, and sets `there` to the senders' names.

    An object whose size is not that of a message is passed over.
    """
    folder = messages_folder(self.event, self.turn)
    self.there = {
      path.rpartition("/")[2]
      for path, size in self.store.sizes(folder).items()
      if size == self.num_bytes
    }

  def covers(self, replicas: Iterable[str]) -> bool:
    """Returns whether each of these replicas is in `held` or in `there`."""
    return all(name in self.held or name in self.there for name in replicas)

  def reads(self, replicas: Iterable[str]) -> list[Callable[[], None]]:
    """Returns functions that read messages which are probably in the store.

    There is one for each of `replicas` that is in `there`, but not in `held`.
    """
    return [
      functools.partial(self.read, name)
      for name in replicas
      if name in self.there and name not in self.held
    ]

  def missing(self, replicas: Iterable[str]) -> list[str]:
    """Returns the names among `replicas` whose messages are not in `held`."""
    return [name for name in replicas if name not in self.held]

  def has(self, replica: str) -> bool:
    """Reads a replica's message if it is not in `held`.

    Returns whether it is in `held` now.
    """
    if replica not in self.held:
      self.read(replica)
    return replica in self.held

  def has_listed(self, replica: str, digest: str) -> bool:
    """Returns whether `held` has a replica's message with this digest."""
    message = self.held.get(replica)
    return message is not None and message.digest == digest

  def read(self, replica: str) -> None:
    """Reads a replica's message, and adds it to `held` if it is valid.

    A valid message is signed, has the size and layout of the turn's messages,
    and a weight that is finite and not negative. The sender is removed from
    `there`.
    """
    self.there.discard(replica)
    path = message_path(self.event, self.turn, replica)
    data = self.store.get(path, self.num_bytes)
    content = self.signer.verify(path, data)
    if data is None or content is None or len(data) != self.num_bytes:
      return
    layout, state_name, weight, base, exact_digest = _HEADER.unpack_from(
      content
    )
    if layout == self._layout and 0 <= weight < math.inf:
      rows = rows_in(content[_HEADER.size : self._arrays_start])
      self.held[replica] = Message(
        data=data,
        weight=weight,
        arrays=arrays_in(content[self._arrays_start :], self._kinds),
        state=SharedState(
          # Zeros: the sender has followed no manifest yet.
          name=state_name.hex() if any(state_name) else "",
          base=base,
          fingerprint=Fingerprint(rows, exact_digest),
        ),
      )
