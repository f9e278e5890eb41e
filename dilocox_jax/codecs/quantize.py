"""Values as floats or codes of a few bits.

Codes are packed into bytes: JAX's own sub-byte types take a whole byte a
value. Scales are bfloat16; pseudo-gradients can be smaller than fp16 reaches.
Codes are chosen for the scale that is sent, not for the one before rounding.
"""

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder, grouped, ungrouped
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import E3M0, Dense, Int, group_shape
from dilocox_jax.pytypes import Array

_LARGEST_SCALE = float(jnp.finfo(jnp.bfloat16).max)
# Codes saturate here: what is twice as large has an inverse that fp32 may flush
# to zero.
_LARGEST_RANGE = 2.0**124
_SMALLEST_SCALE = float(jnp.finfo(jnp.bfloat16).tiny)


def dense(payload: Dense, leaf: Leaf) -> Encoder:
  """Every value as a float; what is too large for fp16 becomes its largest.

  With 11 significant bits fp16 errs evenly within 2^(e-11), where 2^e is the
  power of two at or below |x|; the mean of the square is 2^-22 4^e / 3. On
  N(0, 1) E 4^e = 0.543, hence 4.3e-8.

  Wire: 4 or 2 bytes a value.
  Source: OpenDiLoCo, arXiv 2407.07852, section 3, for fp16.
  Differs: saturates instead of overflowing.
  """
  dtype = jnp.dtype(payload.dtype)
  largest = float(jnp.finfo(dtype).max)

  def encode(values: Array, key: Array) -> tuple[Array, ...]:
    del key
    wide = values.astype(jnp.float32)
    return (jnp.clip(wide, -largest, largest).astype(dtype),)

  def decode(arrays: tuple[Array, ...]) -> Array:
    (values,) = arrays
    return values.astype(jnp.float32).reshape(-1, *leaf.shape)

  return Encoder(encode, decode)


def integer(payload: Int, leaf: Leaf) -> Encoder:
  """Values rounded to 2^bits levels.

  8 and 4 bits: q = round(x / s), s = max|x| / (2^(bits-1) - 1) over the group
  and then rounded to bfloat16, so |error| <= s / 2 for each value. On N(0, 1),
  blocks of 128 have E max^2 = 8.16, so that the mean squared error is at most
  E s^2 / 12 = 0.0139 at 4 bits and 4.2e-5 at 8.

  2 bits: a sign and one of two magnitudes, the means of |x| below and above
  the mean of |x|: 0.378 and 1.366 for N(0, 1), mean squared error 0.125 (the
  best four levels have 0.1175).

  1 bit: the sign times the mean of |x|; 1 - 2 / pi = 0.363 on N(0, 1).

  Stochastic rounding has evenly spaced levels that reach from -max|x| to
  max|x| and is unbiased; its error is at most one step.

  Wire: bits a value; 2 bytes a group, 4 for two magnitudes.
  Source: CocktailSGD (Wang et al., 2023, ICML) for 4 bits; SparseLoCo, arXiv
  2508.15706, for 2; 1-bit SGD (Seide et al., 2014) for 1.
  Differs: bfloat16 scales; the two magnitudes of 2 bits follow the data.
  """
  groups, width = group_shape(leaf, payload.scale, payload.block_size)
  rounded = _unbiased if payload.rounding == "stochastic" else _nearest
  to_codes, to_values = rounded(payload.bits)
  return _coded(leaf, groups, width, payload.bits, to_codes, to_values)


def e3m0(payload: E3M0, leaf: Leaf) -> Encoder:
  """A sign and a power of two: 0 or s 2^-6 ... s, with s = max|x| of a block.

  Each value goes to the nearest level. Between 2^j and 2^(j+1) the error is at
  most 2^(j-1), a third of the value; below 2^-6 s at most 2^-7 s. Hence the
  squared error is at most x^2 / 9 + (2^-7 s)^2, which is 0.112 on N(0, 1); if
  log |x| is spread evenly between 2^j and 2^(j+1), it is 0.038 x^2.

  Wire: 4 bits a value and 2 bytes a block.
  Source: Streaming DiLoCo, arXiv 2501.18512, section 2.4.
  Differs: the paper gives no scale; here the exponents hang from each block's
  largest value, and the lowest code is zero.
  """
  groups, width = group_shape(leaf, "block", payload.block_size)

  def to_codes(values: Array, key: Array) -> tuple[Array, Array]:
    del key
    scales = _bfloat(_largest(values))
    size = _ratio(jnp.abs(values), scales)
    # 4/3 puts the midpoints between powers of two onto powers of two.
    _, exponent = jnp.frexp(size * (4 / 3))
    # The exponent of zero is zero: it says nothing about small values.
    level = jnp.where(size >= 2.0**-7, jnp.clip(exponent + 6, 1, 7), 0)
    sign = (values < 0).astype(level.dtype)
    return (level + 8 * sign).astype(jnp.uint8), scales

  def to_values(codes: Array, scales: Array) -> Array:
    level = (codes & 7).astype(jnp.int32)
    size = jnp.where(level > 0, jnp.exp2((level - 7).astype(jnp.float32)), 0.0)
    sign = jnp.where(codes < 8, 1.0, -1.0)
    return sign * size * scales.astype(jnp.float32)

  return _coded(leaf, groups, width, 4, to_codes, to_values)


