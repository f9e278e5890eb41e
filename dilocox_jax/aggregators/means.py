"""Sums and means over the replicas that participate."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder, Reduced
from dilocox_jax.codecs.batching import Arrays, Shape
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.trees import Array, Boolean, Scalar, Tree


def summed(
  values: Tree, participates: Boolean, axis_name: str = REPLICA_AXIS
) -> tuple[Tree, Scalar]:
  """Sums values over replicas, and counts the replicas that participate.

  Args:
    values: Tree whose leaves all have one dtype; zeros if this replica does not
      participate.
    participates: Whether this replica counts in the mean (boolean scalar).
    axis_name: Name of the axis over which replicas are mapped.

  Returns:
    A tuple (sums, count): a tree like the values, and a scalar of their dtype.
  """
  # The flag has the dtype of the values, so that the compiler can sum both in
  # one message. A second message would double the latency on a slow link.
  flag = participates.astype(jax.tree.leaves(values)[0].dtype)
  return jax.lax.psum((values, flag), axis_name)


def mean_of_participants(total: Array, count: Scalar) -> Array:
  """Divides a sum by the number of participants, or by 1 if there are none."""
  return total / jnp.maximum(count, 1).astype(total.dtype)


def mean_of_messages(
  encoder: Encoder,
  shapes: Sequence[Shape],
  own: Arrays,
  arrays: Arrays,
  weights: Array,
  is_counted: Boolean,
) -> Reduced:
  """Decodes the messages of several replicas, and averages them.

  Args:
    encoder: Encoder of the messages.
    shapes: Shape of each leaf, (num_layers, *shape).
    own: Encoded arrays of this replica's message, [...] each.
    arrays: Encoded arrays of all K messages, [K, ...] each.
    weights: Weight of each message in the mean, [K]. The sum must be 0 (the
      mean is then zeros) or at least 1.
    is_counted: Whether this replica's own message counts in the mean (boolean
      scalar). If not, `Reduced.own` is zeros.
  """
  count = jnp.sum(weights, dtype=jnp.float32)

  def weighted(number: int) -> list[Array]:
    message = [array[number] for array in arrays]
    values = encoder.concatenated(message, shapes)
    return [each * weights[number].astype(each.dtype) for each in values]

  # The loop adds one message after the other, so that at most one message lies
  # decoded in memory.
  total = weighted(0)
  for number in range(1, weights.shape[0]):
    total = [a + b for a, b in zip(total, weighted(number), strict=True)]
  mean = [mean_of_participants(values, count) for values in total]
  decoded = [
    jnp.where(is_counted, values, jnp.zeros_like(values))
    for values in encoder.concatenated(own, shapes)
  ]
  return Reduced(
    mean=encoder.leaves(mean, shapes), own=encoder.leaves(decoded, shapes)
  )
