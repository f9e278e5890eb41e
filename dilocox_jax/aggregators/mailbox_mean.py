"""Averages the messages of a run with a mailbox.

A mailbox is a store of objects, such as a bucket. Replicas do not send to each
other: each writes its message into the store and reads the messages of the
others (`mailbox_protocol`). This module encodes the message of a replica, and
decodes and averages the messages that were read.
"""

from collections.abc import Sequence
from typing import Any

from dilocox_jax.aggregators.collective import Collective, Sender
from dilocox_jax.aggregators.means import mean_of_messages
from dilocox_jax.aggregators.sizes import encoded_bytes
from dilocox_jax.codecs.base import Encoder
from dilocox_jax.codecs.batching import Shape
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.mailbox_protocol.messages import message_bytes
from dilocox_jax.plan.operations import Operation, StoreObject
from dilocox_jax.trees import Array


class MailboxMean(Collective):
  """Averages the messages that are read from a mailbox."""

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns one `StoreObject`: a message's bytes, with tags and header."""
    del num_replicas
    return [StoreObject(message_bytes(encoded_bytes(encoder, shapes)))]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages as `Collective.reduce` says, but stops only once.

    The coroutine yields the arrays to send, and whether this replica
    participates. It must be sent the reply of the mailbox
    (`mailbox_protocol.client.ExchangeSession.send`): the arrays [K, ...] of the
    K messages that are averaged, the weights of these messages [K], and whether
    this replica's message is one of them.
    """
    message = encoder.encode(leaves)
    arrays, weights, is_counted = yield message, sender.participates
    return mean_of_messages(
      encoder,
      [leaf.shape for leaf in leaves],
      own=message,
      arrays=arrays,
      weights=weights,
      is_counted=is_counted,
    )
