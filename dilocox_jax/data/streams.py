"""Gives each replica its own text, in an order fixed by seed and step.

Replicas may run in one process or in many, be killed and start again. If the
order depended on anything but the seed and the step, a resumed run would be
another experiment. So a stream is a grain `MapDataset`, which has random
access: batch s is computed from s alone, without threads, buffers or reading
ahead. A checkpoint has to keep only one number, the step.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer


class ReplicaStreams:
  """Endless streams of batches, one per replica, without common text.

  The tokens are cut into sequences that do not overlap. Replica m owns the
  sequences m, m + M, m + 2 M, ... of M replicas. It reads each of them once an
  epoch, in an order drawn anew for every epoch.

  Example: ten sequences and M = 3 replicas. Replica 0 owns 0, 3, 6, 9; replica
  1 owns 1, 4, 7; replica 2 owns 2, 5, 8. In batches of two, replica 1 may read
  [4, 1], [7 | 7], [4, 1], where "|" is the end of its first epoch. A batch
  goes on across that end, so no sequence is dropped.

  Args:
    tokens: Training tokens.
    num_replicas: Number of streams, M.
    batch_size: Sequences in a batch of one replica.
    sequence_length: Tokens that a model predicts in a sequence, L. A sequence
      has L + 1 tokens.
    seed: Any integer; seed of the order.

  Raises:
    ValueError: If a replica would own less than one batch.
  """

  def __init__(
    self,
    tokens: Integer[np.ndarray, " tokens"],
    *,
    num_replicas: int,
    batch_size: int,
    sequence_length: int,
    seed: int,
  ):
    sequences = cut(tokens, sequence_length)
    if len(sequences) < num_replicas * batch_size:
      raise ValueError(
        f"{len(tokens)} training tokens make {len(sequences)} sequences of"
        f" {sequence_length + 1}, but {num_replicas} replicas with batch_size"
        f" {batch_size} need {num_replicas * batch_size}: use more text, or"
        " lower batch_size, sequence_length or num_replicas"
      )
    self._identity = {
      "num_windows": len(sequences),  # The name in checkpoints.
      "num_replicas": num_replicas,
      "batch_size": batch_size,
      "sequence_length": sequence_length,
      "seed": seed,
    }
    self._sequences = sequences
    # The streams hold indices of sequences, because numpy gathers a whole batch
    # faster than grain collects single sequences. Line by line: keep every
    # M-th index, draw an order per epoch, repeat for ever, make batches.
    self._batches = [
      grain.MapDataset.range(len(sequences))
      .slice(slice(m, None, num_replicas))
      .shuffle(seed=_replica_seed(seed, m))
      .repeat()
      .batch(batch_size)
      for m in range(num_replicas)
    ]
    self._step = 0

  def take(
    self, num_steps: int, replicas: Sequence[int] | None = None
  ) -> Int32[np.ndarray, "replicas steps batch sequence"]:
    """Reads the next batches and moves on.

    All replicas move on, also those that are not read. So processes that run
    different replicas stay at the same step.

    Args:
      num_steps: Number of steps to read.
      replicas: Indices of the replicas to read; all by default.

    Returns:
      Tokens [replicas, num_steps, batch_size, sequence_length + 1].
    """
    chosen = range(len(self._batches)) if replicas is None else replicas
    steps = range(self._step, self._step + num_steps)
    batch_size, width = self._identity["batch_size"], self._sequences.shape[1]
    shape = (len(chosen), num_steps, batch_size, width)
    out = np.empty(shape, np.int32)
    for stream, m in zip(out, chosen, strict=True):
      for batch, step in zip(stream, steps, strict=True):
        batch[:] = self._sequences[np.asarray(self._batches[m][step])]
    self._step += num_steps
    return out

  def get_state(self) -> dict[str, int]:
    """Returns the position for JSON; it is the same in every process."""
    return {"step": self._step, **self._identity}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues at the step of a state from `get_state`.

    Args:
      state: State of streams with the same sizes, seed and number of
        sequences.

    Raises:
      ValueError: If the state belongs to other streams. The same step would
        mean other batches there.
    """
    differing = [
      f"{name}={state.get(name)} there and {own} here"
      for name, own in self._identity.items()
      if state.get(name) != own
    ]
    if differing:
      raise ValueError(
        f"the saved position is of other streams ({', '.join(differing)}):"
        " resume with the same data, or start a new run"
      )
    self._step = int(state["step"])


def cut(tokens: np.ndarray, sequence_length: int) -> np.ndarray:
  """Cuts tokens into sequences [number, L + 1]; a shorter rest is dropped.

  Files are packed: a sequence may begin in one file and end in the next.
  Example with L = 4: sequence 0 has the tokens 0 to 4, sequence 1 the tokens 5
  to 9. The model reads 0 to 3 and predicts 1 to 4. Token 5 is never predicted,
  because the sequences do not overlap.
  """
  width = sequence_length + 1
  num_sequences = len(tokens) // width
  return tokens[: num_sequences * width].reshape(num_sequences, width)


def _replica_seed(seed: int, replica: int) -> int:
  # Grain adds the epoch to its seed. With the seeds s and s + 1 replica 1
  # would use in epoch 0 the order that replica 0 uses in epoch 1. Hashing puts
  # the seeds of replicas far apart.
  return int.from_bytes(
    hashlib.sha256(f"{seed}/{replica}".encode()).digest()[:4], "big"
  )
