"""Embeds tokens and computes their loss where data shards divide the tables.

The embedding and the head have a row or a column for every token of the
vocabulary. They are the largest leaves that all stages share: of a model of 107
billion parameters each takes 4.6 GiB in fp32, and its gradient as much. So each
data shard of a stage has the tokens [n V / N, (n + 1) V / N) alone, and the
shards work together: each takes the rows of all of them, computes what its own
tokens add, and the sums go back to the shards from which the rows came. A shard
computes N times as many rows with an N-th of the table, which is the same work.

Example: N = 2 and V = 8. Shard 0 reads tokens [1, 6] and shard 1 reads [3, 4].
Shard 0 looks up 1 and 3, and shard 1 looks up 6 and 4; each gives zeros for
what it does not have. The sums [1, 6] go to shard 0 and [3, 4] to shard 1.

Derivatives are those of a sum over the shards' losses: that of a gathered array
is scattered, and that of a scattered one is gathered.
Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3 (over other devices).
Differs: rows are gathered here; there all devices have the same rows.

Letters in names: B batch, L length, T = B L tokens of a shard, N data shards, U
tokens of all shards (U = N T), D model, W = V / N tokens of a shard's part of
the vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dilocox_jax.plan.model.division import DATA_AXIS
from dilocox_jax.trees import Tree


def divided_embed(embed: Callable[..., Array]) -> Callable[..., Array]:
  """Returns `CutModel.embed` for a part [W, D] of the embedding.

  Args:
    embed: (leaves, tokens [B, L], **context) -> x [T, D].
  """

  def together(rest: Tree, tokens_BxL: Array, **context: Array) -> Array:
    tokens, context = _gathered((tokens_BxL, context))
    size = rest["embed"]["embedding"].shape[0]
    places, is_own = _places(tokens, size)
    # A token outside the vocabulary stays one, for every shard: its row is NaN.
    is_unknown = (tokens < 0) | (tokens >= size * jax.lax.axis_size(DATA_AXIS))
    rows_UxD = embed(rest, jnp.where(is_unknown, size, places), **context)
    is_read = (is_own | is_unknown).reshape(-1, 1)
    return _scattered(jnp.where(is_read, rows_UxD, 0))

  return together


def divided_logits(logits: Callable[[Array], Array]) -> Callable:
  """Returns logits [U, W] of all shards' rows, for a part of the head.

  Args:
    logits: (x [U, D]) -> logits [U, W].
  """
  return lambda x_TxD: logits(_gathered(x_TxD))


def divided_scores(
  logits_UxW: Float[Array, "U W"], targets_T: Int[Array, " T"]
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
  """Returns `models.loss.token_scores` of a shard's rows.

  Args:
    logits_UxW: Logits of all shards' rows for this shard's tokens.
    targets_T: Tokens that this shard's rows should have predicted.

  Returns:
    log(Z) and the logit of the target, both [T].
  """
  shard, tokens = jax.lax.axis_index(DATA_AXIS), targets_T.size
  highest_U = jnp.max(jax.lax.stop_gradient(logits_UxW), axis=-1)
  highest_U = jax.lax.pmax(highest_U, DATA_AXIS)
  own_T = jax.lax.dynamic_slice_in_dim(highest_U, shard * tokens, tokens)
  sum_T = _scattered(jnp.sum(jnp.exp(logits_UxW - highest_U[:, None]), axis=-1))
  places, is_own = _places(_gathered(targets_T), logits_UxW.shape[1])
  target_U = jnp.take_along_axis(logits_UxW, places[:, None], axis=-1)[:, 0]
  return own_T + jnp.log(sum_T), _scattered(jnp.where(is_own, target_U, 0))


def _places(tokens: Array, size: int) -> tuple[Array, Array]:
  """Returns places in this shard's part, 0 elsewhere, and what is in it."""
  places = tokens - size * jax.lax.axis_index(DATA_AXIS)
  is_own = (places >= 0) & (places < size)
  return jnp.where(is_own, places, 0), is_own


def _gathered(tree: Tree) -> Tree:
  """Returns the rows of all shards, in the order of the shards."""
  return jax.tree.map(
    lambda rows: jax.lax.all_gather(rows, DATA_AXIS, tiled=True), tree
  )


def _scattered(rows: Array) -> Array:
  """Sums rows over the shards; each gets those that it had gathered."""
  return jax.lax.psum_scatter(rows, DATA_AXIS, tiled=True)
