"""Values as floats or codes of a few bits.

Codes are packed into bytes, because JAX's own sub-byte types take a whole byte
for each value. Scales are bfloat16, because pseudo-gradients can be smaller
than fp16 reaches (6e-8). A scale is rounded first and codes are then chosen
for the rounded one, which is the one that is sent.
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
    """Returns the values in the type; of arrays of any shape."""
    dtype = jnp.dtype(self.dtype)
    largest = float(jnp.finfo(dtype).max)
    wide = rows.astype(jnp.float32)
    return (jnp.clip(wide, -largest, largest).astype(dtype),)

  def values(self, arrays: Arrays, width: int) -> Array:
    """Returns the values in float32; of arrays of any shape."""
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
    """Reverses `code`."""
    codes, scales = unpack(arrays[0], self.bits, width), arrays[1]
    sizes = scales.astype(jnp.float32)
    if self.bits > 2:
      return (codes.astype(jnp.float32) - self._middle) * sizes
    if self.bits == 2:
      sizes = jnp.where((codes & 1) == 1, sizes[..., 1:], sizes[..., :1])
    # The sign is the highest bit.
    return jnp.where(codes < self.bits, sizes, -sizes)

  @property
  def of_means(self) -> "Int":
    """Codes means in 2 bits where values have 1, else as values."""
    return dataclasses.replace(self, bits=2) if self.bits == 1 else self

  @property
  def _middle(self) -> int:
    """The code of zero, where there is one."""
    return 2 ** (self.bits - 1)


@dataclasses.dataclass(frozen=True)
class E3M0(Quantizer):
  """Sends a sign and a power of two in 4 bits, and a scale for each block.

  Levels are 0 and s 2^-6, s 2^-5, ..., s, with s = max|x| of a block, and each
  value goes to the nearest one. Between 2^j and 2^(j+1) the error is at
  most 2^(j-1), a third of the value; below 2^-6 s at most 2^-7 s. Hence the
  squared error is at most x^2 / 9 + (2^-7 s)^2, which is 0.112 on N(0, 1); if
  log |x| is spread evenly between 2^j and 2^(j+1), it is 0.038 x^2.

  Wire: 4 bits for each value and 2 bytes for each block.
  Source: Streaming DiLoCo, arXiv 2501.18512, section 2.4.
  Differs: the paper gives no scale; here the exponents hang from each block's
  largest value, and the lowest code is zero.

  Attributes:
    block_size: Largest number of values in a block.
  """

  block_size: int = limited(128, at_least=1)

  def width(self, shape: Shape) -> int:
    """Returns the number of values of a block."""
    return block_width(math.prod(shape), self.block_size)

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns packed codes [..., bytes] and scales [..., 1]."""
    scales = _bfloat(_largest(rows))
    size = _ratio(jnp.abs(rows), scales)
    # The midpoint of 2^j and 2^(j+1) is 3/4 of 2^(j+1). Times 4/3 it is a power
    # of two, where frexp's exponent changes: 0.74 gives 0.987 = 0.987 * 2^0,
    # so level 6 or s/2; 0.76 gives 1.013 = 0.507 * 2^1, so level 7 or s.
    _, exponent = jnp.frexp(size * (4 / 3))
    # Below half of the lowest level, 2^-6, a value is 0. This is asked of the
    # size, because frexp gives zero the exponent 0, as it gives 0.75.
    level = jnp.where(size >= 2.0**-7, jnp.clip(exponent + 6, 1, 7), 0)
    sign = (rows < 0).astype(level.dtype)
    return pack((level + 8 * sign).astype(jnp.uint8), 4), scales

  def values(self, arrays: Arrays, width: int) -> Array:
    """Reverses `code`."""
    codes, scales = unpack(arrays[0], 4, width), arrays[1]
    level = (codes & 7).astype(jnp.int32)
    size = jnp.where(level > 0, jnp.exp2((level - 7).astype(jnp.float32)), 0.0)
    sign = jnp.where(codes < 8, 1.0, -1.0)
    return sign * size * scales.astype(jnp.float32)


float32 = functools.partial(Float, "float32")
bfloat16 = functools.partial(Float, "bfloat16")
float16 = functools.partial(Float, "float16")


def _nearest(values: Array, middle: int) -> tuple[Array, Array]:
  """Returns codes of the nearest levels, and scales."""
  scales = _bfloat(_largest(values) / (middle - 1))
  steps = jnp.round(_ratio(values, scales))
  steps = jnp.clip(steps, 1 - middle, middle - 1)
  return (steps + middle).astype(jnp.uint8), scales


