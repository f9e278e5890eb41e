"""The one number that is minimised, in one unit.

Every loss the project reports is the mean over predicted tokens in nats and
fp32, so that curves of different methods can share an axis.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dilocox_jax.models.transformer import Model, Params


def token_loss(
  logits_TxV: Float[Array, "T V"],
  targets_T: Int[Array, " T"],
  z_loss: float | int = 0.0,
) -> Float[Array, ""]:
  """Cross-entropy of tokens, given the logits for each.

  Args:
    logits_TxV: Logits.
    targets_T: The tokens that came.
    z_loss: Weight of the mean squared log-partition, which keeps logits from
      drifting (Chowdhery et al. 2022, arXiv 2204.02311, section 5; 1e-4
      there).

  Returns:
    Mean over T tokens (nats, dtype of the logits), with the z-loss added.
  """
  log_partition_T = jax.nn.logsumexp(logits_TxV, axis=-1)
  target_T = jnp.take_along_axis(logits_TxV, targets_T[:, None], axis=-1)[:, 0]
  loss = jnp.mean(log_partition_T - target_T)
  if z_loss:
    loss = loss + z_loss * jnp.mean(jnp.square(log_partition_T))
  return loss


def next_token_loss(
  model: Model,
  params: Params,
  tokens_BxS: Int[Array, "B S"],
  z_loss: float | int = 0.0,
) -> Float[Array, ""]:
  """Cross-entropy of each token given those before it.

  Args:
    model: The model.
    params: Its parameters.
    tokens_BxS: Token numbers, S = L + 1: the first L are read, the last L are
      predicted.
    z_loss: As for `token_loss`.

  Returns:
    Mean over B * L tokens (nats, fp32; of a float64 model float64), with the
    z-loss added.
  """
  logits_BxLxV = model.apply(params, tokens_BxS[:, :-1])
  logits_TxV = logits_BxLxV.reshape(-1, logits_BxLxV.shape[-1])
  return token_loss(logits_TxV, tokens_BxS[:, 1:].reshape(-1), z_loss)
