"""A matrix as two thin factors.

Made together (PowerSGD), the left factor is averaged first, made orthonormal,
and the right one is what each replica's matrix is in that common basis: both
are linear in the matrices, so that averaging the factors averages the
matrices. Made alone, each replica has a basis of its own and both factors
must be sent and decoded before the mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Codec, CodecSteps, Encoder, Reduced
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.reduction import LowRank
from dilocox_jax.pytypes import Array, Index


class Factors(NamedTuple):
  """What low rank remembers of a leaf, the same on all replicas.

  Attributes:
    right: Averaged right factor, [num_layers, columns, max_rank].
    gram: Its products of columns, [num_layers, max_rank, max_rank], whose
      eigenvalues are the squared singular values of the last averaged update;
      zero beyond the rank it was sent with.
  """

  right: Array
  gram: Array


def first_factors(leaf: Leaf, max_rank: int, key: Array) -> Factors:
  """A random start."""
  shape = (leaf.num_layers, leaf.shape[1], max_rank)
  return Factors(
    jax.random.normal(key, shape, jnp.float32),
    jnp.zeros((leaf.num_layers, max_rank, max_rank), jnp.float32),
  )


def shared_factors(
  payload: LowRank, leaf: Leaf, left: Codec, right: Codec, max_rank: int = 0
) -> Codec:
  """Power iteration on the mean matrix, from the factor of the time before.

  P = mean_m (A_m Q), orthonormalised; Q = mean_m (A_m^T P); the mean decodes to
  P Q^T. Exact if the mean matrix has no more than `rank` directions and Q is
  not orthogonal to one of them.

  Wire: rank (rows + columns) values a matrix and power iteration, in the next
  payload's encoding.
  Source: PowerSGD, Vogels et al., 2019, arXiv 1905.13727, Algorithm 1; DiLoCoX,
  arXiv 2506.21263, for quantised factors.
  Differs: Gram-Schmidt is run twice; a missing direction becomes a zero column,
  not noise, and starts at random the next time. Sums run over rows only, so
  rows may be sharded.

  Args:
    payload: Rank and power iterations.
    leaf: Matrices [rows, columns].
    left: Exchanges left factors.
    right: Exchanges right factors.
    max_rank: Rank of the kept factor, if the rank varies from time to time.
  """
  rank = payload.rank

  def init(key: Array) -> Factors:
    return first_factors(leaf, max(max_rank, rank), key)

  def run(values: Array, state: Factors, key: Array) -> CodecSteps:
    matrix = values.astype(jnp.float32)
    factor = _revived(state.right[..., :rank], key)
    for _ in range(payload.power_iterations):
      reduced, _ = yield from left.run(matrix @ _unit(factor), (), key)
      basis = orthonormal(reduced.mean)
      turned = jnp.swapaxes(matrix, 1, 2) @ basis
      reduced, _ = yield from right.run(turned, (), key)
      factor = reduced.mean
    matrices = [basis @ jnp.swapaxes(q, 1, 2) for q in reduced]
    gram = jnp.swapaxes(factor, 1, 2) @ factor
    kept = Factors(
      state.right.at[..., :rank].set(factor),
      jnp.zeros_like(state.gram).at[..., :rank, :rank].set(gram),
    )
    return Reduced(*matrices), kept

  return Codec(
    init, run, (left.messages + right.messages) * payload.power_iterations
  )


def local_factors(payload: LowRank, inner: tuple[Encoder, Encoder]) -> Encoder:
  """Each replica factorises its own matrix, from a fixed random start.

  Wire: rank (rows + columns) values a matrix, in the next payload's encoding.
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
      basis = orthonormal(matrix @ _unit(factor))
      factor = jnp.swapaxes(matrix, 1, 2) @ basis
    return (*left.encode(basis, key), *right.encode(factor, key))

  def decode(arrays: tuple[Array, ...]) -> Array:
    half = len(arrays) // 2
    basis, factor = left.decode(arrays[:half]), right.decode(arrays[half:])
    return basis @ jnp.swapaxes(factor, 1, 2)

  return Encoder(encode, decode)


# A column whose new direction is shorter than this share of it has none.
_NOTHING_NEW = 1e-5


def orthonormal(matrix: Array) -> Array:
  """An orthonormal basis of the columns of [num_layers, rows, rank].

  Directions that the columns do not have become zero columns. Each column is
  freed of the ones before it twice, which is enough for orthogonality to
  rounding. XLA's own batched decompositions are not used: on few CPU cores
  they can wait for each other for ever (docs/log.md).
  """
  columns = _unit(matrix)

  def add_column(number: Index, basis: Array) -> Array:
    column = jax.lax.dynamic_slice_in_dim(columns, number, 1, axis=2)
    for _ in range(2):
      column = column - basis @ (jnp.swapaxes(basis, 1, 2) @ column)
    length = jnp.sqrt(jnp.sum(jnp.square(column), axis=1, keepdims=True))
    is_new = length > _NOTHING_NEW
    column = jnp.where(is_new, column / jnp.where(is_new, length, 1.0), 0.0)
    return jax.lax.dynamic_update_slice_in_dim(basis, column, number, axis=2)

  rank = matrix.shape[2]
  return jax.lax.fori_loop(
    jnp.int32(0), jnp.int32(rank), add_column, jnp.zeros_like(columns)
  )


def _unit(matrix: Array) -> Array:
  """Columns of length 1, or 0; no square over- or underflows on the way."""
  largest = jnp.max(jnp.abs(matrix), axis=1, keepdims=True)
  matrix = matrix / jnp.where(largest > 0, largest, 1.0)
  size = jnp.sqrt(jnp.sum(jnp.square(matrix), axis=1, keepdims=True))
  return matrix / jnp.where(size > 0, size, 1.0)


def _revived(factor: Array, key: Array) -> Array:
  """A factor whose missing columns have been drawn anew."""
  drawn = jax.random.normal(key, factor.shape, factor.dtype)
  is_missing = jnp.all(factor == 0, axis=1, keepdims=True)
  return jnp.where(is_missing, drawn, factor)