def _signs(values: Array) -> tuple[Array, Array]:
  """Returns signs as `pack` would pack them, and the mean of |x|, in one pass.

  XLA hands the sum of one array along rows to a library on CPUs, and would read
  the values once for it and once for the signs.
  """
  width = values.shape[-1]
  eight = _in_parts(values, 8)
  size, share = _shares(eight, width)
  place = jax.lax.broadcasted_iota(jnp.uint8, eight.shape, values.ndim - 1)
  signs = (eight < 0).astype(jnp.uint8) << place
  size, packed = sums([size, signs], values.ndim - 1)
  total = jnp.sum(size, axis=-1, keepdims=True)
  return packed, _bfloat(total / (width * share))


def _magnitudes(values: Array) -> tuple[Array, Array]:
  """Returns signs and whether |x| is above its mean as codes; two scales."""
  width = values.shape[-1]
  size, share = _shares(values, width)
  is_large = size > jnp.mean(size, axis=-1, keepdims=True)
  parts = [jnp.where(mask, size, 0.0) for mask in (~is_large, is_large)]
  parts += [is_large.astype(jnp.int32)]
  # Few values of a long row are added up at a time, which errs less.
  found = sums([_in_parts(part, 8) for part in parts], values.ndim - 1)
  *totals, count = [jnp.sum(part, -1, part.dtype) for part in found]
  counts = jnp.maximum(jnp.stack([width - count, count], axis=-1), 1)
  means = jnp.stack(totals, axis=-1) / counts.astype(size.dtype)
  signs = (values < 0).astype(jnp.uint8)
  return 2 * signs + is_large.astype(jnp.uint8), _bfloat(means / share)


def _in_parts(values: Array, count: int) -> Array:
  """Cuts rows into parts [..., count, values]; zeros fill the last ones."""
  filled = pad(values, -values.shape[-1] % count)
  return filled.reshape(*values.shape[:-1], count, -1)


def _shares(values: Array, width: int) -> tuple[Array, float]:
  """Returns |x| times a power of two, whose sum is in fp32; and the power."""
  # A power of two rounds nothing above 2^-126, and no sum exceeds fp32.
  share = 2.0 ** -(width - 1).bit_length()
  return jnp.minimum(jnp.abs(values), _LARGEST_RANGE) * share, share


def _largest(values: Array) -> Array:
  largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
  return jnp.minimum(largest, _LARGEST_RANGE)


def _bfloat(scales: Array) -> Array:
  return jnp.minimum(scales, _LARGEST_SCALE).astype(jnp.bfloat16)


def _ratio(values: Array, scales: Array) -> Array:
  """Divides by scales in fp32; 0 where a scale is 0 or too small to invert."""
  wide = scales.astype(jnp.float32)
  is_usable = wide > _SMALLEST_SCALE
  inverse = jnp.where(is_usable, 1 / jnp.where(is_usable, wide, 1.0), 0.0)
  return values * inverse


def pack(codes: Array, bits: int) -> Array:
  """Packs codes [..., N] below 2^bits into bytes [..., ceil(N bits / 8)].

  A byte does not hold neighbors, but codes that lie a whole row of bytes
  apart. Packing is then an "or" of a few shifted slices, which vectorises.

  4 bits, codes a b c d e f: rows (a b c) and (d e f), so the 3 bytes are
  a + 16 d, b + 16 e, c + 16 f. 2 bits, codes a to g: padded with a zero to the
  rows (a b), (c d), (e f), (g 0), so the 2 bytes are a + 4 c + 16 e + 64 g and
  b + 4 d + 16 f.

  Args:
    codes: uint8 codes.
    bits: Bits of a code: 1, 2, 4 or 8.
  """
  rows = _in_parts(codes, 8 // bits)
  packed = rows[..., 0, :]
  for number in range(1, 8 // bits):
    packed = packed | (rows[..., number, :] << jnp.uint8(bits * number))
  return packed


def unpack(packed: Array, bits: int, count: int) -> Array:
  """Reverses `pack`: returns the `count` codes of every row of bytes.

  Args:
    packed: Bytes that `pack` returned.
    bits: Bits of a code, as in `pack`.
    count: Number of codes of a row, N.
  """
  shifts = bits * np.arange(8 // bits, dtype=np.uint8)

  def joined(packed: Array) -> Array:
    return jnp.concatenate([packed >> shift for shift in shifts], axis=-1)

  def spread(packed: Array) -> Array:
    rows = jax.vmap(lambda shift: packed >> shift, out_axes=-2)(shifts)
    return rows.reshape(*packed.shape[:-1], -1)

  # A GPU would ask for each value in which of eight joined rows it is, and a
  # CPU is slow where its innermost loop is as short as a row of bytes.
  codes = jax.lax.platform_dependent(packed, cuda=spread, default=joined)
  return codes[..., :count] & jnp.uint8(2**bits - 1)
