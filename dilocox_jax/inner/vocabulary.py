"""Embeds tokens and computes their scores if data shards divide the vocabulary.

Data shard n of N holds only the tokens [n V / N, (n + 1) V / N) of the V
tokens. The shards gather the input rows of all shards. Each shard computes what
its own tokens contribute to the results of all rows. The contributions are
summed, and each shard gets the sums for its own input rows.

Example: N = 2 and V = 8. Shard 0 has the input tokens [1, 6], and shard 1 has
[3, 4]. Shard 0 holds the tokens 0 to 3, so it looks up 1 and 3. Shard 1 looks
up 6 and 4. Each gives zeros for the tokens that it does not hold. The sums for
[1, 6] go to shard 0, and the sums for [3, 4] go to shard 1.

Derivatives are those of a sum over the shards' losses.

Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3, where tensor-parallel
devices divide the vocabulary.
Differs: rows are gathered here; in the paper all devices have the same rows.

Letters in names: B sequences of L tokens each, T = B L tokens of a shard, N
data shards, U = N T tokens of all shards, D width of the residual stream,
W = V / N tokens of a shard's part of the vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dilocox_jax.plan.model.division import DATA_AXIS
from dilocox_jax.trees import Tree


def divided_embed(embed: Callable[..., Array]) -> Callable[..., Array]:
  """Wraps an embedding function for a shard that holds a part of the table.

  Args:
    embed: Function (leaves, tokens [B, L], **context) -> x [T, D] that looks up
      tokens in the table `leaves["embed"]["embedding"]`.

  Returns:
    A function like `embed`, but the table in its leaves is this shard's part,
    [W, D], which has W = V / N of the V tokens for N shards. All data shards
    must call the function together, each with its own tokens. A token outside
    the V tokens is looked up beyond the end of the table, for which `embed`
    should return NaN.
  """

  def embed_with_all_shards(
    rest: Tree, tokens_BxL: Array, **context: Array
  ) -> Array:
    tokens, context = _gathered((tokens_BxL, context))
    size = rest["embed"]["embedding"].shape[0]
    rows, is_held = _rows_in_part(tokens, size)
    # A token outside the vocabulary gets the row number `size`, which no part
    # has. So its row is NaN on every shard.
    is_unknown = (tokens < 0) | (tokens >= size * jax.lax.axis_size(DATA_AXIS))
    rows_UxD = embed(rest, jnp.where(is_unknown, size, rows), **context)
    is_read = (is_held | is_unknown).reshape(-1, 1)
    return _scattered(jnp.where(is_read, rows_UxD, 0))

  return embed_with_all_shards


def divided_logits(logits: Callable[[Array], Array]) -> Callable:
  """Wraps a function of logits for a shard that holds a part of the head.

  The head is divided like the embedding: each shard has W of the V tokens.

  Args:
    logits: Function from rows x [U, D] to the logits of this shard's W tokens,
      [U, W].

  Returns:
    Function from this shard's rows x [T, D] to logits [U, W]. It gathers the
    rows of all shards, U in all, and passes them to `logits`. All data shards
    must call it together.
  """
  return lambda x_TxD: logits(_gathered(x_TxD))


def divided_scores(
  logits_UxW: Float[Array, "U W"], targets_T: Int[Array, " T"]
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
  """Computes log(Z) and the target's logit if shards divide the vocabulary.

  The cross-entropy of a row is log(Z) minus the logit of its target.

  Args:
    logits_UxW: Logits of the rows of all shards, for the W tokens of the
      vocabulary that this shard holds.
    targets_T: Tokens that this shard's rows should predict.

  Returns:
    For this shard's rows, log(Z) and the logit of the target, both [T]. Z is
    the sum of exp(logit) over the whole vocabulary.
  """
  shard = jax.lax.axis_index(DATA_AXIS)
  num_tokens = targets_T.size
  # The highest logit of a row is subtracted so that exp does not overflow. It
  # is added to the logarithm again, so it needs no gradient.
  highest_U = jnp.max(jax.lax.stop_gradient(logits_UxW), axis=-1)
  highest_U = jax.lax.pmax(highest_U, DATA_AXIS)
  highest_T = jax.lax.dynamic_slice_in_dim(
    highest_U, shard * num_tokens, num_tokens
  )
  sum_T = _scattered(jnp.sum(jnp.exp(logits_UxW - highest_U[:, None]), axis=-1))
  columns, is_held = _rows_in_part(_gathered(targets_T), logits_UxW.shape[1])
  target_U = jnp.take_along_axis(logits_UxW, columns[:, None], axis=-1)[:, 0]
  log_z_T = highest_T + jnp.log(sum_T)
  return log_z_T, _scattered(jnp.where(is_held, target_U, 0))


def _rows_in_part(tokens: Array, size: int) -> tuple[Array, Array]:
  """Returns the row of each token in this shard's part of a table, and a mask.

  A token that this shard does not hold has the row 0 and the mask False.
  """
  rows = tokens - size * jax.lax.axis_index(DATA_AXIS)
  is_held = (rows >= 0) & (rows < size)
  return jnp.where(is_held, rows, 0), is_held


def _gathered(tree: Tree) -> Tree:
  """Gathers the rows of all shards, in order: [rows, ...] to [N rows, ...]."""
  return jax.tree.map(
    lambda rows: jax.lax.all_gather(rows, DATA_AXIS, tiled=True), tree
  )


def _scattered(rows: Array) -> Array:
  """Sums rows [U, ...] over the shards; returns this shard's rows [T, ...]."""
  return jax.lax.psum_scatter(rows, DATA_AXIS, tiled=True)
