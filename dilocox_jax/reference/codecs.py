"""Codecs of messages in plain numpy: `float32`, and `int(bits=1)`.

A codec turns the leaves of a model into the arrays of a message, and back. It
cuts leaves into rows of values. For example, `int(bits=1)` (`Signs`) with
block_size=4 cuts a leaf of 6 values into two rows of 3. It sends a bit for each
value, and a scale for each row:

    values    0.5  -1.0   1.5 |  2.0   0.0  -4.0
    codes       0     1     0 |    0     0     1    a set bit means "negative"
    scales              1.0   |             2.0     the mean of |x| of each row
    received  1.0  -1.0   1.0 |  2.0   2.0  -2.0

The messages are those of a replica that is not divided among devices. The fast
code is codecs/quantize.py (`Float`, `Int`) and codecs/batching.py
(`RowLayout`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays
from dilocox_jax.reference.row_codecs import FloatRows, IntRows, RowCodec

# A leaf with more values than this is a group of its own.
MOST_CONCATENATED = 2**22
BLOCKS = "blocks/"  # Leaves below it have an axis of layers in front.


class MessageCodec:
  """Base class of the codecs of messages.

  Leaves are encoded in *groups*. A leaf of more than 2^22 values is a group of
  its own. All other leaves with rows of one width are one group. The groups are
  in the order of their first leaves.

  A subclass defines `rows`, `dtypes` and `width`.

  Attributes:
    rows: Codec that turns rows of values into bytes (`row_codecs`).
  """

  rows: RowCodec

  @property
  def dtypes(self) -> tuple[Any, ...]:
    """Types of the arrays that are sent for each group of leaves, in order.

    A group is leaves that are coded together.
    """
    raise NotImplementedError

  def width(self, shape: tuple[int, ...]) -> int:
    """Returns the number of values in a row. A leaf is coded in such rows.

    Args:
      shape: Shape of one layer of the leaf.
    """
    raise NotImplementedError

  def encode(self, tree: Arrays) -> list[np.ndarray]:
    """Returns the arrays of a message, in the order in which they are sent.

    Some leaves are coded together, as a group. Each group has one array for
    each type in `dtypes`.

    Args:
      tree: float32 leaves by path, in the same order on all replicas. The
        leaves below "blocks/" have an axis of layers in front.
    """
    arrays = []
    for names in self._groups(tree):
      rows = [self._rows_of(name, tree[name], names) for name in names]
      arrays += self._encoded(np.concatenate(rows, axis=1))
    return arrays

  def decode(self, arrays: Sequence[np.ndarray], like: Arrays) -> Arrays:
    """Decodes the arrays of a message to float32 leaves by path.

    Args:
      arrays: Arrays of the message, as `encode` returned them.
      like: Leaves with the same paths, shapes and order. Their values are not
        read.
    """
    groups = self._groups(like)
    arrays_per_group = len(arrays) // len(groups)
    leaves = {}
    for number, names in enumerate(groups):
      first = number * arrays_per_group
      group_arrays = arrays[first : first + arrays_per_group]
      width = self._width_of(names[0], like[names[0]])
      rows = self._decoded(group_arrays, width)
      start = 0
      for name in names:
        num_rows = self._rows_of(name, like[name], names).shape[1]
        leaf_rows = rows[:, start : start + num_rows]
        leaves[name] = _leaf_of(leaf_rows, name, like[name])
        start += num_rows
    return {name: leaves[name] for name in like}

  def _encoded(self, rows: np.ndarray) -> list[np.ndarray]:
    """Encodes the rows of a group of leaves, float32 [layers, rows, width].

    Returns arrays [layers, rows, ...] of the types `dtypes`.
    """
    layers_and_rows = rows.shape[:2]
    encoded = self.rows.encode(rows.reshape(-1, rows.shape[2]))
    return [
      array.view(dtype).reshape(*layers_and_rows, -1)
      for array, dtype in zip(encoded, self.dtypes, strict=True)
    ]

  def _decoded(self, arrays: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Decodes a group of leaves to rows, float32 [layers, rows, width]."""
    num_layers, num_rows = arrays[0].shape[:2]
    encoded = [
      np.ascontiguousarray(array)
      .view(np.uint8)
      .reshape(num_layers * num_rows, -1)
      for array in arrays
    ]
    values = self.rows.decode(encoded, width)
    return values.reshape(num_layers, num_rows, width)

  def _groups(self, tree: Arrays) -> list[list[str]]:
    """Returns the groups of leaves that are coded together, by their paths.

    Leaves of at most 2^22 values whose rows have one width are one group. Each
    larger leaf is a group of its own.
    """
    groups: dict[object, list[str]] = {}
    for name, leaf in tree.items():
      is_large = leaf.size > MOST_CONCATENATED
      key = name if is_large else self._width_of(name, leaf)
      groups.setdefault(key, []).append(name)
    return list(groups.values())

  def _width_of(self, name: str, leaf: np.ndarray) -> int:
    """Returns the number of values in a row of a leaf."""
    return self.width(_stacked(name, leaf).shape[1:])

  def _rows_of(
    self, name: str, leaf: np.ndarray, group: list[str]
  ) -> np.ndarray:
    """Returns the rows of a leaf, padded with zeros.

    They are [layers, rows, width] if the leaf is alone in its group; otherwise
    [1, rows of all layers, width].
    """
    width = self._width_of(name, leaf)
    stacked = _stacked(name, leaf)
    layers = stacked.reshape(len(stacked), -1)
    layers = _padded(layers, -layers.shape[1] % width)
    if len(group) > 1:
      return layers.reshape(1, -1, width)
    return layers.reshape(len(layers), -1, width)


