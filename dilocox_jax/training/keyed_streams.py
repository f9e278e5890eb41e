"""Adds random keys to batches, for a loss that draws random numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dilocox_jax.data.streams import Streams
from dilocox_jax.models.random_loss import KeyedBatch
from dilocox_jax.trees import Tree


class KeyedStreams:
  """Streams of batches with random keys, for a loss that draws random numbers.

  The class has the methods of `data.streams.Streams`. It returns the batches
  together with their keys (`KeyedBatch`). The keys depend on the seed, the
  replica and the step alone.
  """

  def __init__(self, streams: Streams, num_replicas: int, seed: int):
    self._streams = streams
    self._num_replicas = num_replicas
    self._seed = seed
    self._step = int(streams.get_state()["step"])
    self.get_state = streams.get_state

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Moves the streams to a position that `get_state` returned."""
    self._streams.set_state(state)
    self._step = int(state["step"])

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """Reads the next batches, and moves all replicas on by `num_steps`.

    Args:
      num_steps: Number of batches to read of each replica.
      replicas: Indices of the replicas to read; None: all.

    Returns:
      A `KeyedBatch` of the batches, leaves [replicas, num_steps, B, ...], and
      of keys, uint32 [replicas, num_steps, B, 2].
    """
    if replicas is None:
      replicas = range(self._num_replicas)
    batches = self._streams.take(num_steps, replicas)
    batch_size = jax.tree.leaves(batches)[0].shape[2]
    steps = range(self._step, self._step + num_steps)
    keys = np.array(
      [
        [row_keys(self._seed, replica, step, batch_size) for step in steps]
        for replica in replicas
      ]
    )
    self._step = steps.stop
    return KeyedBatch(batches, keys)


def row_keys(seed: int, replica: int, step: int, batch_size: int) -> np.ndarray:
  """Draws a random key of JAX for each row of a batch, as uint32 [B, 2]."""
  generator = np.random.default_rng([seed, replica, step])
  return generator.integers(2**32, size=(batch_size, 2), dtype=np.uint32)
