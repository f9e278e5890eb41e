"""Averages over replicas by an all-gather.

Every replica receives all messages, decodes them and averages them.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from dilocox_jax.aggregators import byte_collectives
from dilocox_jax.aggregators.collective import FLAG_BYTES, Collective, Sender
from dilocox_jax.aggregators.means import mean_of_messages
from dilocox_jax.aggregators.sizes import encoded_bytes
from dilocox_jax.codecs.base import Encoder
from dilocox_jax.codecs.batching import Shape
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.plan.operations import AllGather, Operation
from dilocox_jax.trees import Array


class AllGatherMean(Collective):
  """Averages the messages of any codec; every replica receives all of them."""

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns one all-gather of the codes and of a flag.

    The flag says whether the sender counts in the mean.
    """
    del num_replicas
    return [AllGather(encoded_bytes(encoder, shapes) + FLAG_BYTES)]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Encodes the leaves, gathers all messages, and averages them.

    `Collective.reduce` has the arguments and the result.
    """
    arrays = encoder.encode(leaves)
    flag = sender.participates.astype(jnp.uint8)[None]
    # The first `yield` comes before the message leaves, the second one before
    # the received arrays are used. So the caller can run inner steps while the
    # message travels. It gives the yielded arrays back (`coroutines`).
    arrays, flag = yield arrays, flag
    *gathered, flags = yield byte_collectives.all_gathered(
      [*arrays, flag], sender.axis_name
    )
    return mean_of_messages(
      encoder,
      [leaf.shape for leaf in leaves],
      own=arrays,
      arrays=gathered,
      weights=flags[:, 0],
      is_counted=sender.participates,
    )
