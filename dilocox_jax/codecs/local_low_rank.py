"""A matrix as two thin factors that each replica makes alone.

Each replica has a basis of its own, so both factors must be sent and decoded
before the mean.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dilocox_jax.checks import limited
from dilocox_jax.codecs.base import (
  Encoder,
)
from dilocox_jax.codecs.low_rank import (
  matmul,
  matrices_of,
  orthonormal,
  turned,
  unit,
)
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.codecs.rows import (
  Shape,
  stacked,
  unstacked,
)
from dilocox_jax.pytypes import Array


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

  def encode(self, leaves: Sequence[Array], key: Array) -> list[Array]:
    """Returns left factors, right factors and whole leaves as `then` does."""
    groups, whole = matrices_of([leaf.shape for leaf in leaves], self.rank)
    pairs = [self._factorised(m) for m in stacked(leaves, groups)]
    left, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return self.then.encode([*left, *right, *(leaves[n] for n in whole)], key)

  def decode(
    self, arrays: Sequence[Array], shapes: Sequence[Shape]
  ) -> list[Array]:
    """Reverses `encode`."""
    groups, whole = matrices_of(shapes, self.rank)
    left, right = [], []
    for group in groups:
      layers = sum(shapes[number][0] for number in group)
      _, rows, columns = shapes[group[0]]
      left.append((layers, rows, self.rank))
      right.append((layers, columns, self.rank))
    inner = [*left, *right, *(shapes[number] for number in whole)]
    values, count = self.then.decode(arrays, inner), len(groups)
    right = map(turned, values[count : 2 * count])
    products = list(map(matmul, values[:count], right))
    found = unstacked(products, groups, shapes)
    found |= dict(zip(whole, values[2 * count :], strict=True))
    return [found[number] for number in range(len(shapes))]

  def _factorised(self, values: Array) -> tuple[Array, Array]:
    matrix = values.astype(jnp.float32)
    # The same for every layer, so that a layer does not feel the others.
    shape = (matrix.shape[2], self.rank)
    factor = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    factor = jnp.broadcast_to(factor, (len(matrix), *shape))
    basis = factor
    for _ in range(self.power_iterations):
      basis = orthonormal(matmul(matrix, unit(factor)))
      factor = matmul(turned(matrix), basis)
    return basis, factor
