"""Runs data-parallel steps: replicas average their gradients in every step.

The AllReduce baseline and the warm start run these steps. They must give the
same parameters as training one model on the batches of all replicas together.
So the replicas exchange gradients and not differences of parameters: in
floating point a - (a - b) is not always b.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.outer.round_program import StepMetrics
from dilocox_jax.pytypes import Aggregator, Tree


class SharedState(NamedTuple):
  """State of data-parallel training, which is equal on all replicas.

  Attributes:
    params: Parameters of the model.
    optimizer: State of the optimizer.
    exchange: State of the aggregator.
  """

  params: Tree
  optimizer: Tree
  exchange: Tree


def init_shared(
  params: Tree, optimizer: optax.GradientTransformation, aggregator: Aggregator
) -> SharedState:
  """Returns the state before the first step."""
  return SharedState(params, optimizer.init(params), aggregator.init(params))


def run_steps(
  gradient: Callable,
  optimizer: optax.GradientTransformation,
  aggregator: Aggregator,
  state: SharedState,
  batches: Tree,
) -> tuple[SharedState, StepMetrics]:
  """Runs data-parallel steps. The code is that of one replica.

  Args:
    gradient: Function (params, batch) -> (loss, gradients) of one replica.
    optimizer: Optimizer that steps on the mean gradient; it includes clipping.
    aggregator: Averages gradients over replicas.
    state: State before the first step.
    batches: Batches of this replica, leaves [num_steps, ...].

  Returns:
    The state after the last step, and metrics of every step, arrays
    [num_steps]: the loss of this replica and the norm of the mean gradient.
  """

  def body(carry: SharedState, batch: Tree):
    """Takes one step, as `jax.lax.scan` calls it: (state, metrics)."""
    loss, gradients = gradient(carry.params, batch)
    mean_gradients, exchange_state = aggregator.update(
      gradients, carry.exchange
    )
    updates, optimizer_state = optimizer.update(
      mean_gradients, carry.optimizer, carry.params
    )
    params = optax.apply_updates(carry.params, updates)
    metrics = StepMetrics(loss, optax.tree.norm(mean_gradients))
    metrics = jax.tree.map(lambda x: x.astype(jnp.float32), metrics)
    return SharedState(params, optimizer_state, exchange_state), metrics

  return jax.lax.scan(body, state, batches)
