"""Finds the documents that are packed into a sequence.

A segment is the part of a sequence that belongs to one document. The token that
ends a document is the first one of the next segment, so that a document is read
with a mark of its beginning. Every token is still predicted, and the loss needs
no weights: the last token of a document predicts the end, and the end predicts
the first token of the next document.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def segment_ids(
  tokens_BxL: Int[Array, "B L"], end_of_text: int
) -> Int[Array, "B L"]:
  """Returns the number of each token's document in its sequence.

  Example with the end 0: the tokens [7, 8, 0, 5, 6, 0, 9] have the segments
  [0, 0, 1, 1, 1, 2, 2].

  Args:
    tokens_BxL: Tokens that a model reads.
    end_of_text: Token that ends a document.
  """
  return jnp.cumsum(tokens_BxL == end_of_text, axis=1, dtype=jnp.int32)


def segment_positions(segments_BxL: Int[Array, "B L"]) -> Int[Array, "B L"]:
  """Returns the distance of each token from the first one of its segment.

  Example: the segments [0, 0, 1, 1, 1] have the positions [0, 1, 0, 1, 2].
  """
  places = jnp.arange(segments_BxL.shape[1], dtype=jnp.int32)[None]
  before = jnp.pad(segments_BxL[:, :-1], ((0, 0), (1, 0)))
  starts = jnp.where(segments_BxL != before, places, 0)
  return places - jax.lax.cummax(starts, axis=1)
