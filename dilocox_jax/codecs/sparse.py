"""Codecs that send only some values of a leaf: the largest or random ones."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import limited
from dilocox_jax.codecs import batching
from dilocox_jax.codecs.base import Encoder, Projection, Reduce, Reduced
from dilocox_jax.codecs.batching import Arrays, Shape
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.distributed.local_map import map_over_rows
from dilocox_jax.trees import Array, Tree
from dilocox_jax.turns import Pausing

INDEX_CODINGS = ("packed", "bitmap")
_MAGNITUDE_BITS = 15  # Bits of a bfloat16 without its sign.


@dataclasses.dataclass(frozen=True)
class TopK(Encoder):
  """Sends the k values of largest magnitude in each block of n values.

  The other values decode to zero. If the k values are sent exactly, the error
  is ||x - C(x)||^2 <= (1 - (1 - 2^-6) k / n) ||x||^2.

  Magnitudes are compared in bfloat16. If some of them are equal, the values
  that come first in the block are sent. The reason is Adam: if it has moved an
  embedding's row only once, the changes of all values in the row have the same
  magnitude, except for rounding. Rounding differs between meshes, so it must
  not decide which values are sent.

  Wire: packed indices of ceil(log2(block)) bits for each sent value, or one
  bit for each value of the block; then the sent values as `then` encodes them.
  The indices of 64 of 4096 values take 64 * 12 bits = 96 bytes packed, and 512
  bytes as a bitmap; from 342 kept values on the bitmap is smaller.
  Source: SparseLoCo, arXiv 2508.15706 (64 of 4096); CocktailSGD (Wang et al.,
  2023, ICML) for the bitmap.
  Differs: all blocks of a leaf have the same length, while CocktailSGD selects
  over a whole tensor. Both papers compare magnitudes without rounding them.

  Attributes:
    fraction: Share of a block's values that is sent.
    block_size: Most values of a block (count).
    indices: Coding of the places: "packed" or "bitmap".
    then: Encodes the sent values, one vector for each layer.
  """

  fraction: float = limited(1 / 64, above=0, at_most=1)
  block_size: int = limited(4096, at_least=1)
  indices: str = limited("packed", choices=INDEX_CODINGS)
  then: Encoder = Float()

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns the indices of each group of leaves, then the sent values."""
    shapes = [leaf.shape for leaf in leaves]
    indices, kept = [], []
    for values in batching.concat_layers(_flat(leaves), _same_size(shapes)):
      width = batching.block_width(values.shape[1], self.block_size)
      flat = batching.pad(values, -values.shape[1] % width)
      select = functools.partial(self._select, self.num_kept(width))
      blocks = flat.reshape(len(flat), -1, width)
      own, largest = map_over_rows(select, blocks)
      indices.append(own)
      kept.append(largest.reshape(len(largest), -1))
    return [*indices, *self.then.encode(kept)]

  def decode(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Reverses `encode`."""
    groups, found = _same_size(shapes), []
    indices, arrays = arrays[: len(groups)], arrays[len(groups) :]
    sizes = [math.prod(shapes[group[0]][1:]) for group in groups]
    widths = [batching.block_width(size, self.block_size) for size in sizes]
    inner = [
      (len(own), own.shape[1] * self.num_kept(width))
      for own, width in zip(indices, widths, strict=True)
    ]
    kept = self.then.decode(arrays, inner)
    of_groups = zip(indices, sizes, widths, kept, strict=True)
    for own, size, width, values in of_groups:
      largest = values.reshape(*own.shape[:2], -1)
      blocks = map_over_rows(functools.partial(self._put, width), own, largest)
      found.append(blocks.reshape(len(blocks), -1)[:, :size])
    return _shaped(found, groups, shapes)

  def num_kept(self, width: int) -> int:
    """Returns the number of values that are sent of a block."""
    return max(1, round(self.fraction * width))

  def _select(self, count: int, blocks: Array) -> tuple[Array, Array]:
    """Returns the coded places [..., bytes] and the values [..., count]."""
    words, width = _among_largest(blocks, count), blocks.shape[-1]
    places = _places(words, count)
    # Each pass of the quantizer would otherwise look the values up again.
    [largest] = batching.materialize([jnp.take_along_axis(blocks, places, -1)])
    if self.indices == "packed":
      bits = _bits(places, _index_bits(width))
    else:
      bits = _bits(words, 32)[..., :width]
    return jnp.packbits(bits, axis=-1), largest

  def _put(self, width: int, indices: Array, largest: Array) -> Array:
    """Returns blocks [..., width] with the values at their places."""
    bits = jnp.unpackbits(indices, axis=-1)
    if self.indices == "packed":
      places = _numbers(bits, _index_bits(width))[..., : largest.shape[-1]]
      return _spread(width, largest, places.astype(jnp.int32))
    # For the mask 0 1 0 1 the running count minus one is -1 0 0 1. At a true
    # value it is the index of this value in `largest`.
    index = _running_count(_numbers(bits, 32)).reshape(*bits.shape[:-1], -1)
    index = jnp.maximum(index[..., :width] - 1, 0)
    values = jnp.take_along_axis(largest, index, axis=-1)
    return jnp.where(bits[..., :width] == 1, values, 0.0)


def _flat(leaves: Arrays) -> list[Array]:
  """Returns leaves as float32 [layers, size]."""
  return [leaf.reshape(len(leaf), -1).astype(jnp.float32) for leaf in leaves]


def _same_size(shapes: Sequence[Shape]) -> list[list[int]]:
  """Groups the leaves whose layers have equally many values."""
  return batching.group_by_shape(
    shapes, [math.prod(shape[1:]) for shape in shapes]
  )


def _shaped(
  arrays: Arrays, groups: Sequence[Sequence[int]], shapes: Sequence[Shape]
) -> list[Array]:
  """Returns the leaves of groups [layers, size] in their shapes and order."""
  leaves = batching.split_layers(arrays, groups, shapes)
  return [leaves[n].reshape(shape) for n, shape in enumerate(shapes)]


def _index_bits(width: int) -> int:
  """Returns the number of bits of one packed index into a block."""
  return max(1, (width - 1).bit_length())


def _among_largest(blocks: Array, count: int) -> Array:
  """Marks the `count` values of largest magnitude along the last axis.

  Among values of equal magnitude the first ones are marked. The smallest
  magnitude among the marked values, `least`, is built from the highest bits
  on, three in each pass over the values: the largest three bits are taken that
  at least `count` values reach. Example: the 2 largest of 6, 3, 5, 1 in 3 bits.
  Two values reach 101 and one reaches 110, so `least` is 5. Sorting takes 80
  times as long on a CPU (measured).

  Args:
    blocks: Values [..., width].
    count: Number of values to mark in each row of `width` values.

  Returns:
    The marks as words of 32 bits, [..., ceil(width / 32)].
  """
  # The bits of positive floats, read as integers, are ordered like the floats.
  order = jax.lax.bitcast_convert_type(
    jnp.abs(blocks).astype(jnp.bfloat16), jnp.uint16
  )
  # Made from the values, so that it varies over the same mesh axes as they do.
  least = jnp.zeros_like(order[..., :1])
  for shift in range(_MAGNITUDE_BITS - 3, -1, -3):
    steps = [least + jnp.uint16(n << shift) for n in range(1, 8)]
    reaching = [(order >= step).astype(jnp.int32)[..., None] for step in steps]
    numbers = batching.sums(reaching, order.ndim - 1)
    reached = sum((number >= count).astype(jnp.uint16) for number in numbers)
    least += reached << jnp.uint16(shift)
  above, equal = _numbers(order > least, 32), _numbers(order == least, 32)
  num_missing = count - _running_count(above)[..., -1:, -1:]
  is_wanted = _running_count(equal) <= num_missing
  return above | (equal & _numbers(is_wanted, 32)[..., 0])


def _running_count(words: Array) -> Array:
  """Counts the bits of a row of words up to each bit.

  Few words are counted one after the other instead of many values, and the
  count inside a word asks for no other word. Example with words of 2 bits: the
  row 01 11 (its lowest bits first: 1 0, 1 1) has the counts 1 1, 2 3.

  Args:
    words: Words [..., words], the lowest bits first.

  Returns:
    int32 counts [..., words, 32].
  """
  inside = _count_inside(words).astype(jnp.int32)
  before = jnp.cumsum(inside[..., -1], -1, jnp.int32) - inside[..., -1]
  return inside + before[..., None]


def _count_inside(words: Array) -> Array:
  """Counts the bits of each word up to each of its bits (uint32)."""
  place = jax.lax.broadcasted_iota(jnp.uint32, (*words.shape, 32), words.ndim)
  return jax.lax.population_count(words[..., None] & ((2 << place) - 1))


@functools.partial(jnp.vectorize, excluded=(1,), signature="(w)->(c)")
def _places(words: Array, count: int) -> Array:
  """Returns the places of the `count` bits of a row of words, ascending.

  The bit of a rank, from 0, is in the first word at whose end more bits are
  counted than the rank. Before it are the bits of this word up to which no
  more are counted. Example with words of 2 bits: up to the bits of 01 11 are
  counted 1 1, 2 3, so the bit of rank 1 is in the second word, and at its
  place 0, since no count of 2 and 3 is at most 1.

  Args:
    words: Words [..., words], with `count` bits in each row.
    count: Number of bits in each row.

  Returns:
    int32 places [..., count].
  """
  counts = jax.lax.population_count(words)
  ends = jnp.cumsum(counts, dtype=jnp.uint32)
  ranks = jnp.arange(count, dtype=jnp.uint32)
  search = functools.partial(jnp.searchsorted, side="right")
  # As a loop the search reads and writes all its bounds in every step on a GPU.
  # On a CPU each step that is written out repeats those before it.
  written_out = functools.partial(search, method="scan_unrolled")
  word = jax.lax.platform_dependent(
    ends, ranks, cuda=written_out, default=search
  ).astype(jnp.int32)
  own, before = jnp.stack([words, ends - counts])[:, word]
  is_before = before[:, None] + _count_inside(own) <= ranks[:, None]
  return 32 * word + jnp.sum(is_before, -1, jnp.int32)


def _spread(width: int, values: Array, places: Array) -> Array:
  """Returns zeros [..., width] with values [..., count] at their places."""
  zeros = jnp.zeros((*values.shape[:-1], width), values.dtype)
  return jnp.put_along_axis(zeros, places, values, -1, inplace=False)


def _bits(numbers: Array, count: int) -> Array:
  """Returns the lowest bits of each number, [..., numbers * count] as uint8."""
  shape = *numbers.shape, count
  place = jax.lax.broadcasted_iota(numbers.dtype, shape, numbers.ndim)
  bits = (numbers[..., None] >> place).astype(jnp.uint8) & 1
  return bits.reshape(*numbers.shape[:-1], -1)


def _numbers(bits: Array, count: int) -> Array:
  """Returns numbers (uint32) of `count` bits, the lowest first, or fewer."""
  bits = batching.pad(bits, -bits.shape[-1] % count).astype(jnp.uint32)
  bits = bits.reshape(*bits.shape[:-1], -1, count)
  shifts = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
  return jnp.sum(bits << shifts, -1, dtype=jnp.uint32)


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


@dataclasses.dataclass(frozen=True)
class RandomMask(Projection):
  """Sends random values of a leaf; every exchange draws other values.

  The leaf is cut into strata of neighboring values, and one value is drawn
  from each stratum. For example, 10 values and a fraction of 0.3 give three
  strata: values 0-2, 3-5 and 6-9. Each value is drawn with a probability equal
  to the fraction p, except that strata have whole lengths. Values that are not
  drawn decode to zero, so E ||x - C(x)||^2 = (1 - p) ||x||^2. Error feedback
  sends them later.

  Wire: the drawn values as `then` encodes them. The mask itself takes no
  bytes, because all replicas draw the same places.
  Source: CocktailSGD (Wang et al., 2023, ICML).
  Differs: one value is drawn from each stratum, which needs no permutation of
  all values.

  Attributes:
    fraction: Share of the values that is sent.
    then: Encodes the drawn values, one vector for each layer.
  """

  fraction: float = limited(0.1, above=0, at_most=1)
  then: Encoder = Float()

  def num_kept(self, size: int) -> int:
    """Returns the number of values drawn of a layer of some values."""
    return max(1, round(self.fraction * size))

  def run(
    self, leaves: Arrays, state: list[Tree], key: Array, reduce: Reduce
  ) -> Pausing:
    """Sends the drawn values of every group of leaves of one size."""
    shapes = [leaf.shape for leaf in leaves]
    groups = _same_size(shapes)
    values = [
      flat[:, None] for flat in batching.concat_layers(_flat(leaves), groups)
    ]
    places = [
      self._draw(flat.shape[-1], batching.layer_numbers(group, shapes), key)
      for group, flat in zip(groups, values, strict=True)
    ]
    take = functools.partial(jnp.take_along_axis, axis=-1)
    taken = map(functools.partial(map_over_rows, take), values, places)
    reduced = yield from reduce([each[:, 0] for each in taken])

    def spread(drawn: list[Array]) -> list[Array]:
      found = []
      for flat, own, at in zip(values, drawn, places, strict=True):
        put = functools.partial(_spread, flat.shape[-1])
        found.append(map_over_rows(put, own[:, None], at)[:, 0])
      return _shaped(found, groups, shapes)

    return Reduced(*map(spread, reduced)), state

  def _draw(self, size: int, layers: Array, key: Array) -> Array:
    """Returns one place of each stratum of every layer, [layers, 1, kept]."""
    bounds = stratum_bounds(size, self.num_kept(size))
    widths = jnp.diff(bounds)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, layers)
    draw = functools.partial(jax.random.uniform, shape=(1, len(widths)))
    uniform = jax.vmap(functools.partial(draw, dtype=jnp.float32))(keys)
    offset = jnp.floor(uniform * widths.astype(jnp.float32)[None, None])
    offset = jnp.minimum(offset.astype(jnp.int32), widths[None, None] - 1)
    return bounds[None, None, :-1] + offset
