"""Encodes rows of values as bytes, and decodes them, in numpy.

These are the quantizers of `dilocox_jax.codecs.quantize` without JAX. All
machines get the same bytes from the same values, because values are added in a
fixed order.

`FloatRows` encodes a row as one row of bytes, the values. The other codecs
encode a row as two rows of bytes: the codes and the scales. For example,
`IntRows` with 1 bit encodes the row (1, -3, 2, 2) as the byte 0b0010 = 2, in
which a set bit means "negative", and the scale 2, the mean of |x|. The row is
decoded as (2, -2, 2, 2).
"""

import dataclasses
from typing import Protocol

import numpy as np

LARGEST_BFLOAT16 = 3.3895313892515355e38
SMALLEST_SCALE = 2.0**-126
_LARGEST_RANGE = 2.0**124  # Larger values saturate, as in `codecs.quantize`.


class RowCodec(Protocol):
  """Encodes float32 rows as rows of bytes.

  Attributes:
    num_arrays: Number of arrays of bytes into which rows are encoded.
    is_exact: Whether decoded rows equal the rows that were encoded.
    is_coarse: Whether the codec is so lossy that encoding the mean, too, would
      raise the training loss.
  """

  @property
  def num_arrays(self) -> int: ...  # noqa: D102 - see the class.

  @property
  def is_exact(self) -> bool: ...  # noqa: D102 - see the class.

  @property
  def is_coarse(self) -> bool: ...  # noqa: D102 - see the class.

  def encode(self, rows: np.ndarray) -> list[np.ndarray]:
    """Returns the encoded rows, uint8 [R, bytes of a row] for each array.

    Args:
      rows: Values, float32 [R, width].
    """
    ...

  def decode(self, arrays: list[np.ndarray], width: int) -> np.ndarray:
    """Returns the values, float32 [R, width].

    Args:
      arrays: Encoded rows, uint8 [R, bytes of a row] for each array.
      width: Number of values in a row.
    """
    ...


@dataclasses.dataclass(frozen=True)
class FloatRows:
  """Sends every value as a float. Values that are too large saturate.

  `dtype` is "float32", "float16" or "bfloat16".
  """

  dtype: str = "float32"

  @property
  def num_arrays(self) -> int:
    """Number of arrays of bytes: 1, the values."""
    return 1

  @property
  def is_exact(self) -> bool:
    """Whether decoded finite rows equal the encoded rows: only with float32."""
    return self.dtype == "float32"

  @property
  def is_coarse(self) -> bool:
    """False: the relative error of a float is small."""
    return False

  def encode(self, rows: np.ndarray) -> list[np.ndarray]:
    """Converts rows, float32 [R, width], to bytes of the type, little-endian.

    The only array of the result is uint8 [R, bytes of a row].
    """
    if self.dtype == "bfloat16":
      return [_bytes_of(_to_bfloat16(rows))]
    largest = float(np.finfo(self.dtype).max)
    clipped = np.clip(rows, -largest, largest)
    return [_bytes_of(clipped.astype(np.dtype(self.dtype).newbyteorder("<")))]

  def decode(self, arrays: list[np.ndarray], width: int) -> np.ndarray:
    """Converts the bytes of rows to values, float32 [R, width]."""
    if self.dtype == "bfloat16":
      return _from_bfloat16(arrays[0])
    flat = np.ascontiguousarray(arrays[0])
    values = flat.view(np.dtype(self.dtype).newbyteorder("<"))
    return values.astype(np.float32).reshape(-1, width)


