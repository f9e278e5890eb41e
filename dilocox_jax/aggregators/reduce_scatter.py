"""Each replica averages one slice of the values and sends its mean to all."""

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

  So the mean is rounded a second time, by `encoder.of_means`. `Reduced.own` of
  a replica has its values as the owners decoded them, before the second
  rounding.

  Error feedback must also make up for the second rounding, which at one bit a
  value loses as much as the first. With `Sender.shares_add_up`, the owner of a
  slice does this. It takes its own values of the slice exactly, since they
  travel over no link. In `Reduced.own` of the owner, the loss of the second
  rounding is subtracted from these values. Example: the replicas have the
  values 0.4 and 0.8 in a slice that the first one owns, and codes are whole
  numbers. The owner receives 1, and the mean is (0.4 + 1) / 2 = 0.7. All
  receive the rounded mean 1. The rounding has added 0.3 to the mean, which is
  0.6 of the sum. So `own` is 0.4 + 0.6 = 1 at the owner and 1 at the other
  replica, and the owner's residual is 0.4 - 1 = -0.6.
  """

  def refusal(self, codec: Codec) -> str:
    """Refuses a codec that selects values: a slice needs all of its values."""
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

    The means need the result of the all-to-all, so they have a later turn. They
    carry no flag.
    """
    values, means = scattered_bytes(encoder, shapes, num_replicas)
    return [
      AllToAll(values + num_replicas * FLAG_BYTES),
      AllGather(means // num_replicas, turn=1),
    ]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages as `Collective.reduce` says."""
    num_replicas = jax.lax.axis_size(sender.axis_name)
    replica = jax.lax.axis_index(sender.axis_name)
    layout = encoder.layout([leaf.shape for leaf in leaves], num_replicas)
    # An array [M, rows, width] for every width of rows.
    values = layout.rows(leaves)
    codes = encoder.coded(values)
    flag = jnp.full((num_replicas, 1), sender.participates, jnp.uint8)
    codes, flag = yield codes, flag
    *own_slice_codes, flags = yield byte_collectives.all_to_all(
      [*codes, flag], sender.axis_name
    )
    count = jnp.sum(flags, dtype=jnp.float32)
    means = []
    codes_of_means = []
    for number, parts in enumerate(encoder.decoded(layout, own_slice_codes)):
      if sender.shares_add_up:
        parts = parts.at[replica].set(values[number][replica])
      total = jnp.sum(parts, axis=0, keepdims=True)
      mean = mean_of_participants(total, count)
      means.append(mean)
      codes_of_means += encoder.of_means.code(mean)
    codes_of_means = yield codes_of_means
    gathered = yield byte_collectives.all_gathered(
      codes_of_means, sender.axis_name
    )
    rows = encoder.of_means.decoded(layout, [array[:, 0] for array in gathered])
    own = encoder.decoded(layout, codes)
    if sender.shares_add_up:
      for number, exact_mean in enumerate(means):
        loss_of_sum = count * (exact_mean[0] - rows[number][replica])
        own_part = values[number][replica] - loss_of_sum
        own[number] = own[number].at[replica].set(own_part)
    return Reduced(mean=layout.leaves(rows), own=layout.leaves(own))
