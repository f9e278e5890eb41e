"""Chooses the sequences on which a run is evaluated.

A run is evaluated on the held-out part of its text, and on more texts if the
config names some. Each of them is read as a few sequences or as a whole. The
sequences are the same at every evaluation, so two losses can be compared.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Integer

from dilocox_jax.checks import require
from dilocox_jax.data import shards
from dilocox_jax.data.corpus import digest_of
from dilocox_jax.data.documents import (
  TEXT_FIELD,
  matching_files,
  read_documents,
)
from dilocox_jax.data.streams import cut
from dilocox_jax.data.tokenizers import Tokenizer, join


def validation_batches(
  tokens: Integer[np.ndarray, " tokens"],
  *,
  batch_size: int,
  sequence_length: int,
  max_sequences: int,
) -> Int32[np.ndarray, "batches batch sequence"]:
  """Chooses a few sequences for every evaluation.

  They are evenly spaced, so a few of them represent the whole text. They are
  the same at every evaluation, so two losses can be compared. Example: 8 of
  1000 sequences are 0, 125, 250, ..., 875.

  Args:
    tokens: Validation tokens.
    batch_size: Sequences in a batch.
    sequence_length: Tokens that a model predicts in a sequence, L. A sequence
      has L + 1 tokens.
    max_sequences: Largest number of sequences; rounded down to whole batches.

  Returns:
    Tokens [batches, batch_size, sequence_length + 1].

  Raises:
    ValueError: If there is no whole batch.
  """
  sequences = cut(tokens, sequence_length)
  num_batches = min(max_sequences, len(sequences)) // batch_size
  if num_batches < 1:
    raise ValueError(
      f"{len(tokens)} validation tokens make {len(sequences)} sequences of"
      f" {sequence_length + 1} and max_sequences is {max_sequences}, but one"
      f" batch needs {batch_size}: use more text, raise"
      " data.validation_fraction, lower data.batch_size or"
      " data.sequence_length, or raise max_sequences"
      " (evaluation.num_sequences; 0 takes the whole text)"
    )
  count = num_batches * batch_size
  chosen = sequences[np.arange(count) * len(sequences) // count]
  return chosen.reshape(num_batches, batch_size, -1).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class WholePass:
  """All validation tokens in batches [1, B, L + 1], which are cut when read.

  Neighbouring sequences share one token. So every token but the first is
  predicted exactly once. Example with 10 tokens, L = 2 and B = 3: one batch
  predicts the tokens 1 to 6, one batch of a single sequence 7 and 8, and one
  batch [1, 1, 2] the token 9. The loss of the text is the mean of the three
  losses with the weights 6, 2 and 1.

  Attributes:
    tokens: Validation tokens.
    batch_size: Most sequences in a batch, B.
    sequence_length: Most tokens that are predicted in a sequence, L.

  Raises:
    ValueError: If there is no token to predict.
  """

  tokens: Integer[np.ndarray, " tokens"]
  batch_size: int
  sequence_length: int

  def __post_init__(self):
    require(
      len(self.tokens) > 1,
      f"{len(self.tokens)} validation tokens leave none to predict: use more "
      "text",
    )

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
    return np.asarray(self.tokens[indices][None], np.int32)


def held_out_batches(
  tokens: Integer[np.ndarray, " tokens"],
  *,
  batch_size: int,
  sequence_length: int,
  max_sequences: int,
) -> Iterable[np.ndarray]:
  """Returns `validation_batches` as one part, or a `WholePass`.

  Args:
    tokens: Validation tokens.
    batch_size: Sequences in a batch, B.
    sequence_length: Tokens that a model predicts in a sequence, L.
    max_sequences: Largest number of sequences; 0 takes the whole text.

  Returns:
    Arrays of token ids [batches, sequences, tokens].
  """
  if not max_sequences:
    return WholePass(tokens, batch_size, sequence_length)
  sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
  return [validation_batches(tokens, max_sequences=max_sequences, **sizes)]


class ValidationSet(NamedTuple):
  """A text that a run is evaluated on besides its own.

  Attributes:
    tokens: All of its tokens.
    digest: 16 hex digits that name them.
    bytes_per_token: Bytes of the text over its tokens.
  """

  tokens: Integer[np.ndarray, " tokens"]
  digest: str
  bytes_per_token: float


def load_validation_set(
  glob: str, tokenizer: Tokenizer | None, text_field: str = TEXT_FIELD
) -> ValidationSet:
  """Reads a text for evaluations with the tokenizer of the training text.

  Args:
    glob: Pattern of text files, all of which are read, or a folder that
      `shards.write` finished, of which the validation tokens are read.
    tokenizer: Tokenizer of the training text.
    text_field: Field of a JSON line that has the text.

  Raises:
    ValueError: If the training text has no tokenizer, the shards have another
      one, or a file cannot be read.
  """
  if tokenizer is None:
    raise ValueError("the training text has no tokenizer for evaluation.sets")
  if shards.is_finished(glob):
    corpus = shards.map_corpus(glob)
    made = corpus.tokenizer
    require(
      made is not None and made.digest == tokenizer.digest,
      f"the tokens in {glob} are of another tokenizer than the training text: "
      "write them anew with that one",
    )
    return ValidationSet(
      corpus.validation, corpus.digest, corpus.bytes_per_token or 1.0
    )
  found = {
    document.name: document.content
    for name, path in matching_files(glob)
    for document in read_documents(name, path, text_field)
  }
  texts = [content for content in found.values() if content]
  require(bool(texts), f"the files of the glob {glob!r} are empty")
  tokens = join(tokenizer, texts)
  num_bytes = sum(map(len, texts)) + len(texts) - 1
  return ValidationSet(tokens, digest_of(found), num_bytes / len(tokens))
