"""Sends and reads messages that are cut into slices.

If each replica averages one slice of all messages (`shares.py`), it needs only
that slice of each message. So the object of a message has one section for each
slice. Each section has its own seal, a code with which the section is verified
without the others (`signer.py`). The digest of the whole message, its header
and its fingerprint (a few random sums of the sender's state, or nothing) are
repeated in each section:

    section 0    digest, seal, header, fingerprint, slice 0
    section 1    digest, seal, header, fingerprint, slice 1
    ...

`reference.shares` says where messages are cut.
"""

import dataclasses
import functools
import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.buffers import Buffer
from dilocox_jax.mailbox_protocol.fingerprints import (
  Fingerprint,
  SharedState,
  rows_bytes,
  rows_in,
)
from dilocox_jax.mailbox_protocol.messages import (
  Inbox,
  Message,
  message_path,
  raw_bytes,
)
from dilocox_jax.mailbox_protocol.signer import (
  SECTION_HEAD_BYTES,
  TAG_BYTES,
)
from dilocox_jax.reference.row_codecs import FloatRows
from dilocox_jax.reference.shares import Cuts, Table, Tables

# The header: digest of the layout, digest of the manifest of the event before,
# weight, event of the snapshot that the sender began with,
# `Fingerprint.exact_digest`, and norm of the decoded values.
_HEADER = struct.Struct("<32s32sdq8sd")


def sliced_message_bytes(num_array_bytes: int, num_slices: int) -> int:
  """Returns how many bytes a message has that is cut into slices.

  The arrays of the message have `num_array_bytes` bytes. The random sums of the
  sender's state (fingerprint) are not counted.
  """
  return num_array_bytes + num_slices * (SECTION_HEAD_BYTES + _HEADER.size)


class Section(NamedTuple):
  """One slice of a message, and the message's digest.

  Attributes:
    digest: Digest of the whole message, as 64 hexadecimal digits.
    tables: The slice, as tables of encoded rows.
  """

  digest: str
  tables: list[Table]


@dataclasses.dataclass
class SlicedInbox(Inbox):
  """The messages of one turn, of which a replica reads only some slices.

  `num_slices` must be at least 1. Messages in `held` that were read from the
  store have no arrays.

  Attributes:
    tables: How the arrays of a message are encoded.
    first_slice: Number of the slice that this replica reads of each message
      before the list of messages is decided: the slice that it averages itself,
      or 0 if it averages none.
    sections: The slices that this replica has read, by (sender, number).
  """

  tables: Tables = Tables(FloatRows(), widths=())
  first_slice: int = 0
  sections: dict[tuple[str, int], Section] = dataclasses.field(
    default_factory=dict
  )

  def __post_init__(self) -> None:
    """Derives where messages are cut, their size and their layout."""
    super().__post_init__()
    # Only the shapes matter, so zeros stand for the arrays.
    like = [
      np.broadcast_to(np.zeros((), array.dtype), array.shape)
      for array in self.like
    ]
    self.cuts = Cuts.of(self.tables.of_arrays(like), self.num_slices)
    self._slice_start = _HEADER.size + rows_bytes(self.num_blocks)
    sizes = [
      SECTION_HEAD_BYTES + self._slice_start + self.cuts.num_bytes(number)
      for number in range(self.num_slices)
    ]
    self._starts = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    self.num_bytes = self._starts[-1]
    # A message that is cut in another way must not be read as one of this turn.
    text = f"slices[{self.num_slices}];{self.tables}".encode()
    self._layout = hashlib.sha256(self._layout + text).digest()

  def _sealed(
    self,
    path: str,
    weight: float,
    arrays: Sequence[np.ndarray],
    state: SharedState,
  ) -> Message:
    """Returns a signed message of this replica in slices, without writing it.

    If the norm of the decoded values is not finite, the message has the weight
    0 and declares the norm 0.
    """
    tables = self.tables.of_arrays(arrays)
    norm = self.tables.norm(tables) if weight else 0.0
    if not math.isfinite(norm):
      weight = 0.0
      norm = 0.0
    header = _HEADER.pack(
      self._layout,
      bytes.fromhex(state.name),
      weight,
      state.base,
      state.fingerprint.exact_digest,
      norm,
    )
    rows = raw_bytes(state.fingerprint.rows)
    sections = []
    for number in range(self.num_slices):
      part = self.cuts.slice_of(tables, number)
      matrices = [raw_bytes(matrix) for table in part for matrix in table]
      sections.append([header, rows, *matrices])
    return Message(
      data=self.signer.sign_sections(path, sections),
      weight=float(weight),
      arrays=list(arrays),
      state=state,
      norm=norm,
    )

  def is_ours(self, path: str, stored: Buffer) -> bool:
    """Returns whether the bytes at a path are a whole message of this run."""
    view = memoryview(stored)
    return all(
      self.signer.verify_section(
        path,
        number,
        self.num_slices,
        view[self._starts[number] : self._starts[number + 1]],
      )
      is not None
      for number in range(self.num_slices)
    )

  def read(self, replica: str) -> None:
    """Reads slice `first_slice` of a replica's message.

    A valid slice is added to `sections`. If `held` has no message of this
    sender, the message is added there, without arrays. The sender is removed
    from `there`.
    """
    self.there.discard(replica)
    self._read_section(replica, self.first_slice)

  def read_slices(
    self, replicas: Sequence[str], number: int
  ) -> list[Callable[[], None]]:
    """Returns functions that read slice `number` of each sender's message.

    There is no function for a slice that this replica has already.
    """
    return [
      functools.partial(self._read_section, name, number)
      for name in replicas
      if self.slice(name, number) is None
    ]

  def slice(self, replica: str, number: int) -> Section | None:
    """Returns a slice of a sender's message; None if none was read yet."""
    message = self.held.get(replica)
    if message is not None and message.is_whole:
      tables = self.tables.of_arrays(message.arrays)
      return Section(message.digest, self.cuts.slice_of(tables, number))
    return self.sections.get((replica, number))

  def forget(self, replica: str, number: int) -> None:
    """Forgets a slice of a message, and the message itself.

    The slice can then be read again.
    """
    self.sections.pop((replica, number), None)
    self.held.pop(replica, None)

  def _read_section(self, replica: str, number: int) -> None:
    """Reads a section (one slice and the header) of a replica's message.

    A valid slice is added to `sections`. If `held` has no message of this
    sender, the message is added there, without arrays. If the sender replaces
    its message meanwhile, the slice and the message in `held` have different
    digests.
    """
    path = message_path(self.event, self.turn, replica)
    data = self.store.get_range(
      path, self._starts[number], self._starts[number + 1]
    )
    content = self.signer.verify_section(path, number, self.num_slices, data)
    if data is None or content is None:
      return
    if len(data) != self._starts[number + 1] - self._starts[number]:
      return
    layout, state_name, weight, base, exact_digest, norm = _HEADER.unpack_from(
      content
    )
    is_usable = 0 <= weight < math.inf and 0 <= norm < math.inf
    if layout != self._layout or not is_usable:
      return
    tables = self.cuts.slice_in(content[self._slice_start :], number)
    digest = bytes(data[:TAG_BYTES]).hex()
    self.sections[replica, number] = Section(digest, tables)
    if replica in self.held:
      return
    rows = rows_in(content[_HEADER.size : self._slice_start])
    self.held[replica] = Message(
      data=data,
      weight=weight,
      arrays=[],
      state=SharedState(
        name=state_name.hex() if any(state_name) else "",
        base=base,
        fingerprint=Fingerprint(rows, exact_digest),
      ),
      norm=norm,
      is_whole=False,
    )
