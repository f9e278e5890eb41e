"""Each replica owns a slice, adds it up and sends its mean to all."""

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
  """Averages slices at their owners, and gathers the means.

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

  def refusal(self, codec: Codec) -> str:
    """Refuses codecs that select values: a slice needs all of its values."""
    if isinstance(codec.encoder, Quantizer):
      return ""
    return (
      "needs every value in its place, but the codec selects values: take "
      "'all_gather'"
    )

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns the slices to their owners, and a gathering of the means.

    The means need what the all-to-all has brought, and no flag.
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
    # [M, rows, width] of every width.
    values = layout.rows(leaves)
    codes = encoder.coded(values)
    flag = jnp.full((num_replicas, 1), sender.participates, jnp.uint8)
    codes, flag = yield codes, flag
    *swapped, flags = yield byte_collectives.all_to_all(
      [*codes, flag], sender.axis_name
    )
    count = jnp.sum(flags, dtype=jnp.float32)
    means = []
    codes_of_means = []
    for number, arrived in enumerate(encoder.decoded(layout, swapped)):
      if sender.shares_add_up:
        arrived = arrived.at[replica].set(values[number][replica])
      total = jnp.sum(arrived, axis=0, keepdims=True)
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
        lost = count * (exact_mean[0] - rows[number][replica])
        exact = values[number][replica] - lost
        own[number] = own[number].at[replica].set(exact)
    return Reduced(mean=layout.leaves(rows), own=layout.leaves(own))
