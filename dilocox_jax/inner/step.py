"""One optimizer step of one replica.

A round has H of these steps. An inner step is one call of the optimizer, over
however many micro-batches its gradient is accumulated. It does not depend on
other replicas.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.trees import Scalar, Tree

# (params, batch) -> mean loss, and -> (mean loss, gradients).
Loss = Callable[[Tree, Tree], Scalar]
Gradient = Callable[..., tuple[Scalar, Tree]]


def accumulated_gradient(loss: Loss, accumulate_steps: int = 1) -> Gradient:
  """Builds the mean loss and gradient over a batch's micro-batches.

  Example: with 4 steps a batch of 12 rows has 4 micro-batches of 3 rows. The
  first one has the rows 0, 1 and 2. The micro-batches have equal sizes, so the
  mean of their means is the mean over the batch.

  Args:
    loss: (params, micro-batch) -> mean loss.
    accumulate_steps: Number of micro-batches in a batch. It must divide the
      leading axis of each leaf of the batch.

  Returns:
    (params, batch) -> (loss, gradients).
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
  """Builds the inner step that a round repeats H times.

  Args:
    gradient: (params, batch) -> (loss, gradients). It also gets the keyword
      arguments of the step, such as `frozen`.
    optimizer: Inner optimizer.

  Returns:
    (params, optimizer state, batch) -> (params, optimizer state, (loss,
    gradient norm)). The norm is taken before the optimizer clips.
  """

  def step(
    params: Tree, state: Tree, batch: Tree, **kwargs: Tree
  ) -> tuple[Tree, Tree, tuple[Scalar, Scalar]]:
    loss, gradients = gradient(params, batch, **kwargs)
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, (loss, optax.tree.norm(gradients))

  return step
