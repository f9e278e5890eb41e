"""Codecs that send every value, as a float or as a code of a few bits.

Codes are packed into bytes, because JAX stores a value of its sub-byte types in
a whole byte. Scales are bfloat16, because pseudo-gradients can be smaller than
the smallest number of fp16 (6e-8).
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

# Values of the codecs' fields `dtype`, `bits` and `scale`.
FLOATS = ("float32", "bfloat16", "float16")
BITS = (8, 4, 2, 1)
SCALES = ("block", "row", "tensor")

_LARGEST_SCALE = float(jnp.finfo(jnp.bfloat16).max)
# Larger values are clipped to this one. The inverse of a number above 2^126 is
# below the normal numbers of fp32, and a device may turn it into zero.
_LARGEST_RANGE = 2.0**124
# The smallest normal number of bfloat16. Scales up to it are not inverted,
# because the inverse could be infinite, or a device may read them as zero.
_SMALLEST_SCALE = float(jnp.finfo(jnp.bfloat16).tiny)


@dataclasses.dataclass(frozen=True)
class Float(Quantizer):
  """Sends every value as a float of 4 or 2 bytes.

  A value beyond the largest number of the dtype (65504 in fp16) becomes this
  number, with its sign. For N(0, 1), fp16 has a mean squared error of 4.3e-8.

  Wire: 4 bytes for each value in float32, 2 in float16 and bfloat16.
  Source: OpenDiLoCo, arXiv 2407.07852, section 3, for fp16.
  Differs: a value that is too large is clipped instead of becoming infinite.

  Attributes:
    dtype: "float32", "bfloat16" or "float16".
  """

  dtype: str = limited("float32", choices=FLOATS)

  def width(self, shape: Shape) -> int:
    """Returns the length of a layer's last axis, 1 for a scalar."""
    return shape[-1] if shape else 1

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns a tuple of one array: the values as `dtype`."""
    dtype = jnp.dtype(self.dtype)
    largest = float(jnp.finfo(dtype).max)
    wide = rows.astype(jnp.float32)
    return (jnp.clip(wide, -largest, largest).astype(dtype),)

  def values(self, arrays: Arrays, width: int) -> Array:
    """Returns the values as float32."""
    del width
    return arrays[0].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Int(Quantizer):
  """Sends a code of 8, 4, 2 or 1 bits for each value, and a scale for each row.

  With 8 and 4 bits the code stands for q = round(x / s), which decodes to q s.
  The scale of the row is s = max|x| / (2^(bits-1) - 1). For example, with 4
  bits and max|x| = 1.4, s is 0.2, and 0.6 becomes q = 3. For N(0, 1) in blocks
  of 128, the mean squared error is 0.0139 with 4 bits and 4.2e-5 with 8 bits.

  With 2 bits the code is the sign and one of two magnitudes. Let m be the mean
  of all |x| in the row. One magnitude is the mean of the |x| up to m, and the
  other is the mean of the |x| above m. For N(0, 1) the mean squared error is
  0.125.

  With 1 bit the code is the sign, and the value decodes to the mean m of all
  |x| in the row, with this sign. For N(0, 1) the mean squared error is 0.363.

  Wire: `bits` bits for each value, and 2 bytes for the scale of each row; with
  2 bits a row has two magnitudes, so 4 bytes. For example, 1024 values with 4
  bits in blocks of 128 take 512 + 8 * 2 = 528 bytes. If values have 1 bit, the
  means in a reduce-scatter have 2.
  Source: CocktailSGD (Wang et al., 2023, ICML) for 4 bits; SparseLoCo, arXiv
  2508.15706, for 2; 1-bit SGD (Seide et al., 2014) for 1.
  Differs: scales are bfloat16, and the two magnitudes with 2 bits are computed
  from the data.

  Attributes:
    bits: Bits of a code: 8, 4, 2 or 1.
    scale: Which values make a row, i.e. share a scale: "block" (at most
      `block_size` neighbors), "row" (the last axis) or "tensor" (one layer).
    block_size: Largest number of values in a block; only read for "block".
  """

  bits: int = limited(4, choices=BITS)
  scale: str = limited("block", choices=SCALES)
  block_size: int = limited(128, at_least=1)

  def width(self, shape: Shape) -> int:
    """Returns how many values of a leaf make a row, i.e. share a scale."""
    if self.scale == "row":
      return shape[-1] if shape else 1
    size = math.prod(shape)
    longest = size if self.scale == "tensor" else self.block_size
    return block_width(size, longest)

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns packed codes and scales.

    Args:
      rows: float32 values [..., width].

    Returns:
      uint8 codes [..., ceil(width * bits / 8)], and bfloat16 scales [..., 1].
      With 2 bits the scales are [..., 2].
    """
    if self.bits == 1:
      return _signs(rows)
    if self.bits == 2:
      codes, scales = _magnitudes(rows)
    else:
      codes, scales = _nearest(rows, self._middle)
    return pack(codes, self.bits), scales

  def values(self, arrays: Arrays, width: int) -> Array:
    """Decodes packed codes and scales into float32 values [..., width]."""
    codes = unpack(arrays[0], self.bits, width)
    magnitudes = arrays[1].astype(jnp.float32)
    if self.bits > 2:
      return (codes.astype(jnp.float32) - self._middle) * magnitudes
    if self.bits == 2:
      is_large = (codes & 1) == 1
      magnitudes = jnp.where(is_large, magnitudes[..., 1:], magnitudes[..., :1])
    # The sign is the highest bit: codes 0 and 1 of 2 bits, and 0 of 1 bit, are
    # positive.
    return jnp.where(codes < self._middle, magnitudes, -magnitudes)

  @property
  def of_means(self) -> "Int":
    """The quantizer of means in a reduce-scatter.

    It is `self`, but with 1 bit a copy with 2 bits.
    """
    if self.bits == 1:
      return dataclasses.replace(self, bits=2)
    return self

  @property
  def _middle(self) -> int:
    """Half of the number of codes, 2^(bits - 1).

    With 4 and 8 bits it is the code of zero, with 1 and 2 bits the first code
    of a negative value.
    """
    return 2 ** (self.bits - 1)


