"""The programs of a run, compiled for all replicas.

One replica's code (`round`, `flush`, `data_parallel`) is mapped over the
replica axis and compiled once for every static shape of a round; which
numbers it runs with is data. Most methods need two shapes: the first rounds,
in which nothing arrives yet, and all the others.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.mesh import Replicas
from dilocox_jax.outer import data_parallel, flush, round
from dilocox_jax.outer.round import ReplicaState, RoundState
from dilocox_jax.outer.transforms import OuterState, OuterTransform
from dilocox_jax.plan.pieces import Piece, Table, pieces
from dilocox_jax.plan.schedule import Window
from dilocox_jax.pytypes import Aggregator, Tree


def state_axes(outer: OuterTransform) -> RoundState:
  """Which parts of the state have a leading replica axis (tree prefix)."""
  own: Any = 0
  outer_axes: list[Any] = [0 if outer.rule.is_personal else None] * 2
  exchange = outer.partition.for_all(outer.aggregator.axes)
  return RoundState(
    OuterState(*outer_axes, exchange=exchange, in_flight=own),
    ReplicaState(own, own),
  )


@dataclasses.dataclass(frozen=True)
class RoundPrograms:
  """Runs rounds of all replicas.

  Attributes:
    outer: The outer side.
    inner_step: One replica's optimizer step.
    replicas: How many, and where.
  """

  outer: OuterTransform
  inner_step: round.InnerStep
  replicas: Replicas

  @functools.cached_property
  def axes(self) -> RoundState:
    """Tree prefix of the state: 0 where leaves are [M, ...]."""
    return state_axes(self.outer)

  def init(self, params: Tree, optimizer: Tree) -> RoundState:
    """The first state: replicas start from the same parameters.

    Args:
      params: Parameters of the model.
      optimizer: Inner optimizer state to start from, one replica's.
    """
    state = jax.jit(self._start)(params, optimizer)
    return self.replicas.place(state, self.axes)

  def abstract(self, params: Tree, optimizer: Tree) -> RoundState:
    """Shapes, types and places of `init`'s result."""
    state = jax.eval_shape(self._start, params, optimizer)
    return self.replicas.abstract(state, self.axes)

  def _start(self, params: Tree, optimizer: Tree) -> RoundState:
    start = RoundState(self.outer.init(params), ReplicaState(params, optimizer))
    return _copied(self.axes, start, self.replicas.num_replicas)

  def round(
    self, state: RoundState, batches: Tree, windows: Sequence[Window]
  ) -> tuple[RoundState, round.StepMetrics, list]:
    """Runs windows of the plan; the old state's memory is used up.

    Args:
      state: State of all replicas.
      batches: Leaves [M, H, ...].
      windows: A round of the method's schedule, or its first part.

    Returns:
      The new state; losses and gradient norms [M, H]; drifts by piece.
    """
    shapes, tables = pieces(self.outer.method.schedule, windows)
    batches = self.replicas.place(batches, 0)
    tables = self.replicas.place(tables, None)
    return self.compiled(shapes)(state, batches, tables)

  @functools.cache  # noqa: B019 - programs live as long as the run.
  def compiled(self, shapes: tuple[Piece, ...]):
    """The jitted program of one static shape: (state, batches, tables)."""

    def one(state: RoundState, batches: Tree, tables: tuple[Table, ...]):
      return round.run_round(
        self.outer, self.inner_step, shapes, state, batches, tables
      )

    over = self.replicas.over(one, (self.axes, 0, None), (self.axes, 0, None))
    return jax.jit(over, donate_argnums=0)

  def flush(self, state: RoundState, step: int) -> RoundState:
    """The state with everything pending and unsent exchanged.

    Args:
      state: State of all replicas; it is left intact.
      step: Inner steps of the schedule finished.
    """
    return self._flush(step)(state)

  @functools.cache  # noqa: B019 - as above.
  def _flush(self, step: int):
    one = functools.partial(flush.flush, self.outer, step)
    return jax.jit(self.replicas.over(one, (self.axes,), self.axes))

  def outer_params(self, state: RoundState) -> Tree:
    """The parameters to evaluate: the outer ones, or their mean."""
    params = state.outer.params
    return mean_of(params) if self.outer.rule.is_personal else params


@dataclasses.dataclass(frozen=True)
class StepPrograms:
  """Runs data-parallel steps of all replicas.

  Attributes:
    gradient: One replica's (params, batch) -> (loss, gradients).
    optimizer: Steps on the mean gradient.
    aggregator: Averages over replicas.
    replicas: How many, and where.
  """

  gradient: Callable
  optimizer: optax.GradientTransformation
  aggregator: Aggregator
  replicas: Replicas

  @property
  def axes(self) -> data_parallel.SharedState:
    """Tree prefix of the state: 0 where leaves are [M, ...]."""
    return data_parallel.SharedState(None, None, self.aggregator.axes)

  def init(self, params: Tree) -> data_parallel.SharedState:
    """The first state."""
    return self.replicas.place(jax.jit(self._start)(params), self.axes)

  def abstract(self, params: Tree) -> data_parallel.SharedState:
    """Shapes, types and places of `init`'s result."""
    state = jax.eval_shape(self._start, params)
    return self.replicas.abstract(state, self.axes)

  def _start(self, params: Tree) -> data_parallel.SharedState:
    start = data_parallel.init_shared(params, self.optimizer, self.aggregator)
    return _copied(self.axes, start, self.replicas.num_replicas)

  def steps(
    self, state: data_parallel.SharedState, batches: Tree
  ) -> tuple[data_parallel.SharedState, round.StepMetrics]:
    """Runs one step a batch; the old state's memory is used up.

    Args:
      state: The shared state.
      batches: Leaves [M, num_steps, ...].

    Returns:
      The new state; losses and gradient norms, [M, num_steps].
    """
    return self.compiled(state, self.replicas.place(batches, 0))

  @functools.cached_property
  def compiled(self):
    """The jitted program: (state, batches)."""
    one = functools.partial(
      data_parallel.run_steps, self.gradient, self.optimizer, self.aggregator
    )
    over = self.replicas.over(one, (self.axes, 0), (self.axes, 0))
    return jax.jit(over, donate_argnums=0)


def _copied(axes, state: Tree, num_replicas: int) -> Tree:
  """A state with [M, ...] leaves wherever a tree prefix says 0."""

  def copy(axis, tree):
    if axis is None:
      return tree
    return jax.tree.map(
      lambda leaf: jnp.broadcast_to(leaf, (num_replicas, *leaf.shape)), tree
    )

  return jax.tree.map(copy, axes, state, is_leaf=lambda x: x is None)


@jax.jit
def mean_of(tree: Tree) -> Tree:
  """The mean of leaves [M, ...] over replicas."""
  return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
