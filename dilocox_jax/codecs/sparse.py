"""Codecs that send only some values of a leaf: the largest or random ones."""

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
  """Encodes the k values of largest magnitude in each block of n values.

  The other values decode to zero. If the k values are sent exactly, the error
  is ||x - C(x)||^2 <= (1 - (1 - 2^-6) k / n) ||x||^2.

  Magnitudes are compared in bfloat16. If some of them are equal, the values
  that come first in the block are sent. The reason is Adam: if it has moved an
  embedding's row only once, the changes of all values in the row have the same
  magnitude, except for rounding. Rounding differs between meshes, so it must
  not decide which values are sent.

  Wire: packed indices of ceil(log2(block)) bits for each sent value, or one
  bit for each value of the block; then the sent values as `inner` encodes
  them. The indices of 64 of 4096 values take 64 * 12 bits = 96 bytes packed,
  and 512 bytes as a bitmap.
  Source: SparseLoCo, arXiv 2508.15706 (64 of 4096); CocktailSGD (Wang et al.,
  2023, ICML) for the bitmap.
  Differs: all blocks of a leaf have the same length, while CocktailSGD selects
  over a whole tensor. Both papers compare magnitudes without rounding them.
  """
  groups, width = group_shape(leaf, "block", payload.block_size)
  count = payload.num_kept(width)
  is_packed = payload.indices == "packed"

  # Shapes: blocks are [num_layers, groups, width]; the largest values and
  # their places are [num_layers, groups, count].
  def select(blocks: Array) -> tuple[Array, Array]:
    mask = _among_largest(blocks, count)
    places = _places(mask, count)
    largest = jnp.take_along_axis(blocks, places, axis=-1)
    if is_packed:
      return _pack_places(places, payload.index_bits(width)), largest
    return jnp.packbits(mask, axis=-1), largest

  def from_bitmap(bitmap: Array, largest: Array) -> Array:
    mask = jnp.unpackbits(bitmap, axis=-1, count=width)
    # For the mask 0 1 0 1 the running count minus one is -1 0 0 1. At a true
    # value it is the index of this value in `largest`.
    index = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    values = jnp.take_along_axis(largest, jnp.maximum(index, 0), axis=-1)
    return jnp.where(mask == 1, values, 0.0)

  def encode(values: Array, key: Array) -> tuple[Array, ...]:
    blocks = grouped(values, groups, width)
    indices, largest = map_over_rows(select, blocks)
    # `inner` encodes one vector of groups * count values for each layer.
    return indices, *inner.encode(largest.reshape(len(largest), -1), key)

  def decode(arrays: tuple[Array, ...]) -> Array:
    indices, *inner_arrays = arrays
    largest = inner.decode(tuple(inner_arrays))
    largest = largest.reshape(len(largest), groups, count)
    if is_packed:
      places = _unpack_places(indices, payload.index_bits(width), count)
      blocks = map_over_rows(functools.partial(_spread, width), largest, places)
    else:
      blocks = map_over_rows(from_bitmap, indices, largest)
    return ungrouped(blocks, leaf)

  return Encoder(encode, decode)


def _among_largest(blocks: Array, count: int) -> Array:
  """Marks the `count` values of largest magnitude along the last axis.

  Among values of equal magnitude the first ones are marked. The smallest
  magnitude among the marked values, `least`, is built bit by bit from the
  highest bit. A bit is set if at least `count` values reach the number with
  this bit. Example: the 2 largest of 6, 3, 5, 1 in 3 bits. Two values reach
  100, so its bit is set. Only one value reaches 110, so its bit is not set. Two
  values reach 101, so `least` is 5. Sorting takes 20 times as long on a CPU
  (docs/log.md).

  Args:
    blocks: Values [..., width].
    count: Number of values to mark in each row of `width` values.

  Returns:
    Booleans [..., width].
  """
  # The bits of positive floats, read as integers, are ordered like the floats.
  order = jax.lax.bitcast_convert_type(
    jnp.abs(blocks).astype(jnp.bfloat16), jnp.uint16
  )

  def next_bit(step: Array, least: Array) -> Array:
    bit = jnp.uint16(1) << (_MAGNITUDE_BITS - 1 - step).astype(jnp.uint16)
    num_reaching = jnp.sum(order >= (least | bit), -1, jnp.int32, keepdims=True)
    return jnp.where(num_reaching >= count, least | bit, least)

  # Made from the values, so that it varies over the same mesh axes as they do.
  least = jnp.zeros_like(order[..., :1])
  least = jax.lax.fori_loop(0, _MAGNITUDE_BITS, next_bit, least)
  above, equal = order > least, order == least
  num_missing = count - jnp.sum(above, -1, jnp.int32, keepdims=True)
  return above | (equal & (jnp.cumsum(equal, -1, jnp.int32) <= num_missing))