@dataclasses.dataclass(frozen=True)
class E3M0(Quantizer):
  """Sends a sign and a power of two in 4 bits, and a scale for each block.

  The levels are 0, s 2^-6, s 2^-5, ..., s, where the scale s is max|x| of the
  block. Each |x| is rounded to the nearest level. The error is at most a third
  of |x| if |x| is at least 2^-6 s, and at most 2^-7 s if |x| is smaller. For
  N(0, 1), the mean squared error is at most 0.112.

  Wire: 4 bits for each value and 2 bytes for each block.
  Source: Streaming DiLoCo, arXiv 2501.18512, section 2.4.
  Differs: the paper gives no scale. Here the levels are relative to the largest
  value of each block, and the lowest code means zero.

  Attributes:
    block_size: Largest number of values in a block.
  """

  block_size: int = limited(128, at_least=1)

  def width(self, shape: Shape) -> int:
    """Returns how many values of a leaf make a row, which is a block."""
    return block_width(math.prod(shape), self.block_size)

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns packed codes and scales.

    Args:
      rows: float32 values [..., width].

    Returns:
      uint8 codes [..., ceil(width / 2)], and bfloat16 scales [..., 1].
    """
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
    """Decodes packed codes and scales into float32 values [..., width]."""
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
  """Rounds values to codes of 8 or 4 bits, and returns codes and scales.

  `middle` is the code of the value zero, 128 or 8.
  """
  scales = _to_bfloat16(_largest(values) / (middle - 1))
  steps = jnp.round(_ratio(values, scales))
  steps = jnp.clip(steps, 1 - middle, middle - 1)
  return (steps + middle).astype(jnp.uint8), scales


def _signs(values: Array) -> tuple[Array, Array]:
  """Returns the packed signs (1: negative) and the mean of |x| of each row."""
  width = values.shape[-1]
  parts = _in_parts(values, 8)
  sizes, factor = _scaled_magnitudes(parts, width)
  shift = jax.lax.broadcasted_iota(jnp.uint8, parts.shape, values.ndim - 1)
  signs = (parts < 0).astype(jnp.uint8) << shift
  # The eight signs of a byte have different bits, so their sum is their "or".
  part_sums, packed = sums([sizes, signs], values.ndim - 1)
  total = jnp.sum(part_sums, axis=-1, keepdims=True)
  return packed, _to_bfloat16(total / (width * factor))


def _magnitudes(values: Array) -> tuple[Array, Array]:
  """Returns codes of 2 bits [..., width], and two scales of each row [..., 2].

  The high bit of a code says whether x is negative, and the low bit whether |x|
  is above its mean over the row. The scales are the mean of the |x| up to this
  mean, and the mean of the |x| above it.
  """
  width = values.shape[-1]
  # |x| times `factor`, so that sums over a row are finite.
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
  """Divides each row into `count` equal parts; zeros fill the last ones."""
  filled = pad(values, -values.shape[-1] % count)
  return filled.reshape(*values.shape[:-1], count, -1)


def _scaled_magnitudes(values: Array, width: int) -> tuple[Array, float]:
  """Scales the magnitudes |x| down, so that the sum of each row is finite.

  Returns the scaled magnitudes and the factor, a power of two. Magnitudes above
  2^124 are clipped to it first.
  """
  factor = 2.0 ** -(width - 1).bit_length()
  return jnp.minimum(jnp.abs(values), _LARGEST_RANGE) * factor, factor


def _largest(values: Array) -> Array:
  """Returns the largest |x| of each row, at most `_LARGEST_RANGE`."""
  largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
  return jnp.minimum(largest, _LARGEST_RANGE)


def _to_bfloat16(scales: Array) -> Array:
  """Rounds scales to bfloat16; at most to the largest number of bfloat16."""
  return jnp.minimum(scales, _LARGEST_SCALE).astype(jnp.bfloat16)


def _ratio(values: Array, scales: Array) -> Array:
  """Returns values / scales; 0 where the scale is 0 or too small to invert."""
  wide = scales.astype(jnp.float32)
  is_usable = wide > _SMALLEST_SCALE
  inverse = jnp.where(is_usable, 1 / jnp.where(is_usable, wide, 1.0), 0.0)
  return values * inverse


def pack(codes: Array, bits: int) -> Array:
  """Packs codes of few bits into bytes.

  The codes of a row are divided into 8 / bits parts, and each byte has one code
  of every part. For example, the 6 codes a to f of 4 bits have the parts
  (a b c) and (d e f), so the 3 bytes are a + 16 d, b + 16 e, c + 16 f. Zeros
  fill the last part.

  Args:
    codes: uint8 codes [..., N], below 2^bits.
    bits: Bits of a code: 1, 2, 4 or 8.

  Returns:
    uint8 bytes [..., ceil(N * bits / 8)].
  """
  parts = _in_parts(codes, 8 // bits)
  packed = parts[..., 0, :]
  for number in range(1, 8 // bits):
    packed = packed | (parts[..., number, :] << jnp.uint8(bits * number))
  return packed


def unpack(packed: Array, bits: int, count: int) -> Array:
  """Unpacks codes from bytes. It reverses `pack`.

  Args:
    packed: uint8 bytes that `pack` returned, [..., ceil(count * bits / 8)].
    bits: Bits of a code: 1, 2, 4 or 8.
    count: Number of codes in a row.

  Returns:
    uint8 codes [..., count].
  """
  shifts = bits * np.arange(8 // bits, dtype=np.uint8)

  def concatenated(packed: Array) -> Array:
    return jnp.concatenate([packed >> shift for shift in shifts], axis=-1)

  def mapped(packed: Array) -> Array:
    rows = jax.vmap(lambda shift: packed >> shift, out_axes=-2)(shifts)
    return rows.reshape(*packed.shape[:-1], -1)

  # Both functions return the same codes. A GPU is slow with the concatenation,
  # because it decides for each code which of up to eight parts has it. A CPU is
  # slow with the map, because its innermost loop is as short as a row of bytes.
  codes = jax.lax.platform_dependent(packed, cuda=mapped, default=concatenated)
  return codes[..., :count] & jnp.uint8(2**bits - 1)
