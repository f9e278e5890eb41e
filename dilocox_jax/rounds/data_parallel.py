"""Data-parallel steps, which average gradients over replicas in every step.

The methods `allreduce` (the baseline) and `cocktail_sgd` consist of these
steps, and other methods can begin with them (warm start).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.distributed.replicas import Replicas, map_prefix
from dilocox_jax.rounds.window import StepMetrics, with_frozen
from dilocox_jax.trees import Tree, shardings_of


class SharedState(NamedTuple):
  """State of data-parallel training, of all replicas.

  Attributes:
    params: Parameters, leaves [...] without a replica axis.
    optimizer: State of the inner optimizer, without a replica axis.
    exchange: State of the aggregator that averages gradients. `Aggregator.axes`
      says which of its leaves have a replica axis.
  """

  params: Tree
  optimizer: Tree
  exchange: Tree


@dataclasses.dataclass(frozen=True)
class StepPrograms:
  """Runs data-parallel steps of all replicas.

  Attributes:
    gradient: Function (params, batch) -> (loss, gradients) of one replica.
    optimizer: Optimizer whose input is the mean gradient.
    aggregator: Averages gradients over replicas.
    replicas: Number of replicas, and their devices.
    frozen: Parameters that are not trained. `gradient` gets them as one more
      argument, `frozen`. None: all parameters are trained.
  """

  gradient: Callable
  optimizer: optax.GradientTransformation
  aggregator: Aggregator
  replicas: Replicas
  frozen: Tree | None = None

  @property
  def axes(self) -> SharedState:
    """Replica axis of each part of a `SharedState`, as a prefix of its tree.

    It is 0 for arrays [M, ...], and None for arrays that all replicas share.
    """
    return SharedState(None, None, self.aggregator.axes)

  def init(self, params: Tree) -> SharedState:
    """Returns the state before the first step, on the devices.

    `params` are the parameters of the model, without a replica axis.
    """
    places = shardings_of(self.abstract(params))
    return jax.jit(self._start, out_shardings=places)(params)

  def abstract(self, params: Tree) -> SharedState:
    """Returns shapes, types and shardings of the state; computes nothing.

    Of `params`, only shapes and types are read.
    """
    state = jax.eval_shape(self._start, params)
    return self.replicas.abstract(state, self.axes)

  def _start(self, params: Tree) -> SharedState:
    """Returns the first state of all replicas from the model's parameters."""
    start = SharedState(
      params, self.optimizer.init(params), self.aggregator.init(params)
    )
    return map_prefix(self.replicas.copies, self.axes, start)

  def steps(
    self, state: SharedState, batches: Tree
  ) -> tuple[SharedState, StepMetrics]:
    """Takes one data-parallel step for each batch of a replica.

    The new state reuses the memory of the old one, which must not be read
    again.

    Args:
      state: State before the first of the steps.
      batches: Leaves [M, num_steps, ...]: a batch for every replica and step.
        Each process passes the batches of its own replicas (`Replicas.own`).

    Returns:
      The new state, and the metrics: the losses of each replica and the norms
      of the mean gradient, both [M, num_steps].
    """
    batches = self.replicas.place_batches(batches)
    return self.compiled(state, batches, self.frozen)

  @functools.cached_property
  def compiled(self):
    """The jitted program (state, batches, frozen) -> (state, metrics).

    It does the work of the method `steps`, which first puts the batches on the
    devices. The program reuses the state's memory.
    """

    def replica_program(
      state: SharedState, batches: Tree, frozen: Tree | None
    ) -> tuple[SharedState, StepMetrics]:
      gradient = with_frozen(self.gradient, frozen)
      state, metrics = jax.lax.scan(
        functools.partial(self._step, gradient), state, batches
      )
      return self.replicas.divided(state), metrics

    program = self.replicas.map(
      replica_program, (self.axes, 0, None), (self.axes, 0)
    )
    return jax.jit(program, donate_argnums=0)

  def _step(
    self, gradient: Callable, state: SharedState, batch: Tree
  ) -> tuple[SharedState, StepMetrics]:
    """Takes one data-parallel step, in the code of one replica.

    Returns:
      The new state; this replica's loss and the norm of the mean gradient.
    """
    # Replicas exchange gradients, never differences of parameters: in floating
    # point a - (a - b) is not always b.
    params = state.params
    loss, gradients = gradient(params, batch)
    mean, exchange = self.aggregator.update(gradients, state.exchange, params)
    updates, optimizer = self.optimizer.update(mean, state.optimizer, params)
    metrics = StepMetrics(loss, optax.tree.norm(mean))
    metrics = jax.tree.map(lambda x: x.astype(jnp.float32), metrics)
    params = optax.apply_updates(params, updates)
    return SharedState(params, optimizer, exchange), metrics
