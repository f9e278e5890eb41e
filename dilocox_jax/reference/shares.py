"""Computes the mean of messages in parts (shares), one by each replica.

A message consists of *tables*: rows of values of one width, encoded by one
codec. All rows of a message, table after table, are cut into S *slices* of
about equally many bytes. *Share* s is the mean of the slices s of all messages,
encoded with the codec of the messages. So the S shares together have the form
of a message, and their values are the mean.

For example, a message has one table of 5 rows of 4 bytes, and S = 2. Byte 10 of
20 is within row 2. A slice has whole rows, so slice 0 has rows 0 and 1, and
slice 1 has rows 2, 3 and 4.

Encoding rounds the mean. The error is the *residual* of the share. If it is
kept (`Tables.has_residual`), it is added to the same slice of the next mean
before that mean is encoded. The residual is encoded too, in 4 bits a value,
because another replica may compute the next share. For example, there is one
row, the mean is (0.4, 1.2) each time, and the codec rounds to whole numbers.
The rounding of the residual itself is left out here:

    mean          plus residual     share       residual
    0.4, 1.2      0.4, 1.2          0, 1        0.4, 0.2
    0.4, 1.2      0.8, 1.4          1, 1        -0.2, 0.4

All machines compute the same bytes of a share (`row_codecs`).

Source: 1-bit Adam, Tang et al., 2021, arXiv 2102.02888, for the residual of the
mean ("server error" there).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dilocox_jax.reference.row_codecs import IntRows, RowCodec

# Codec of residuals. Its mean squared error is 0.014 for values from N(0, 1).
RESIDUAL_ROWS = IntRows(bits=4)
# A norm is computed in float64 from float32 values. Machines differ by less.
NORM_TOLERANCE = 2.0**-10
# A share that is too large is scaled down a little further than it has to be,
# because its scales are rounded again.
_SHRINK = 0.98

# The encoded rows of a table: uint8 [R, bytes of a row] for each array.
Table = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Tables:
  """Says how the arrays of a message form tables of encoded rows.

  All rows of a table have one width. A codec that encodes a row as codes and a
  scale makes two arrays for each table. A message has the arrays of its first
  table, then those of its second table, and so on.

  Attributes:
    codec: Codec of all rows.
    widths: Number of values in a row of each table.
    has_residual: Whether the loss of encoding a share (a part of the mean) is
      kept and added to the next mean.
  """

  codec: RowCodec
  widths: tuple[int, ...]
  has_residual: bool = False

  def of_arrays(self, arrays: Sequence[np.ndarray]) -> list[Table]:
    """Divides the arrays of a message into its tables, as rows of bytes.

    Args:
      arrays: The arrays of the message. The last axis of each array is a row.
    """
    matrices = [_rows_of(array) for array in arrays]
    size = self.codec.num_arrays
    return [
      matrices[start : start + size] for start in range(0, len(matrices), size)
    ]

  def decode(self, tables: Sequence[Table]) -> list[np.ndarray]:
    """Decodes each table of encoded rows to its values, float32 [R, width]."""
    return [
      self.codec.decode(table, width)
      for table, width in zip(tables, self.widths, strict=True)
    ]

  def encode(self, values: Sequence[np.ndarray]) -> list[Table]:
    """Encodes the values of each table, float32 [R, width], to tables."""
    return [self.codec.encode(rows) for rows in values]

  def norm(self, tables: Sequence[Table]) -> float:
    """Returns the Euclidean norm of all decoded values together."""
    return norm_of_values(self.decode(tables))


def norm_of_values(values: Sequence[np.ndarray]) -> float:
  """Returns the Euclidean norm of all values together, computed in float64.

  If a value is NaN, the norm is NaN.
  """
  squares = 0.0
  for array in values:
    flat = array.reshape(-1)
    squares += float(np.einsum("i,i->", flat, flat, dtype=np.float64))
  return math.sqrt(squares) if squares >= 0 else math.nan


@dataclasses.dataclass(frozen=True)
class Cuts:
  """The rows at which a message is cut into S slices.

  A message consists of tables. A table consists of one array or several, e.g.
  the codes and the scales of encoded rows, which have equally many rows.

  Attributes:
    starts: First row of each slice in each table, [S + 1][number of tables].
      The last entry has the number of rows of each table.
    row_bytes: Bytes of a row in each array of each table, [number of
      tables][arrays of a table].
  """

  starts: tuple[tuple[int, ...], ...]
  row_bytes: tuple[tuple[int, ...], ...]

  @classmethod
  def of(cls, tables: Sequence[Table], num_slices: int) -> "Cuts":
    """Cuts the tables of a message into slices of about equally many bytes."""
    row_bytes = tuple(
      tuple(matrix.shape[1] for matrix in table) for table in tables
    )
    num_rows = [table[0].shape[0] for table in tables]
    sizes = [
      rows * sum(widths)
      for rows, widths in zip(num_rows, row_bytes, strict=True)
    ]
    # Example: two tables of 3 rows of 4 bytes have 24 bytes, and 2 slices. The
    # cut at byte 12 is after 3 rows of the first table and 0 of the second one.
    # So `starts` is [[0, 0], [3, 0], [3, 3]].
    starts = []
    for number in range(num_slices + 1):
      # Bytes before the cut. Each table takes its own bytes from them. Behind
      # the table that is cut `left` is negative: these tables have no row
      # before the cut.
      left = number * sum(sizes) // num_slices
      rows_before = []
      for rows, widths in zip(num_rows, row_bytes, strict=True):
        size = max(sum(widths), 1)
        rows_before.append(min(max(left // size, 0), rows))
        left -= rows * size
      starts.append(tuple(rows_before))
    # The last slice ends with all rows, even with rows of no bytes.
    starts[-1] = tuple(num_rows)
    return cls(starts=tuple(starts), row_bytes=row_bytes)

  @property
  def num_slices(self) -> int:
    """Number of slices, S."""
    return len(self.starts) - 1

  def num_rows(self, number: int) -> list[int]:
    """Returns the number of rows that slice `number` has in each table."""
    first = self.starts[number]
    end = self.starts[number + 1]
    return [stop - start for start, stop in zip(first, end, strict=True)]

  def num_bytes(self, number: int) -> int:
    """Returns the number of bytes of slice `number`."""
    return sum(
      rows * sum(widths)
      for rows, widths in zip(
        self.num_rows(number), self.row_bytes, strict=True
      )
    )

  def slice_of(self, tables: Sequence[Table], number: int) -> list[Table]:
    """Returns the rows of slice `number` in each table, without copying."""
    first = self.starts[number]
    end = self.starts[number + 1]
    return [
      [matrix[start:stop] for matrix in table]
      for table, start, stop in zip(tables, first, end, strict=True)
    ]

  def slice_in(self, content: bytes | memoryview, number: int) -> list[Table]:
    """Reads the tables of slice `number` from its raw bytes.

    The bytes are the rows of each array of each table, one after the other.

    Raises:
      ValueError: If there are too few bytes. More bytes are not read.
    """
    tables = []
    start = 0
    for rows, widths in zip(self.num_rows(number), self.row_bytes, strict=True):
      table = []
      for width in widths:
        stop = start + rows * width
        flat = np.frombuffer(content[start:stop], np.uint8)
        table.append(flat.reshape(rows, width))
        start = stop
      tables.append(table)
    return tables

  def join(self, slices: Sequence[Sequence[Table]]) -> list[np.ndarray]:
    """Joins all slices of a message to its arrays, uint8 [R, row bytes]."""
    return [
      np.concatenate([tables[t][a] for tables in slices])
      for t, widths in enumerate(self.row_bytes)
      for a in range(len(widths))
    ]


def make_share(
  tables: Tables,
  slices: Sequence[Sequence[Table]],
  weights: Sequence[float],
  norms: Sequence[float],
  residual: Sequence[np.ndarray] | None = None,
) -> tuple[list[Table], list[Table]]:
  """Averages the same slice of all messages, and encodes the mean (a share).

  A sender declares the norm of its whole message. A slice with a larger norm is
  scaled down to the declared norm. The norm of the share is at most the largest
  declared norm.

  Args:
    tables: How messages are encoded.
    slices: The same slice of each of the K messages, as tables of encoded rows.
      There must be at least one message. All replicas must have the messages in
      the same order.
    weights: Weight of each message, [K]. They must not all be 0.
    norms: Norm of each whole message, as its sender declared it, [K].
    residual: What was lost when this slice of the previous mean was encoded, as
      values of each table, float32 [R, width]; None: nothing.

  Returns:
    The tables of the share, and the tables of its residual, encoded by
    `RESIDUAL_ROWS`. The second list is empty if shares have no residual.
  """
  total: list[np.ndarray] | None = None
  sum_of_weights = np.float32(0)
  for message, weight, norm in zip(slices, weights, norms, strict=True):
    values = tables.decode(message)
    factor = np.float32(weight)
    # The whole weight counts, also if the slice is scaled down.
    sum_of_weights += factor
    actual_norm = norm_of_values(values)
    if actual_norm > norm * (1 + NORM_TOLERANCE):
      factor *= np.float32(norm / actual_norm)
    weighted = [factor * rows for rows in values]
    if total is None:
      total = weighted
    else:
      total = [a + b for a, b in zip(total, weighted, strict=True)]
  assert total is not None, "a share is made of at least one message"
  mean = [rows / sum_of_weights for rows in total]
  if residual is not None:
    mean = [a + b for a, b in zip(mean, residual, strict=True)]
  share = _encoded_within(tables, mean, max(norms))
  if not tables.has_residual:
    return share, []
  losses = [a - b for a, b in zip(mean, tables.decode(share), strict=True)]
  return share, [RESIDUAL_ROWS.encode(rows) for rows in losses]


def _encoded_within(
  tables: Tables, values: Sequence[np.ndarray], largest_norm: float
) -> list[Table]:
  """Encodes values, scaled down until their decoded norm is within a limit."""
  encoded = tables.encode(values)
  norm = tables.norm(encoded)
  while norm > largest_norm:
    factor = np.float32(_SHRINK * largest_norm / norm)
    values = [factor * rows for rows in values]
    encoded = tables.encode(values)
    norm = tables.norm(encoded)
  return encoded


def residual_values(
  tables: Tables, residual: Sequence[Table]
) -> list[np.ndarray]:
  """Decodes the residual of a share: the loss of encoding the share.

  Returns the values of each table, float32 [R, width].
  """
  return [
    RESIDUAL_ROWS.decode(table, width)
    for table, width in zip(residual, tables.widths, strict=True)
  ]


def residual_cuts(tables: Tables, cuts: Cuts) -> Cuts:
  """Returns where the residual of a mean is cut into slices.

  The residual (the loss of encoding the mean) has the rows and slices of the
  messages, but a row may have another number of bytes.
  """
  bits = RESIDUAL_ROWS.bits
  # The codes of a row, and its bfloat16 scale.
  row_bytes = tuple((-(-width * bits // 8), 2) for width in tables.widths)
  return Cuts(starts=cuts.starts, row_bytes=row_bytes)


def _rows_of(array: np.ndarray) -> np.ndarray:
  """Returns the bytes of each row of an array, uint8 [R, bytes of a row].

  The last axis is a row. The bytes are little-endian. Without rows, the result
  is [0, 0].
  """
  little = array.astype(array.dtype.newbyteorder("<"), copy=False)
  flat = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
  num_rows = math.prod(array.shape[:-1])
  return flat.reshape(num_rows, -1) if num_rows else flat.reshape(0, 0)