@functools.partial(jnp.vectorize, excluded=(1,), signature="(w)->(c)")
def _places(mask: Array, count: int) -> Array:
  """Returns the indices of the `count` true values of a mask, ascending.

  The nth true value stands where the running count reaches n. Example: the
  running count of (0 1 1 0 1) is (0 1 2 2 3), so the places are 1, 2 and 4.

  Args:
    mask: Booleans [..., width], `count` of them true in each row.
    count: Number of true values in each row.

  Returns:
    int32 indices [..., count].
  """
  running_count = jnp.cumsum(mask, dtype=jnp.int32)
  targets = jnp.arange(1, count + 1, dtype=jnp.int32)
  return jnp.searchsorted(running_count, targets).astype(jnp.int32)


def _spread(width: int, values: Array, places: Array) -> Array:
  """Returns zeros [..., width] with values [..., count] at their places."""
  zeros = jnp.zeros((*values.shape[:-1], width), values.dtype)
  return jnp.put_along_axis(zeros, places, values, -1, inplace=False)


def _pack_places(places: Array, bits: int) -> Array:
  """Packs places [..., count] into bytes; each place takes `bits` bits."""
  digits = (places[..., None] >> _shifts(bits, places.ndim + 1)) & 1
  flat = digits.reshape(*places.shape[:-1], -1).astype(jnp.uint8)
  return jnp.packbits(flat, axis=-1)


def _unpack_places(packed: Array, bits: int, count: int) -> Array:
  """Reverses `_pack_places`: returns int32 places [..., count]."""
  flat = jnp.unpackbits(packed, axis=-1, count=count * bits)
  digits = flat.reshape(*packed.shape[:-1], count, bits).astype(jnp.int32)
  return jnp.sum(digits << _shifts(bits, digits.ndim), axis=-1, dtype=jnp.int32)


def _shifts(bits: int, ndim: int) -> Array:
  """Returns the numbers 0 to bits - 1 along the last of `ndim` axes."""
  return jnp.arange(bits, dtype=jnp.int32).reshape((1,) * (ndim - 1) + (bits,))


def stratum_bounds(size: int, count: int) -> Array:
  """Cuts `size` values into strata; returns floor(i size / count).

  The program computes them. As constants they would be written into it, some
  10 MB of text for 4 million values.

  Args:
    size: Number of values.
    count: Number of strata, less than 80 million.

  Returns:
    int32 bounds [count + 1]: stratum i begins at the ith.
  """
  width, rest = divmod(size, count)
  number = jnp.arange(count + 1, dtype=jnp.int32)
  # i rest / count is what is missing. The product may exceed int32, so the
  # quotient is guessed in fp32. What the guess is off by is small, and exact
  # although both products wrap around.
  share = np.float32(rest / count)
  guess = jnp.floor(number.astype(jnp.float32) * share).astype(jnp.int32)
  off = number * rest - guess * count
  return number * width + guess + off // count


def random_mask(
  payload: RandomMask, leaf: Leaf, inner: Codec, *, max_rank: int = 0
) -> Codec:
  """Exchanges random values of a leaf; every exchange draws other values.

  The leaf is cut into strata of neighbouring values, and one value is drawn
  from each stratum. For example, 10 values and a fraction of 0.3 give three
  strata: values 0-2, 3-5 and 6-9. Each value is drawn with a probability equal
  to the payload's fraction p, except that strata have whole lengths. Values
  that are not drawn decode to zero, so E ||x - C(x)||^2 = (1 - p) ||x||^2.
  Error feedback sends them later.

  Wire: the drawn values as `inner` encodes them. The mask itself takes no
  bytes, because all replicas draw the same places.
  Source: CocktailSGD (Wang et al., 2023, ICML).
  Differs: one value is drawn from each stratum, which needs no permutation of
  all values.
  """
  del max_rank  # Every projection is told; a mask has no rank.
  count = payload.num_kept(leaf.size)

  def places(key: Array) -> Array:
    bounds = stratum_bounds(leaf.size, count)
    widths = jnp.diff(bounds)
    shape = (leaf.num_layers, count)
    uniform = jax.random.uniform(key, shape, jnp.float32)
    offset = jnp.floor(uniform * widths.astype(jnp.float32)[None])
    offset = jnp.minimum(offset.astype(jnp.int32), widths[None] - 1)
    return bounds[None, :-1] + offset

  def run(values: Array, state: Tree, key: Array) -> CodecSteps:
    flat = values.reshape(leaf.num_layers, 1, -1)
    drawn_places = places(key)[:, None]
    take = functools.partial(jnp.take_along_axis, axis=-1)
    drawn_values = map_over_rows(take, flat, drawn_places)[:, 0]
    # The inner codec's messages are this codec's messages.
    reduced, state = yield from inner.run(drawn_values, state, key)

    def spread(mean: Array) -> Array:
      put = functools.partial(_spread, leaf.size)
      blocks = map_over_rows(put, mean[:, None], drawn_places)
      return blocks.reshape(values.shape)

    return Reduced(*map(spread, reduced)), state

  return Codec(inner.init, run, inner.messages)