@dataclasses.dataclass(frozen=True)
class Float32(MessageCodec):
  """Sends every value as it is, in 4 bytes. This is the codec `float32`.

  An infinite value becomes the largest finite number of its sign.
  """

  rows = FloatRows()

  @property
  def dtypes(self) -> tuple[Any, ...]:
    """Type of the only array of a group: float32."""
    return (np.float32,)

  def width(self, shape: tuple[int, ...]) -> int:
    """Returns the number of values in a row: the length of the last axis.

    A layer without axes is a row of one value.
    """
    return shape[-1] if shape else 1


@dataclasses.dataclass(frozen=True)
class Signs(MessageCodec):
  """Sends the sign of every value, and a scale for each row of values.

  This is the codec `int(bits=1)`. Rows of values become two arrays:

  - Bits, uint8 [..., rows, W]. A row is divided into eight parts of
    W = ceil(width / 8) values, and zeros fill the last parts. Value j of part k
    is value k W + j of the row. If it is negative, bit k of byte j is 1.
  - Scales, bfloat16 [..., rows, 1]: the mean of |x| of each row, rounded to the
    nearest bfloat16. If zeros fill the last row of a layer up to the width of
    the others, the mean counts them.

  Source: 1-bit SGD, Seide et al., 2014.

  Attributes:
    block_size: Largest number of values in a row.
  """

  block_size: int = 128
  rows = IntRows(bits=1)

  @property
  def dtypes(self) -> tuple[Any, ...]:
    """Types of the two arrays that are sent: uint8 bits and bfloat16 scales."""
    # numpy learns the type bfloat16 from this package. Programs that send no
    # messages do without it.
    import ml_dtypes

    return np.uint8, ml_dtypes.bfloat16

  def width(self, shape: tuple[int, ...]) -> int:
    """Returns the number of values in a row.

    A layer has as few rows as `block_size` allows, all of one length. For
    example, with a block size of 128 a layer of 300 values has 3 rows of 100.

    Args:
      shape: Shape of one layer of a leaf.
    """
    size = math.prod(shape)
    num_rows = -(-size // self.block_size)
    return -(-size // num_rows)


# Codec by the name that a config has.
CODECS: dict[str, MessageCodec] = {
  "float32": Float32(),
  "int(bits=1)": Signs(),
}


def _stacked(name: str, leaf: np.ndarray) -> np.ndarray:
  """Returns a leaf with an axis of layers in front, [layers, ...].

  Leaves below "blocks/" have this axis; any other leaf gets an axis of length
  1.
  """
  return leaf if name.startswith(BLOCKS) else leaf[np.newaxis]


def _leaf_of(rows: np.ndarray, name: str, like: np.ndarray) -> np.ndarray:
  """Returns a leaf, of the shape of `like`, from its rows without padding."""
  num_layers = len(_stacked(name, like))
  layers = rows.reshape(num_layers, -1)
  return layers[:, : like.size // num_layers].reshape(like.shape)


def _padded(values: np.ndarray, num_zeros: int) -> np.ndarray:
  """Adds `num_zeros` zeros at the end of the last axis of an array."""
  return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, num_zeros)])
