"""Losses that draw random numbers, for example for dropout.

Such a loss has an argument `key`: (model, batch, key) -> scalar. In training
`key` is a key of JAX, another one for each micro-batch of each replica. In an
evaluation it is None, and the loss should draw nothing.

The keys travel with the batch, as two numbers for each row. So whatever divides
a batch, such as micro-batches and data shards, divides the keys as well, and a
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
    keys: Data of a key for each row (`jax.random.key_data`), uint32 [B, 2].
  """

  batch: Any
  keys: Any


def draws_random(loss: Callable) -> bool:
  """Returns whether a loss has an argument `key`; False if Python cannot tell.

  Args:
    loss: Function (model, batch) or (model, batch, key) -> scalar.
  """
  try:
    return "key" in inspect.signature(loss).parameters
  except (TypeError, ValueError):  # A builtin without a signature.
    return False


def reads_keyed_batch(loss: Callable) -> Callable[[Any, Any], Array]:
  """Returns a loss of two arguments that takes its key from the batch.

  Args:
    loss: Function (model, batch, key) -> scalar.

  Returns:
    Function (model, batch) -> scalar. If the batch is a `KeyedBatch`, the loss
    gets the key of the first row. It gets the key None with any other batch.
  """

  def keyed_loss(model: Any, batch: Any) -> Array:
    if not isinstance(batch, KeyedBatch):
      return loss(model, batch, key=None)
    # Whatever JAX's default is, keys of this kind have two numbers each.
    key = jax.random.wrap_key_data(batch.keys[0], impl="threefry2x32")
    return loss(model, batch.batch, key=key)

  return keyed_loss
