"""Codecs that send every value, as a float or as a code of a few bits.

Codes are packed into bytes, because JAX's own sub-byte types take a whole byte
for each value. Scales are bfloat16, because pseudo-gradients can be smaller
than the smallest number of fp16 (6e-8). A scale is rounded first. Codes are
then chosen for the rounded scale, because that is the scale that is sent.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import limited
from dilocox_jax.codecs.base import Quantizer
from dilocox_jax.codecs.batching import Arrays, Shape, block_width, pad, sums
from dilocox_jax.trees import Array

FLOATS = ("float32", "bfloat16", "float16")
BITS = (8, 4, 2, 1)
SCALES = ("block", "row", "tensor")

_LARGEST_SCALE = float(jnp.finfo(jnp.bfloat16).max)
# Larger values saturate. The inverse of a number above 2^126 is below fp32's
# normal numbers, and a device may turn it into zero.
_LARGEST_RANGE = 2.0**124
_SMALLEST_SCALE = float(jnp.finfo(jnp.bfloat16).tiny)


@dataclasses.dataclass(frozen=True)
class Float(Quantizer):
  """Sends every value as a float.

  A value that is too large for fp16 becomes fp16's largest number, 65504.

  With 11 significant bits fp16 errs evenly within 2^(e-11), where 2^e is the
  power of two at or below |x|; the mean of the square is 2^-22 4^e / 3. On
  N(0, 1) E 4^e = 0.543, hence 4.3e-8.

  Wire: 4 bytes for each value in float32, 2 in float16 and bfloat16.
  Source: OpenDiLoCo, arXiv 2407.07852, section 3, for fp16.
  Differs: a value saturates instead of overflowing.

  Attributes:
    dtype: Type of the floats, one of `FLOATS`.
  """

  dtype: str = limited("float32", choices=FLOATS)

  def width(self, shape: Shape) -> int:
    """Returns the length of the last axis; no row is padded."""
    return shape[-1] if shape else 1

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns the values in the type `dtype`.

    Args:
      rows: Values of any shape.
    """
    dtype = jnp.dtype(self.dtype)
    largest = float(jnp.finfo(dtype).max)
    wide = rows.astype(jnp.float32)
    return (jnp.clip(wide, -largest, largest).astype(dtype),)

  def values(self, arrays: Arrays, width: int) -> Array:
    """Returns the values in float32.

    Args:
      arrays: What `code` returned: one array of any shape.
      width: Not used.
    """
    del width
    return arrays[0].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Int(Quantizer):
  """Sends values rounded to few bits, packed, with a scale for each row.

  8 and 4 bits: q = round(x / s), s = max|x| / (2^(bits-1) - 1) over the row
  and then rounded to bfloat16, so |error| <= s / 2 for each value. At 4 bits
  and max|x| = 1.4, s is 0.2, and 0.6 has the code q = 3. On N(0, 1), blocks
  of 128 have E max^2 = 8.16, so that the mean squared error is at most
  E s^2 / 12 = 0.0139 at 4 bits and 4.2e-5 at 8.

  2 bits: a sign and one of two magnitudes, the means of |x| below and above
  the mean of |x|: 0.378 and 1.366 for N(0, 1), mean squared error 0.125 (the
  best four levels have 0.1175).

  1 bit: the sign times the mean of |x|; 1 - 2 / pi = 0.363 on N(0, 1).

  Wire: `bits` bits for each value and 2 bytes for each row, 4 bytes where a
  row has two magnitudes. 1024 values at 4 bits in blocks of 128 take
  512 + 8 * 2 = 528 bytes. After a reduce-scatter of 1 bit the means travel in
  2: the sum of several signs has more than two values, and one more rounding
  to a sign would lose more than the first.
  Source: CocktailSGD (Wang et al., 2023, ICML) for 4 bits; SparseLoCo, arXiv
  2508.15706, for 2; 1-bit SGD (Seide et al., 2014) for 1.
  Differs: bfloat16 scales; the two magnitudes of 2 bits follow the data.

  Attributes:
    bits: Bits of a code: 8, 4, 2 or 1.
    scale: Values that share a scale: "block", "row" (last axis) or "tensor"
      (one layer).
    block_size: Largest number of values in a block.
  """

  bits: int = limited(4, choices=BITS)
  scale: str = limited("block", choices=SCALES)
  block_size: int = limited(128, at_least=1)

  def width(self, shape: Shape) -> int:
    """Returns the number of values that share a scale."""
    if self.scale == "row":
      return shape[-1] if shape else 1
    size = math.prod(shape)
    longest = size if self.scale == "tensor" else self.block_size
    return block_width(size, longest)

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns packed codes [..., bytes] and scales [..., 1 or 2]."""
    if self.bits == 1:
      return _signs(rows)
    if self.bits == 2:
      codes, scales = _magnitudes(rows)
    else:
      codes, scales = _nearest(rows, self._middle)
    return pack(codes, self.bits), scales

  def values(self, arrays: Arrays, width: int) -> Array:
    """Returns float32 rows [..., width], the reverse of `code`.

    Args:
      arrays: Packed codes and scales.
      width: Values of a row (count).
    """
    codes = unpack(arrays[0], self.bits, width)
    magnitudes = arrays[1].astype(jnp.float32)
    if self.bits > 2:
      return (codes.astype(jnp.float32) - self._middle) * magnitudes
    if self.bits == 2:
      is_large = (codes & 1) == 1
      magnitudes = jnp.where(is_large, magnitudes[..., 1:], magnitudes[..., :1])
    # The sign is the highest bit: codes 0 and 1 of 2 bits, and 0 of 1 bit, are
    # positive.
    return jnp.where(codes < self.bits, magnitudes, -magnitudes)

  @property
  def of_means(self) -> "Int":
    """The quantizer of means: with 2 bits if values have 1, else `self`."""
    if self.bits == 1:
      return dataclasses.replace(self, bits=2)
    return self

  @property
  def _middle(self) -> int:
    """The code of the value zero, at 4 or 8 bits."""
    return 2 ** (self.bits - 1)


@dataclasses.dataclass(frozen=True)
class E3M0(Quantizer):
  """Sends a sign and a power of two in 4 bits, and a scale for each block.

  Levels are 0 and s 2^-6, s 2^-5, ..., s, with s = max|x| of a block, and each
  value is rounded to the nearest level. Between 2^j and 2^(j+1) the error is at
  most 2^(j-1), a third of the value; below 2^-6 s at most 2^-7 s. Hence the
  squared error is at most x^2 / 9 + (2^-7 s)^2, which is 0.112 on N(0, 1); if
  log |x| is spread evenly between 2^j and 2^(j+1), it is 0.038 x^2.

  Wire: 4 bits for each value and 2 bytes for each block.
  Source: Streaming DiLoCo, arXiv 2501.18512, section 2.4.
  Differs: the paper gives no scale. Here the levels are relative to the largest
  value of each block, and the lowest code means zero.

  Attributes:
    block_size: Largest number of values in a block.
  """

  block_size: int = limited(128, at_least=1)

  def width(self, shape: Shape) -> int:
    """Returns the number of values of a block."""
    return block_width(math.prod(shape), self.block_size)

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns packed codes [..., bytes] and scales [..., 1]."""
    scales = _to_bfloat16(_largest(rows))
    size = _ratio(jnp.abs(rows), scales)
    # The midpoint of 2^j and 2^(j+1) is 3/4 of 2^(j+1). Times 4/3 it is a power
    # of two, where frexp's exponent changes: 0.74 gives 0.987 = 0.987 * 2^0,
    # so level 6 or s/2; 0.76 gives 1.013 = 0.507 * 2^1, so level 7 or s.
    _, exponent = jnp.frexp(size * (4 / 3))
    # A value below 2^-7, half of the lowest level, becomes 0. The exponent
    # cannot tell that: frexp gives the exponent 0 both for zero and for 0.75.
    level = jnp.where(size >= 2.0**-7, jnp.clip(exponent + 6, 1, 7), 0)
    sign = (rows < 0).astype(level.dtype)
    return pack((level + 8 * sign).astype(jnp.uint8), 4), scales

  def values(self, arrays: Arrays, width: int) -> Array:
    """Returns float32 rows [..., width], the reverse of `code`.

    Args:
      arrays: Packed codes and scales.
      width: Values of a row (count).
    """
    codes = unpack(arrays[0], 4, width)
    scales = arrays[1]
    level = (codes & 7).astype(jnp.int32)
    size = jnp.where(level > 0, jnp.exp2((level - 7).astype(jnp.float32)), 0.0)
    sign = jnp.where(codes < 8, 1.0, -1.0)
    return sign * size * scales.astype(jnp.float32)


