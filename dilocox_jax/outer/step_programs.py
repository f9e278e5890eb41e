"""Compiles and runs data-parallel steps of all replicas."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import optax

from dilocox_jax.checks import require
from dilocox_jax.distributed.replicas import Replicas, map_prefix
from dilocox_jax.outer import data_parallel, round_program
from dilocox_jax.pytypes import Aggregator, Tree
from dilocox_jax.trees import shardings_of


@dataclasses.dataclass(frozen=True)
class StepPrograms:
  """Runs data-parallel steps of all replicas.

  Attributes:
    gradient: Function (params, batch) -> (loss, gradients) of one replica.
    optimizer: Optimizer that steps on the mean gradient.
    aggregator: Averages gradients over replicas.
    replicas: Number of replicas, and their devices.
  """

  gradient: Callable
  optimizer: optax.GradientTransformation
  aggregator: Aggregator
  replicas: Replicas

  def __post_init__(self):
    require(
      self.aggregator.is_shared,
      "steps on averaged gradients need one mean for all replicas, but this "
      "exchange gives each its own: take a method with rounds",
    )

  @property
  def axes(self) -> data_parallel.SharedState:
    """Replica axes of the state, a tree prefix (see `programs.state_axes`)."""
    return data_parallel.SharedState(None, None, self.aggregator.axes)

  def init(self, params: Tree) -> data_parallel.SharedState:
    """Returns the first state."""
    places = shardings_of(self.abstract(params))
    return jax.jit(self._start, out_shardings=places)(params)

  def abstract(self, params: Tree) -> data_parallel.SharedState:
    """Returns shapes, types and shardings of `init`'s result."""
    state = jax.eval_shape(self._start, params)
    return self.replicas.abstract(state, self.axes)

  def _start(self, params: Tree) -> data_parallel.SharedState:
    start = data_parallel.SharedState(
      params, self.optimizer.init(params), self.aggregator.init(params)
    )
    return map_prefix(self.replicas.copies, self.axes, start)

  def steps(
    self, state: data_parallel.SharedState, batches: Tree
  ) -> tuple[data_parallel.SharedState, round_program.StepMetrics]:
    """Runs one step for each batch.

    The new state reuses the memory of the old one, so the caller must not read
    the old state again.

    Args:
      state: State that all replicas share.
      batches: Leaves [M, num_steps, ...], as for `RoundPrograms.round`.

    Returns:
      The new state; losses and gradient norms, [M, num_steps].
    """
    return self.compiled(state, self.replicas.place_batches(batches))

  @functools.cached_property
  def compiled(self):
    """The jitted program (state, batches) -> (state, metrics)."""
    parts = self.gradient, self.optimizer, self.aggregator

    def replica_program(state: data_parallel.SharedState, batches: Tree):
      state, metrics = data_parallel.run_steps(*parts, state, batches)
      return self.replicas.divided(state), metrics

    program = self.replicas.map(replica_program, (self.axes, 0), (self.axes, 0))
    return jax.jit(program, donate_argnums=0)
