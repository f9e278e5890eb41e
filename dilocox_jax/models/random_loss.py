"""Losses that draw random numbers, for example for dropout.

Such a loss has an argument `key`: (model, batch, key) -> scalar. In training it
is a random key of JAX: a new one in each step for each micro-batch of each
replica. In an evaluation it is None, and the loss should draw no random
numbers.

Each row of a batch has a key of its own (two numbers), so keys are divided into
micro-batches as rows are. The loss gets the key of the first row of its
micro-batch. If devices divide a micro-batch, all of them use this key. So a
replica draws the same numbers however many devices it has.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyedBatch:
  """A batch for a loss that draws random numbers.

  Attributes:
    batch: The batch that the loss reads, leaves [B, ...].
    keys: A key for each row (`jax.random.key_data`), uint32 [B, 2].
  """

  batch: Any
  keys: Any


def draws_random(loss: Callable) -> bool:
  """Returns whether a loss has an argument `key`.

  False for a builtin whose signature cannot be read.
  """
  try:
    return "key" in inspect.signature(loss).parameters
  except (TypeError, ValueError):  # A builtin without a signature.
    return False


def reads_keyed_batch(loss: Callable) -> Callable[[Any, Any], Array]:
  """Converts a loss (model, batch, key) into a function (model, batch).

  If the function gets a `KeyedBatch`, it passes the plain batch and the key of
  the batch's first row to the loss. It passes any other batch as it is, with
  None as the key.
  """

  def keyed_loss(model: Any, batch: Any) -> Array:
    if not isinstance(batch, KeyedBatch):
      return loss(model, batch, key=None)
    # Whatever JAX's default is, keys of this kind have two numbers each.
    key = jax.random.wrap_key_data(batch.keys[0], impl="threefry2x32")
    return loss(model, batch.batch, key=key)

  return keyed_loss
