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

from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import Replicas, is_none, with_shardings
from dilocox_jax.outer import data_parallel, round_program
from dilocox_jax.outer.drift import AXES, Drift
from dilocox_jax.outer.round_program import ReplicaState, RoundState
from dilocox_jax.outer.transforms import OuterState, OuterTransform
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.plan.schedule.window_groups import (
  WindowGroup,
  WindowTable,
  window_groups,
)
from dilocox_jax.pytypes import Aggregator, Tree


def state_axes(outer: OuterTransform) -> RoundState:
  """Which parts of the state have a leading replica axis (tree prefix)."""
  own: Any = 0
  outer_axes: list[Any] = [0 if outer.rule.is_per_replica else None] * 2
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
    outer_memory: Where the outer state lies, "device" or "pinned_host".
  """

  outer: OuterTransform
  inner_step: round_program.InnerStep
  replicas: Replicas
  outer_memory: str = host_memory.DEVICE

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
    shapes = jax.eval_shape(self._start, params, optimizer)
    places = self._places(shapes)
    return jax.jit(self._start, out_shardings=places)(params, optimizer)

  def abstract(self, params: Tree, optimizer: Tree) -> RoundState:
    """Shapes, types and places of `init`'s result."""
    state = jax.eval_shape(self._start, params, optimizer)
    return with_shardings(state, self._places(state))

  def _places(self, state: RoundState) -> RoundState:
    places = self.replicas.state_shardings(state, self.axes)
    if self.outer_memory == host_memory.DEVICE:
      return places

    def moved(axis, part, place):
      shape = place.shard_shape(part.shape)[0 if axis is None else 1 :]
      if not host_memory.is_worth_moving(shape):
        return place
      return host_memory.with_memory_kind(place, self.outer_memory)

    outer = jax.tree.map(
      lambda axis, *parts: jax.tree.map(functools.partial(moved, axis), *parts),
      self.axes.outer,
      state.outer,
      places.outer,
      is_leaf=is_none,
    )
    return places._replace(outer=outer)

  def with_outer_optimizer(self, state: RoundState, kept: Tree) -> RoundState:
    """A state that goes on from another one's outer optimizer state."""
    places = jax.tree.map(lambda leaf: leaf.sharding, state.outer.optimizer)
    kept = self.replicas.place_state(kept, self.axes.outer.optimizer)
    placed = jax.jit(lambda tree: tree, out_shardings=places)(kept)
    return state._replace(outer=state.outer._replace(optimizer=placed))

  def _start(self, params: Tree, optimizer: Tree) -> RoundState:
    start = RoundState(self.outer.init(params), ReplicaState(params, optimizer))
    return _copied(self.axes, start, self.replicas.num_replicas)

  def round(
    self, state: RoundState, batches: Tree, windows: Sequence[Window]
  ) -> tuple[RoundState, round_program.StepMetrics, list]:
    """Runs windows of the plan; the old state's memory is used up.

    Args:
      state: State of all replicas.
      batches: Leaves [M, H, ...]; of several processes each has its own
        replicas' (`Replicas.own`).
      windows: A round of the method's schedule, or its first part.

    Returns:
      The new state; losses and gradient norms [M, H]; drifts by piece, with
      axes as in `drift.AXES`, then [num_windows].
    """
    shapes, tables = window_groups(self.outer.method.schedule, windows)
    batches = self.replicas.place_batches(batches)
    tables = self.replicas.place(tables, None)
    places = None
    if self.outer_memory != host_memory.DEVICE:
      leaves, structure = jax.tree.flatten(state)
      places = structure, tuple(leaf.sharding for leaf in leaves)
    return self.compiled(shapes, places)(state, batches, tables)

  @functools.cache  # noqa: B019 - programs live as long as the run.
  def compiled(self, shapes: tuple[WindowGroup, ...], places=None):
    """The jitted program of one static shape: (state, batches, tables).

    Args:
      shapes: Static shape of the round.
      places: Structure of the state, and where its leaves lie. Only needed
        where that is in two memories: JAX would else match old leaves with
        new ones by shape alone, and give memory of one kind to the other.
    """

    def one(state: RoundState, batches: Tree, tables: tuple[WindowTable, ...]):
      state, *seen = round_program.run_round(
        self.outer, self.inner_step, shapes, state, batches, tables
      )
      return self.replicas.divided(state), *seen

    drifts = [AXES for shape in shapes if shape.applied]
    over = self.replicas.map(one, (self.axes, 0, None), (self.axes, 0, drifts))
    if places is None:
      return jax.jit(over, donate_argnums=0)
    kept = jax.tree.unflatten(*places)
    seen = jax.tree.map(self.replicas.whole, (0, drifts), is_leaf=is_none)
    return jax.jit(over, donate_argnums=0, out_shardings=(kept, *seen))

  def flush(
    self, state: RoundState, step: int
  ) -> tuple[RoundState, list[Drift]]:
    """Exchanges and applies everything pending and unsent.

    Args:
      state: State of all replicas; it is left intact.
      step: Inner steps of the schedule finished.

    Returns:
      The flushed state; the drift of every exchange of the flush, in the order
      of `SyncSchedule.flush_windows`, with axes as in `drift.AXES`, then [1].
    """
    return self._flush(step)(state)

  @functools.cache  # noqa: B019 - as above.
  def _flush(self, step: int):
    def replica_program(state: RoundState) -> tuple[RoundState, list[Drift]]:
      state, drifts = round_program.run_flush(self.outer, step, state)
      return self.replicas.divided(state), drifts

    windows = self.outer.method.schedule.flush_windows(step)
    drifts = [AXES for window in windows if window.applied]
    return jax.jit(
      self.replicas.map(replica_program, (self.axes,), (self.axes, drifts))
    )

  def outer_params(self, state: RoundState) -> Tree:
    """The parameters to evaluate, on the device: the outer, or their mean."""
    params = state.outer.params
    if self.outer.rule.is_per_replica:
      return mean_of(params)
    return (
      params if self.outer_memory == host_memory.DEVICE else _fetched(params)
    )


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
    shapes = jax.eval_shape(self._start, params)
    places = self.replicas.state_shardings(shapes, self.axes)
    return jax.jit(self._start, out_shardings=places)(params)

  def abstract(self, params: Tree) -> data_parallel.SharedState:
    """Shapes, types and places of `init`'s result."""
    state = jax.eval_shape(self._start, params)
    return self.replicas.abstract(state, self.axes)

  def _start(self, params: Tree) -> data_parallel.SharedState:
    start = data_parallel.init_shared(params, self.optimizer, self.aggregator)
    return _copied(self.axes, start, self.replicas.num_replicas)

  def steps(
    self, state: data_parallel.SharedState, batches: Tree
  ) -> tuple[data_parallel.SharedState, round_program.StepMetrics]:
    """Runs one step a batch; the old state's memory is used up.

    Args:
      state: The shared state.
      batches: Leaves [M, num_steps, ...], as for `RoundPrograms.round`.

    Returns:
      The new state; losses and gradient norms, [M, num_steps].
    """
    return self.compiled(state, self.replicas.place_batches(batches))

  @functools.cached_property
  def compiled(self):
    """The jitted program: (state, batches)."""
    parts = self.gradient, self.optimizer, self.aggregator

    def one(state: data_parallel.SharedState, batches: Tree):
      state, seen = data_parallel.run_steps(*parts, state, batches)
      return self.replicas.divided(state), seen

    over = self.replicas.map(one, (self.axes, 0), (self.axes, 0))
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
  tree = host_memory.on_device(tree)
  return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)


_fetched = jax.jit(host_memory.on_device)
