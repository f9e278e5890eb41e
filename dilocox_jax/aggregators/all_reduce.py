"""Averages fp32 values over replicas by an all-reduce."""

from collections.abc import Sequence
from typing import Any

from dilocox_jax.aggregators.collective import Collective, Sender
from dilocox_jax.aggregators.means import mean_of_participants, summed
from dilocox_jax.aggregators.sizes import encoded_bytes
from dilocox_jax.codecs.base import Codec, Encoder, Reduced
from dilocox_jax.codecs.batching import Shape
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.plan.operations import AllReduce, Operation
from dilocox_jax.trees import Array

# The number of participants is summed as one more value of fp32.
COUNT_BYTES = 4


class AllReduceMean(Collective):
  """Averages fp32 values by one all-reduce, which also counts participants."""

  def refusal(self, codec: Codec) -> str:
    """Refuses codecs whose encoder is not float32: codes cannot be added.

    Returns the reason, or "" if the encoder is float32.
    """
    if codec.encoder == Float():
      return ""
    return (
      "would add up codes: take 'all_gather' or 'reduce_scatter', or float32"
    )

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns one all-reduce of the values and the number of participants."""
    del num_replicas
    return [AllReduce(encoded_bytes(encoder, shapes) + COUNT_BYTES)]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Sums the leaves over replicas, and divides by the number of participants.

    `Collective.reduce` has the arguments and the result.
    """
    values = [encoder.code(leaf)[0] for leaf in leaves]
    # The first `yield` comes before the message leaves, the second one before
    # the received arrays are used. So the caller can run inner steps while the
    # message travels. It gives the yielded arrays back (`coroutines`).
    values, participates = yield values, sender.participates
    totals, count = yield summed(values, participates, sender.axis_name)
    mean = [mean_of_participants(total, count) for total in totals]
    return Reduced(mean=mean, own=values)
