"""One message across the replica axis: encode, carry, decode and average.

All leaves travel together. The message also says whether its sender
participates: a message for that alone would cost a slow link as much latency
again. `collectives` chooses which collective carries it, and counts the bytes
by the same choice.

Every way is a generator that pauses where a message leaves and where it has
arrived (`Aggregator.paused`), so that inner steps can run in between.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dilocox_jax.aggregators import carriers
from dilocox_jax.aggregators.collectives import chosen_collective
from dilocox_jax.codecs.base import Encoder, Reduced
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.trees import Array, Boolean, Pausing, Scalar, Tree


def reduce(
  encoder: Encoder,
  participates: Boolean,
  collective: str,
  axis_name: str,
  shares_add_up: bool,
  is_carried: bool,
  leaves: Sequence[Array],
) -> Pausing:
  """Averages leaves over the replicas that participate.

  Args:
    encoder: Encodes the leaves.
    participates: Whether this replica participates; if not, they are zeros.
    collective: One of `plan.collective.COLLECTIVES`.
    axis_name: Axis over which replicas are mapped.
    shares_add_up: Whether the own parts of all replicas add up to the mean
      times their number even where the mean is rounded too (`_scatter`).
    is_carried: Whether the host carries the messages (`_gather`).
    leaves: Values of this replica, [num_layers, *shape] each.

  Returns:
    A generator that pauses as `Aggregator.paused` does. In the end it returns
    `Reduced`.
  """
  given = encoder, leaves, participates, axis_name
  if is_carried:  # There is no axis.
    return _gather(*given, is_carried)
  way = chosen_collective(encoder, collective, jax.lax.axis_size(axis_name))
  if way == "all_gather":
    return _gather(*given, is_carried)
  if way == "all_reduce":
    return _add(*given)
  return _scatter(*given, shares_add_up)


def _add(encoder: Any, leaves, participates, axis_name: str) -> Pausing:
  """The network adds values in fp32."""
  sent = [encoder.code(leaf)[0] for leaf in leaves]
  sent, participates = yield sent, participates
  totals, count = yield summed(sent, participates, axis_name)
  return Reduced([mean_of_participants(leaf, count) for leaf in totals], sent)


def _gather(
  encoder: Encoder, leaves, participates, axis_name: str, is_carried: bool
) -> Pausing:
  """Every replica receives all messages, decodes them and adds them up.

  If the host carries them it pauses once: it yields what is to be sent, and is
  sent the arrays [K, ...] of the K replicas that are listed, the weight of each
  in the mean [K], and whether its own are among them (`meeting.carrier`).
  """
  shapes = [leaf.shape for leaf in leaves]
  sent = encoder.encode(leaves)
  if is_carried:
    arrays, weights, is_counted = yield sent, participates
  else:
    sent, flag = yield sent, participates.astype(jnp.uint8)[None]
    *arrays, flags = yield carriers.all_gathered([*sent, flag], axis_name)
    weights, is_counted = flags[:, 0], participates
  count = jnp.sum(weights, dtype=jnp.float32)

  def weighted(replica: int) -> list[Array]:
    own = [array[replica] for array in arrays]
    values = encoder.joined(own, shapes)
    return [each * weights[replica].astype(each.dtype) for each in values]

  # One replica after the other, so that the decoded values of one replica at
  # most are in memory.
  total = weighted(0)
  for replica in range(1, weights.shape[0]):
    total = list(map(jnp.add, total, weighted(replica)))
  mean = [mean_of_participants(values, count) for values in total]
  own = [
    jnp.where(is_counted, each, jnp.zeros_like(each))
    for each in encoder.joined(sent, shapes)
  ]
  return Reduced(encoder.leaves(mean, shapes), encoder.leaves(own, shapes))


def _scatter(
  encoder: Any, leaves, participates, axis_name: str, shares_add_up: bool
) -> Pausing:
  """Each replica owns a slice, adds it up and sends its mean to all.

  M = 3 and a leaf of 7 rows: a slice has ceil(7 / 3) = 3 rows, and rows of
  zeros fill the last one.

      replica 0 has   1 2 3 | 4 5 6 | 7 0 0   encoded as three slices
      all_to_all:     replica 0 receives the first slice of all three replicas,
                      replica 1 the second, replica 2 the third
      each owner      decodes three slices, adds them up, divides by the number
                      of participants, and encodes the mean of its slice
      all_gather:     every replica receives the means of the three slices,
                      joins them and drops the rows of zeros

  So the mean is rounded once more than the values, by `encoder.of_means`. The
  replica's own part is what the owners decoded of it, before that second
  rounding.

  With error feedback the second rounding must be made up for as well, and at
  one bit a value it loses as much as the first. So with `shares_add_up` the
  owner uses the exact values of its own slice, which no link carries, and its
  own part there is what it had less what the rounding of the sum has lost.
  Example: two replicas have 0.4 and 0.8 in a slice of the first one, and codes
  are whole numbers. The owner receives 1, its mean is 0.7, and all receive 1.
  The rounding added 0.3 to the mean, which is 0.6 of the sum. So the own parts
  are 0.4 + 0.6 = 1 and 1, and the owner owes 0.4 - 1 = -0.6.
  """
  num_replicas = jax.lax.axis_size(axis_name)
  layout = encoder.layout([leaf.shape for leaf in leaves], num_replicas)
  # [M, rows, width] of every width.
  values = layout.rows(leaves)
  sent = encoder.coded(values)
  flag = jnp.full((num_replicas, 1), participates, jnp.uint8)
  sent, flag = yield sent, flag
  *swapped, flags = yield carriers.all_to_all([*sent, flag], axis_name)
  count = jnp.sum(flags, dtype=jnp.float32)
  replica = jax.lax.axis_index(axis_name)
  means, codes = [], []
  for number, arrived in enumerate(encoder.decoded(layout, swapped)):
    if shares_add_up:
      arrived = arrived.at[replica].set(values[number][replica])
    total = jnp.sum(arrived, axis=0, keepdims=True)
    means.append(mean_of_participants(total, count))
    codes += encoder.of_means.code(means[-1])
  codes = yield codes
  gathered = yield carriers.all_gathered(codes, axis_name)
  rows = encoder.of_means.decoded(layout, [array[:, 0] for array in gathered])
  own = encoder.decoded(layout, sent)
  if shares_add_up:
    for number, exact_mean in enumerate(means):
      lost = count * (exact_mean[0] - rows[number][replica])
      exact = values[number][replica] - lost
      own[number] = own[number].at[replica].set(exact)
  return Reduced(layout.leaves(rows), layout.leaves(own))


def summed(
  values: Tree, participates: Boolean, axis_name: str = REPLICA_AXIS
) -> tuple[Tree, Scalar]:
  """Sums values over replicas and counts the participants.

  The count is one more number of the values' type, so that the compiler puts
  it into the same message. A message of its own would cost a slow link as much
  latency again.

  Args:
    values: Leaves of one type; zeros if this replica does not participate.
    participates: Whether this replica participates.
    axis_name: Axis over which replicas are mapped.
  """
  flag = participates.astype(jax.tree.leaves(values)[0].dtype)
  return jax.lax.psum((values, flag), axis_name)


def mean_of_participants(total: Array, count: Scalar) -> Array:
  """Divides a sum by the number of participants; zero if there is none.

  Args:
    total: Sum over the participants.
    count: Number of participants.
  """
  return total / jnp.maximum(count, 1).astype(total.dtype)