@dataclasses.dataclass(frozen=True)
class IntRows:
  """Sends values rounded to few bits, with one or two scales for each row.

  - 8 and 4 bits: a value is divided by the scale and rounded to a whole number.
    The scale is the largest |x| of the row, divided by 127 or 7. So whole
    numbers go from -127 to 127, or from -7 to 7.
  - 2 bits: a value becomes its sign times one of two scales. The values whose
    |x| is above the mean |x| of the row get the larger scale, which is the mean
    of their |x|. The smaller scale is the mean |x| of all other values.
  - 1 bit: a value becomes its sign times the scale, the mean of |x|.

  Attributes:
    bits: Bits of a code: 8, 4, 2 or 1.
  """

  bits: int

  @property
  def num_arrays(self) -> int:
    """Number of arrays of bytes: 2, the codes and the scales."""
    return 2

  @property
  def is_exact(self) -> bool:
    """False: values are rounded."""
    return False

  @property
  def is_coarse(self) -> bool:
    """Whether a code has 1 or 2 bits."""
    return self.bits <= 2

  @property
  def _middle(self) -> int:
    """Half of the number of codes, 2^(bits - 1)."""
    return 2 ** (self.bits - 1)

  def encode(self, rows: np.ndarray) -> list[np.ndarray]:
    """Rounds rows to codes, and computes the scales of each row.

    Args:
      rows: Values, float32 [R, width].

    Returns:
      The packed codes, uint8 [R, ceil(width bits / 8)], and the bfloat16 scales
      as bytes: uint8 [R, 2], or [R, 4] with 2 bits, which have two scales a
      row.
    """
    if self.bits == 1:
      codes = (rows < 0).astype(np.uint8)
      scales = _to_bfloat16(_row_means(np.abs(rows)))
    elif self.bits == 2:
      codes, scales = _two_magnitudes(rows)
    else:
      largest = np.abs(rows).max(axis=1, keepdims=True)
      largest = np.minimum(largest, np.float32(_LARGEST_RANGE))
      most = self._middle - 1  # The largest whole number, 127 or 7.
      scales = _to_bfloat16(largest / np.float32(most))
      # Divide by the rounded scales, by which `decode` multiplies.
      steps = np.rint(_ratio(rows, _from_bfloat16(_bytes_of(scales))))
      codes = (np.clip(steps, -most, most) + self._middle).astype(np.uint8)
    return [pack(codes, self.bits), _bytes_of(scales)]

  def decode(self, arrays: list[np.ndarray], width: int) -> np.ndarray:
    """Computes the values from codes and scales, float32 [R, width]."""
    codes = unpack(arrays[0], self.bits, width)
    scales = _from_bfloat16(arrays[1])
    if self.bits > 2:
      steps = codes.astype(np.float32) - np.float32(self._middle)
      return steps * scales
    if self.bits == 2:
      is_large = (codes & 1) == 1
      scales = np.where(is_large, scales[:, 1:], scales[:, :1])
    # The highest bit of a code is the sign.
    return np.where(codes < self._middle, scales, -scales)


