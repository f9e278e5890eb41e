"""A few values stand for many: the largest ones, or a random part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.codecs.base import (
  Codec,
  CodecSteps,
  Encoder,
  Reduced,
  grouped,
  ungrouped,
)
from dilocox_jax.distributed.local_map import map_over_rows
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import group_shape
from dilocox_jax.plan.wire.reduction import RandomMask, TopK
from dilocox_jax.pytypes import Array, Tree

_ORDER_BITS = 15  # Of a bfloat16 without its sign.


def top_k(payload: TopK, leaf: Leaf, inner: Encoder) -> Encoder:
  """Keeps the largest values of each block; the others decode to zero.

  ||x - C(x)||^2 <= (1 - (1 - 2^-6) k / n) ||x||^2 if the kept values are sent
  exactly. They are compared in bfloat16, and of equals the first are kept:
  rows of an embedding that Adam moved once are as far from zero but for
  rounding, which must not decide what is sent, as it differs between meshes.

  Wire: packed indices of ceil(log2(block)) bits each, or one bit a value of
  the block; then what `inner` makes of the kept values.
  Source: SparseLoCo, arXiv 2508.15706 (64 of 4096); CocktailSGD (Wang et al.,
  2023, ICML) for the bitmap.
  Differs: blocks are made equally long; CocktailSGD selects over a whole
  tensor; both compare values as they are.
  """
  groups, width = group_shape(leaf, "block", payload.block_size)
  count = payload.num_kept(width)
  is_packed = payload.indices == "packed"

  def largest(blocks: Array) -> tuple[Array, Array]:
    chosen = _among_largest(blocks, count)
    places = _places(chosen, count)
    kept = jnp.take_along_axis(blocks, places, axis=-1)
    if is_packed:
      return _pack_places(places, payload.index_bits(width)), kept
    return jnp.packbits(chosen, axis=-1), kept

  def from_bitmap(packed: Array, kept: Array) -> Array:
    chosen = jnp.unpackbits(packed, axis=-1, count=width)
    number = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1
    values = jnp.take_along_axis(kept, jnp.maximum(number, 0), axis=-1)
    return jnp.where(chosen == 1, values, 0.0)

  def encode(values: Array, key: Array) -> tuple[Array, ...]:
    blocks = grouped(values, groups, width)
    indices, kept = map_over_rows(largest, blocks)
    return indices, *inner.encode(kept.reshape(len(kept), -1), key)

  def decode(arrays: tuple[Array, ...]) -> Array:
    indices, *carried = arrays
    kept = inner.decode(tuple(carried))
    kept = kept.reshape(len(kept), groups, count)
    if is_packed:
      places = _unpack_places(indices, payload.index_bits(width), count)
      blocks = map_over_rows(functools.partial(_spread, width), kept, places)
    else:
      blocks = map_over_rows(from_bitmap, indices, kept)
    return ungrouped(blocks, leaf)

  return Encoder(encode, decode)


def _among_largest(blocks: Array, count: int) -> Array:
  """Which values [..., width] are the `count` largest; of equals, the first.

  The smallest of them is found bit by bit, counting how many reach it: sorting
  takes 20 times as long on a CPU (docs/log.md).
  """
  # Without a sign, bits are ordered like the values they stand for.
  order = jax.lax.bitcast_convert_type(
    jnp.abs(blocks).astype(jnp.bfloat16), jnp.uint16
  )

  def next_bit(number: Array, least: Array) -> Array:
    bit = jnp.uint16(1) << (_ORDER_BITS - 1 - number).astype(jnp.uint16)
    reaching = jnp.sum(order >= (least | bit), -1, jnp.int32, keepdims=True)
    return jnp.where(reaching >= count, least | bit, least)

  least = jnp.zeros((*order.shape[:-1], 1), jnp.uint16)
  least = jax.lax.fori_loop(0, _ORDER_BITS, next_bit, least)
  above, equal = order > least, order == least
  left = count - jnp.sum(above, -1, jnp.int32, keepdims=True)
  return above | (equal & (jnp.cumsum(equal, -1, jnp.int32) <= left))


@functools.partial(jnp.vectorize, excluded=(1,), signature="(w)->(c)")
def _places(chosen: Array, count: int) -> Array:
  """Where `count` of [..., width] are true, in order."""
  number = jnp.cumsum(chosen, dtype=jnp.int32)
  nth = jnp.arange(1, count + 1, dtype=jnp.int32)
  return jnp.searchsorted(number, nth).astype(jnp.int32)


def _spread(width: int, part: Array, places: Array) -> Array:
  """Values [..., count] at their places among zeros [..., width]."""
  whole = jnp.zeros((*part.shape[:-1], width), part.dtype)
  return jnp.put_along_axis(whole, places, part, -1, inplace=False)


def _pack_places(places: Array, bits: int) -> Array:
  digits = (places[..., None] >> _shifts(bits, places.ndim + 1)) & 1
  flat = digits.reshape(*places.shape[:-1], -1).astype(jnp.uint8)
  return jnp.packbits(flat, axis=-1)


def _unpack_places(packed: Array, bits: int, count: int) -> Array:
  flat = jnp.unpackbits(packed, axis=-1, count=count * bits)
  digits = flat.reshape(*packed.shape[:-1], count, bits).astype(jnp.int32)
  return jnp.sum(digits << _shifts(bits, digits.ndim), axis=-1, dtype=jnp.int32)


def _shifts(bits: int, ndim: int) -> Array:
  """0 to bits - 1 along the last of some axes."""
  return jnp.arange(bits, dtype=jnp.int32).reshape((1,) * (ndim - 1) + (bits,))


def random_mask(payload: RandomMask, leaf: Leaf, inner: Codec) -> Codec:
  """Exchanges a random part of the values, drawn anew each time.

  The values are cut into as many strata as are drawn, and one is drawn of
  each: every value's chance is the payload's fraction, to rounding of the
  strata. The others decode to zero, so E ||x - C(x)||^2 = (1 - p) ||x||^2;
  error feedback sends them later.

  Wire: nothing of its own, the seed is shared.
  Source: CocktailSGD (Wang et al., 2023, ICML).
  Differs: drawn by strata, which needs no permutation of all values.
  """
  count = payload.num_kept(leaf.size)
  bounds = np.linspace(0, leaf.size, count + 1).astype(np.int32)
  widths = np.diff(bounds)

  def places(key: Array) -> Array:
    shape = (leaf.num_layers, count)
    chance = jax.random.uniform(key, shape, jnp.float32)
    offset = jnp.floor(chance * jnp.asarray(widths, jnp.float32)[None])
    last = jnp.asarray(widths - 1)[None]
    offset = jnp.minimum(offset.astype(jnp.int32), last)
    return jnp.asarray(bounds[:-1])[None] + offset

  def run(values: Array, state: Tree, key: Array) -> CodecSteps:
    drawn = places(key)
    flat = values.reshape(leaf.num_layers, 1, -1)
    drawn = drawn[:, None]
    part = map_over_rows(
      functools.partial(jnp.take_along_axis, axis=-1), flat, drawn
    )
    reduced, state = yield from inner.run(part[:, 0], state, key)

    def spread(part: Array) -> Array:
      put = functools.partial(_spread, leaf.size)
      return map_over_rows(put, part[:, None], drawn).reshape(values.shape)

    return Reduced(*map(spread, reduced)), state

  return Codec(inner.init, run, inner.messages)
