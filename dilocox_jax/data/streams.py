"""Gives each replica its own text, in an order fixed by seed and step.

Replicas may run in one process or in many, be killed and start again. If the
order depended on anything but the seed and the step, a resumed run would be
another experiment. So a stream is a grain `MapDataset`, which has random
access: batch s is computed from s alone. A checkpoint has to keep only one
number, the step.

A run is evaluated on the held-out part of its text, on a few sequences or on
the whole. The sequences are the same at every evaluation, so two losses can be
compared.
"""

import dataclasses
import hashlib
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int32, Integer

from dilocox_jax.checks import require
from dilocox_jax.trees import Tree

Mix = Sequence[Sequence[float]]  # Weight of each part, for each replica.


@runtime_checkable
class Streams(Protocol):
  """Endless streams of batches, one for each replica."""

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """Reads the next batches, leaves [replicas, num_steps, ...]."""

  def get_state(self) -> dict[str, Any]:
    """Returns the position, for JSON."""
    ...

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on at a position; raises ValueError if it is of other data."""


def mix_of(mix: str, num_replicas: int, num_parts: int) -> Mix | None:
  """Returns the weights that `data.mix` gives the parts of a text.

  Args:
    mix: "" for no parts, "own" to give replica m part m modulo the number of
      parts, "0.7,0.3" for the weights of two parts, or such weights for each
      replica, e.g. "0.9,0.1;0.1,0.9".
    num_replicas: Number of replicas, M.
    num_parts: Number of parts of the text.

  Returns:
    Weights [M][num_parts], or None for no parts.

  Raises:
    ValueError: If that is not its form, or it does not fit the numbers.
  """
  if not mix:
    return None
  require(
    num_parts > 1,
    f"data.mix={mix!r} needs several parts: join their globs by ';' in "
    "data.glob, or prepare shards with such a glob",
  )
  if mix == "own":
    require(
      num_parts <= num_replicas,
      f"data.mix='own' would leave out some of {num_parts} parts with "
      f"{num_replicas} replicas: raise mesh.num_replicas",
    )
    owned = [replica % num_parts for replica in range(num_replicas)]
    return [[float(p == own) for p in range(num_parts)] for own in owned]
  try:
    rows = [[float(w) for w in row.split(",")] for row in mix.split(";")]
  except ValueError:
    rows = []
  require(
    len(rows) in (1, num_replicas)
    and all(len(row) == num_parts for row in rows)
    and all(min(row) >= 0 and 0 < sum(row) < math.inf for row in rows),
    f"data.mix={mix!r} must be 'own', or {num_parts} weights joined by ',', or "
    f"such weights for each of {num_replicas} replicas, joined by ';'",
  )
  return rows * num_replicas if len(rows) == 1 else rows


class ReplicaStreams:
  """Endless streams of batches, one per replica, without common text.

  The tokens are cut into sequences that do not overlap. Replica m owns the
  sequences m, m + M, m + 2 M, ... of M replicas. It reads each of them once an
  epoch, in an order drawn anew for every epoch.

  Example: ten sequences and M = 3 replicas. Replica 0 owns 0, 3, 6, 9; replica
  1 owns 1, 4, 7; replica 2 owns 2, 5, 8. In batches of two, replica 1 may read
  [4, 1], [7 | 7], [4, 1], where "|" is the end of its first epoch. A batch
  goes on across that end, so no sequence is dropped.

  With a mix, each part of the text is divided in this way among the replicas
  that give it a weight. A replica reads the parts in turn, so that any stretch
  of its stream has them in the proportion of its weights.

  Args:
    tokens: Training tokens.
    num_replicas: Number of streams, M.
    batch_size: Sequences in a batch of one replica.
    sequence_length: Tokens that a model predicts in a sequence, L. A sequence
      has L + 1 tokens.
    seed: Any integer; seed of the order.
    parts: Tokens of each part of the text, in order; only a mix needs them.
    mix: Weights [M][parts]; None takes the text as one part.

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
    parts: Sequence[int] = (),
    mix: Mix | None = None,
  ):
    width = sequence_length + 1
    if mix is None:
      parts = (len(tokens),)
      mix = [[1.0]] * num_replicas
    counts = [part // width for part in parts]
    for p, (part, count) in enumerate(zip(parts, counts, strict=True)):
      readers = [m for m in range(num_replicas) if mix[m][p]]
      if count < len(readers) * batch_size:
        raise ValueError(
          f"{part} training tokens make {count} sequences of"
          f" {width}, but {len(readers)} replicas with batch_size"
          f" {batch_size} need {len(readers) * batch_size}: use more text, or"
          " lower batch_size, sequence_length or num_replicas"
        )
    # A sequence is read from a view that begins at every token. The streams
    # hold numbers of sequences, because numpy gathers a whole batch faster than
    # grain collects single sequences.
    self._mapped = None
    if isinstance(tokens.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
      self._mapped = tokens.base
    self._windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    self._bounds = np.cumsum([0, *counts])
    self._rests = np.cumsum([0, *parts[:-1]]) - self._bounds[:-1] * width
    self._batches = [
      self._stream(m, mix, seed).batch(batch_size) for m in range(num_replicas)
    ]
    self._batch_size = batch_size
    self._step = 0

  def _stream(self, replica: int, mix: Mix, seed: int) -> grain.MapDataset:
    """Returns the numbers of the sequences that a replica reads, for ever."""
    weights = []
    streams = []
    for p, weight in enumerate(mix[replica]):
      if not weight:
        continue
      readers = [m for m, row in enumerate(mix) if row[p]]
      # Line by line: take the part, keep every sequence that the replica owns,
      # draw an order per epoch, repeat for ever.
      streams.append(
        grain.MapDataset.range(*map(int, self._bounds[p : p + 2]))
        .slice(slice(readers.index(replica), None, len(readers)))
        .shuffle(seed=_order_seed(seed, replica, p))
        .repeat()
      )
      weights.append(weight)
    if len(streams) == 1:
      return streams[0]
    return grain.MapDataset.mix(streams, weights=weights)

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
    self._step += num_steps
    found = [self._batch(replica, step) for replica in chosen for step in steps]
    sizes = self._batch_size, self._windows.shape[1]
    batches = as_int32(np.array(found))
    return batches.reshape(len(chosen), num_steps, *sizes)

  def _batch(self, replica: int, step: int) -> np.ndarray:
    ids = np.asarray(self._batches[replica][step])
    parts = np.searchsorted(self._bounds, ids, side="right") - 1
    width = self._windows.shape[1]
    batch = self._windows[ids * width + self._rests[parts]]
    # The system maps up to 2 MB around a page that is read. Without this, a
    # long run would come to hold all of a file that fits into memory.
    if self._mapped is not None:
      self._mapped.madvise(mmap.MADV_DONTNEED)
    return batch

  def get_state(self) -> dict[str, int]:
    """Returns the position for JSON; it is the same in every process."""
    return {"step": self._step}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues at the step of a state from `get_state`.

    Args:
      state: State of streams with the same arguments. Whoever resumes a run
        compares its config and the digest of its text.
    """
    self._step = int(state["step"])


def cut(tokens: np.ndarray, sequence_length: int) -> np.ndarray:
  """Cuts tokens into sequences [number, L + 1]; a shorter rest is dropped.

  Files are packed: a sequence may begin in one file and end in the next.
  Example with L = 4: sequence 0 has the tokens 0 to 4, sequence 1 the tokens 5
  to 9. The model reads 0 to 3 and predicts 1 to 4. Token 5 is never predicted,
  because the sequences do not overlap.

  Args:
    tokens: Token ids [number of tokens].
    sequence_length: L, one less than the tokens of a sequence.
  """
  width = sequence_length + 1
  num_sequences = len(tokens) // width
  return tokens[: num_sequences * width].reshape(num_sequences, width)


def as_int32(tokens: np.ndarray) -> np.ndarray:
  """Converts token ids to int32 and changes none of them.

  A plain conversion takes the remainder: 2**32 + 5 would become the id 5, which
  every model knows.

  Args:
    tokens: Token ids, integers of any type and shape.

  Raises:
    ValueError: If an id does not fit into int32.
  """
  if not np.can_cast(tokens.dtype, np.int32) and tokens.size:
    lowest = int(tokens.min())
    highest = int(tokens.max())
    limits = np.iinfo(np.int32)
    require(
      limits.min <= lowest and highest <= limits.max,
      f"token ids go from {lowest} to {highest}, but a token id is an int32: "
      "check the type that the file of tokens was written with",
    )
  return tokens.astype(np.int32, copy=False)


def _order_seed(seed: int, replica: int, part: int) -> int:
  # Grain adds the epoch to its seed. With the seeds s and s + 1 replica 1
  # would use in epoch 0 the order that replica 0 uses in epoch 1. Hashing puts
  # the seeds of replicas far apart.
  name = f"{seed}/{replica}" + (f"/{part}" if part else "")
  return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


@dataclasses.dataclass(frozen=True, eq=False)
class WholePass:
  """All validation tokens in batches [1, B, L + 1], which are cut when read.

  Neighboring sequences share one token. So every token but the first is
  predicted exactly once. Example with 10 tokens, L = 2 and B = 3: one batch
  predicts the tokens 1 to 6, one batch of a single sequence 7 and 8, and one
  batch [1, 1, 2] the token 9. The loss of the text is the mean of the three
  losses with the weights 6, 2 and 1.

  Attributes:
    tokens: Validation tokens.
    batch_size: Most sequences in a batch, B.
    sequence_length: Most tokens that are predicted in a sequence, L.
  """

  tokens: Integer[np.ndarray, " tokens"]
  batch_size: int
  sequence_length: int

  def __iter__(self) -> Iterator[np.ndarray]:
    """Yields the batches."""
    length = self.sequence_length
    num_sequences = (len(self.tokens) - 1) // length
    for start in range(0, num_sequences, self.batch_size):
      rows = np.arange(start, min(start + self.batch_size, num_sequences))
      yield self._batch(rows[:, None] * length + np.arange(length + 1))
    rest = np.arange(num_sequences * length, len(self.tokens))
    if len(rest) > 1:
      yield self._batch(rest[None])

  def _batch(self, indices: np.ndarray) -> np.ndarray:
    return as_int32(self.tokens[indices][None])


def held_out_batches(
  tokens: Integer[np.ndarray, " tokens"],
  *,
  batch_size: int,
  sequence_length: int,
  max_sequences: int,
) -> Iterable[np.ndarray]:
  """Returns the batches of every evaluation.

  A few sequences are evenly spaced, so they represent the whole text. Example:
  8 of 1000 sequences are 0, 125, 250, ..., 875.

  Args:
    tokens: Validation tokens.
    batch_size: Sequences in a batch, B.
    sequence_length: Tokens that a model predicts in a sequence, L.
    max_sequences: Largest number of sequences, rounded down to whole batches; 0
      takes the whole text (`WholePass`).

  Returns:
    Arrays of token ids [batches, sequences, tokens].

  Raises:
    ValueError: If there is no whole batch, or no token to predict.
  """
  if not max_sequences:
    can_predict = len(tokens) > 1
    require(
      can_predict, f"{len(tokens)} validation tokens leave none to predict"
    )
    return WholePass(tokens, batch_size, sequence_length)
  sequences = cut(tokens, sequence_length)
  num_batches = min(max_sequences, len(sequences)) // batch_size
  require(
    num_batches > 0,
    f"{len(tokens)} validation tokens make {len(sequences)} sequences of"
    f" {sequence_length + 1} and max_sequences is {max_sequences}, but one"
    f" batch needs {batch_size}: use more text, raise"
    " data.validation_fraction, lower data.batch_size or"
    " data.sequence_length, or raise max_sequences"
    " (evaluation.num_sequences; 0 takes the whole text)",
  )
  count = num_batches * batch_size
  chosen = sequences[np.arange(count) * len(sequences) // count]
  return [as_int32(chosen.reshape(num_batches, batch_size, -1))]