@dataclasses.dataclass(frozen=True)
class E3M0Rows:
  """Sends a sign and a power of two in 4 bits, with a scale for each row.

  The scale s is the largest |x| of a row. A value is rounded to 0 or to one of
  s 2^-6, s 2^-5, ..., s, with its sign.
  """

  @property
  def num_arrays(self) -> int:
    """Number of arrays of bytes: 2, the codes and the scales."""
    return 2

  @property
  def is_exact(self) -> bool:
    """False: values are rounded."""
    return False

  @property
  def is_coarse(self) -> bool:
    """True: powers of two are far apart."""
    return True

  def encode(self, rows: np.ndarray) -> list[np.ndarray]:
    """Rounds rows to powers of two, and computes the scale of each row.

    Args:
      rows: Values, float32 [R, width].

    Returns:
      The packed codes, uint8 [R, ceil(width / 2)], and the bfloat16 scales as
      bytes, uint8 [R, 2].
    """
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scales = _to_bfloat16(np.minimum(largest, np.float32(_LARGEST_RANGE)))
    size = _ratio(np.abs(rows), _from_bfloat16(_bytes_of(scales)))
    # Sizes from 0.75 to 1.5 times 2^k become 2^k, which has the level k + 7.
    _, exponent = np.frexp(size * np.float32(4 / 3))
    level = np.where(size >= 2.0**-7, np.clip(exponent + 6, 1, 7), 0)
    codes = level + 8 * (rows < 0)
    return [pack(codes.astype(np.uint8), 4), _bytes_of(scales)]

  def decode(self, arrays: list[np.ndarray], width: int) -> np.ndarray:
    """Computes the values from codes and scales, float32 [R, width]."""
    codes = unpack(arrays[0], 4, width)
    level = (codes & 7).astype(np.int32)
    size = np.where(level > 0, np.ldexp(np.float32(1), level - 7), 0)
    sign = np.where(codes < 8, np.float32(1), np.float32(-1))
    return sign * size.astype(np.float32) * _from_bfloat16(arrays[1])


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
  """Packs codes of few bits into bytes.

  A row is cut into 8 / bits parts, and zeros fill the last parts. Byte j has
  code j of each part. The code of the first part is in the lowest bits.

  Args:
    codes: uint8 codes [R, width], below 2^bits.
    bits: Bits of a code: 1, 2, 4 or 8.

  Returns:
    uint8 bytes [R, ceil(width bits / 8)].
  """
  num_parts = 8 // bits
  filled = np.pad(codes, ((0, 0), (0, -codes.shape[1] % num_parts)))
  parts = filled.reshape(len(codes), num_parts, filled.shape[1] // num_parts)
  packed = np.zeros((len(codes), parts.shape[2]), np.uint8)
  for number in range(num_parts):
    packed |= parts[:, number] << np.uint8(bits * number)
  return packed


def unpack(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
  """Returns the codes that `pack` put into bytes.

  Args:
    packed: uint8 bytes [R, bytes of a row].
    bits: Bits of a code: 1, 2, 4 or 8.
    width: Number of codes of a row.

  Returns:
    uint8 codes [R, width].
  """
  shifts = range(0, 8, bits)
  codes = np.concatenate([packed >> np.uint8(each) for each in shifts], axis=1)
  return codes[:, :width] & np.uint8(2**bits - 1)


def _two_magnitudes(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Codes values in 2 bits: the sign, and whether |x| is above its mean.

  Returns uint8 codes [R, width], and the bfloat16 bits of the mean |x| of the
  small and of the large values, uint16 [R, 2].
  """
  sizes = np.minimum(np.abs(rows), np.float32(_LARGEST_RANGE))
  is_large = sizes > _row_means(sizes)
  num_large = is_large.sum(axis=1, keepdims=True)
  counts = np.concatenate([rows.shape[1] - num_large, num_large], axis=1)
  totals = np.concatenate(
    [
      _row_sums(np.where(is_large, 0, sizes)),
      _row_sums(np.where(is_large, sizes, 0)),
    ],
    axis=1,
  )
  means = (totals / np.maximum(counts, 1)).astype(np.float32)
  codes = 2 * (rows < 0).astype(np.uint8) + is_large
  return codes, _to_bfloat16(means)


def _row_means(rows: np.ndarray) -> np.ndarray:
  """Returns the mean of each row, float32 [R, 1]."""
  return (_row_sums(rows) / rows.shape[1]).astype(np.float32)


def _row_sums(rows: np.ndarray) -> np.ndarray:
  """Returns the sum of each row, float64 [R, 1], equal on all machines.

  `numpy.sum` adds in an order that depends on the processor. This function adds
  the second half of each row to the first half, until one value is left.
  """
  sums = rows.astype(np.float64)
  while sums.shape[1] > 1:
    half = -(-sums.shape[1] // 2)
    longer = sums[:, :half].copy()
    longer[:, : sums.shape[1] - half] += sums[:, half:]
    sums = longer
  return sums


def _ratio(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns values / scales in float32, or 0 for scales up to 2^-126."""
  is_usable = scales > np.float32(SMALLEST_SCALE)
  divisors = np.where(is_usable, scales, np.float32(1))
  inverse = np.where(is_usable, np.float32(1) / divisors, np.float32(0))
  return values * inverse


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
  """Rounds values to bfloat16, to even at ties, and returns the bits, uint16.

  numpy has no bfloat16, which is the upper half of the bits of a float32.
  Values that are too large become the largest number of bfloat16.
  """
  limit = np.float32(LARGEST_BFLOAT16)
  clipped = np.clip(values.astype(np.float32), -limit, limit)
  bits = clipped.view(np.uint32)
  # The upper half is the bfloat16. The lower half carries into it if it is more
  # than 0x8000, or is 0x8000 and the upper half is odd.
  rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
  return (rounded >> 16).astype("<u2")


def _from_bfloat16(data: np.ndarray) -> np.ndarray:
  """Returns bfloat16 numbers, given as bytes [R, 2 N], as float32 [R, N]."""
  bits = np.ascontiguousarray(data).view("<u2")
  return (bits.astype(np.uint32) << 16).view(np.float32)


def _bytes_of(array: np.ndarray) -> np.ndarray:
  """Returns the bytes of each row of an array, uint8 [R, bytes of a row]."""
  return np.ascontiguousarray(array).view(np.uint8)
