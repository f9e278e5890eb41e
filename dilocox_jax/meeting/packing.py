"""A message: numpy arrays as raw bytes behind a fixed header.

The header has a digest of the layout (types and shapes), the sender's digest of
the shared state and its weight. All replicas know the layout of a message from
the plan. So they know its size before they ask for it.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dilocox_jax.meeting.seal import TAG_BYTES, Buffer

_HEADER = struct.Struct("<32s32sd")
HEADER_BYTES = TAG_BYTES + _HEADER.size  # Before the arrays of a message.


class Content(NamedTuple):
  """What one replica sends in a turn.

  Attributes:
    state: Digest of the sender's shared state, 32 bytes.
    weight: Weight of the message in the mean.
    arrays: The content.
  """

  state: bytes
  weight: float
  arrays: list[np.ndarray]


class Layout(NamedTuple):
  """Types and shapes of a message's arrays."""

  kinds: tuple[tuple[np.dtype, tuple[int, ...]], ...]

  @property
  def sealed_bytes(self) -> int:
    """Bytes of a sealed message."""
    content = sum(
      kind.itemsize * math.prod(shape) for kind, shape in self.kinds
    )
    return HEADER_BYTES + content

  def digest(self) -> bytes:
    """Returns a digest of the layout."""
    text = ";".join(f"{kind.name}{list(shape)}" for kind, shape in self.kinds)
    return hashlib.sha256(text.encode()).digest()


def layout_of(arrays: Sequence[np.ndarray]) -> Layout:
  """Returns the layout of some arrays."""
  return Layout(tuple((array.dtype, array.shape) for array in arrays))


def packed(message: Content) -> list[Buffer]:
  """Returns a message as bytes that follow each other, without a copy."""
  layout = layout_of(message.arrays)
  header = _HEADER.pack(layout.digest(), message.state, message.weight)
  return [header, *map(raw_bytes, message.arrays)]


def unpacked(content: Buffer | None, layout: Layout) -> Content | None:
  """Returns the message, or None if the bytes have another layout."""
  expected = layout.sealed_bytes - TAG_BYTES
  if content is None or len(content) != expected:
    return None
  digest, state, weight = _HEADER.unpack_from(content)
  if digest != layout.digest() or not 0 < weight < math.inf:
    return None
  return Content(state, weight, arrays_in(content[_HEADER.size :], layout))


def raw_bytes(array: np.ndarray) -> memoryview:
  """Returns the values of an array in little-endian order."""
  little = array.astype(array.dtype.newbyteorder("<"), copy=False)
  return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def arrays_in(content: Buffer, layout: Layout) -> list[np.ndarray]:
  """Returns arrays whose raw bytes follow each other."""
  arrays, start = [], 0
  for kind, shape in layout.kinds:
    end = start + kind.itemsize * math.prod(shape)
    flat = np.frombuffer(content[start:end], kind.newbyteorder("<"))
    arrays.append(flat.astype(kind, copy=False).reshape(shape))
    start = end
  return arrays