def _coded(leaf, groups, width, bits, to_codes, to_values) -> Encoder:
  """An encoder from what happens in [num_layers, groups, width]."""

  def encode(values: Array, key: Array) -> tuple[Array, ...]:
    codes, scales = to_codes(grouped(values, groups, width), key)
    return pack(codes, bits), scales

  def decode(arrays: tuple[Array, ...]) -> Array:
    packed, scales = arrays
    return ungrouped(to_values(unpack(packed, bits, width), scales), leaf)

  return Encoder(encode, decode)


def _nearest(bits: int):
  if bits == 2:
    return _two_magnitudes, _from_magnitudes
  if bits == 1:
    return _signs, _from_signs
  middle = 2 ** (bits - 1)

  def to_codes(values: Array, key: Array) -> tuple[Array, Array]:
    del key
    scales = _bfloat(_largest(values) / (middle - 1))
    steps = jnp.round(_ratio(values, scales))
    steps = jnp.clip(steps, 1 - middle, middle - 1)
    return (steps + middle).astype(jnp.uint8), scales

  def to_values(codes: Array, scales: Array) -> Array:
    return (codes.astype(jnp.float32) - middle) * scales.astype(jnp.float32)

  return to_codes, to_values


def _unbiased(bits: int):
  """Stochastic rounding; few bits have no level to spare for zero."""
  middle = 2 ** (bits - 1) if bits > 2 else (2**bits - 1) / 2
  reach = middle - 1 if bits > 2 else middle
  half = middle % 1

  def to_codes(values: Array, key: Array) -> tuple[Array, Array]:
    # Rounded up, so that no value lies beyond the last level.
    scales = _bfloat(_largest(values) * ((1 + 2**-7) / reach))
    chance = jax.random.uniform(key, values.shape, jnp.float32)
    # The middle is added last: next to it, a chance near 1 would become 1.
    codes = jnp.floor(_ratio(values, scales) + half + chance) + (middle - half)
    return jnp.clip(codes, 0, 2**bits - 1).astype(jnp.uint8), scales

  def to_values(codes: Array, scales: Array) -> Array:
    return (codes.astype(jnp.float32) - middle) * scales.astype(jnp.float32)

  return to_codes, to_values


def _two_magnitudes(values: Array, key: Array) -> tuple[Array, Array]:
  del key
  largest = _largest(values)
  size = _ratio(jnp.abs(values), largest)
  is_large = size > jnp.mean(size, axis=-1, keepdims=True)
  low = _mean_where(size, ~is_large)
  high = _mean_where(size, is_large)
  scales = _bfloat(jnp.concatenate([low, high], axis=-1) * largest)
  codes = 2 * (values < 0).astype(jnp.uint8) + is_large.astype(jnp.uint8)
  return codes, scales


def _from_magnitudes(codes: Array, scales: Array) -> Array:
  low, high = jnp.split(scales.astype(jnp.float32), 2, axis=-1)
  size = jnp.where((codes & 1) == 1, high, low)
  return jnp.where(codes < 2, size, -size)


def _mean_where(values: Array, mask: Array) -> Array:
  count = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)
  total = jnp.sum(jnp.where(mask, values, 0.0), axis=-1, keepdims=True)
  return total / jnp.maximum(count, 1).astype(total.dtype)


def _signs(values: Array, key: Array) -> tuple[Array, Array]:
  del key
  largest = _largest(values)
  size = _ratio(jnp.abs(values), largest)
  scales = _bfloat(jnp.mean(size, axis=-1, keepdims=True) * largest)
  return (values < 0).astype(jnp.uint8), scales


def _from_signs(codes: Array, scales: Array) -> Array:
  size = scales.astype(jnp.float32)
  return jnp.where(codes == 0, size, -size)


def _largest(values: Array) -> Array:
  largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
  return jnp.minimum(largest, _LARGEST_RANGE)


def _bfloat(scales: Array) -> Array:
  return jnp.minimum(scales, _LARGEST_SCALE).astype(jnp.bfloat16)


def _ratio(values: Array, scales: Array) -> Array:
  """Divides by scales, in fp32; 0 where a scale is 0 or too small to invert."""
  wide = scales.astype(jnp.float32)
  is_usable = wide > _SMALLEST_SCALE
  inverse = jnp.where(is_usable, 1 / jnp.where(is_usable, wide, 1.0), 0.0)
  return values * inverse


def pack(codes: Array, bits: int) -> Array:
  """Codes [..., N] below 2^bits as bytes [..., ceil(N bits / 8)].

  A byte holds codes that lie a whole row of bytes apart, so that packing is
  the sum of a few shifted slices.
  """
  share = 8 // bits
  if share == 1:
    return codes
  width = -(-codes.shape[-1] // share)
  missing = share * width - codes.shape[-1]
  if missing:
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
  parts = codes.reshape(*codes.shape[:-1], share, width)
  packed = parts[..., 0, :]
  for number in range(1, share):
    packed = packed | (parts[..., number, :] << jnp.uint8(bits * number))
  return packed


def unpack(packed: Array, bits: int, count: int) -> Array:
  """The first `count` codes of every row of bytes."""
  if bits == 8:
    return packed
  mask = jnp.uint8(2**bits - 1)
  parts = [
    (packed >> jnp.uint8(bits * number)) & mask for number in range(8 // bits)
  ]
  return jnp.concatenate(parts, axis=-1)[..., :count]
