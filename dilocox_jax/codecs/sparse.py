"""A few values stand for many: the largest ones, or random ones."""

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

_MAGNITUDE_BITS = 15  # Bits of a bfloat16 without its sign.


def top_k(payload: TopK, leaf: Leaf, inner: Encoder) -> Encoder:
  """Encodes the largest values of each block; the others decode to zero.

  ||x - C(x)||^2 <= (1 - (1 - 2^-6) k / n) ||x||^2 if the kept values are sent
  exactly. Values are compared in bfloat16, and of equal ones the first are
  kept. Rows of an embedding that Adam has moved once all have the same size,
  but for rounding. Rounding differs between meshes, so it must not decide what
  is sent.

  Wire: packed indices of ceil(log2(block)) bits for each kept value, or one
  bit for each value of the block; then the kept values as `inner` encodes
  them. The indices of 64 of 4096 values take 64 * 12 bits = 96 bytes packed,
  and 512 bytes as a bitmap.
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
  """Marks the `count` largest values of [..., width]; of equals, the first.

  The smallest of them, `least`, is found bit by bit from the highest: a bit is
  set if at least `count` values still reach the number with this bit. For the
  2 largest of 6, 3, 5, 1 in 3 bits: 100 is reached by two values, so it stays;
  110 is reached by one, so it does not; 101 is reached by two, so least is 5.
  Sorting takes 20 times as long on a CPU (docs/log.md).
  """
  # The bits of positive floats, read as integers, are ordered like the floats.
  order = jax.lax.bitcast_convert_type(
    jnp.abs(blocks).astype(jnp.bfloat16), jnp.uint16
  )

  def next_bit(number: Array, least: Array) -> Array:
    bit = jnp.uint16(1) << (_MAGNITUDE_BITS - 1 - number).astype(jnp.uint16)
    reaching = jnp.sum(order >= (least | bit), -1, jnp.int32, keepdims=True)
    return jnp.where(reaching >= count, least | bit, least)

  least = jnp.zeros((*order.shape[:-1], 1), jnp.uint16)
  least = jax.lax.fori_loop(0, _MAGNITUDE_BITS, next_bit, least)
  above, equal = order > least, order == least
  left = count - jnp.sum(above, -1, jnp.int32, keepdims=True)
  return above | (equal & (jnp.cumsum(equal, -1, jnp.int32) <= left))


@functools.partial(jnp.vectorize, excluded=(1,), signature="(w)->(c)")
def _places(chosen: Array, count: int) -> Array:
  """Returns the places of the `count` true values of [..., width], in order.

  The nth of them is where the running count reaches n: (0 1 1 0 1) counts to
  (0 1 2 2 3), so the places are 1, 2 and 4.
  """
  number = jnp.cumsum(chosen, dtype=jnp.int32)
  nth = jnp.arange(1, count + 1, dtype=jnp.int32)
  return jnp.searchsorted(number, nth).astype(jnp.int32)


def _spread(width: int, values: Array, places: Array) -> Array:
  """Puts values [..., count] at their places among zeros [..., width]."""
  zeros = jnp.zeros((*values.shape[:-1], width), values.dtype)
  return jnp.put_along_axis(zeros, places, values, -1, inplace=False)


def _pack_places(places: Array, bits: int) -> Array:
  digits = (places[..., None] >> _shifts(bits, places.ndim + 1)) & 1
  flat = digits.reshape(*places.shape[:-1], -1).astype(jnp.uint8)
  return jnp.packbits(flat, axis=-1)


def _unpack_places(packed: Array, bits: int, count: int) -> Array:
  flat = jnp.unpackbits(packed, axis=-1, count=count * bits)
  digits = flat.reshape(*packed.shape[:-1], count, bits).astype(jnp.int32)
  return jnp.sum(digits << _shifts(bits, digits.ndim), axis=-1, dtype=jnp.int32)


def _shifts(bits: int, ndim: int) -> Array:
  """Returns 0 to bits - 1 along the last of `ndim` axes."""
  return jnp.arange(bits, dtype=jnp.int32).reshape((1,) * (ndim - 1) + (bits,))


def random_mask(payload: RandomMask, leaf: Leaf, inner: Codec) -> Codec:
  """Exchanges random values of a leaf, drawn anew each time.

  The values are cut into as many neighbourhoods (strata) as are drawn, and one
  value is drawn of each. 10 values at a fraction of 0.3 have the strata 0-2,
  3-5 and 6-9. Every value's chance is the payload's fraction p, up to the
  rounding of strata. The others decode to zero, so E ||x - C(x)||^2 =
  (1 - p) ||x||^2; error feedback sends them later.

  Wire: nothing of its own, because all replicas draw the same values; then the
  drawn values as `inner` encodes them.
  Source: CocktailSGD (Wang et al., 2023, ICML).
  Differs: one value is drawn of each stratum, which needs no permutation of
  all values.
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
    flat = values.reshape(leaf.num_layers, 1, -1)
    drawn = places(key)[:, None]
    take = functools.partial(jnp.take_along_axis, axis=-1)
    drawn_values = map_over_rows(take, flat, drawn)[:, 0]
    # The inner codec's messages are this codec's messages.
    reduced, state = yield from inner.run(drawn_values, state, key)

    def spread(mean: Array) -> Array:
      put = functools.partial(_spread, leaf.size)
      return map_over_rows(put, mean[:, None], drawn).reshape(values.shape)

    return Reduced(*map(spread, reduced)), state

  return Codec(inner.init, run, inner.messages)
