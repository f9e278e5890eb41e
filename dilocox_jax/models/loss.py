"""The loss of token models, and `LossModel`: any model as pure functions.

The loss of a token model is the mean cross-entropy of the predicted tokens, in
nats. In training, a z-loss may be added.

Letters in names: B sequences of L tokens each, T tokens, D width of the
residual stream, V tokens of the vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dilocox_jax.models.attention import segment_ids
from dilocox_jax.models.transformer import Model, Params

_FILLER = -1  # Target of a row of zeros that fills up the last chunk.

# Type of `token_scores`:
# (logits [T, V], targets [T]) -> (log(Z) [T], logits of the targets [T]).
Scores = Callable[[Array, Array], tuple[Array, Array]]


class LossModel(NamedTuple):
  """Any model as pure functions. Training needs only `init` and `loss`.

  Attributes:
    init: (key) -> parameters, any tree of floating-point arrays.
    loss: (parameters, batch) -> mean loss, a scalar. A batch of a text is
      tokens [B, L + 1]: the model reads the first L and predicts the last L.
    module: (parameters) -> the user's module with these parameters. Without a
      module it returns the parameters.
    logits: (parameters, tokens [B, L]) -> logits [B, L, V]. `as_loss_model`
      sets it for a module that is trained on tokens; None: unknown.
    partition: (path, shape) -> partition of a parameter among the devices of a
      replica (`distributed.partition_rules`). None: a parameter of a user's
      model is divided along its largest suitable dimension, if it has one,
      among the data shards (devices of a replica that read different examples).
    draws_random: Whether the loss draws random numbers. If so, a batch is a
      `random_loss.KeyedBatch` in training, and a plain batch in evaluations.
  """

  init: Callable[[Array], Any]
  loss: Callable[[Any, Any], Array]
  module: Callable[[Any], Any] = lambda params: params
  logits: Callable[[Any, Array], Array] | None = None
  partition: Callable[[str, tuple[int, ...]], Any] | None = None
  draws_random: bool = False


def token_loss(
  logits_TxV: Float[Array, "T V"],
  targets_T: Int[Array, " T"],
  z_loss: float | int = 0.0,
) -> Float[Array, ""]:
  """Computes the mean cross-entropy of tokens, plus a z-loss.

  Example: V = 2 and logits [0, 0] give log Z = log 2 = 0.693, so the loss of
  either token is 0.693 nats. With z_loss = 1e-4 it is larger by
  1e-4 * 0.693^2 = 0.00005. Logits [50, 50] give the same cross-entropy, but
  log Z = 50.7 and a z-loss of 0.257, which pulls the logits back.

  Args:
    logits_TxV: Logits.
    targets_T: Tokens that should have been predicted.
    z_loss: Weight of the mean of log(Z)^2, where Z is the sum of exp(logits).
      Source: Chowdhery et al. 2022, arXiv 2204.02311, section 5, which uses
      1e-4.

  Returns:
    Mean over T tokens in nats, in the dtype of the logits.
  """
  return _mean_loss(*token_scores(logits_TxV, targets_T), z_loss)


def token_scores(
  logits_TxV: Float[Array, "T V"], targets_T: Int[Array, " T"]
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
  """Returns log(Z) and the logit of the target of each token, both [T].

  Z is the sum of exp(logits) over the vocabulary.
  """
  log_partition_T = jax.nn.logsumexp(logits_TxV, axis=-1)
  target_T = jnp.take_along_axis(logits_TxV, targets_T[:, None], axis=-1)[:, 0]
  return log_partition_T, target_T


def token_scores_of_columns(
  logits_TxV: Float[Array, "T V"], targets_T: Int[Array, " T"]
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
  """Computes `token_scores` of logits whose columns are divided among devices.

  The results are log(Z) and the logit of the target of each token. Both are
  sums over columns, because JAX's partitioner divides a sum among the devices.
  For a lookup of the target's column, as in `token_scores`, the partitioner
  would gather all logits on every device.
  """
  log_partition_T = jax.nn.logsumexp(logits_TxV, axis=-1)
  columns_V = jnp.arange(logits_TxV.shape[1], dtype=targets_T.dtype)
  is_target_TxV = targets_T[:, None] == columns_V[None, :]
  target_T = jnp.sum(jnp.where(is_target_TxV, logits_TxV, 0), axis=-1)
  return log_partition_T, target_T


def _mean_loss(
  log_partition_T: Array, target_T: Array, z_loss: float | int
) -> Array:
  """Returns the mean loss of T tokens, with the z-loss added."""
  loss = jnp.mean(log_partition_T - target_T)
  if z_loss:
    loss = loss + z_loss * jnp.mean(jnp.square(log_partition_T))
  return loss


def chunked_token_loss(
  logits: Callable[[Array], Array],
  stream_TxD: Float[Array, "T D"],
  targets_T: Int[Array, " T"],
  z_loss: float | int = 0.0,
  chunk_tokens: int = 0,
  scores: Scores = token_scores,
) -> Float[Array, ""]:
  """Computes `token_loss`, with the logits of one chunk of tokens at a time.

  If there are several chunks, the backward pass computes their logits again, so
  all logits [T, V] are never in memory at once. At T = 16,384 and V = 32,000
  they would take 2.1 GB in fp32.

  Args:
    logits: (stream [C, D]) -> logits [C, V].
    stream_TxD: Residual stream of all tokens, after the last layer.
    targets_T: Tokens that should have been predicted.
    z_loss: Weight of the mean of log(Z)^2 in the loss (`token_loss`).
    chunk_tokens: Largest number of tokens in a chunk, C; 0: one chunk has all.
    scores: Function that returns what `token_scores` returns. If devices divide
      the vocabulary, pass `token_scores_of_columns` (tensor shards) or
      `inner.vocabulary.divided_scores` (data shards).
  """
  num_tokens = targets_T.size
  if not 0 < chunk_tokens < num_tokens:
    log_partition_T, target_T = scores(logits(stream_TxD), targets_T)
    return _mean_loss(log_partition_T, target_T, z_loss)
  num_chunks = -(-num_tokens // chunk_tokens)
  size = -(-num_tokens // num_chunks)
  # All chunks have equal sizes: 10 tokens with chunk_tokens = 4 make 3 chunks
  # of 4. Rows whose loss does not count fill up the last chunk.
  num_fillers = num_chunks * size - num_tokens
  rows = jnp.pad(stream_TxD, ((0, num_fillers), (0, 0)))
  targets = jnp.pad(targets_T, (0, num_fillers), constant_values=_FILLER)
  chunks = (
    rows.reshape(num_chunks, size, -1),
    targets.reshape(num_chunks, size),
  )

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def add_chunk(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
    rows, targets = chunk
    # `_FILLER` is negative, so it cannot choose a logit.
    log_partition, target = scores(logits(rows), jnp.maximum(targets, 0))
    losses = log_partition - target + z_loss * jnp.square(log_partition)
    return total + jnp.sum(jnp.where(targets == _FILLER, 0, losses)), None

  dtype = jax.eval_shape(logits, stream_TxD).dtype
  total, _ = jax.lax.scan(add_chunk, jnp.zeros((), dtype), chunks)
  return total / num_tokens


def next_token_loss(
  model: Model,
  params: Params,
  tokens_BxS: Int[Array, "B S"],
  z_loss: float | int = 0.0,
  end_of_text: int | None = None,
  chunk_tokens: int = 0,
) -> Float[Array, ""]:
  """Computes the mean cross-entropy of each token given all earlier tokens.

  Args:
    model: The decoder, as pure functions of its parameters.
    params: Parameters of the model.
    tokens_BxS: Sequences of S = L + 1 tokens. The model reads the first L and
      predicts the last L.
    z_loss: Weight of the mean of log(Z)^2 in the loss (`token_loss`).
    end_of_text: Token that ends a document. A token then reads only its own
      document. None: a sequence is one document.
    chunk_tokens: Largest number of tokens whose logits are in memory at a time
      (`chunked_token_loss`). 0, or a model without `stream`: all.

  Returns:
    Mean over B * L tokens in nats, with the z-loss added.
  """
  inputs_BxL = tokens_BxS[:, :-1]
  # A model without segments need not take the argument.
  inputs = [inputs_BxL]
  if end_of_text is not None:
    inputs.append(segment_ids(inputs_BxL, end_of_text))
  if chunk_tokens and model.stream is not None:
    stream_TxD = model.stream(params, *inputs)
    return chunked_token_loss(
      logits=functools.partial(model.logits, params),
      stream_TxD=stream_TxD,
      targets_T=tokens_BxS[:, 1:].reshape(-1),
      z_loss=z_loss,
      chunk_tokens=chunk_tokens,
    )
  logits_BxLxV = model.apply(params, *inputs)
  logits_TxV = logits_BxLxV.reshape(-1, logits_BxLxV.shape[-1])
  return token_loss(logits_TxV, tokens_BxS[:, 1:].reshape(-1), z_loss)
