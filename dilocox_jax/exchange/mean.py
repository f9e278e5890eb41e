"""The uncompressed exchange: a mean over replicas.

Codecs and error feedback are further aggregators, with a state of their own,
in the place of this one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.pytypes import Aggregator, Array, Boolean, Scalar, Tree
from dilocox_jax.trees import all_finite


def mean_of_finite_replicas() -> Aggregator:
  """Averages over those replicas whose values are all finite.

  A replica that has diverged is left out of the mean, so that it cannot
  poison the others; if none is finite the mean is zero. Sums run in fp32 or
  the input's own wider type.

  Returns:
    An `Aggregator` without state, for use under the axis "replica".
  """

  def init(params: Tree) -> Tree:
    del params
    return optax.EmptyState()

  def average(values: Tree, state: Tree) -> tuple[Tree, Tree, Tree]:
    finite = all_finite(values)

    def kept(leaf):
      wide = leaf.astype(np.promote_types(np.float32, leaf.dtype))
      return jnp.where(finite, wide, jnp.zeros_like(wide))

    totals, count = summed(jax.tree.map(kept, values), finite)
    mean = jax.tree.map(
      lambda total, leaf: mean_of_participants(total, count).astype(leaf.dtype),
      totals,
      values,
    )
    return mean, values, state

  return Aggregator(init, average)


def summed(values: Tree, participates: Boolean) -> tuple[Tree, Scalar]:
  """Sums over replicas, and how many of them took part.

  The count is one more number of the values' type, so that the compiler puts
  it into their message: one of its own would cost a slow link as much latency
  again. In 16 bits it is exact up to `plan.collectives.MOST_IN_16_BITS`.

  Args:
    values: Of one type; zeros from those who take no part.
    participates: Whether this replica does.
  """
  flag = participates.astype(jax.tree.leaves(values)[0].dtype)
  return jax.lax.psum((values, flag), REPLICA_AXIS)


def mean_of_participants(total: Array, count: Scalar) -> Array:
  """The mean of those who took part; what none of them sent stays zero."""
  return total / jnp.maximum(count, 1).astype(total.dtype)
