"""Steps whose gradients are averaged: the baseline, and the warm start.

The exchange is given each replica's gradient, never a difference of
parameters. In floating point a - (a - b) is not b, and this path must equal
training one model on the replicas' batches put together.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.outer.round_program import StepMetrics
from dilocox_jax.pytypes import Aggregator, Tree


class SharedState(NamedTuple):
  """Parameters and optimizer state that all replicas have in common."""

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
  """Runs data-parallel steps, for one replica.

  Args:
    gradient: Function (params, batch) -> (loss, gradients) of one replica.
    optimizer: Optimizer that steps on the mean gradient, clipping included.
    aggregator: Averages gradients over replicas.
    state: The shared state.
    batches: Batches of this replica, leaves [num_steps, ...].

  Returns:
    The new state; metrics of every step, [num_steps] each: the replica's own
    loss, and the norm of the mean gradient.
  """

  def body(carry: SharedState, batch: Tree):
    loss, own = gradient(carry.params, batch)
    mean, exchange = aggregator.update(own, carry.exchange)
    updates, optimizer_state = optimizer.update(
      mean, carry.optimizer, carry.params
    )
    params = optax.apply_updates(carry.params, updates)
    metrics = StepMetrics(loss, optax.tree.norm(mean))
    metrics = jax.tree.map(lambda x: x.astype(jnp.float32), metrics)
    return SharedState(params, optimizer_state, exchange), metrics

  return jax.lax.scan(body, state, batches)