float32 = functools.partial(Float, "float32")
bfloat16 = functools.partial(Float, "bfloat16")
float16 = functools.partial(Float, "float16")


def _nearest(values: Array, middle: int) -> tuple[Array, Array]:
  """Rounds values to codes of 8 or 4 bits.

  Args:
    values: Rows [..., width].
    middle: Code of the value zero.

  Returns:
    uint8 codes [..., width], and the scales [..., 1].
  """
  scales = _to_bfloat16(_largest(values) / (middle - 1))
  steps = jnp.round(_ratio(values, scales))
  steps = jnp.clip(steps, 1 - middle, middle - 1)
  return (steps + middle).astype(jnp.uint8), scales


def _signs(values: Array) -> tuple[Array, Array]:
  """Codes values in 1 bit, in one pass over the values.

  On CPUs XLA hands the sum of a single array along its rows to a library, and
  would read the values once for that sum and once for the signs.

  Args:
    values: Rows [..., width].

  Returns:
    The signs, packed as `pack` packs them, and the mean of |x| of each row,
    [..., 1].
  """
  width = values.shape[-1]
  parts = _in_parts(values, 8)
  sizes, factor = _scaled_magnitudes(parts, width)
  shift = jax.lax.broadcasted_iota(jnp.uint8, parts.shape, values.ndim - 1)
  signs = (parts < 0).astype(jnp.uint8) << shift
  # No two signs of a byte share a bit, so their sum is their "or".
  part_sums, packed = sums([sizes, signs], values.ndim - 1)
  total = jnp.sum(part_sums, axis=-1, keepdims=True)
  return packed, _to_bfloat16(total / (width * factor))


