"""Each replica reads a text of its own, and step s means one batch for ever.

Replicas may run in one process or in many, be killed and come back. If the
order depended on anything but the seed and the step, a resumed run would be
another experiment. So a stream is a grain `MapDataset`, which is random
access: batch s is computed from s alone, with no thread, buffer or read-ahead,
and the one number a checkpoint has to keep is the step.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer


class ReplicaStreams:
  """Endless, disjoint streams of batches, one for each replica.

  The tokens are cut into windows that do not overlap. Replica m owns the
  windows m, m + num_replicas, m + 2 num_replicas, ... for ever, and reads all
  of them once an epoch, in an order drawn anew each epoch. Batches run on
  across the end of an epoch, so no window is dropped; a last cut shorter than
  a window is.

  Args:
    tokens: The training tokens.
    num_replicas: Streams.
    batch_size: Windows in a batch of one replica.
    sequence_length: Tokens a model predicts in a window, which has one more.
    seed: Chooses the order; any integer.

  Raises:
    ValueError: A replica would own less than one batch.
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
    windows = _cut(tokens, sequence_length)
    if len(windows) < num_replicas * batch_size:
      raise ValueError(
        f"{len(tokens)} training tokens make {len(windows)} windows of"
        f" {sequence_length + 1}, but {num_replicas} replicas with batch_size"
        f" {batch_size} need {num_replicas * batch_size}: use more text, or"
        " lower batch_size, sequence_length or num_replicas"
      )
    self._identity = {
      "num_windows": len(windows),
      "num_replicas": num_replicas,
      "batch_size": batch_size,
      "sequence_length": sequence_length,
      "seed": seed,
    }
    self._windows = windows
    # Of indices, since it is cheaper to gather a whole batch at once.
    self._batches = [
      grain.MapDataset.range(len(windows))
      .slice(slice(m, None, num_replicas))
      .shuffle(seed=_replica_seed(seed, m))
      .repeat()
      .batch(batch_size)
      for m in range(num_replicas)
    ]
    self._step = 0

  def take(
    self, num_steps: int, replicas: Sequence[int] | None = None
  ) -> Int32[np.ndarray, "replicas steps batch window"]:
    """Reads the next batches and moves on.

    Every replica moves on, read or not: a process that runs some of the
    replicas stays in step with those that run the others.

    Args:
      num_steps: Steps to read.
      replicas: The replicas to read, all by default.

    Returns:
      Tokens, [replicas, num_steps, batch_size, sequence_length + 1].
    """
    chosen = range(len(self._batches)) if replicas is None else replicas
    steps = range(self._step, self._step + num_steps)
    batch_size, width = self._identity["batch_size"], self._windows.shape[1]
    shape = (len(chosen), num_steps, batch_size, width)
    out = np.empty(shape, np.int32)
    for stream, m in zip(out, chosen, strict=True):
      for batch, step in zip(stream, steps, strict=True):
        batch[:] = self._windows[np.asarray(self._batches[m][step])]
    self._step += num_steps
    return out

  def get_state(self) -> dict[str, int]:
    """Returns the position, ready for JSON; the same in every process."""
    return {"step": self._step, **self._identity}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was called.

    Args:
      state: From streams of the same shape, seed and number of windows.

    Raises:
      ValueError: The state belongs to other streams, whose step would stand
        for other batches.
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


def validation_batches(
  tokens: Integer[np.ndarray, " tokens"],
  *,
  batch_size: int,
  sequence_length: int,
  max_sequences: int,
) -> Int32[np.ndarray, "batches batch window"]:
  """Picks the windows on which every evaluation is made.

  Evenly spaced, so that a few of them stand for all of the text; the same
  ones at every evaluation, so that two losses can be compared.

  Args:
    tokens: The validation tokens.
    batch_size: Windows in a batch.
    sequence_length: Tokens predicted in a window, which has one more.
    max_sequences: Windows at most; rounded down to whole batches.

  Returns:
    Tokens, [batches, batch_size, sequence_length + 1].

  Raises:
    ValueError: There is no whole batch.
  """
  windows = _cut(tokens, sequence_length)
  num_batches = min(max_sequences, len(windows)) // batch_size
  if num_batches < 1:
    raise ValueError(
      f"{len(tokens)} validation tokens make {len(windows)} windows of"
      f" {sequence_length + 1} and max_sequences is {max_sequences}, but one"
      f" batch needs {batch_size}: use more text, lower batch_size or"
      " sequence_length, or raise max_sequences"
    )
  count = num_batches * batch_size
  chosen = windows[np.arange(count) * len(windows) // count]
  return chosen.reshape(num_batches, batch_size, -1).astype(np.int32)


def _cut(tokens: np.ndarray, sequence_length: int) -> np.ndarray:
  width = sequence_length + 1
  num_windows = len(tokens) // width
  return tokens[: num_windows * width].reshape(num_windows, width)


def _replica_seed(seed: int, replica: int) -> int:
  # Grain adds the epoch to its seed. Neighbouring seeds would give replica
  # m + 1 the order that replica m has an epoch later.
  return int.from_bytes(
    hashlib.sha256(f"{seed}/{replica}".encode()).digest()[:4], "big"
  )
