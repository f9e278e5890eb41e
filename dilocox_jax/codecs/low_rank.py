"""A matrix as two thin factors.

Shared factors (PowerSGD): the left factor is averaged first and made
orthonormal, which gives all replicas one basis. The right factor is what each
replica's matrix is in that basis. Both are linear in the matrices, so the mean
of the factors gives the mean of the matrices.

Local factors: each replica has a basis of its own, so both factors must be
sent and decoded before the mean.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dilocox_jax.codecs.base import Codec, CodecSteps, Encoder, Reduced
from dilocox_jax.distributed.local_map import INNER_AXES, current_division
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.reduction import LowRank
from dilocox_jax.pytypes import Array, Index

# Matrix products are computed in full fp32. By default a TPU multiplies in
# bfloat16 and a recent GPU in TF32. Gram-Schmidt would then keep rounding
# errors as directions: a matrix of norm 1 and rank 16, sent with 64 columns,
# decodes to norm 4.4 to 4.9 (emulated), and a residual grows without bound.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _product(left: Array, right: Array) -> Array:
  """Multiplies matrices [num_layers, ...], all at once or layer by layer.

  Where all devices of a replica divide the rows of a matrix, each needs the
  whole of a factor. Of a model of 107B at rank 2048 that is 29 GiB for all
  layers and 0.4 GiB for one. Results are divided by rows again.
  """
  division = current_division()
  num_devices, num_layers = division.num_devices, left.shape[0]
  if num_devices == 1 or num_layers % division.num_stages == 0:
    return _matmul(left, right)

  def multiply(pair: tuple[Array, Array]) -> Array:
    product = _matmul(*pair)
    if product.shape[0] % num_devices:
      return product
    rows = PartitionSpec(INNER_AXES, None)
    return jax.lax.with_sharding_constraint(product, rows)

  return jax.lax.map(multiply, (left, right))


class Factors(NamedTuple):
  """State that low rank keeps of a leaf; it is equal on all replicas.

  Attributes:
    right: Averaged right factor, [num_layers, columns, max_rank].
    gram: Products of the right factor's columns with each other, [num_layers,
      max_rank, max_rank]. Its eigenvalues are the squared singular values of
      the last averaged update. It is zero beyond the rank that was sent.
  """

  right: Array
  gram: Array


def low_rank(
  payload: LowRank, leaf: Leaf, *inner: Any, max_rank: int = 0
) -> Codec | Encoder:
  """Builds the codec of shared factors, or the encoder of local ones.

  Args:
    payload: Rank and kind of the factors.
    leaf: Shape of the values.
    *inner: What sends the factors, left and right in turn, or the values of a
      leaf that is not factorised.
    max_rank: Columns that the state of shared factors has room for.
  """
  if payload.factorises(leaf):
    if payload.is_projection:
      return shared_factors(payload, leaf, inner[0], inner[1], max_rank)
    return local_factors(payload, (inner[0], inner[1]))
  if not max_rank or not LowRank(1).factorises(leaf):
    return inner[0]
  # At this rank the factors would be larger than the matrix, at a smaller one
  # they are not. The state has the same shape at every rank, so that the rank
  # can change during a run.
  room = functools.partial(first_factors, leaf, max_rank)
  return inner[0]._replace(init=room)


def first_factors(leaf: Leaf, max_rank: int, key: Array) -> Factors:
  """Returns a random right factor to start from."""
  shape = (leaf.num_layers, leaf.shape[1], max_rank)
  return Factors(
    jax.random.normal(key, shape, jnp.float32),
    jnp.zeros((leaf.num_layers, max_rank, max_rank), jnp.float32),
  )


def shared_factors(
  payload: LowRank, leaf: Leaf, left: Codec, right: Codec, max_rank: int = 0
) -> Codec:
  """Builds the codec of one power iteration on the mean matrix.

  It starts from the right factor Q of the exchange before. P = mean_m (A_m Q)
  is made orthonormal, then Q = mean_m (A_m^T P), and the mean decodes to
  P Q^T. This is exact if the mean matrix has no more than `rank` directions
  and none of them is orthogonal to all columns of the old Q.

  Wire: rank (rows + columns) values for each matrix and power iteration, in
  the next payload's encoding. A matrix [512, 512] at rank 16 in fp32 takes
  65,536 bytes instead of 1,048,576. Left and right factors are two messages,
  because the right factor needs the mean of the left one.
  Source: PowerSGD, Vogels et al., 2019, arXiv 1905.13727, Algorithm 1; DiLoCoX,
  arXiv 2506.21263, for quantised factors.
  Differs: Gram-Schmidt is run twice. A missing direction becomes a zero column
  instead of noise, and starts at random the next time. Sums run over rows
  only, so rows may be sharded.

  Args:
    payload: Rank and power iterations.
    leaf: Matrices [rows, columns].
    left: Codec that exchanges left factors.
    right: Codec that exchanges right factors.
    max_rank: Columns of the factor that is kept, where the rank changes from
      exchange to exchange; 0 means the payload's rank.
  """
  rank = payload.rank

  def init(key: Array) -> Factors:
    return first_factors(leaf, max(max_rank, rank), key)

  def run(values: Array, state: Factors, key: Array) -> CodecSteps:
    matrix = values.astype(jnp.float32)
    factor = _revived(state.right[..., :rank], key)
    for _ in range(payload.power_iterations):
      turned = _product(matrix, _unit(factor))
      reduced, _ = yield from left.run(turned, (), key)
      basis = orthonormal(reduced.mean)
      turned = _product(jnp.swapaxes(matrix, 1, 2), basis)
      reduced, _ = yield from right.run(turned, (), key)
      factor = reduced.mean
    matrices = [_product(basis, jnp.swapaxes(q, 1, 2)) for q in reduced]
    gram = _product(jnp.swapaxes(factor, 1, 2), factor)
    new_state = Factors(
      state.right.at[..., :rank].set(factor),
      jnp.zeros_like(state.gram).at[..., :rank, :rank].set(gram),
    )
    return Reduced(*matrices), new_state

  return Codec(
    init, run, (left.messages + right.messages) * payload.power_iterations
  )


def local_factors(payload: LowRank, inner: tuple[Encoder, Encoder]) -> Encoder:
  """Builds an encoder that factorises each replica's matrix by itself.

  The power iteration starts from a fixed random matrix.

  Wire: rank (rows + columns) values for each matrix, in the next payload's
  encoding, however many power iterations there are.
  Source: Halko et al., 2011, arXiv 0909.4061, Algorithm 4.4.
  Differs: nothing.

  Args:
    payload: Rank; each power iteration is one more pass over the matrix.
    inner: Encoders of the left and the right factor.
  """
  left, right = inner

  def encode(values: Array, key: Array) -> tuple[Array, ...]:
    matrix = values.astype(jnp.float32)
    shape = (matrix.shape[0], matrix.shape[2], payload.rank)
    factor = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    for _ in range(payload.power_iterations):
      basis = orthonormal(_matmul(matrix, _unit(factor)))
      factor = _matmul(jnp.swapaxes(matrix, 1, 2), basis)
    return (*left.encode(basis, key), *right.encode(factor, key))

  def decode(arrays: tuple[Array, ...]) -> Array:
    half = len(arrays) // 2
    basis, factor = left.decode(arrays[:half]), right.decode(arrays[half:])
    return _matmul(basis, jnp.swapaxes(factor, 1, 2))

  return Encoder(encode, decode)


# A column of length 1 whose new part is shorter than this has no direction of
# its own: what is left of it is rounding (fp32 rounds at 6e-8, and the sums
# over a few thousand rows make about 1e-6 of it).
_SHORTEST_NEW_PART = 1e-5


def orthonormal(matrix: Array) -> Array:
  """Returns an orthonormal basis of the columns of [num_layers, rows, rank].

  A column that adds no direction becomes a zero column. Gram-Schmidt is
  written out, because XLA's batched QR and eigenvalue routines can wait for
  each other for ever on few CPU cores (docs/log.md).
  """
  columns = _unit(matrix)

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
      along_basis = _matmul(jnp.swapaxes(basis, 1, 2), column)
      column = column - _matmul(basis, along_basis)
    length = jnp.sqrt(jnp.sum(jnp.square(column), axis=1, keepdims=True))
    is_new = length > _SHORTEST_NEW_PART
    column = jnp.where(is_new, column / jnp.where(is_new, length, 1.0), 0.0)
    return jax.lax.dynamic_update_slice_in_dim(basis, column, number, axis=2)

  bounds = jnp.int32(0), jnp.int32(matrix.shape[2])
  return jax.lax.fori_loop(*bounds, add_column, jnp.zeros_like(columns))


def _unit(matrix: Array) -> Array:
  """Scales columns to length 1; a zero column stays zero.

  A column is divided by its largest value first, so that no square overflows
  or underflows: 1e-30 squared is zero in fp32.
  """
  largest = jnp.max(jnp.abs(matrix), axis=1, keepdims=True)
  matrix = matrix / jnp.where(largest > 0, largest, 1.0)
  length = jnp.sqrt(jnp.sum(jnp.square(matrix), axis=1, keepdims=True))
  return matrix / jnp.where(length > 0, length, 1.0)


def _revived(factor: Array, key: Array) -> Array:
  """Replaces zero columns by random ones.

  A zero column would stay zero: A times 0 finds no direction again.
  """
  drawn = jax.random.normal(key, factor.shape, factor.dtype)
  is_missing = jnp.all(factor == 0, axis=1, keepdims=True)
  return jnp.where(is_missing, drawn, factor)
