"""Averages by a reduce-scatter and an all-gather.

Each replica averages one slice of the values of all replicas, and sends the
mean of the slice to all replicas.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dilocox_jax.aggregators import byte_collectives
from dilocox_jax.aggregators.collective import FLAG_BYTES, Collective, Sender
from dilocox_jax.aggregators.means import mean_of_participants
from dilocox_jax.aggregators.sizes import scattered_bytes
from dilocox_jax.codecs.base import Codec, Encoder, Quantizer, Reduced
from dilocox_jax.codecs.batching import Shape
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.plan.operations import AllGather, AllToAll, Operation
from dilocox_jax.trees import Array


class ReduceScatterMean(Collective):
  """Averages each slice at the replica that owns it, and gathers the means.

  Replica i owns slice i. Example with M = 3 replicas and a leaf of 7 rows: a
  slice has ceil(7 / 3) = 3 rows, and rows of zeros fill the last slice.

      replica 0 has   1 2 3 | 4 5 6 | 7 0 0   encoded as three slices
      all_to_all:     replica 0 receives the first slice of all three replicas,
                      replica 1 the second, replica 2 the third
      each owner      decodes three slices, adds them up, divides by the number
                      of participants, and encodes the mean of its slice
      all_gather:     every replica receives the means of the three slices,
                      joins them and drops the rows of zeros

  So values are rounded when they are sent, and the mean is rounded once more,
  by `encoder.of_means`. If `Sender.shares_add_up` is set, error feedback also
  makes up for the second rounding. The owner of a slice then adds its own
  values to the sum without rounding them. Its `Reduced.own` is these values
  minus the loss of the sum, which is M times the loss of the mean if all M
  replicas participate.

  Example with `shares_add_up`: M = 2, values are rounded to whole numbers, and
  replica 0 owns the slice. There was no residual before.

      values          0.4 at replica 0, 0.8 at replica 1
      all_to_all:     replica 0 receives 0.8 rounded to 1
      mean            (0.4 + 1) / 2 = 0.7, rounded to 1
      loss            0.7 - 1 = -0.3 of the mean, so -0.6 of the sum
      `Reduced.own`   0.4 - (-0.6) = 1 at replica 0, 1 at replica 1
      residuals       0.4 - 1 = -0.6 at replica 0, 0.8 - 1 = -0.2 at replica 1
  """

  def refusal(self, codec: Codec) -> str:
    """Refuses codecs whose messages no `Quantizer` encodes, e.g. top-k.

    Returns the reason, or "" for other codecs.
    """
    if isinstance(codec.encoder, Quantizer):
      return ""
    return (
      "needs every value in its place, but the codec selects values: take "
      "'all_gather'"
    )

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns an all-to-all of the slices and an all-gather of the means.

    The all-gather has turn 1: it waits for the all-to-all, which has turn 0.
    """
    values, means = scattered_bytes(encoder, shapes, num_replicas)
    return [
      AllToAll(values + num_replicas * FLAG_BYTES),
      AllGather(means // num_replicas, turn=1),
    ]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages the leaves by two messages, one after the other (see the class).

    `Collective.reduce` has the arguments and the result.
    """
    num_replicas = jax.lax.axis_size(sender.axis_name)
    replica = jax.lax.axis_index(sender.axis_name)
    layout = encoder.layout([leaf.shape for leaf in leaves], num_replicas)
    # An array [M, rows, width] for each group of leaves. Index m of the first
    # axis is slice m. The codes are arrays [M, rows, ...].
    values = layout.rows(leaves)
    codes = encoder.coded(values)
    flag = jnp.full((num_replicas, 1), sender.participates, jnp.uint8)
    # The first `yield` comes before the message leaves, the second one before
    # the received arrays are used. So the caller can run inner steps while the
    # message travels. It gives the yielded arrays back (`coroutines`).
    codes, flag = yield codes, flag
    # Slice `replica` of every sender: codes [M, rows, ...] and flags [M, 1].
    *own_slice_codes, flags = yield byte_collectives.all_to_all(
      [*codes, flag], sender.axis_name
    )
    count = jnp.sum(flags, dtype=jnp.float32)
    means = []
    codes_of_means = []
    decoded_groups = encoder.decoded(layout, own_slice_codes)
    for group, decoded_by_sender in enumerate(decoded_groups):
      if sender.shares_add_up:
        decoded_by_sender = decoded_by_sender.at[replica].set(
          values[group][replica]
        )
      # The sum of slice `replica`, [1, rows, width].
      total = jnp.sum(decoded_by_sender, axis=0, keepdims=True)
      mean = mean_of_participants(total, count)
      means.append(mean)
      codes_of_means += encoder.of_means.code(mean)
    # The next two lines with `yield` are for the message of the means.
    codes_of_means = yield codes_of_means
    # The codes of the mean of every slice, [M, 1, rows, ...].
    gathered = yield byte_collectives.all_gathered(
      codes_of_means, sender.axis_name
    )
    # Rows [M, rows, width]; index m of the first axis is the mean of slice m.
    rows = encoder.of_means.decoded(layout, [array[:, 0] for array in gathered])
    own = encoder.decoded(layout, codes)
    if sender.shares_add_up:
      for group, exact_mean in enumerate(means):
        # The sum is `count` times the mean, so it lost `count` times as much.
        loss_of_sum = count * (exact_mean[0] - rows[group][replica])
        own_slice = values[group][replica] - loss_of_sum
        own[group] = own[group].at[replica].set(own_slice)
    return Reduced(mean=layout.leaves(rows), own=layout.leaves(own))
