"""Encodes and averages the messages of replicas that exchange through files.

A replica encodes its pseudo-gradient, and averages the messages that
`dilocox_jax.Mailbox` brings. With error feedback, the replica adds to its next
message what was lost of its last one: the error of the codec, or the whole
message if it came too late for the mean. The fast code is
aggregators/mailbox_mean.py and `CompressedMean` in aggregators/exchange.py.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from dilocox_jax.reference.codecs import MessageCodec
from dilocox_jax.reference.exchanges import Arrays, are_finite, zeros_like


class Exchanged(Protocol):
  """The fields of the result of `Mailbox.exchange` that this module reads."""

  @property
  def is_own_listed(self) -> bool:
    """Whether a message of this replica is in the mean."""
    ...

  @property
  def is_superseded(self) -> bool:
    """Whether the mean has a message that this replica sent before a restart.

    The mean then lacks the message that the replica has sent since its restart.
    The older message may contain the same work, so the values of the newer
    message should be dropped.
    """
    ...

  @property
  def left_out(self) -> Mapping[str, str]:
    """Why a message that had arrived is not in the mean, by replica name."""
    ...


@dataclasses.dataclass
class Messages:
  """Encodes and averages messages, and keeps the residual of a replica.

  The residual is what was lost of the replica's last message: the error of the
  codec, or the whole message if it came too late for the mean. It is added to
  the next message. In each exchange, call `encode`, exchange the message, then
  call `mean` and `settle`.

  Attributes:
    codec: Codec of the messages.
    like: float32 leaves by path, in an order that is the same for all replicas.
      Only their shapes are read.
    feedback: Fraction of the loss that becomes the residual, 0 to 1.
    residual: Values that are added to the next pseudo-gradient, by path. They
      begin with zeros, also if another residual is passed.
  """

  codec: MessageCodec
  like: Arrays
  feedback: float = 0.0
  residual: Arrays = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    """Starts with a residual of zeros."""
    self.residual = zeros_like(self.like)

  def encode(self, delta: Arrays) -> tuple[list[np.ndarray], bool]:
    """Encodes a pseudo-gradient plus the residual.

    Args:
      delta: Pseudo-gradient by path.

    Returns:
      The arrays of the message, and whether all values are finite. If not, the
      message is zeros; send it with the weight 0.
    """
    corrected = {path: delta[path] + self.residual[path] for path in self.like}
    is_finite = are_finite(corrected)
    if not is_finite:
      corrected = zeros_like(corrected)
    self._corrected = corrected
    self._arrays = self.codec.encode(corrected)
    return self._arrays, is_finite

  def mean(
    self, messages: Iterable[tuple[str, float, list[np.ndarray]]]
  ) -> Arrays:
    """Returns the weighted mean of messages; zeros if no message has a weight.

    Args:
      messages: Replica name, weight and encoded arrays of each message.
    """
    messages = list(messages)
    total_weight = sum(weight for _, weight, _ in messages)
    mean = zeros_like(self.like)
    if not total_weight:
      return mean
    for _, weight, arrays in messages:
      for path, values in self.codec.decode(arrays, self.like).items():
        mean[path] += np.float32(weight / total_weight) * values
    return mean

  def settle(self, exchanged: Exchanged, name: str) -> None:
    """Computes the residual after the message of `encode` was exchanged.

    The residual is `feedback` times what the mean lacks of the message. This is
    the loss of the codec if the message is in the mean, and otherwise the whole
    message. The residual is zero in two cases:

    - The message came in time, but was left out of the mean.
    - A message that this replica sent before a restart is in the mean instead.

    Args:
      exchanged: The result of `dilocox_jax.Mailbox.exchange`.
      name: Name of this replica.
    """
    drops_all = exchanged.is_superseded or name in exchanged.left_out
    if drops_all or not self.feedback:
      self.residual = zeros_like(self.like)
      return
    received = zeros_like(self.like)
    if exchanged.is_own_listed:
      received = self.codec.decode(self._arrays, self.like)
    self.residual = {
      path: np.float32(self.feedback) * (values - received[path])
      for path, values in self._corrected.items()
    }