def _magnitudes(values: Array) -> tuple[Array, Array]:
  """Codes values in 2 bits: the sign, and whether |x| is above its mean.

  Args:
    values: Rows [..., width].

  Returns:
    uint8 codes [..., width], and the two scales of each row, [..., 2]: the mean
    of the small |x| and the mean of the large |x|.
  """
  width = values.shape[-1]
  sizes, factor = _scaled_magnitudes(values, width)
  is_large = sizes > jnp.mean(sizes, axis=-1, keepdims=True)
  small_sizes = jnp.where(~is_large, sizes, 0.0)
  large_sizes = jnp.where(is_large, sizes, 0.0)
  summands = [small_sizes, large_sizes, is_large.astype(jnp.int32)]
  # A long row is summed in eight parts, which has smaller rounding errors.
  part_sums = sums([_in_parts(each, 8) for each in summands], values.ndim - 1)
  small_total, large_total, num_large = [
    jnp.sum(each, -1, each.dtype) for each in part_sums
  ]
  counts = jnp.stack([width - num_large, num_large], axis=-1)
  counts = jnp.maximum(counts, 1)
  totals = jnp.stack([small_total, large_total], axis=-1)
  means = totals / counts.astype(sizes.dtype)
  signs = (values < 0).astype(jnp.uint8)
  codes = 2 * signs + is_large.astype(jnp.uint8)
  return codes, _to_bfloat16(means / factor)


