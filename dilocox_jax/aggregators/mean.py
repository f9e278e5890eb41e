"""The uncompressed exchange: a mean over replicas.

Codecs and error feedback are other aggregators with a state of their own. They
take the place of this one.
"""

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.aggregators.transport import mean_of_participants, summed
from dilocox_jax.checks import require
from dilocox_jax.codecs.base import are_finite
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.trees import (
  Aggregator,
  Array,
  Boolean,
  Pausing,
  Tree,
  all_finite,
  widened,
  without_pauses,
)


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


def finite_part(values: Tree) -> tuple[Tree, Boolean]:
  """Returns the values, or zeros if one is not finite; and whether all are."""
  is_finite = are_finite(values)
  return jax.tree.map(
    lambda leaf: jnp.where(is_finite, leaf, jnp.zeros_like(leaf)), values
  ), is_finite


def check_leaves_out(
  aggregator: Aggregator, params: Tree, num_replicas: int
) -> None:
  """Tries an aggregator on replicas of which one sends NaN, as if it was away.

  All others send ones. So the mean is about what it would be with everybody,
  and the next one is finite again. A replica that counts as zeros would take
  1 / M of it.

  Args:
    aggregator: The aggregator to try.
    params: Shapes and types of a model; axes are cut to 128 values.
    num_replicas: M.

  Raises:
    ValueError: If the others' mean is not finite, or much smaller.
  """

  def exchanges(replica: Array) -> tuple[Boolean, Array, Array]:
    is_there = replica >= 0  # Makes the values those of a replica, for vmap.
    tree = jax.tree.map(
      lambda leaf: jnp.full([min(n, 128) for n in leaf.shape], is_there).astype(
        leaf.dtype
      ),
      params,
    )
    left_out = jax.tree.map(
      lambda leaf: jnp.where(replica == 0, jnp.full_like(leaf, jnp.nan), leaf),
      tree,
    )
    state = aggregator.init(tree)
    whole, _ = aggregator.update(tree, state, tree)
    mean, state = aggregator.update(left_out, state, tree)
    after, _ = aggregator.update(tree, state, tree)
    size, whole = optax.tree.sum(mean), optax.tree.sum(whole)
    return all_finite((mean, after)), jnp.asarray(size), jnp.asarray(whole)

  run = jax.vmap(exchanges, axis_name=REPLICA_AXIS)
  is_finite, size, whole = jax.jit(run)(jnp.arange(num_replicas))
  others = slice(1, None)  # An exchange may give each replica its own result.
  is_whole = abs(size - whole) * num_replicas <= abs(whole) / 2
  is_right = is_finite & (is_whole | (not aggregator.is_shared))
  require(
    bool(is_right[others].all()),
    "this exchange does not leave out a replica whose values are not finite, "
    "as those of an absent one are: see dilocox_jax.Aggregator, or drop "
    "membership.absences, absence_rate and inner_steps",
  )
