"""Averages messages that replicas exchange through a mailbox (folder, bucket).

Each replica writes its message into the mailbox, and reads the messages of the
others (`mailbox_protocol`). This module encodes the message of a replica, and
decodes and averages the messages that were read. Instead, each replica may make
a *share* of the mean: it averages one slice of all messages, and reads the
means of the other slices from the mailbox.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from dilocox_jax.aggregators.collective import Collective, Sender
from dilocox_jax.aggregators.means import mean_of_messages
from dilocox_jax.aggregators.message_groups import MessageGroups, is_in_rows
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
  """A message that leaves a compiled program, to be written into a mailbox.

  Attributes:
    arrays: The encoded arrays of the message.
    tables: How the arrays are encoded, so that each replica can average one
      slice of all messages. None: each averages whole messages.
  """

  arrays: list[Array]
  tables: Tables | None


def row_codec(encoder: Encoder) -> RowCodec | None:
  """Returns the numpy codec that encodes rows to the same bytes as an encoder.

  There is one for `Float`, `Int` and `E3M0`. For other encoders the result is
  None.
  """
  # A subclass may encode in another way, so `isinstance` would be wrong here.
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
  """Returns how a message is encoded, or None if `row_codec` returns None.

  With the tables, each replica can average one slice of all messages: a *share*
  of the mean. If `makes_up_for_loss` and the codec is lossy, each share has a
  residual: the loss of encoding the share.
  """
  codec = row_codec(encoder)
  if codec is None:
    return None
  assert isinstance(encoder, Quantizer), "all encoders of rows are quantizers"
  groups = MessageGroups.of(encoder, shapes)
  # All leaves of a group have rows of the same width.
  return Tables(
    codec=codec,
    widths=tuple(groups.widths[group[0]] for group in groups.of_message),
    has_residual=makes_up_for_loss and not codec.is_exact,
  )


class MailboxMean(Collective):
  """Averages the messages that a replica reads from a mailbox.

  Unlike the other collectives it sends nothing itself. The caller writes and
  reads the messages (`reduce`).
  """

  def __init__(self, shares: str = "auto"):
    """Stores whether each replica averages only one slice of all messages.

    `shares` is "on", "off" or "auto", which decides by the codec and the number
    of replicas (`MailboxRules.shares`).
    """
    self._shares = shares

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns the one operation by which a mailbox averages one message.

    It is a `StoreShares` if each replica averages one slice of the messages,
    else a `StoreObject`. Its size is that of the encoded leaves, a header and a
    signature. With a lossy codec, a `StoreShares` also has the size of the
    residuals (what encoding the means loses), even if the run sends none.
    """
    size = encoded_bytes(encoder, shapes)
    tables = message_tables(encoder, shapes, makes_up_for_loss=True)
    count = 0  # Number of slices; 0: each replica averages whole messages.
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
    """Averages the leaves of one message over the replicas.

    The coroutine yields once: the `EncodedMessage` to send, and whether this
    replica participates. The caller must resume it with a tuple
    (`ExchangeSession.send`): the arrays [K, ...] of the K messages to average,
    their weights [K], and whether this replica's message is one of them. If
    each replica has averaged one slice of all messages, K is 1, and the only
    message is the mean.

    Args:
      encoder: Encoder of the leaves.
      leaves: Values of this replica, [num_layers, *shape] each.
      sender: Whether this replica participates, and whether the exchange makes
        up for a loss (`Sender.shares_add_up`).

    Returns:
      A coroutine that returns `codecs.base.Reduced`.
    """
    shapes = [leaf.shape for leaf in leaves]
    encoded = encoder.encode(leaves)
    # In a message, leaves are grouped as on a replica with one device. So
    # replicas with different numbers of devices can read it.
    groups = MessageGroups.of(encoder, shapes) if is_in_rows(encoder) else None
    message = encoded if groups is None else groups.to_message(encoded)
    tables = message_tables(encoder, shapes, sender.shares_add_up)
    leaving = EncodedMessage(arrays=message, tables=tables)
    reply = yield leaving, sender.participates
    arrays, weights, is_counted = reply
    if groups is not None:
      arrays = groups.from_messages(arrays)
    return mean_of_messages(
      encoder,
      shapes,
      own=encoded,
      arrays=arrays,
      weights=weights,
      is_counted=is_counted,
    )
