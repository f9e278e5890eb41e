"""Leaves a replica out of a mean if the norm of its values is far too large.

`mailbox_protocol.manifest` has a similar rule for replicas that exchange
through a mailbox (a folder or bucket).
"""

import math

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.checks import require, within_limits
from dilocox_jax.coroutines import Coroutine, as_function
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.overlap import PARTS
from dilocox_jax.trees import Tree, widened


def norm_filter(
  aggregator: Aggregator, max_norm_ratio: float, axis_name: str = REPLICA_AXIS
) -> Aggregator:
  """Wraps an aggregator, and leaves out replicas with too large a norm.

  The norm of a replica's values is compared with the usual norm: the lower
  median of all replicas' norms that are finite and not 0. If the replica's norm
  is too large or not finite, the replica is left out of the mean, its
  `Averaged.sent` and `Averaged.retained` are zeros, and `Averaged.is_left_out`
  is True. A norm of 0 is never too large.

  Wire: each replica sends the norm of its values, 4 bytes, to all others before
  the messages of the wrapped aggregator. All wait for the norms.

  Args:
    aggregator: The aggregator to wrap, e.g. `dilocox_jax.exchange()`.
    max_norm_ratio: Largest allowed norm, as a multiple of the usual norm. It
      must be finite and above 1.
    axis_name: Name of the axis over which replicas are mapped.

  Raises:
    ValueError: If `aggregator` is not an `Aggregator`, or if `max_norm_ratio`
      is not a finite number above 1.
  """
  require(
    isinstance(aggregator, Aggregator),
    "norm_filter needs an Aggregator of replicas in one runtime, such as "
    "dilocox_jax.exchange(); replicas that meet in a store have "
    "MailboxRules(max_norm_ratio=...)",
  )
  within_limits("max_norm_ratio", max_norm_ratio, above=1, below=math.inf)
  ends = aggregator.stretch_ends or (lambda params: (PARTS,))

  def average(values: Tree, state: Tree, params: Tree = None) -> Coroutine:
    norm = yield optax.tree.norm(widened(values)).astype(jnp.float32)
    norms = yield jax.lax.all_gather(norm, axis_name)
    # The norm 0 of a replica without progress does not count towards the usual
    # norm. NaN is sorted behind all numbers. So the norms 8, 0, 2, 4, 1 become
    # 1, 2, 4, 8, NaN, and the lower median is 2.
    has_progress = jnp.isfinite(norms) & (norms > 0)
    ordered = jnp.sort(jnp.where(has_progress, norms, jnp.nan))
    # If no replica has progress, the index is -1 and the usual norm is NaN.
    usual = ordered[(jnp.sum(has_progress) - 1) // 2]
    # A comparison with NaN is false, so a replica with a norm of NaN is left
    # out.
    is_counted = (norm <= max_norm_ratio * usual) | (norm == 0)

    def replace_if_left_out(tree: Tree, replacement: float) -> Tree:
      return jax.tree.map(
        lambda leaf: jnp.where(is_counted, leaf, replacement), tree
      )

    # The wrapped aggregator leaves out a replica whose values are NaN.
    averaged = yield from aggregator.average_coroutine(
      replace_if_left_out(values, jnp.nan), state, params
    )
    return averaged._replace(
      sent=replace_if_left_out(averaged.sent, 0.0),
      retained=replace_if_left_out(averaged.retained, 0.0),
      is_left_out=~is_counted,
    )

  return aggregator._replace(
    average=as_function(average),
    # No inner steps hide the turn of the norms.
    stretch_ends=lambda params: (0, *ends(params)),
  )
