"""A matrix as two thin factors, of all replicas together or of each alone.

Together (PowerSGD), the left factor is averaged first and made orthonormal,
which gives all replicas one basis. The right factor is what each replica's
matrix is in that basis. Both are linear in the matrices, so the mean of the
factors gives the mean of the matrices. Alone, each replica has a basis of its
own, so both factors must be sent and decoded before the mean.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dilocox_jax.checks import limited
from dilocox_jax.codecs import batching
from dilocox_jax.codecs.base import Codec, Encoder, Projection, Reduce, Reduced
from dilocox_jax.codecs.batching import Arrays, Shape
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.distributed.local_map import INNER_AXES, current_division
from dilocox_jax.trees import Array, Index, Tree
from dilocox_jax.turns import Pausing

# Matrix products are computed in full fp32. By default a TPU multiplies in
# bfloat16 and a recent GPU in TF32. Gram-Schmidt would then keep rounding
# errors as directions: a matrix of norm 1 and rank 16, sent with 64 columns,
# decodes to norm 4.4 to 4.9 (emulated), and a residual grows without bound.
matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _product(left: Array, right: Array) -> Array:
  """Multiplies matrices [num_layers, ...], all at once or layer by layer.

  Where all devices of a replica divide the rows of a matrix, each needs the
  whole of a factor. Of a model of 107B at rank 2048 that is 29 GiB for all
  layers and 0.4 GiB for one. Results are divided by rows again.
  """
  division = current_division()
  num_devices, num_layers = division.num_devices, left.shape[0]
  if num_devices == 1 or num_layers % division.num_stages == 0:
    return matmul(left, right)

  def multiply(pair: tuple[Array, Array]) -> Array:
    product = matmul(*pair)
    if product.shape[0] % num_devices:
      return product
    rows = PartitionSpec(INNER_AXES, None)
    return jax.lax.with_sharding_constraint(product, rows)

  return jax.lax.map(multiply, (left, right))


class Factors(NamedTuple):
  """State that low rank keeps of a leaf; it is equal on all replicas.

  Attributes:
    right: Averaged right factor, [num_layers, columns, max_rank]; zero where
      the leaf was sent whole.
  """

  right: Array


def factorizes(shape: Shape, rank: int) -> bool:
  """Whether a leaf is sent as factors.

  It is if its layers are matrices, and factors have fewer values than they.

  Args:
    shape: Shape of the leaf, with the layer axis.
    rank: Columns of a factor.
  """
  if len(shape) != 3:
    return False
  _, rows, columns = shape
  return rank * (rows + columns) < rows * columns


@dataclasses.dataclass(frozen=True)
class LowRank(Projection):
  """Sends each matrix as two thin factors that all replicas make together.

  One power iteration on the mean matrix starts from the right factor Q of the
  exchange before. P = mean_m (A_m Q) is made orthonormal, then
  Q = mean_m (A_m^T P), and the mean decodes to P Q^T. This is exact if the mean
  matrix has no more than `rank` directions and none of them is orthogonal to
  all columns of the old Q. A leaf whose factors would have more values than the
  matrix is sent whole, beside the left factors.

  Wire: rank (rows + columns) values for each matrix and power iteration, as
  `then` encodes them. A matrix [512, 512] at rank 16 in fp32 takes 65,536 bytes
  instead of 1,048,576. Left and right factors are two messages, because the
  right factor needs the mean of the left one.
  Source: PowerSGD, Vogels et al., 2019, arXiv 1905.13727, Algorithm 1; DiLoCoX,
  arXiv 2506.21263, for quantized factors.
  Differs: Gram-Schmidt is run twice. A missing direction becomes a zero column
  instead of noise, and starts at random the next time. Sums run over rows
  only, so rows may be sharded.

  Attributes:
    rank: Columns of a factor (count).
    power_iterations: Passes over the matrix (count), two messages each.
    max_rank: Columns for which the factor that is kept has room, where the rank
      changes from exchange to exchange; 0 means `rank`.
    then: Encodes the factors.
  """

  rank: int = limited(16, at_least=1)
  power_iterations: int = limited(1, at_least=1)
  max_rank: int = limited(0, at_least=0)
  then: Encoder = Float()

  @property
  def has_shared_state(self) -> bool:
    """All replicas project their matrices onto the same mean factors."""
    return True

  def init(self, shapes: Sequence[Shape], key: Array) -> list[Tree]:
    """Returns a right factor of zeros for each leaf that has factors.

    Columns of zeros begin at random in the exchange that first needs them. With
    `max_rank` all leaves keep a factor that would have one at rank 1, so that
    the state has the same shape at every rank.
    """
    del key
    least = 1 if self.max_rank else self.rank
    rank = max(self.max_rank, self.rank)
    return [
      Factors(jnp.zeros((shape[0], shape[2], rank), jnp.float32))
      if factorizes(shape, least)
      else ()
      for shape in shapes
    ]

  def run(
    self, leaves: Arrays, state: list[Tree], key: Array, reduce: Reduce
  ) -> Pausing:
    """Sends left factors and whole leaves, then right factors."""
    shapes = [leaf.shape for leaf in leaves]
    groups, whole = matrices_of(shapes, self.rank)
    matrices = [
      m.astype(jnp.float32) for m in batching.concat_layers(leaves, groups)
    ]
    factors = [
      _revived(
        jnp.concatenate([state[n].right[..., : self.rank] for n in group]),
        batching.layer_numbers(group, shapes),
        key,
      )
      for group in groups
    ]
    others, bases = Reduced([], []), factors
    for iteration in range(self.power_iterations):
      left = list(map(_product, matrices, map(normalize_columns, factors)))
      # Leaves without factors travel with the first left ones.
      rest = [] if iteration else [leaves[number] for number in whole]
      reduced = yield from reduce([*left, *rest])
      if rest:
        others = Reduced(*(each[len(groups) :] for each in reduced))
      if not groups:
        return others, self._kept(state, [], [], shapes)
      bases = [orthonormal(mean) for mean in reduced.mean[: len(groups)]]
      right = list(map(_product, map(transpose, matrices), bases))
      reduced = yield from reduce(right)
      factors = reduced.mean

    def decoded(right: list[Array], others: list[Array]) -> list[Array]:
      products = list(map(_product, bases, map(transpose, right)))
      found = batching.split_layers(products, groups, shapes)
      found |= dict(zip(whole, others, strict=True))
      return [found[number] for number in range(len(shapes))]

    result = Reduced(*map(decoded, reduced, others))
    return result, self._kept(state, factors, groups, shapes)

  def _kept(self, state, factors, groups, shapes) -> list[Tree]:
    """Returns the new right factors, beside older columns beyond the rank."""
    right = batching.split_layers(factors, groups, shapes)
    kept = [jax.tree.map(jnp.zeros_like, old) for old in state]
    for number, columns in right.items():
      room = state[number].right[..., self.rank :]
      kept[number] = Factors(jnp.concatenate([columns, room], axis=-1))
    return kept


@dataclasses.dataclass(frozen=True)
class LocalLowRank(Encoder):
  """Sends each matrix as two thin factors that its replica makes alone.

  The power iteration starts from a fixed random matrix.

  Wire: rank (rows + columns) values for each matrix, as `then` encodes them,
  however many power iterations there are.
  Source: Halko et al., 2011, arXiv 0909.4061, Algorithm 4.4.
  Differs: nothing.

  Attributes:
    rank: Columns of a factor (count).
    power_iterations: Passes over the matrix (count).
    then: Encodes both factors, and the leaves that have none.
  """

  rank: int = limited(16, at_least=1)
  power_iterations: int = limited(1, at_least=1)
  then: Encoder = Float()

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns left factors, right factors and whole leaves as `then` does."""
    groups, whole = matrices_of([leaf.shape for leaf in leaves], self.rank)
    pairs = [
      self._factorized(m) for m in batching.concat_layers(leaves, groups)
    ]
    factors = [pair[side] for side in (0, 1) for pair in pairs]
    return self.then.encode([*factors, *(leaves[n] for n in whole)])

  def decode(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Reverses `encode`."""
    groups, whole = matrices_of(shapes, self.rank)
    inner = [
      (sum(shapes[n][0] for n in group), shapes[group[0]][side], self.rank)
      for side in (1, 2)
      for group in groups
    ]
    inner += [shapes[number] for number in whole]
    values, count = self.then.decode(arrays, inner), len(groups)
    right = map(transpose, values[count : 2 * count])
    products = list(map(matmul, values[:count], right))
    found = batching.split_layers(products, groups, shapes)
    found |= dict(zip(whole, values[2 * count :], strict=True))
    return [found[number] for number in range(len(shapes))]

  def _factorized(self, values: Array) -> tuple[Array, Array]:
    matrix = values.astype(jnp.float32)
    # The same for every layer, so that a layer does not feel the others.
    shape = (matrix.shape[2], self.rank)
    factor = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    factor = jnp.broadcast_to(factor, (len(matrix), *shape))
    basis = factor
    for _ in range(self.power_iterations):
      basis = orthonormal(matmul(matrix, normalize_columns(factor)))
      factor = matmul(transpose(matrix), basis)
    return basis, factor


def with_rank(codec: Codec, rank: int) -> Codec:
  """Returns a codec with another rank, where it has one that all share.

  Args:
    codec: The codec.
    rank: Columns of a factor.
  """
  if not isinstance(codec, LowRank):
    return codec
  return dataclasses.replace(codec, rank=rank)


def matrices_of(
  shapes: Sequence[Shape], rank: int
) -> tuple[list[list[int]], list[int]]:
  """Returns groups of leaves that have factors, and the leaves that have none.

  Matrices of one shape stand in one group, whose layers are one batch.

  Args:
    shapes: Shapes of the leaves, with the layer axis.
    rank: Columns of a factor.
  """
  kinds = [shape[1:] if factorizes(shape, rank) else () for shape in shapes]
  groups = [
    own for own in batching.group_by_shape(shapes, kinds) if kinds[own[0]]
  ]
  return groups, [n for n, kind in enumerate(kinds) if not kind]


def transpose(matrices: Array) -> Array:
  """Returns the transposed matrices [layers, columns, rows]."""
  return jnp.swapaxes(matrices, 1, 2)


# A column of length 1 whose new part is shorter than this has no direction of
# its own: what is left of it is rounding (fp32 rounds at 6e-8, and the sums
# over a few thousand rows make about 1e-6 of it).
_SHORTEST_NEW_PART = 1e-5


def orthonormal(matrix: Array) -> Array:
  """Returns an orthonormal basis of the columns of [num_layers, rows, rank].

  A column that adds no direction becomes a zero column. Gram-Schmidt is
  written out, because XLA's batched QR and eigenvalue routines can wait for
  each other for ever on few CPU cores.
  """
  columns = normalize_columns(matrix)

  def add_column(number: Index, basis: Array) -> Array:
    column = jax.lax.dynamic_slice_in_dim(columns, number, 1, axis=2)
    # Columns are added from left to right, so the basis holds the columns
    # before this one, and zeros where the others will be. The column's part
    # along the basis is subtracted twice. If the column lies close to the
    # basis, little of it is left, and the rounding errors are large beside
    # that: of a part of length 1e-4, errors of 1e-7 are 1e-3, so the new
    # column would be orthogonal to 3 digits only. The second pass removes
    # them; after it the errors are those of fp32 again (twice is enough).
    for _ in range(2):
      along_basis = matmul(jnp.swapaxes(basis, 1, 2), column)
      column = column - matmul(basis, along_basis)
    length = jnp.sqrt(jnp.sum(jnp.square(column), axis=1, keepdims=True))
    is_new = length > _SHORTEST_NEW_PART
    column = jnp.where(is_new, column / jnp.where(is_new, length, 1.0), 0.0)
    return jax.lax.dynamic_update_slice_in_dim(basis, column, number, axis=2)

  bounds = jnp.int32(0), jnp.int32(matrix.shape[2])
  return jax.lax.fori_loop(*bounds, add_column, jnp.zeros_like(columns))


def normalize_columns(matrix: Array) -> Array:
  """Scales columns to length 1; a zero column stays zero.

  A column is divided by its largest value first, so that no square overflows
  or underflows: 1e-30 squared is zero in fp32.
  """
  largest = jnp.max(jnp.abs(matrix), axis=1, keepdims=True)
  matrix = matrix / jnp.where(largest > 0, largest, 1.0)
  length = jnp.sqrt(jnp.sum(jnp.square(matrix), axis=1, keepdims=True))
  return matrix / jnp.where(length > 0, length, 1.0)


def _revived(factor: Array, layers: Array, key: Array) -> Array:
  """Replaces zero columns of numbered layers by random ones.

  A zero column would stay zero: A times 0 finds no direction again.
  """
  is_missing = jnp.all(factor == 0, axis=1, keepdims=True)
  return jnp.where(is_missing, _scattered(factor.shape, layers, key), factor)


def _scattered(shape: Shape, layers: Array, key: Array) -> Array:
  """Returns values between -1 and 1 that look random, from a hash of numbers.

  They are read where a column is missing: at first, and hardly ever later.
  `jax.random` would take a second to compile on CPUs, in each program with a
  low rank. Values are numbered axis by axis, since devices can divide that.

  Source: "lowbias32" of C. Wellons, 2018, "Prospecting for hash functions".
  """
  seed = jax.random.key_data(key)[-1]
  number = (layers * jnp.uint32(2654435769))[:, None, None]
  for axis in (1, 2):
    place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    number = number * jnp.uint32(shape[axis]) + place
  number *= jnp.uint32(2654435769)
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    number ^= seed
    number = (number ^ (number >> shift)) * jnp.uint32(factor)
  number ^= number >> 16
  signed = jax.lax.bitcast_convert_type(number, jnp.int32)
  return signed.astype(jnp.float32) * 2.0**-31


# Factor products that the host is given after an exchange. All those of a model
# of 1.3 billion parameters at rank 64 are 2 MB. Of 107 billion at rank 2048
# they are 6.6 GB, and their eigenvalues take minutes; so it gets one layer of
# each leaf.
MAX_OBSERVED_BYTES = 64 * 2**20


def grams(factors: Mapping[str, Factors], rank: int) -> dict[str, Array]:
  """Returns products of right factors' columns with each other, for the host.

  Their eigenvalues are the squared singular values of the last averaged update.
  Of large ones it returns those of a few layers, at least one, evenly spread
  and scaled so that their sum over layers stays what it was.

  Args:
    factors: State of every leaf that has one, by path.
    rank: Columns of a factor that were sent.

  Returns:
    Arrays [layers, rank, rank] by path, zero for leaves that were sent whole.
  """
  found = {}
  for path, each in factors.items():
    right, num_layers = each.right[..., :rank], len(each.right)
    most = MAX_OBSERVED_BYTES // (4 * rank**2 * len(factors))
    count = min(max(most, 1), num_layers)
    some = right[np.arange(count) * num_layers // count]
    found[path] = _product(transpose(some), some) * (num_layers / count)
  return found
