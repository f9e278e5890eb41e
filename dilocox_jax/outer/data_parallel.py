"""Steps whose gradients are averaged: the baseline, and the warm start.

Here each replica's gradient enters the exchange, never a difference of
parameters: a - (a - b) is not b in floating point, and this path must equal
training on the joint batch.
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
  """The state before the first step."""
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
    gradient: (params, batch) -> (loss, gradients) of one replica.
    optimizer: Runs on the mean gradient, clipping included.
    aggregator: Averages over replicas.
    state: The shared state.
    batches: This replica's batches, leaves [num_steps, ...].

  Returns:
    The new state; the replica's own loss and the mean gradient's norm by
    step, [num_steps] each.
  """

  def body(carry: SharedState, batch: Tree):
    loss, own = gradient(carry.params, batch)
    mean, exchange = aggregator.update(own, carry.exchange)
    updates, kept = optimizer.update(mean, carry.optimizer, carry.params)
    params = optax.apply_updates(carry.params, updates)
    seen = StepMetrics(loss, optax.tree.norm(mean))
    seen = jax.tree.map(lambda x: x.astype(jnp.float32), seen)
    return SharedState(params, kept, exchange), seen

  return jax.lax.scan(body, state, batches)
