"""Data-parallel steps, which average gradients over replicas in every step.

The baseline and the warm start run these steps. The exchange gets each
replica's gradient, never a difference of parameters. In floating point
a - (a - b) is not always b, and these steps must equal the training of one
model on the batches of all replicas together.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.outer.round_program import StepMetrics
from dilocox_jax.pytypes import Aggregator, Tree


class SharedState(NamedTuple):
  """State of data-parallel training, which all replicas share.

  Attributes:
    params: Parameters, leaves [...].
    optimizer: State of the inner optimizer.
    exchange: State of the aggregator that averages gradients.
  """

  params: Tree
  optimizer: Tree
  exchange: Tree


def run_steps(
  gradient: Callable,
  optimizer: optax.GradientTransformation,
  aggregator: Aggregator,
  state: SharedState,
  batches: Tree,
) -> tuple[SharedState, StepMetrics]:
  """Runs data-parallel steps. The code is written for one replica.

  Args:
    gradient: Function (params, batch) -> (loss, gradients) of one replica.
    optimizer: Optimizer that steps on the mean gradient. It includes clipping.
    aggregator: Averages gradients over replicas.
    state: State that all replicas share.
    batches: Batches of this replica, leaves [num_steps, ...].

  Returns:
    The new state, and the metrics of every step. The metrics are the loss of
    this replica and the norm of the mean gradient, float32 [num_steps] each.
  """

  def body(carry: SharedState, batch: Tree):
    loss, gradients = gradient(carry.params, batch)
    mean_gradients, exchange = aggregator.update(
      gradients, carry.exchange, carry.params
    )
    updates, optimizer_state = optimizer.update(
      mean_gradients, carry.optimizer, carry.params
    )
    params = optax.apply_updates(carry.params, updates)
    metrics = StepMetrics(loss, optax.tree.norm(mean_gradients))
    metrics = jax.tree.map(lambda x: x.astype(jnp.float32), metrics)
    return SharedState(params, optimizer_state, exchange), metrics

  return jax.lax.scan(body, state, batches)
