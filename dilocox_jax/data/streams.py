"""Gives each replica its own sequences of a text, in an order set by the seed.

The batch of a replica in a step depends only on the text, the config and the
step. So a run that is killed and resumed, or that runs in another number of
processes, reads the same batches, and a checkpoint keeps only the step.

`held_out_batches` makes the batches of evaluations. They are the same at every
evaluation, so the losses of two evaluations can be compared.
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

# Weights of the parts of a text, with a row for each replica:
# [M][number of parts].
Mix = Sequence[Sequence[float]]


@runtime_checkable
class Streams(Protocol):
  """Interface of endless streams of batches, one stream for each replica.

  All streams have the same position: the step whose batches are read next.
  """

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """Reads the next batches, and moves all replicas on by `num_steps`.

    Args:
      num_steps: Number of batches to read of each replica.
      replicas: Indices of the replicas to read; None: all.

    Returns:
      A tree of arrays [replicas, num_steps, ...].
    """

  def get_state(self) -> dict[str, Any]:
    """Returns the position of the streams as values of JSON."""
    ...

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Moves the streams to a saved position.

    Args:
      state: State that `get_state` returned for streams of the same data.

    Raises:
      ValueError: If the data come from an iterator whose position cannot be
        set.
    """


def mix_of(mix: str, num_replicas: int, num_parts: int) -> Mix | None:
  """Returns how much each replica reads of each part of a text.

  A part is the files of one glob. Example: for two replicas and two parts,
  "0.7,0.3" gives the rows [0.7, 0.3] and [0.7, 0.3], and "own" gives [1, 0] and
  [0, 1].

  Args:
    mix: Value of the config's field `data.mix`. "": no weights; the whole text
      is divided among the replicas. "own": replica m reads part m modulo the
      number of parts. "0.7,0.3": weights of two parts. "0.9,0.1;0.1,0.9":
      weights for each replica.
    num_replicas: Number of replicas, M.
    num_parts: Number of parts of the text.

  Returns:
    Weights [M][num_parts]; None for the mix "".

  Raises:
    ValueError: If `mix` has another form, if it does not fit the numbers of
      parts and replicas ("own" needs a replica for each part), or if there is
      only one part and `mix` is not "".
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
    rows = []
    for replica in range(num_replicas):
      row = [0.0] * num_parts
      row[replica % num_parts] = 1.0
      rows.append(row)
    return rows
  try:
    rows = [
      [float(weight) for weight in row.split(",")] for row in mix.split(";")
    ]
  except ValueError:
    rows = []  # It is refused below.

  def is_valid(row: Sequence[float]) -> bool:
    if len(row) != num_parts:
      return False
    return min(row) >= 0 and 0 < sum(row) < math.inf

  require(
    len(rows) in (1, num_replicas) and all(map(is_valid, rows)),
    f"data.mix={mix!r} must be 'own', or {num_parts} weights joined by ',', or "
    f"such weights for each of {num_replicas} replicas, joined by ';'",
  )
  if len(rows) == 1:
    return rows * num_replicas
  return rows


class ReplicaStreams:
  """Endless streams of batches of a text. No two replicas share a sequence.

  The tokens are cut into sequences that do not overlap. Of M replicas, replica
  m owns the sequences m, m + M, m + 2 M, ... In each epoch a replica reads
  every one of its sequences once, in an order that is drawn for this epoch.

  Example: ten sequences and M = 3 replicas. Replica 0 owns 0, 3, 6, 9; replica
  1 owns 1, 4, 7; replica 2 owns 2, 5, 8. In batches of two, replica 1 may read
  [4, 1], [7 | 7], [4, 1], where "|" is the end of its first epoch.

  With a mix, the sequences of each part of the text (the files of one glob) are
  divided in this way among the replicas whose weight of the part is above 0. A
  replica reads from several parts in the proportion of its weights. An epoch is
  then a pass over one part.

  Args:
    tokens: Training tokens.
    num_replicas: Number of replicas, M.
    batch_size: Number of sequences in a batch of one replica.
    sequence_length: Number of tokens that a model predicts in a sequence, L. A
      sequence has L + 1 tokens.
    seed: Seed of the order, any integer.
    parts: Number of tokens of each part of the text, in order. It is only read
      if there is a mix.
    mix: Weights of the parts for each replica, [M][parts] (`mix_of`); None: the
      whole text counts as one part, and is divided among all replicas.

  Raises:
    ValueError: If a part has too few sequences for one batch of each replica
      that reads it.
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
    sequences_of_parts = [num_tokens // width for num_tokens in parts]
    for part, num_tokens in enumerate(parts):
      num_sequences = sequences_of_parts[part]
      readers = _readers(mix, part)
      if num_sequences < len(readers) * batch_size:
        raise ValueError(
          f"{num_tokens} training tokens make {num_sequences} sequences of"
          f" {width}, but {len(readers)} replicas with batch_size"
          f" {batch_size} need {len(readers) * batch_size}: use more text, or"
          " lower batch_size, sequence_length or num_replicas"
        )
    # Set if the tokens are in a file that is mapped into memory. `_batch` then
    # frees the memory of the pages that it has read.
    self._mapped_file = None
    if isinstance(tokens.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
      self._mapped_file = tokens.base
    # Row t of this view has the tokens t to t + width - 1.
    self._windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    # Sequences are numbered across all parts. Entry p is the number of the
    # first sequence of part p, and the last entry is the number of sequences.
    self._part_starts = np.cumsum([0, *sequences_of_parts])
    # Entry p is the number of tokens before part p that belong to no sequence,
    # because the end of an earlier part is shorter than a sequence.
    part_token_starts = np.cumsum([0, *parts[:-1]])
    self._skipped_tokens = part_token_starts - self._part_starts[:-1] * width
    # Grain only orders the numbers of the sequences. numpy then reads the
    # tokens of a whole batch, which is faster.
    self._batches_by_replica = [
      self._stream(replica, mix, seed).batch(batch_size)
      for replica in range(num_replicas)
    ]
    self._batch_size = batch_size
    self._step = 0

  def _stream(self, replica: int, mix: Mix, seed: int) -> grain.MapDataset:
    """Returns an endless stream of the numbers of the sequences to read."""
    weights = []
    streams = []
    for part, weight in enumerate(mix[replica]):
      if not weight:
        continue
      first_sequence = int(self._part_starts[part])
      end_sequence = int(self._part_starts[part + 1])
      readers = _readers(mix, part)
      # Line by line: take the part, keep the sequences that the replica owns,
      # draw an order for each epoch, and repeat without end.
      streams.append(
        grain.MapDataset.range(first_sequence, end_sequence)
        .slice(slice(readers.index(replica), None, len(readers)))
        .shuffle(seed=_order_seed(seed, replica, part))
        .repeat()
      )
      weights.append(weight)
    if len(streams) == 1:
      return streams[0]
    return grain.MapDataset.mix(streams, weights=weights)

  def take(
    self, num_steps: int, replicas: Sequence[int] | None = None
  ) -> Int32[np.ndarray, "replicas steps batch sequence"]:
    """Reads the next batches, [replicas, num_steps, batch_size, L + 1].

    `replicas` are the replicas to read (None: all). All streams move on.

    Raises:
      ValueError: If a token id does not fit into int32.
    """
    if replicas is None:
      replicas = range(len(self._batches_by_replica))
    steps = range(self._step, self._step + num_steps)
    self._step += num_steps
    batches = [
      self._batch(replica, step) for replica in replicas for step in steps
    ]
    width = self._windows.shape[1]
    return as_int32(np.array(batches)).reshape(
      len(replicas), num_steps, self._batch_size, width
    )

  def _batch(self, replica: int, step: int) -> np.ndarray:
    """Returns the tokens of one batch, [batch_size, sequence_length + 1]."""
    sequences = np.asarray(self._batches_by_replica[replica][step])
    parts = np.searchsorted(self._part_starts, sequences, side="right") - 1
    width = self._windows.shape[1]
    first_tokens = sequences * width + self._skipped_tokens[parts]
    batch = self._windows[first_tokens]
    # The system maps up to 2 MB around each page of the file that is read.
    # Without this call, a long run would in the end hold the whole file in
    # memory.
    if self._mapped_file is not None:
      self._mapped_file.madvise(mmap.MADV_DONTNEED)
    return batch

  def get_state(self) -> dict[str, int]:
    """Returns the step as a value of JSON."""
    return {"step": self._step}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Moves the streams to the step in a state that `get_state` returned."""
    self._step = int(state["step"])


def _readers(mix: Mix, part: int) -> list[int]:
  """Returns the indices of the replicas whose weight of a part is above 0."""
  return [replica for replica, weights in enumerate(mix) if weights[part]]


def cut(tokens: np.ndarray, sequence_length: int) -> np.ndarray:
  """Cuts tokens into sequences of L + 1 tokens, which do not overlap.

  A shorter rest at the end is dropped. Example with L = 4: sequence 0 has the
  tokens 0 to 4, and sequence 1 the tokens 5 to 9. In sequence 0 the model reads
  the tokens 0 to 3 and predicts 1 to 4. Token 5 is never predicted.

  Args:
    tokens: Token ids [number of tokens].
    sequence_length: Number of tokens that are predicted in a sequence, L.

  Returns:
    Sequences [number of sequences, L + 1].
  """
  width = sequence_length + 1
  num_sequences = len(tokens) // width
  return tokens[: num_sequences * width].reshape(num_sequences, width)


def as_int32(tokens: np.ndarray) -> np.ndarray:
  """Converts token ids of any integer dtype to int32.

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
  """Returns the seed (32 bits) of the order in which a replica reads a part."""
  # Grain adds the epoch to the seed. With the seeds s and s + 1, one replica
  # would read in epoch 1 the order that the other reads in epoch 0.
  name = f"{seed}/{replica}" + (f"/{part}" if part else "")
  return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


@dataclasses.dataclass(frozen=True, eq=False)
class WholePass:
  """An iterable over all tokens of a held-out text, in batches [1, B, L + 1].

  Neighboring sequences share one token. So every token but the first is
  predicted exactly once. The last batches may have fewer sequences, or one
  shorter sequence. Example with the tokens 0 to 9, L = 2 and B = 3: a batch [1,
  3, 3] predicts the tokens 1 to 6, a batch [1, 1, 3] the tokens 7 and 8, and a
  batch [1, 1, 2] the token 9.

  Attributes:
    tokens: Tokens of the text, [number of tokens].
    batch_size: Largest number of sequences in a batch, B.
    sequence_length: Largest number of tokens that are predicted in a sequence,
      L.
  """

  tokens: Integer[np.ndarray, " tokens"]
  batch_size: int
  sequence_length: int

  def __iter__(self) -> Iterator[np.ndarray]:
    """Yields the batches as int32.

    Raises:
      ValueError: If a token id does not fit into int32.
    """
    length = self.sequence_length
    # Neighbors share a token: only the first sequence needs `length` + 1.
    num_sequences = (len(self.tokens) - 1) // length
    for start in range(0, num_sequences, self.batch_size):
      rows = np.arange(start, min(start + self.batch_size, num_sequences))
      yield self._batch(rows[:, None] * length + np.arange(length + 1))
    rest = np.arange(num_sequences * length, len(self.tokens))
    if len(rest) > 1:
      yield self._batch(rest[None])

  def _batch(self, indices: np.ndarray) -> np.ndarray:
    """Returns the tokens at `indices` as a batch, with a first axis of 1."""
    return as_int32(self.tokens[indices][None])


def held_out_batches(
  tokens: Integer[np.ndarray, " tokens"],
  *,
  batch_size: int,
  sequence_length: int,
  max_sequences: int,
) -> Iterable[np.ndarray]:
  """Cuts a validation or judge text into the batches of every evaluation.

  If not all sequences are read, the chosen ones are evenly spaced. Example: 8
  of 1000 sequences are 0, 125, 250, ..., 875.

  Args:
    tokens: Tokens of the text, [number of tokens].
    batch_size: Number of sequences in a batch, B.
    sequence_length: Number of tokens that a model predicts in a sequence, L.
    max_sequences: Largest number of sequences. It is rounded down to whole
      batches. 0: the whole text is read (`WholePass`).

  Returns:
    Token ids, int32: a list with one array [batches, B, L + 1], or a
    `WholePass` over arrays [1, sequences, tokens].

  Raises:
    ValueError: If there is no whole batch or no token to predict, or if a token
      id does not fit into int32.
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
  num_chosen = num_batches * batch_size
  indices = np.arange(num_chosen) * len(sequences) // num_chosen
  chosen = sequences[indices]
  return [as_int32(chosen.reshape(num_batches, batch_size, -1))]
