"""Checks that a model knows the token ids of batches.

For an id outside its table of tokens, a model silently computes NaN or reads
the row of another token. So batches are checked before they reach a device.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.data.streams import Streams
from dilocox_jax.token_ids import Vocabulary, check_token_ids
from dilocox_jax.trees import Tree


def check_token_batch(batch: Tree, what: str) -> None:
  """Checks that a batch is an array of integers [B, S], B >= 1 and S >= 2.

  The integers are token ids. Their values are not checked.

  Args:
    batch: Batch of any kind, as a user's data gives it.
    what: Words for the batch in messages, e.g. "the first batch".

  Raises:
    ValueError: If the batch is not such an array.
  """
  wanted = (
    "without loss= a batch is token ids, integers [sequences, tokens]; pass "
    "loss=, a function of model and batch, for others"
  )
  is_array = hasattr(batch, "dtype") and hasattr(batch, "shape")
  require(is_array, f"{what} is a {type(batch).__name__} of arrays: {wanted}")
  shape = list(batch.shape)
  is_tokens = len(shape) == 2 and np.issubdtype(batch.dtype, np.integer)
  require(is_tokens, f"{what} is {batch.dtype}{shape}: {wanted}")
  require(shape[0] > 0, f"{what} has no rows: give it one or more")
  require(
    shape[1] > 1,
    f"{what} has rows of one token: a token is predicted from those before it, "
    "so rows need two or more",
  )


class CheckedStreams:
  """Wraps `Streams`, and checks the token ids of every batch that is taken."""

  def __init__(self, streams: Streams, vocabulary: Vocabulary):
    """Wraps `streams`, whose token ids must be in `vocabulary`."""
    self._streams = streams
    self._vocabulary = vocabulary
    self.get_state = streams.get_state
    self.set_state = streams.set_state

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """Reads the next batches, [replicas, num_steps, batch size, tokens].

    `replicas` are the replicas to read (None: all). All streams move on.

    Raises:
      TokenError: If the model does not know a token id.
    """
    batches = self._streams.take(num_steps, replicas)
    check_token_ids(batches, self._vocabulary, "tokens of a training batch")
    return batches


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedBatches:
  """Held-out batches whose token ids are checked when they are read.

  Attributes:
    batches: Arrays of token ids, of any shape. They can be iterated more than
      once.
    vocabulary: The ids that the model knows.
  """

  batches: Iterable[np.ndarray]
  vocabulary: Vocabulary

  def __iter__(self) -> Iterator[np.ndarray]:
    """Yields the batches.

    Raises:
      TokenError: If the model does not know a token id.
    """
    for batch in self.batches:
      check_token_ids(batch, self.vocabulary, "tokens of a validation batch")
      yield batch
