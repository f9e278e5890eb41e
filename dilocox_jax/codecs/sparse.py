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
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.distributed.local_map import map_over_rows
from dilocox_jax.trees import Array, Tree

INDEX_CODINGS = ("packed", "bitmap")  # Values of `TopK.indices`.
_MAGNITUDE_BITS = 15  # Bits of a bfloat16 without its sign.


@dataclasses.dataclass(frozen=True)
class TopK(Encoder):
  """Sends the k values of largest magnitude in each block of n values.

  The other values decode to zero. Magnitudes are compared after rounding to
  bfloat16; among equal magnitudes, the values that come first in the block are
  sent. If `then` encodes the k values without loss, a block x decodes to C(x)
  with the error

      ||x - C(x)||^2 <= (1 - (1 - 2^-6) k / n) ||x||^2

  Wire: the indices of the sent values in each block, then the sent values of
  all blocks as `then` encodes them. The indices are either packed, in
  ceil(log2(n)) bits each, or sent as a bitmap, with one bit for each of the n
  values. For example, the indices of 64 of 4096 values take 64 * 12 bits = 96
  bytes packed, and 512 bytes as a bitmap.
  Source: SparseLoCo, arXiv 2508.15706 (64 of 4096); CocktailSGD (Wang et al.,
  2023, ICML) for the bitmap.
  Differs: the values are selected in blocks of equal length, while CocktailSGD
  selects over a whole tensor. Both papers compare magnitudes without rounding
  them.

  Attributes:
    fraction: Fraction k / n of a block's values that is sent, above 0, at most
      1. The number k is rounded, and is at least 1.
    block_size: Largest number of values in a block.
    indices: How the indices of the sent values are coded: "packed" or "bitmap".
    then: Encoder of the sent values. It gets one vector for each layer.
  """

  fraction: float = limited(1 / 64, above=0, at_most=1)
  block_size: int = limited(4096, at_least=1)
  indices: str = limited("packed", choices=INDEX_CODINGS)
  then: Encoder = Float()

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns the arrays to send for some leaves.

    They are the coded indices of each group of leaves, uint8 [layers, blocks,
    bytes], and then the sent values of all groups, encoded by `then`. A group
    has leaves whose layers have equally many values, or is a single leaf.
    """
    shapes = [leaf.shape for leaf in leaves]
    coded_indices = []
    sent_values = []
    for values in batching.concat_layers(_flat(leaves), _same_size(shapes)):
      width = batching.block_width(values.shape[1], self.block_size)
      flat = batching.pad(values, -values.shape[1] % width)
      select = functools.partial(self._select, self.num_sent(width))
      blocks = flat.reshape(len(flat), -1, width)
      indices, largest = map_over_rows(select, blocks)
      coded_indices.append(indices)
      sent_values.append(largest.reshape(len(largest), -1))
    return [*coded_indices, *self.then.encode(sent_values)]

  def decode(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Decodes arrays that `encode` returned into float32 leaves.

    Values that were not sent are zero.
    """
    groups = _same_size(shapes)
    # One array [layers, blocks, bytes] for each group.
    coded_indices = arrays[: len(groups)]
    coded_values = arrays[len(groups) :]
    sizes = [math.prod(shapes[group[0]][1:]) for group in groups]
    widths = [batching.block_width(size, self.block_size) for size in sizes]
    # The sent values of each group are [layers, blocks * count].
    value_shapes = [
      (len(indices), indices.shape[1] * self.num_sent(width))
      for indices, width in zip(coded_indices, widths, strict=True)
    ]
    sent_values = self.then.decode(coded_values, value_shapes)
    layers_of_groups = []
    for indices, size, width, values in zip(
      coded_indices, sizes, widths, sent_values, strict=True
    ):
      # [layers, blocks, count].
      largest = values.reshape(*indices.shape[:2], -1)
      to_blocks = functools.partial(self._to_blocks, width)
      # [layers, blocks, width]. Without the padding a layer has `size` values.
      blocks = map_over_rows(to_blocks, indices, largest)
      layers_of_groups.append(blocks.reshape(len(blocks), -1)[:, :size])
    return _shaped(layers_of_groups, groups, shapes)

  def num_sent(self, width: int) -> int:
    """Returns how many of the `width` values of a block are sent."""
    return max(1, round(self.fraction * width))

  def _select(self, count: int, blocks: Array) -> tuple[Array, Array]:
    """Selects the `count` values of largest magnitude in each block.

    Returns their coded indices, uint8 [..., bytes], and the values [..., count]
    in the order of their indices.
    """
    width = blocks.shape[-1]
    words = _mark_largest(blocks, count)
    indices = _bit_indices(words, count)
    # Without `materialize`, each pass of the quantizer over the selected values
    # would select them again.
    [largest] = batching.materialize([jnp.take_along_axis(blocks, indices, -1)])
    if self.indices == "packed":
      return _pack(indices.astype(jnp.uint32), _index_bits(width)), largest
    return _pack(words, 32)[..., : -(-width // 8)], largest

  def _to_blocks(self, width: int, indices: Array, largest: Array) -> Array:
    """Returns blocks [..., width]: values at coded indices, zeros elsewhere."""
    if self.indices == "packed":
      numbers = _unpack(indices, _index_bits(width), largest.shape[-1])
      return _scatter(width, largest, numbers.astype(jnp.int32))
    bits = jnp.unpackbits(indices, axis=-1)
    # For the mask 0 1 0 1 the running count minus one is -1 0 0 1. At a true
    # value it is the index of this value in `largest`.
    words = _to_words(bits)
    index = _running_count(words).reshape(*bits.shape[:-1], -1)
    index = jnp.maximum(index[..., :width] - 1, 0)
    values = jnp.take_along_axis(largest, index, axis=-1)
    return jnp.where(bits[..., :width] == 1, values, 0.0)


def _flat(leaves: Arrays) -> list[Array]:
  """Returns leaves [num_layers, *shape] as float32 [num_layers, size]."""
  return [leaf.reshape(len(leaf), -1).astype(jnp.float32) for leaf in leaves]


def _same_size(shapes: Sequence[Shape]) -> list[list[int]]:
  """Groups leaves by the number of values in a layer (`group_by_shape`)."""
  return batching.group_by_shape(
    shapes, [math.prod(shape[1:]) for shape in shapes]
  )


def _shaped(
  arrays: Arrays, groups: Sequence[Sequence[int]], shapes: Sequence[Shape]
) -> list[Array]:
  """Splits the layers [layers, size] of each group into leaves."""
  leaves = batching.split_layers(arrays, groups, shapes)
  return [leaves[i].reshape(shape) for i, shape in enumerate(shapes)]


def _index_bits(width: int) -> int:
  """Returns how many bits an index into a block of `width` values needs."""
  return max(1, (width - 1).bit_length())


def _mark_largest(blocks: Array, count: int) -> Array:
  """Marks the `count` values of largest magnitude along the last axis.

  Magnitudes are rounded to bfloat16. Among equal ones, the first are marked.

  Returns one bit for each value: uint32 [..., ceil(width / 32)], the lowest bit
  first.
  """
  # `least` is the smallest magnitude to mark: the largest one that at least
  # `count` values reach. Its binary digits are found from the highest on, three
  # in each pass. Sorting takes 80 times as long on a CPU (measured).
  #
  # With Adam, all values of an embedding row may change by the same magnitude,
  # up to rounding errors that depend on how devices divide the model. These
  # must not decide which values are sent, so magnitudes are in bfloat16.
  # The bits of positive floats, read as integers, are ordered like the floats.
  order = jax.lax.bitcast_convert_type(
    jnp.abs(blocks).astype(jnp.bfloat16), jnp.uint16
  )
  # The zeros are made from the values, so that in a `jax.shard_map` both vary
  # over the same mesh axes.
  least = jnp.zeros_like(order[..., :1])
  for shift in range(_MAGNITUDE_BITS - 3, -1, -3):
    candidates = [least + jnp.uint16(n << shift) for n in range(1, 8)]
    is_reached = [
      (order >= candidate).astype(jnp.int32)[..., None]
      for candidate in candidates
    ]
    totals = batching.sums(is_reached, order.ndim - 1)
    # Candidates ascend, so the largest n with enough values is the number of
    # candidates with enough values.
    three_bits = sum((total >= count).astype(jnp.uint16) for total in totals)
    least += three_bits << jnp.uint16(shift)
  # Mark all values above `least`. The last running count is their number. The
  # first of the values that equal `least` are marked until `count` is reached.
  above = _to_words(order > least)
  equal = _to_words(order == least)
  num_missing = count - _running_count(above)[..., -1:, -1:]
  is_wanted = _running_count(equal) <= num_missing
  return above | (equal & _to_words(is_wanted)[..., 0])


def _running_count(words: Array) -> Array:
  """Counts, for each bit of a row of words, the set bits up to this bit.

  The bit itself is included. Example with words of 2 bits: the row 01 11 (with
  the lowest bits first: 1 0, 1 1) has the counts 1 1, 2 3.
  """
  inside = _count_inside(words).astype(jnp.int32)
  before = jnp.cumsum(inside[..., -1], -1, jnp.int32) - inside[..., -1]
  return inside + before[..., None]


def _count_inside(words: Array) -> Array:
  """Counts, for each bit of a word, the word's set bits up to this bit."""
  bit = jax.lax.broadcasted_iota(jnp.uint32, (*words.shape, 32), words.ndim)
  return jax.lax.population_count(words[..., None] & ((2 << bit) - 1))


@functools.partial(jnp.vectorize, excluded=(1,), signature="(w)->(c)")
def _bit_indices(words: Array, count: int) -> Array:
  """Returns the indices of the `count` set bits of a row of words, ascending.

  The lowest bit of a word comes first.
  """
  # The rank of a set bit is the number of set bits before it.
  #
  # Example with words of 4 bits, the lowest bits first: the row 0100 1011 has 1
  # and 4 set bits at the ends of its words. So the set bit of rank 2 is in the
  # second word, where it has rank 1.
  counts = jax.lax.population_count(words).astype(jnp.int32)
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  # The number of the word is the number of words before it: those at whose end
  # the row has at most `rank` set bits. To count them takes two passes over the
  # ranks. To search them would take a pass for each halving, and on CPUs the
  # search took five times as long (measured).
  num_ending = jnp.zeros((count,), jnp.int32).at[ends].add(1, mode="drop")
  word = jnp.cumsum(num_ending, dtype=jnp.int32)
  ranks_in_word = jnp.arange(count, dtype=jnp.int32) - (ends - counts)[word]
  position = _bit_of_rank(words[word], ranks_in_word.astype(jnp.uint32))
  return 32 * word + position


def _bit_of_rank(words: Array, ranks: Array) -> Array:
  """Returns the position of the set bit of a given rank, for each word.

  The rank of a set bit is the number of set bits below it in the word. The
  lowest bit has position 0.
  """
  position = jnp.zeros_like(words)
  # A binary search for the bit: each step skips a half with too few set bits.
  for length in (16, 8, 4, 2, 1):
    lower_half = (words >> position) & jnp.uint32(2**length - 1)
    count = jax.lax.population_count(lower_half)
    is_above = count <= ranks
    ranks = jnp.where(is_above, ranks - count, ranks)
    position = jnp.where(is_above, position + jnp.uint32(length), position)
  return position.astype(jnp.int32)


def _scatter(width: int, values: Array, indices: Array) -> Array:
  """Returns zeros [..., width] with values at some indices of the last axis."""
  zeros = jnp.zeros((*values.shape[:-1], width), values.dtype)
  return jnp.put_along_axis(zeros, indices, values, -1, inplace=False)


def _pack(numbers: Array, count: int) -> Array:
  """Packs the `count` lowest bits of each number into bytes.

  The lowest bit of the first number is the highest bit of the first byte, as in
  `jnp.packbits`.

  Args:
    numbers: uint32 numbers below 2^count, [..., numbers].
    count: Number of bits of each number, at most 32.

  Returns:
    uint8 bytes [..., ceil(numbers * count / 8)]. Zeros fill the last byte.
  """
  num_bytes = -(-numbers.shape[-1] * count // 8)
  filled = batching.pad(numbers, -numbers.shape[-1] % 8)
  # Eight numbers fill `count` bytes. The bits of each number are reversed, so
  # that its lowest bit comes first.
  eights = _reversed_bits(filled, count).reshape(*numbers.shape[:-1], -1, 8)
  packed = []
  # If a byte ends d bits after a number, the number is shifted left by d bits.
  # Example: with 12 bits, number 0 ends after 12 bits and byte 1 after 16. So
  # the number is shifted left by 4 bits.
  for byte in range(count):
    parts = [
      _shifted(eights[..., number], 8 * (byte + 1) - count * (number + 1))
      for number in _overlapping(byte, 8, count)
    ]
    packed.append(functools.reduce(jnp.bitwise_or, parts).astype(jnp.uint8))
  stacked = jnp.stack(packed, axis=-1)
  return stacked.reshape(*numbers.shape[:-1], -1)[..., :num_bytes]


def _unpack(packed: Array, count: int, num_numbers: int) -> Array:
  """Takes uint32 numbers of `count` bits out of bytes; reverses `_pack`."""
  filled = batching.pad(packed, -packed.shape[-1] % count).astype(jnp.uint32)
  groups = filled.reshape(*packed.shape[:-1], -1, count)
  numbers = []
  # If a number ends d bits after a byte, the byte is shifted left by d bits.
  for number in range(8):
    parts = [
      _shifted(groups[..., byte], count * (number + 1) - 8 * (byte + 1))
      for byte in _overlapping(number, count, 8)
    ]
    numbers.append(functools.reduce(jnp.bitwise_or, parts))
  stacked = jnp.stack(numbers, axis=-1).reshape(*packed.shape[:-1], -1)
  lowest_bits = stacked[..., :num_numbers] & jnp.uint32(2**count - 1)
  return _reversed_bits(lowest_bits, count)


def _overlapping(index: int, length: int, other_length: int) -> range:
  """Returns which pieces of `other_length` bits overlap one of `length` bits.

  `index` is the number of that one, from 0. Example: of numbers of 12 bits,
  number 1 has the bits 12 to 23, so it overlaps the bytes 1 and 2.
  """
  first_bit = index * length
  last_bit = first_bit + length - 1
  return range(first_bit // other_length, last_bit // other_length + 1)


def _shifted(numbers: Array, places: int) -> Array:
  """Shifts the bits of numbers to the left, or to the right if `places` < 0."""
  if places < 0:
    return numbers >> jnp.uint32(-places)
  return numbers << jnp.uint32(places)


def _reversed_bits(numbers: Array, count: int) -> Array:
  """Reverses the order of the `count` lowest bits of uint32 numbers."""
  for length, mask in (
    (1, 0x55555555),
    (2, 0x33333333),
    (4, 0x0F0F0F0F),
    (8, 0x00FF00FF),
    (16, 0x0000FFFF),
  ):
    lower = (numbers & jnp.uint32(mask)) << jnp.uint32(length)
    numbers = lower | ((numbers >> jnp.uint32(length)) & jnp.uint32(mask))
  return numbers >> jnp.uint32(32 - count)


def _to_words(bits: Array) -> Array:
  """Combines every 32 neighboring bits into a word, the first as lowest bit.

  Zeros fill the last word.
  """
  bits = batching.pad(bits, -bits.shape[-1] % 32).astype(jnp.uint32)
  bits = bits.reshape(*bits.shape[:-1], -1, 32)
  shifts = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
  return jnp.sum(bits << shifts, -1, dtype=jnp.uint32)


def stratum_bounds(size: int, count: int) -> Array:
  """Divides values into `count` strata: ranges of about equal length.

  Stratum i begins at floor(i size / count).

  Args:
    size: Number of values.
    count: Number of strata, less than 80 million.

  Returns:
    int32 bounds [count + 1]: where each stratum begins, and at the end `size`.
  """
  # As constants, the bounds of 4 million values would add 10 MB to the program.
  width, remainder = divmod(size, count)
  number = jnp.arange(count + 1, dtype=jnp.int32)
  # A bound is i width + floor(i remainder / count). The product i remainder may
  # exceed int32, so the quotient is guessed in fp32. `error` is what is left of
  # the product. With less than 80 million strata it fits into int32, so its
  # value is exact although both products wrap around.
  quotient = np.float32(remainder / count)
  guess = jnp.floor(number.astype(jnp.float32) * quotient).astype(jnp.int32)
  error = number * remainder - guess * count
  return number * width + guess + error // count


@dataclasses.dataclass(frozen=True)
class RandomMask(Projection):
  """Sends some values of each layer, drawn at random for every exchange.

  The n values of a layer are divided into about p n strata, which are ranges of
  about equal length. One value of each stratum is drawn. For example, 10 values
  and p = 0.3 give three strata: values 0-2, 3-5 and 6-9. Values that are not
  drawn decode to zero. So if a layer x decodes to C(x), the expected error
  E ||x - C(x)||^2 is about (1 - p) ||x||^2.

  Wire: the drawn values as `then` encodes them. The mask itself takes no bytes,
  because all replicas draw the same indices.
  Source: CocktailSGD (Wang et al., 2023, ICML).
  Differs: one value is drawn from each stratum, which needs no permutation of
  all values.

  Attributes:
    fraction: Fraction p of the values that is sent, above 0, at most 1. At
      least one value of a layer is sent.
    then: Encoder of the drawn values. It gets one vector for each layer.
  """

  fraction: float = limited(0.1, above=0, at_most=1)
  then: Encoder = Float()

  def num_sent(self, size: int) -> int:
    """Returns how many of the `size` values of a layer are drawn."""
    return max(1, round(self.fraction * size))

  def run(
    self, leaves: Arrays, state: list[Tree], key: Array, reduce: Reduce
  ) -> Coroutine:
    """Averages the drawn values of all leaves, in one message.

    Values that were not drawn are zero in the result. `Codec.run` has the
    arguments and the result.
    """
    shapes = [leaf.shape for leaf in leaves]
    groups = _same_size(shapes)
    # [layers, 1, size]: for `map_over_rows`, each layer is one row.
    values = [
      flat[:, None] for flat in batching.concat_layers(_flat(leaves), groups)
    ]
    indices = [
      self._draw(flat.shape[-1], batching.layer_numbers(group, shapes), key)
      for group, flat in zip(groups, values, strict=True)
    ]
    take = functools.partial(jnp.take_along_axis, axis=-1)
    drawn_values = []
    for flat, group_indices in zip(values, indices, strict=True):
      drawn_values.append(map_over_rows(take, flat, group_indices)[:, 0])
    reduced = yield from reduce(drawn_values)

    def decoded(drawn: list[Array]) -> list[Array]:
      layers_of_groups = []
      for flat, sent, group_indices in zip(values, drawn, indices, strict=True):
        scatter = functools.partial(_scatter, flat.shape[-1])
        layers = map_over_rows(scatter, sent[:, None], group_indices)
        layers_of_groups.append(layers[:, 0])
      return _shaped(layers_of_groups, groups, shapes)

    mean = decoded(reduced.mean)
    own = decoded(reduced.own)
    return Reduced(mean=mean, own=own), state

  def _draw(self, size: int, layers: Array, key: Array) -> Array:
    """Draws one index from each stratum, for every layer: [layers, 1, strata].

    `layers` has a number for each layer (`batching.layer_numbers`), and `key`
    is equal on all replicas.
    """
    bounds = stratum_bounds(size, self.num_sent(size))
    widths = jnp.diff(bounds)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, layers)
    draw = functools.partial(jax.random.uniform, shape=(1, len(widths)))
    uniform = jax.vmap(functools.partial(draw, dtype=jnp.float32))(keys)
    offset = jnp.floor(uniform * widths.astype(jnp.float32)[None, None])
    # The product may have been rounded up to the width.
    offset = jnp.minimum(offset.astype(jnp.int32), widths[None, None] - 1)
    return bounds[None, None, :-1] + offset
