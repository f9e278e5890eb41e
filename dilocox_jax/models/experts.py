"""Routing of tokens to experts, and the loss that keeps experts equally busy.

Letters in names: T tokens, E experts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def route(
  scores_TxE: Float[Array, "T E"], experts_per_token: int, balance_loss: float
) -> Float[Array, "T E"]:
  """Returns the share of each expert in each token.

  The share is the softmax of the scores for the highest experts of a token,
  and 0 for the others. A single expert has the share 1.

  The balance loss is E times the sum over experts of f_e p_e. f_e is the part
  of the choices that fell on expert e and p_e the mean of its softmax. It is 1
  if all experts are equally busy, and E if one has all tokens. Its gradient is
  added in the backward pass; the loss that is reported does not contain it. So
  it reaches the router wherever a layer is differentiated, also on a stage of a
  pipeline, as long as the loss of a batch itself is differentiated and not a
  multiple of it.

  Source: Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6.
  Differs: a token may have several experts, each with its softmax.

  Args:
    scores_TxE: Scores of the router.
    experts_per_token: Number of experts of a token.
    balance_loss: Weight of the balance loss.

  Returns:
    Shares in fp32 or a wider type.
  """
  wide = np.promote_types(np.float32, scores_TxE.dtype)
  softmax_TxE = jax.nn.softmax(scores_TxE.astype(wide), axis=-1)
  num_experts = softmax_TxE.shape[-1]
  _, chosen = jax.lax.top_k(softmax_TxE, experts_per_token)
  is_chosen = jnp.sum(jax.nn.one_hot(chosen, num_experts, dtype=wide), axis=1)
  busy_E = jnp.mean(is_chosen, axis=0) / experts_per_token
  loss = num_experts * jnp.sum(busy_E * jnp.mean(softmax_TxE, axis=0))
  return _with_loss(balance_loss, softmax_TxE * is_chosen, loss)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_loss(weight: float, x: Array, loss: Array) -> Array:
  """Returns x; the gradient of `loss` is its weight."""
  del weight, loss
  return x


def _with_loss_forward(weight, x, loss):
  del weight, loss
  return x, None


def _with_loss_backward(weight, _, gradient):
  return gradient, jnp.asarray(weight, gradient.dtype)


_with_loss.defvjp(_with_loss_forward, _with_loss_backward)
