"""Checks token ids before a model looks them up in tables.

If an id is not in a table, JAX raises no error. It returns NaN or the row of
another token.
"""

import dataclasses

import numpy as np


class TokenError(ValueError):
  """Raised if token ids are not integers, or not known to the model."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The token ids that a model knows: 0 to size - 1.

  Attributes:
    size: Number of different tokens.
    source: Where the size comes from, for messages, e.g. "vocab_size=50".
  """

  size: int
  source: str


def check_token_ids(
  tokens: np.ndarray, vocabulary: Vocabulary, what: str
) -> None:
  """Raises TokenError unless all ids are integers that a vocabulary has.

  Args:
    tokens: Token ids, of any shape. An empty array of integers passes.
    vocabulary: The ids that are known.
    what: What the ids are, for the message, e.g. "train tokens of 'own'".
  """
  if not np.issubdtype(tokens.dtype, np.integer):
    raise TokenError(f"{what} are {tokens.dtype}: pass integers")
  if not tokens.size:
    return
  lowest = int(tokens.min())
  highest = int(tokens.max())
  if lowest < 0 or highest >= vocabulary.size:
    raise TokenError(
      f"{what} go from {lowest} to {highest}, but {vocabulary.source} allows 0 "
      f"to {vocabulary.size - 1}"
    )
