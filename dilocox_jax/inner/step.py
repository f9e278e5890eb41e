"""Builds the inner step: one optimizer step of one replica.

An inner step calls the optimizer once, with a gradient that may be accumulated
over several micro-batches.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.trees import Scalar, Tree

# Function (params, batch) -> mean loss.
Loss = Callable[[Tree, Tree], Scalar]
# Function (params, batch) -> (mean loss, gradients).
Gradient = Callable[..., tuple[Scalar, Tree]]


def accumulated_gradient(loss: Loss, accumulate_steps: int = 1) -> Gradient:
  """Returns a gradient function that divides a batch into micro-batches.

  Micro-batches are computed one after the other, to save memory. Example: with
  accumulate_steps = 4, a batch of 12 rows has 4 micro-batches of 3 rows; the
  first has the rows 0, 1 and 2.

  Args:
    loss: Function (params, micro-batch) -> mean loss.
    accumulate_steps: Number of micro-batches in a batch. It must divide the
      leading axis of each leaf of the batch.

  Returns:
    Function (params, batch) -> (loss, gradients), which are means over the
    batch.
  """
  gradient = jax.value_and_grad(loss)
  if accumulate_steps == 1:
    return gradient

  def accumulate(params: Tree, batch: Tree) -> tuple[Scalar, Tree]:
    micro_batches = jax.tree.map(
      lambda x: x.reshape(accumulate_steps, -1, *x.shape[1:]), batch
    )

    def body(total: Tree, micro_batch: Tree) -> tuple[Tree, None]:
      loss_and_gradients = gradient(params, micro_batch)
      return jax.tree.map(jnp.add, total, loss_and_gradients), None

    first_micro_batch = jax.tree.map(lambda x: x[0], micro_batches)
    shapes = jax.eval_shape(gradient, params, first_micro_batch)
    zeros = jax.tree.map(jnp.zeros_like, shapes)
    total, _ = jax.lax.scan(body, zeros, micro_batches)
    return jax.tree.map(lambda x: x / accumulate_steps, total)

  return accumulate


def inner_step(
  gradient: Gradient, optimizer: optax.GradientTransformation
) -> Callable:
  """Builds the inner step, which calls the optimizer once with a gradient.

  Args:
    gradient: Function (params, batch, **kwargs) -> (loss, gradients).
    optimizer: Inner optimizer.

  Returns:
    Function (params, optimizer state, batch, **kwargs) -> (params, optimizer
    state, (loss, gradient norm)). `gradient` gets the keyword arguments. The
    norm is that of the gradients before the optimizer clips them.
  """

  def step(
    params: Tree, state: Tree, batch: Tree, **kwargs: Tree
  ) -> tuple[Tree, Tree, tuple[Scalar, Scalar]]:
    loss, gradients = gradient(params, batch, **kwargs)
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, (loss, optax.tree.norm(gradients))

  return step
