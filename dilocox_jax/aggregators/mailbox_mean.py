"""Averages the messages of a run with a mailbox.

A mailbox is a store of objects, such as a bucket. Replicas do not send to each
other: each writes its message into the store and reads the messages of the
others (`mailbox_protocol`). This module encodes the message of a replica, and
decodes and averages the messages that were read.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from dilocox_jax.aggregators.collective import Collective, Sender
from dilocox_jax.aggregators.means import mean_of_messages
from dilocox_jax.aggregators.sizes import encoded_bytes
from dilocox_jax.codecs.base import Encoder, Quantizer
from dilocox_jax.codecs.batching import Shape
from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.mailbox_protocol.messages import message_bytes
from dilocox_jax.mailbox_protocol.sliced import sliced_message_bytes
from dilocox_jax.plan.collectives import num_slices
from dilocox_jax.plan.operations import Operation, StoreObject, StoreShares
from dilocox_jax.reference.row_codecs import (
  E3M0Rows,
  FloatRows,
  IntRows,
  RowCodec,
)
from dilocox_jax.reference.shares import RESIDUAL_ROWS, Tables
from dilocox_jax.trees import Array


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["arrays"],
  meta_fields=["tables"],
)
@dataclasses.dataclass(frozen=True)
class EncodedMessage:
  """A message that leaves a compiled program.

  Attributes:
    arrays: The arrays of the message.
    tables: How the arrays are encoded, so that the mean can be made in shares.
      None: it cannot, because the codec selects values or is not known to
      numpy (`reference.row_codecs`).
  """

  arrays: list[Array]
  tables: Tables | None


def row_codec(encoder: Encoder) -> RowCodec | None:
  """Returns the codec in numpy whose bytes mean the same; None: there is none.

  Args:
    encoder: The encoder of a message.
  """
  # A subclass may encode in another way, so the class itself counts.
  if type(encoder) is Float:
    return FloatRows(encoder.dtype)
  if type(encoder) is Int:
    return IntRows(encoder.bits)
  if type(encoder) is E3M0:
    return E3M0Rows()
  return None


def message_tables(
  encoder: Encoder, shapes: Sequence[Shape], makes_up_for_loss: bool
) -> Tables | None:
  """Returns how a message is encoded in rows; None if it is not.

  Args:
    encoder: The encoder of the message.
    shapes: Shapes of the leaves, with the layer axis.
    makes_up_for_loss: Whether the exchange makes up for what a codec loses, by
      error feedback or in the parameters. Then shares have residuals.
  """
  codec = row_codec(encoder)
  if codec is None:
    return None
  assert isinstance(encoder, Quantizer), "all encoders of rows are quantizers"
  layout = encoder.layout(list(shapes))
  return Tables(
    codec=codec,
    widths=tuple(layout.widths[group[0]] for group in layout.groups),
    has_residual=makes_up_for_loss and not codec.is_exact,
  )


class MailboxMean(Collective):
  """Averages the messages that are read from a mailbox."""

  def __init__(self, shares: str = "auto"):
    """Makes the collective.

    Args:
      shares: When the mean is made in shares (`MailboxRules.shares`). Only
        `operations` reads it.
    """
    self._shares = shares

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns one operation, a message's bytes with tags and header.

    It is a `StoreShares` if the mean is made in shares, and else a
    `StoreObject`. Residuals are counted for all codecs that lose something, as
    if the exchange made up for the loss.
    """
    size = encoded_bytes(encoder, shapes)
    tables = message_tables(encoder, shapes, makes_up_for_loss=True)
    count = 0
    if tables is not None:
      count = num_slices(self._shares, num_replicas, tables.codec.is_coarse)
    if not count or tables is None:
      return [StoreObject(message_bytes(size))]
    residual_bytes = 0
    if tables.has_residual:
      residual_bytes = encoded_bytes(Int(RESIDUAL_ROWS.bits), shapes)
    return [
      StoreShares(
        sliced_message_bytes(size, count), residual_bytes=residual_bytes
      )
    ]

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages as `Collective.reduce` says, but stops only once.

    The coroutine yields the `EncodedMessage` to send, and whether this replica
    participates. It must be sent the reply of the mailbox
    (`mailbox_protocol.client.ExchangeSession.send`): the arrays [K, ...] of the
    K messages that are averaged, the weights of these messages [K], and whether
    this replica's message is one of them. If the mean was made in shares, it is
    the only message, K = 1.
    """
    message = encoder.encode(leaves)
    tables = message_tables(
      encoder, [leaf.shape for leaf in leaves], sender.shares_add_up
    )
    leaving = EncodedMessage(arrays=message, tables=tables)
    reply = yield leaving, sender.participates
    arrays, weights, is_counted = reply
    return mean_of_messages(
      encoder,
      [leaf.shape for leaf in leaves],
      own=message,
      arrays=arrays,
      weights=weights,
      is_counted=is_counted,
    )
