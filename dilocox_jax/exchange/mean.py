"""The uncompressed exchange: a mean over replicas.

Codecs and error feedback are other aggregators with a state of their own. They
take the place of this one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.pytypes import (
  Aggregator,
  Array,
  Boolean,
  Pausing,
  Scalar,
  Tree,
  without_pauses,
)
from dilocox_jax.trees import all_finite


def mean_of_finite_replicas(axis_name: str = REPLICA_AXIS) -> Aggregator:
  """Averages over the replicas whose values are all finite.

  A replica that has diverged is left out of the mean, so that it cannot spoil
  the others; its `sent` stays not finite, which shows in the drift. If no
  replica is finite, the mean is zero. Sums run in fp32, or in the values' own
  type if that is wider.

  Wire: 4 bytes a value, and 4 for the count of participants, in an all-reduce.

  Args:
    axis_name: Axis over which replicas are mapped.

  Returns:
    An `Aggregator` without state, for use under that axis.
  """

  def init(params: Tree) -> Tree:
    del params
    return optax.EmptyState()

  def average(values: Tree, state: Tree, params: Tree = None) -> Pausing:
    del params
    finite, is_finite = yield finite_part(widened(values))
    totals, count = yield summed(finite, is_finite, axis_name)
    mean = jax.tree.map(
      lambda total, leaf: mean_of_participants(total, count).astype(leaf.dtype),
      totals,
      values,
    )
    return mean, values, state

  return Aggregator(init, without_pauses(average))


def widened(values: Tree) -> Tree:
  """Returns values in fp32, or in their own type if that is wider."""
  return jax.tree.map(
    lambda leaf: leaf.astype(np.promote_types(np.float32, leaf.dtype)), values
  )


def finite_part(values: Tree) -> tuple[Tree, Boolean]:
  """Returns the values, or zeros if one is not finite; and whether all are."""
  is_finite = all_finite(values)
  return jax.tree.map(
    lambda leaf: jnp.where(is_finite, leaf, jnp.zeros_like(leaf)), values
  ), is_finite


def summed(
  values: Tree, participates: Boolean, axis_name: str = REPLICA_AXIS
) -> tuple[Tree, Scalar]:
  """Sums values over replicas and counts the participants.

  The count is one more number of the values' type, so that the compiler puts
  it into the same message. A message of its own would cost a slow link as much
  latency again. In 16 bits it is exact up to
  `plan.wire.collectives.MOST_IN_16_BITS` replicas.

  Args:
    values: Leaves of one type; zeros if this replica does not participate.
    participates: Whether this replica participates.
    axis_name: Axis over which replicas are mapped.
  """
  flag = participates.astype(jax.tree.leaves(values)[0].dtype)
  return jax.lax.psum((values, flag), axis_name)


def mean_of_participants(total: Array, count: Scalar) -> Array:
  """Divides a sum by the number of participants; zero if there is none."""
  return total / jnp.maximum(count, 1).astype(total.dtype)
