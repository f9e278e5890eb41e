"""One optimizer step of one replica.

H counts these: however many micro-batches a gradient is accumulated over, an
inner step is one call of the optimizer. Nothing here knows of other replicas.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.pytypes import Scalar, Tree

Loss = Callable[[Tree, Tree], Scalar]
Gradient = Callable[[Tree, Tree], tuple[Scalar, Tree]]


def accumulated_gradient(loss: Loss, accumulate_steps: int = 1) -> Gradient:
  """The mean loss and gradient over a batch's micro-batches.

  Args:
    loss: (params, micro-batch) -> mean loss.
    accumulate_steps: Micro-batches in a batch; each batch leaf's leading axis
      is divided by it.

  Returns:
    (params, batch) -> (loss, gradients).
  """
  gradient = jax.value_and_grad(loss)
  if accumulate_steps == 1:
    return gradient

  def accumulate(params: Tree, batch: Tree) -> tuple[Scalar, Tree]:
    micro = jax.tree.map(
      lambda x: x.reshape(accumulate_steps, -1, *x.shape[1:]), batch
    )

    def body(total, part):
      return jax.tree.map(jnp.add, total, gradient(params, part)), None

    first = jax.tree.map(lambda x: x[0], micro)
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(gradient, params, first),
    )
    total, _ = jax.lax.scan(body, zeros, micro)
    return jax.tree.map(lambda x: x / accumulate_steps, total)

  return accumulate


def inner_step(
  gradient: Gradient, optimizer: optax.GradientTransformation
) -> Callable:
  """Builds the step that a round repeats.

  Args:
    gradient: (params, batch) -> (loss, gradients).
    optimizer: The inner optimizer.

  Returns:
    (params, optimizer state, batch) -> (params, optimizer state, (loss,
    gradient norm before clipping)).
  """

  def step(params: Tree, state: Tree, batch: Tree):
    loss, gradients = gradient(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, (loss, optax.tree.norm(gradients))

  return step
