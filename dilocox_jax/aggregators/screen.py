"""Leaves out of a mean the replicas whose values are far larger than usual.

It is the rule of replicas that meet in a store (`meeting.manifest`) for those
whose messages are all there: usual is the lower median of their norms.
"""

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.collective import PARTS
from dilocox_jax.trees import Aggregator, Pausing, Tree, widened, without_pauses


def screened(
  aggregator: Aggregator, max_norm_ratio: float, axis_name: str = REPLICA_AXIS
) -> Aggregator:
  """Returns an aggregator that leaves out replicas with too large a norm.

  Such a replica is treated as one that is not finite. What was sent of its
  values is 0, and nothing of them stays with it.

  Wire: 4 bytes, the norm of the values, to all others and in front of the
  messages of the aggregator. Everybody waits for them.

  Args:
    aggregator: Averages what is left, e.g. `dilocox_jax.exchange()`.
    max_norm_ratio: How many times the usual norm values may have.
    axis_name: Axis over which replicas are mapped.
  """
  ends = aggregator.stretch_ends or (lambda params: (PARTS,))

  def average(values: Tree, state: Tree, params: Tree = None) -> Pausing:
    norm = yield optax.tree.norm(widened(values)).astype(jnp.float32)
    norms = yield jax.lax.all_gather(norm, axis_name)
    # NaN comes last. Who made no progress says nothing of what is usual.
    counts = jnp.isfinite(norms) & (norms > 0)
    ordered = jnp.sort(jnp.where(counts, norms, jnp.nan))
    usual = ordered[(jnp.sum(counts) - 1) // 2]
    # NaN is not in.
    is_in = jnp.less_equal(norm, max_norm_ratio * usual) | (norm == 0)

    def unless_left_out(tree: Tree, other: float) -> Tree:
      return jax.tree.map(lambda leaf: jnp.where(is_in, leaf, other), tree)

    given = unless_left_out(values, jnp.nan)
    mean, sent, state = yield from aggregator.paused(given, state, params)
    return mean, unless_left_out(sent, 0.0), state

  return aggregator._replace(
    average=without_pauses(average),
    stretch_ends=lambda params: (0, *ends(params)),
    is_screened=True,
  )
