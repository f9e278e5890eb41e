"""Codecs that send a matrix as two thin factors.

With `LowRank` (PowerSGD) the replicas average their left factors, and make the
columns of the mean orthonormal. All replicas go on with this left factor, so
their right factors can be averaged, too.

With `LocalLowRank` each replica sends a left factor and a right factor of its
own. Receivers multiply the two factors of each replica before they average.
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
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.distributed.local_map import INNER_AXES, current_division
from dilocox_jax.trees import Array, Index, Tree

# Matrix products are computed in full fp32. By default a TPU multiplies in
# bfloat16 and a recent GPU in TF32. Gram-Schmidt would then keep rounding
# errors as directions: a matrix of norm 1 and rank 16, sent with 64 columns,
# decodes to norm 4.4 to 4.9 (emulated), and a residual grows without bound.
matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _product(left: Array, right: Array) -> Array:
  """Computes left @ right for each layer, [num_layers, a, c]."""
  # To multiply a layer, a device needs its whole factor `right`. With evenly
  # divided layers it needs only the factors of its own layers. Otherwise a loop
  # gathers one layer's factor at a time: for 107 billion parameters at rank
  # 2048, a feed-forward factor of all layers takes 29 GiB.
  division = current_division()
  num_devices = division.num_devices
  num_layers = left.shape[0]
  if num_devices == 1 or num_layers % division.num_stages == 0:
    return matmul(left, right)

  def multiply(pair: tuple[Array, Array]) -> Array:
    product = matmul(*pair)
    if product.shape[0] % num_devices:
      return product  # The devices cannot divide the rows equally.
    rows = PartitionSpec(INNER_AXES, None)
    return jax.lax.with_sharding_constraint(product, rows)

  return jax.lax.map(multiply, (left, right))


class Factors(NamedTuple):
  """State that `LowRank` keeps for a leaf. It is equal on all replicas.

  Attributes:
    right: Averaged right factor of the last exchange, float32
      [num_layers, columns, r], where `columns` is the last axis of the leaf and
      r is the larger of `LowRank.rank` and `LowRank.max_rank`. Columns beyond
      the rank of the last exchange are those of earlier exchanges. All are zero
      before the first exchange, and if the leaf was sent whole.
  """

  right: Array


def factorizes(shape: Shape, rank: int) -> bool:
  """Returns whether a leaf is sent as factors, and not whole.

  Its layers must be matrices that have more values than their two factors.

  Args:
    shape: Shape of the leaf, (num_layers, *shape).
    rank: Number of columns of a factor.
  """
  if len(shape) != 3:
    return False
  _, rows, columns = shape
  return rank * (rows + columns) < rows * columns


@dataclasses.dataclass(frozen=True)
class LowRank(Projection):
  """Sends each matrix as two thin factors that all replicas compute together.

  A power iteration approximates the mean of the matrices A_m over the replicas
  m. It starts from the right factor Q of the last exchange:

      P = orthonormal(mean_m (A_m Q))
      Q = mean_m (A_m^T P)
      mean_m A_m is decoded as P Q^T

  A leaf whose factors would not be smaller (`factorizes`) is sent whole.

  Wire: rank (rows + columns) values for each matrix and power iteration, as
  `then` encodes them. For example, a matrix [512, 512] at rank 16 in fp32 takes
  65,536 bytes instead of 1,048,576. Left and right factors are two messages,
  because the right factors need the mean of the left ones.
  Source: PowerSGD, Vogels et al., 2019, arXiv 1905.13727, Algorithm 1; DiLoCoX,
  arXiv 2506.21263, for quantized factors.
  Differs: columns are made orthonormal several at a time, and three times for
  accuracy (`orthonormal`). If the matrix has a lower rank than `rank`, the
  missing columns of P are zero instead of noise, and the next exchange starts
  these columns of Q at random.

  Attributes:
    rank: Number of columns of a factor.
    power_iterations: Number of power iterations, with two messages each.
    max_rank: Number of columns of the factors in the state if the rank changes
      from exchange to exchange; 0: as many as `rank`.
    then: Encoder of the factors and of the leaves that are sent whole.
  """

  rank: int = limited(16, at_least=1)
  power_iterations: int = limited(1, at_least=1)
  max_rank: int = limited(0, at_least=0)
  then: Encoder = Float()

  @property
  def has_shared_state(self) -> bool:
    """True: all replicas must project their matrices onto the same basis."""
    return True

  def init(self, shapes: Sequence[Shape], key: Array) -> list[Tree]:
    """Returns `Factors` of zeros for each leaf with factors, () for the others.

    If `max_rank` is set, every leaf that has factors at rank 1 gets `Factors`,
    so that the state has the same shapes at every rank.

    Args:
      shapes: Shape of each leaf, (num_layers, *shape).
      key: Not used.
    """
    del key
    states: list[Tree] = []
    for shape in shapes:
      factor_shape = self.factor_shape(shape)
      if factor_shape is None:
        states.append(())
      else:
        states.append(Factors(jnp.zeros(factor_shape, jnp.float32)))
    return states

  def factor_shape(self, shape: Shape) -> Shape | None:
    """Returns the shape of the right factors that the state keeps for a leaf.

    The result is (num_layers, columns of the leaf, columns of a factor), or
    None if the state keeps none (`init`).

    Args:
      shape: Shape of the leaf, (num_layers, *shape).
    """
    smallest_rank = 1 if self.max_rank else self.rank
    if not factorizes(shape, smallest_rank):
      return None
    return (shape[0], shape[2], max(self.max_rank, self.rank))

  def run(
    self, leaves: Arrays, state: list[Tree], key: Array, reduce: Reduce
  ) -> Coroutine:
    """Averages leaves: sends left factors and whole leaves, then right factors.

    A leaf is sent whole if its factors would not be smaller. Each further power
    iteration sends left factors and right factors again. `Codec.run` has the
    arguments and the result.
    """
    shapes = [leaf.shape for leaf in leaves]
    groups, whole = matrices_of(shapes, self.rank)
    matrices = [
      m.astype(jnp.float32) for m in batching.concat_layers(leaves, groups)
    ]
    # The right factors of the exchange before, one array for each group.
    factors = [
      _with_random_columns(
        jnp.concatenate([state[n].right[..., : self.rank] for n in group]),
        batching.layer_numbers(group, shapes),
        key,
      )
      for group in groups
    ]
    whole_leaves = Reduced(mean=[], own=[])
    bases = factors  # Replaced in the first power iteration.
    for iteration in range(self.power_iterations):
      left = [
        _product(matrix, normalize_columns(factor))
        for matrix, factor in zip(matrices, factors, strict=True)
      ]
      # Leaves without factors travel with the first left factors.
      sent_whole = [leaves[i] for i in whole] if iteration == 0 else []
      reduced = yield from reduce([*left, *sent_whole])
      if sent_whole:
        whole_leaves = Reduced(
          mean=reduced.mean[len(groups) :], own=reduced.own[len(groups) :]
        )
      # No leaf has factors, so no further message is needed.
      if not groups:
        return whole_leaves, self._new_state(state, [], [], shapes)
      bases = [orthonormal(mean) for mean in reduced.mean[: len(groups)]]
      right = [
        _product(transpose(matrix), basis)
        for matrix, basis in zip(matrices, bases, strict=True)
      ]
      reduced = yield from reduce(right)
      factors = reduced.mean

    def decoded(right: list[Array], sent_whole: list[Array]) -> list[Array]:
      products = [
        _product(basis, transpose(factor))
        for basis, factor in zip(bases, right, strict=True)
      ]
      decoded_leaves = batching.split_layers(products, groups, shapes)
      decoded_leaves |= dict(zip(whole, sent_whole, strict=True))
      return [decoded_leaves[i] for i in range(len(shapes))]

    # `reduced` has the right factors of the last power iteration.
    mean = decoded(reduced.mean, whole_leaves.mean)
    own = decoded(reduced.own, whole_leaves.own)
    new_state = self._new_state(state, factors, groups, shapes)
    return Reduced(mean=mean, own=own), new_state

  def _new_state(
    self,
    state: list[Tree],
    factors: Arrays,
    groups: Sequence[Sequence[int]],
    shapes: Sequence[Shape],
  ) -> list[Tree]:
    """Returns the state of every leaf with its new right factor.

    `factors` has the right factors of each group of leaves (`matrices_of`).
    Columns beyond `rank` stay, and a leaf that was sent whole gets zeros.
    """
    right = batching.split_layers(factors, groups, shapes)
    new_state = [jax.tree.map(jnp.zeros_like, old) for old in state]
    for i, columns in right.items():
      other_columns = state[i].right[..., self.rank :]
      factor = jnp.concatenate([columns, other_columns], axis=-1)
      new_state[i] = Factors(factor)
    return new_state


@dataclasses.dataclass(frozen=True)
class LocalLowRank(Encoder):
  """Sends each matrix as two thin factors, which each replica finds by itself.

  The power iteration starts from a fixed random matrix. A leaf whose factors
  would not be smaller (`factorizes`) is sent whole.

  Wire: rank (rows + columns) values for each matrix, as `then` encodes them.
  More power iterations send no more values.
  Source: Halko et al., 2011, arXiv 0909.4061, Algorithm 4.4.
  Differs: the random matrix is the same in every exchange. Between two power
  iterations, the columns of the right factor are scaled to length 1 instead of
  being made orthonormal.

  Attributes:
    rank: Number of columns of a factor.
    power_iterations: Number of power iterations.
    then: Encoder of both factors, and of the leaves that are sent whole.
  """

  rank: int = limited(16, at_least=1)
  power_iterations: int = limited(1, at_least=1)
  then: Encoder = Float()

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns left factors, right factors and whole leaves, coded by `then`."""
    groups, whole = matrices_of([leaf.shape for leaf in leaves], self.rank)
    pairs = [
      self._factorized(m) for m in batching.concat_layers(leaves, groups)
    ]
    left = [basis for basis, _ in pairs]
    right = [factor for _, factor in pairs]
    sent_whole = [leaves[i] for i in whole]
    return self.then.encode([*left, *right, *sent_whole])

  def decode(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Decodes the arrays that `encode` returned into float32 leaves."""
    groups, whole = matrices_of(shapes, self.rank)
    left_shapes = []
    right_shapes = []
    for group in groups:
      _, rows, columns = shapes[group[0]]
      num_layers = sum(shapes[i][0] for i in group)
      left_shapes.append((num_layers, rows, self.rank))
      right_shapes.append((num_layers, columns, self.rank))
    whole_shapes = [shapes[i] for i in whole]
    values = self.then.decode(
      arrays, [*left_shapes, *right_shapes, *whole_shapes]
    )
    num_groups = len(groups)
    left = values[:num_groups]
    right = values[num_groups : 2 * num_groups]
    products = [
      matmul(left_factor, transpose(right_factor))
      for left_factor, right_factor in zip(left, right, strict=True)
    ]
    decoded = batching.split_layers(products, groups, shapes)
    decoded |= dict(zip(whole, values[2 * num_groups :], strict=True))
    return [decoded[i] for i in range(len(shapes))]

  def _factorized(self, values: Array) -> tuple[Array, Array]:
    """Computes the factors of matrices [layers, rows, columns].

    Returns left factors [layers, rows, rank] with orthonormal or zero columns,
    and right factors [layers, columns, rank].
    """
    matrix = values.astype(jnp.float32)
    # All layers start from one random matrix, so that the factors of a layer do
    # not depend on the other layers.
    shape = (matrix.shape[2], self.rank)
    factor = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    factor = jnp.broadcast_to(factor, (len(matrix), *shape))
    basis = factor
    for _ in range(self.power_iterations):
      basis = orthonormal(matmul(matrix, normalize_columns(factor)))
      factor = matmul(transpose(matrix), basis)
    return basis, factor


def with_rank(codec: Codec, rank: int) -> Codec:
  """Returns a copy of a `LowRank` codec with the given rank.

  Any other codec is returned unchanged.
  """
  if not isinstance(codec, LowRank):
    return codec
  return dataclasses.replace(codec, rank=rank)


def matrices_of(
  shapes: Sequence[Shape], rank: int
) -> tuple[list[list[int]], list[int]]:
  """Returns which leaves are sent as factors, in groups, and which as a whole.

  All matrices of a group have one shape.

  Args:
    shapes: Shape of each leaf, (num_layers, *shape).
    rank: Number of columns of a factor.

  Returns:
    Indices of the leaves of each group, and of the leaves that are sent whole.
  """
  matrix_shapes = [
    shape[1:] if factorizes(shape, rank) else () for shape in shapes
  ]
  groups = [
    group
    for group in batching.group_by_shape(shapes, matrix_shapes)
    if matrix_shapes[group[0]]
  ]
  whole = [i for i, shape in enumerate(matrix_shapes) if not shape]
  return groups, whole


def transpose(matrices: Array) -> Array:
  """Transposes the matrices [layers, rows, columns] of all layers."""
  return jnp.swapaxes(matrices, 1, 2)


# Gram-Schmidt subtracts from a column of length 1 its part along the columns
# before it. If the remainder is shorter than this, it is only rounding errors:
# fp32 rounds at 6e-8, and a sum over a few thousand rows makes that about 1e-6.
_SHORTEST_NEW_PART = 1e-5
_PANEL_WIDTH = 8  # Largest number of columns that are made orthonormal at once.
# Numbers that are added to the squared lengths of the columns of a panel, each
# time that it is made orthonormal. Rounding errors of dot products are about
# 3e-7, so a shorter squared remainder could not be told from them.
_SHIFTS = (1e-5, 1e-6, 0.0)


def orthonormal(matrix: Array) -> Array:
  """Makes the columns of matrices orthonormal, from left to right.

  The result is that of Gram-Schmidt, but several neighboring columns, a
  *panel*, are computed at once. All sums over rows are matrix products, so the
  rows may be divided among devices.

  Args:
    matrix: Matrices [num_layers, rows, rank].

  Returns:
    Matrices of this shape. A column in the span of the columns before it
    becomes zero.
  """
  # XLA's batched QR and eigenvalue routines can deadlock on few CPU cores.
  columns = normalize_columns(matrix)
  rank = columns.shape[2]
  width = batching.block_width(rank, _PANEL_WIDTH)
  columns = batching.pad(columns, -rank % width)
  if width == columns.shape[2]:
    return _orthonormal_panel(columns, basis=None)[:, :, :rank]

  def add_panel(number: Index, basis: Array) -> Array:
    start = number * width
    panel = jax.lax.dynamic_slice_in_dim(columns, start, width, axis=2)
    # Panels are added from left to right, so the basis holds the panels before
    # this one, and zeros in place of the later panels.
    panel = _orthonormal_panel(panel, basis)
    return jax.lax.dynamic_update_slice_in_dim(basis, panel, start, axis=2)

  basis = jax.lax.fori_loop(
    jnp.int32(0),
    jnp.int32(columns.shape[2] // width),
    body_fun=add_panel,
    init_val=jnp.zeros_like(columns),
  )
  return basis[:, :, :rank]


def _orthonormal_panel(panel: Array, basis: Array | None) -> Array:
  """Makes a few columns orthonormal to a basis and to each other.

  Source: Fukaya et al., 2020, "Shifted Cholesky QR for computing the QR
  factorization of ill-conditioned matrices".
  Differs: columns are scaled to length 1 first, the second pass has a shift,
  too, and dependent columns are left out.

  Args:
    panel: Columns of length 1 or 0, [num_layers, rows, width].
    basis: Matrices with orthonormal or zero columns, [num_layers, rows, rank];
      None: there are no columns before this panel.
  """
  # A column close to the span of the columns before it has a short remainder
  # with large rounding errors. So everything is done three times. The first
  # time lengthens a remainder by up to 300. The second time makes it orthogonal
  # to about 2 digits, and the third time to the accuracy of fp32.
  #
  # `length` is the factor by which each column has been shortened so far; 1
  # means not at all.
  length = jnp.ones_like(panel[:, 0])
  for time, shift in enumerate(_SHIFTS):
    # Rounding errors of the panel have small parts along the basis. The second
    # time removes them to the accuracy of fp32 ("twice is enough").
    if basis is not None and time < 2:
      panel = panel - matmul(basis, matmul(transpose(basis), panel))
    gram = matmul(transpose(panel), panel)
    panel, length = jax.lax.platform_dependent(
      panel,
      gram,
      length,
      cuda=functools.partial(unrolled_gram_schmidt, shift),
      default=functools.partial(looped_gram_schmidt, shift),
    )
  return panel


def looped_gram_schmidt(
  shift: float, panel: Array, gram: Array, length: Array
) -> tuple[Array, Array]:
  """Makes columns orthonormal, given their dot products: a column in each step.

  Args:
    shift: Number that is added to the squared length of each column, after the
      column was scaled to length 1.
    panel: Columns [num_layers, rows, width].
    gram: Their dot products [num_layers, width, width].
    length: Factors by which earlier calls have shortened the columns,
      [num_layers, width].

  Returns:
    The new columns, and `length` times the factors by which this call has
    shortened the columns. A column that is only rounding errors becomes zero.
  """
  panel, gram, sizes = _with_length_1(panel, gram)
  length = length * sizes
  numbers = jnp.arange(gram.shape[1], dtype=jnp.int32)[None]

  def add_column(
    number: Index, carry: tuple[Array, Array, Array]
  ) -> tuple[Array, Array, Array]:
    panel, gram, length = carry
    is_own = numbers == number
    # Dot products of this column with all columns.
    row = jax.lax.dynamic_index_in_dim(gram, number, 1, keepdims=False)
    pivot = jax.lax.dynamic_index_in_dim(row, number, 1)
    own_length = jax.lax.dynamic_index_in_dim(length, number, 1)
    remainder, inverse = _remainder(pivot + shift, own_length)
    # The column is divided by `remainder`, and subtracted from later columns.
    row = jnp.where(numbers > number, row * inverse, 0.0)
    # The dot products of the later columns change with these columns.
    gram = gram - row[:, :, None] * row[:, None, :]
    column = jax.lax.dynamic_index_in_dim(panel, number, 2)
    column = column * inverse[:, None]
    panel = jnp.where(is_own[:, None], column, panel - column * row[:, None])
    return panel, gram, jnp.where(is_own, length * remainder, length)

  panel, _, length = jax.lax.fori_loop(
    jnp.int32(0),
    jnp.int32(gram.shape[1]),
    body_fun=add_column,
    init_val=(panel, gram, length),
  )
  return panel, length


def unrolled_gram_schmidt(
  shift: float, panel: Array, gram: Array, length: Array
) -> tuple[Array, Array]:
  """Computes the same as `looped_gram_schmidt` without a loop, for GPUs."""
  # First all coefficients are computed from the dot products, and then the
  # columns. The barrier keeps XLA from fusing the two parts.
  width = gram.shape[1]
  squares = [gram[:, j, j] for j in range(width)]
  sizes = [jnp.sqrt(square) for square in squares]
  rows: dict[tuple[int, int], Array] = {}
  inverses = []
  lengths = []
  for j in range(width):
    scale = _inverse_or_zero(sizes[j])
    # Dot products of column j with itself and later columns, all of length 1.
    products = {
      i: gram[:, j, i] * scale * _inverse_or_zero(sizes[i])
      for i in range(j, width)
    }
    # The parts along finished columns are subtracted. `rows[k, i]` is the dot
    # product of the finished column k and column i.
    for i in range(j, width):
      for k in range(j):
        products[i] = products[i] - rows[k, j] * rows[k, i]
    own_length = length[:, j] * sizes[j]
    remainder, inverse = _remainder(products[j] + shift, own_length)
    for i in range(j + 1, width):
      rows[j, i] = products[i] * inverse
    inverses.append((scale, inverse))
    lengths.append(own_length * remainder)
  rows, inverses, lengths = jax.lax.optimization_barrier(
    (rows, inverses, lengths)
  )
  columns: list[Array] = []
  for j, (scale, inverse) in enumerate(inverses):
    column = panel[:, :, j] * scale[:, None]
    for k in range(j):
      column = column - columns[k] * rows[k, j][:, None]
    columns.append(column * inverse[:, None])
  return jnp.stack(columns, axis=-1), jnp.stack(lengths, axis=-1)


def _with_length_1(panel: Array, gram: Array) -> tuple[Array, Array, Array]:
  """Scales columns to length 1, and their dot products likewise.

  Returns the columns, their dot products, and the lengths before. Columns of
  length 0 stay zero.
  """
  sizes = jnp.sqrt(jnp.diagonal(gram, axis1=1, axis2=2))
  scales = _inverse_or_zero(sizes)
  scaled_gram = gram * scales[:, :, None] * scales[:, None, :]
  return panel * scales[:, None, :], scaled_gram, sizes


def _inverse_or_zero(size: Array) -> Array:
  """Returns 1 / size, and 0 for a size of 0."""
  return jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0)


def _remainder(pivot: Array, length: Array) -> tuple[Array, Array]:
  """Returns the length of a column's remainder, and the inverse of this length.

  The remainder is the column without its parts along earlier columns. The
  inverse is 0 if the remainder is only rounding errors.

  Args:
    pivot: Squared length of the remainder of a column of length 1, plus the
      shift (`looped_gram_schmidt`). Rounding may make it negative.
    length: Factor by which the column has been shortened before.
  """
  remainder = jnp.sqrt(jnp.maximum(pivot, 0.0))
  is_new = length * remainder > _SHORTEST_NEW_PART
  return remainder, jnp.where(
    is_new, 1 / jnp.where(is_new, remainder, 1.0), 0.0
  )


def normalize_columns(matrix: Array) -> Array:
  """Scales the columns of matrices to length 1. A zero column stays zero."""
  # The squares of small or large values would underflow or overflow.
  largest = jnp.max(jnp.abs(matrix), axis=1, keepdims=True)
  matrix = matrix / jnp.where(largest > 0, largest, 1.0)
  length = jnp.sqrt(jnp.sum(jnp.square(matrix), axis=1, keepdims=True))
  return matrix / jnp.where(length > 0, length, 1.0)


def _with_random_columns(factor: Array, layers: Array, key: Array) -> Array:
  """Replaces zero columns of right factors by random columns.

  `layers` has a number for each layer (`batching.layer_numbers`), and `key` is
  equal on all replicas.
  """
  # A zero column would stay zero in all later power iterations.
  is_missing = jnp.all(factor == 0, axis=1, keepdims=True)
  random_values = _hashed_values(factor.shape, layers, key)
  return jnp.where(is_missing, random_values, factor)


def _hashed_values(shape: Shape, layers: Array, key: Array) -> Array:
  """Returns pseudo-random float32 values between -1 and 1.

  Each value is a hash of its indices and the key, so devices can divide the
  computation. `layers` has a number for each layer (`batching.layer_numbers`).

  Source: "lowbias32" of C. Wellons, 2018, "Prospecting for hash functions".
  """
  # On CPUs, `jax.random` would take a second to compile.
  seed = jax.random.key_data(key)[-1]
  # 2654435769 is 2^32 divided by the golden ratio. Its multiples modulo 2^32
  # are spread evenly.
  number = (layers * jnp.uint32(2654435769))[:, None, None]
  for axis in (1, 2):
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    number = number * jnp.uint32(shape[axis]) + index
  number *= jnp.uint32(2654435769)
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    number ^= seed
    number = (number ^ (number >> shift)) * jnp.uint32(factor)
  number ^= number >> 16
  signed = jax.lax.bitcast_convert_type(number, jnp.int32)
  return signed.astype(jnp.float32) * 2.0**-31


# Largest number of bytes of Gram matrices (`grams`) that go to the host after
# an exchange. For a model of 1.3 billion parameters at rank 64, the matrices of
# all layers have 2 MB. For 107 billion parameters at rank 2048 they have 6.6
# GB, and their eigenvalues take minutes. Then only the Gram matrix of one layer
# of each leaf goes to the host.
MAX_OBSERVED_BYTES = 64 * 2**20


def grams(factors: Mapping[str, Factors], rank: int) -> dict[str, Array]:
  """Returns the Gram matrices Q^T Q of the right factors Q.

  Their eigenvalues are the squared singular values of the last averaged update.
  If the matrices of all layers would exceed `MAX_OBSERVED_BYTES`, some layers
  are left out, but at least one of each leaf is kept. The kept matrices are
  scaled so that their sum estimates the sum over all layers.

  Args:
    factors: State of every leaf that has factors, by path.
    rank: Number of columns of a factor that were sent in the last exchange.

  Returns:
    float32 arrays [kept layers, rank, rank] by path; zero for leaves that were
    sent whole.
  """
  products = {}
  for path, leaf_factors in factors.items():
    right = leaf_factors.right[..., :rank]
    num_layers = len(leaf_factors.right)
    # A Gram matrix has rank^2 values of 4 bytes.
    most_layers = MAX_OBSERVED_BYTES // (4 * rank**2 * len(factors))
    num_observed = min(max(most_layers, 1), num_layers)
    # The kept layers are spread evenly over all layers.
    observed = right[np.arange(num_observed) * num_layers // num_observed]
    product = _product(transpose(observed), observed)
    products[path] = product * (num_layers / num_observed)
  return products
