"""Leaves out of a mean the replicas whose values are far larger than usual.

It is the rule of replicas that meet in a store (`mailbox_protocol.manifest`)
for those whose messages are all there: usual is the lower median of their
norms.
"""

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.checks import require
from dilocox_jax.coroutines import Coroutine, as_function
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.overlap import PARTS
from dilocox_jax.trees import Tree, widened


def norm_filter(
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

  Raises:
    ValueError: If that is no `Aggregator`.
  """
  require(
    isinstance(aggregator, Aggregator),
    "norm_filter needs an Aggregator of replicas in one runtime, such as "
    "dilocox_jax.exchange(); replicas that meet in a store have "
    "MailboxRules(max_norm_ratio=...)",
  )
  ends = aggregator.stretch_ends or (lambda params: (PARTS,))

  def average(values: Tree, state: Tree, params: Tree = None) -> Coroutine:
    norm = yield optax.tree.norm(widened(values)).astype(jnp.float32)
    norms = yield jax.lax.all_gather(norm, axis_name)
    # A replica without progress says nothing about what is usual. NaN is
    # sorted behind all numbers.
    has_progress = jnp.isfinite(norms) & (norms > 0)
    ordered = jnp.sort(jnp.where(has_progress, norms, jnp.nan))
    usual = ordered[(jnp.sum(has_progress) - 1) // 2]
    # A comparison with NaN is false, so a norm of NaN is left out.
    is_in = (norm <= max_norm_ratio * usual) | (norm == 0)

    def unless_left_out(tree: Tree, other: float) -> Tree:
      return jax.tree.map(lambda leaf: jnp.where(is_in, leaf, other), tree)

    averaged = yield from aggregator.average_coroutine(
      unless_left_out(values, jnp.nan), state, params
    )
    return averaged._replace(
      sent=unless_left_out(averaged.sent, 0.0),
      retained=unless_left_out(averaged.retained, 0.0),
    )

  return aggregator._replace(
    average=as_function(average),
    stretch_ends=lambda params: (0, *ends(params)),
  )
