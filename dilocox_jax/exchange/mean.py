"""The uncompressed exchange: a mean over replicas.

Codecs and error feedback are further aggregators, with a state of their own,
in the place of this one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dilocox_jax.mesh import REPLICA_AXIS
from dilocox_jax.pytypes import Aggregator, Boolean, Tree


def mean_over_replicas() -> Aggregator:
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
    count = jax.lax.psum(finite.astype(jnp.int32), REPLICA_AXIS)
    count = jnp.maximum(count, 1)

    def mean(leaf):
      wide = leaf.astype(np.promote_types(np.float32, leaf.dtype))
      kept = jnp.where(finite, wide, jnp.zeros_like(wide))
      total = jax.lax.psum(kept, REPLICA_AXIS)
      return (total / count.astype(total.dtype)).astype(leaf.dtype)

    return jax.tree.map(mean, values), values, state

  return Aggregator(init, average)


def all_finite(tree: Tree) -> Boolean:
  """Whether every value of a tree is finite (boolean scalar)."""
  leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.stack(leaves).all()