def _in_parts(values: Array, count: int) -> Array:
  """Divides rows into `count` parts, [..., count, values of a part].

  Zeros fill the last parts.
  """
  filled = pad(values, -values.shape[-1] % count)
  return filled.reshape(*values.shape[:-1], count, -1)


def _scaled_magnitudes(values: Array, width: int) -> tuple[Array, float]:
  """Returns |x| times a factor, such that a sum of `width` of them is finite.

  The factor is a power of two, so the product rounds nothing above 2^-126.

  Returns:
    The magnitudes, in the shape of `values`, and the factor.
  """
  factor = 2.0 ** -(width - 1).bit_length()
  return jnp.minimum(jnp.abs(values), _LARGEST_RANGE) * factor, factor


def _largest(values: Array) -> Array:
  """Returns the largest |x| of each row, [..., 1], at most `_LARGEST_RANGE`."""
  largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
  return jnp.minimum(largest, _LARGEST_RANGE)


def _to_bfloat16(scales: Array) -> Array:
  """Rounds scales to bfloat16; scales that are too large saturate."""
  return jnp.minimum(scales, _LARGEST_SCALE).astype(jnp.bfloat16)


def _ratio(values: Array, scales: Array) -> Array:
  """Divides by scales in fp32.

  The ratio is 0 where a scale is 0 or too small to invert.
  """
  wide = scales.astype(jnp.float32)
  is_usable = wide > _SMALLEST_SCALE
  inverse = jnp.where(is_usable, 1 / jnp.where(is_usable, wide, 1.0), 0.0)
  return values * inverse


def pack(codes: Array, bits: int) -> Array:
  """Packs codes [..., N] below 2^bits into bytes [..., ceil(N bits / 8)].

  A byte does not hold neighboring codes: in n bytes, the codes of a byte lie n
  codes apart. So packing is an "or" of a few shifted slices, which vectorizes.

  For example, 6 codes a to f of 4 bits are the rows (a b c) and (d e f), so the
  3 bytes are a + 16 d, b + 16 e, c + 16 f. And 7 codes a to g of 2 bits are
  padded with a zero to the rows (a b), (c d), (e f), (g 0), so the 2 bytes are
  a + 4 c + 16 e + 64 g and b + 4 d + 16 f.

  Args:
    codes: uint8 codes [..., N].
    bits: Bits of a code: 1, 2, 4 or 8.
  """
  rows = _in_parts(codes, 8 // bits)
  packed = rows[..., 0, :]
  for number in range(1, 8 // bits):
    packed = packed | (rows[..., number, :] << jnp.uint8(bits * number))
  return packed


def unpack(packed: Array, bits: int, count: int) -> Array:
  """Returns the codes [..., count] of every row of bytes, reversing `pack`.

  Args:
    packed: Bytes that `pack` returned.
    bits: Bits of a code, as in `pack`.
    count: Number of codes of a row, N.
  """
  shifts = bits * np.arange(8 // bits, dtype=np.uint8)

  def concatenated(packed: Array) -> Array:
    return jnp.concatenate([packed >> shift for shift in shifts], axis=-1)

  def mapped(packed: Array) -> Array:
    rows = jax.vmap(lambda shift: packed >> shift, out_axes=-2)(shifts)
    return rows.reshape(*packed.shape[:-1], -1)

  # Both return the same codes. A GPU is slow with the concatenation, because
  # it decides for each value which of eight rows holds it. A CPU is slow with
  # the map, because its innermost loop is as short as a row of bytes.
  codes = jax.lax.platform_dependent(packed, cuda=mapped, default=concatenated)
  return codes[..., :count] & jnp.uint8(2**bits - 1)
