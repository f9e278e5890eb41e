"""Compiles the programs of a run for all replicas.

The code of one replica (`round_program`, `data_parallel`) is mapped over the
replica axis and compiled once for every static shape of a round. The step
counts, fragments and slots of a round are arguments of the program, so they
need no new compilation. Most methods need two shapes: one for the first
rounds, in which nothing is applied yet, and one for all the others.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import (
  Replicas,
  is_none,
  map_prefix,
  with_shardings,
)
from dilocox_jax.outer import flush_program, round_program
from dilocox_jax.outer.drift import Drift, axes_of
from dilocox_jax.outer.exchange_thread import ExchangeThread, ThreadedRounds
from dilocox_jax.outer.round_program import ReplicaState, RoundState
from dilocox_jax.outer.transforms import OuterState, OuterTransform
from dilocox_jax.plan.schedule.membership import RoundAttendance
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.plan.schedule.window_groups import (
  WindowGroup,
  WindowTable,
  window_groups,
)
from dilocox_jax.pytypes import Array, Index, Tree
from dilocox_jax.trees import shardings_of


def state_axes(outer: OuterTransform) -> RoundState:
  """Returns the replica axes of the state, as a tree prefix.

  An axis is 0 for leaves [M, ...], which differ by replica, and None for leaves
  that all replicas share.
  """
  per_replica: Any = 0
  shared: Any = per_replica if outer.is_per_replica else None
  exchange: Any = outer.partition.for_all(outer.aggregator.axes)
  outer_axes = OuterState(shared, shared, exchange, in_flight=per_replica)
  return RoundState(outer_axes, ReplicaState(per_replica, per_replica))


@dataclasses.dataclass(frozen=True, eq=False)
class RoundPrograms:
  """Runs rounds of all replicas.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    inner_step: Optimizer step of one replica.
    replicas: Number of replicas, and their devices.
    outer_memory: Memory of the outer state, "device" or "pinned_host".
    thread: Thread that dispatches the exchanges of a round; None keeps them in
      the round's program.
  """

  outer: OuterTransform
  inner_step: round_program.InnerStep
  replicas: Replicas
  outer_memory: str = host_memory.DEVICE
  thread: ExchangeThread | None = None

  def __post_init__(self):
    require(
      self.thread is None or self.outer_memory == host_memory.DEVICE,
      f"outer_memory={self.outer_memory!r} needs rounds that are one program: "
      "leave the exchange in it, or take outer_memory='device'",
    )

  @functools.cached_property
  def axes(self) -> RoundState:
    """Replica axes of the state, a tree prefix (`state_axes`)."""
    return state_axes(self.outer)

  @functools.cached_property
  def _threaded(self) -> ThreadedRounds | None:
    parts = self.outer, self.inner_step, self.replicas, self.axes
    return ThreadedRounds(*parts, self.thread) if self.thread else None

  def init(self, params: Tree, optimizer: Tree) -> RoundState:
    """Returns the first state, in which all replicas have equal parameters.

    Args:
      params: Parameters of the model, without a replica axis.
      optimizer: Inner optimizer state of one replica to start from.
    """
    places = shardings_of(self.abstract(params, optimizer))
    return jax.jit(self._start, out_shardings=places)(params, optimizer)

  def abstract(self, params: Tree, optimizer: Tree) -> RoundState:
    """Returns shapes, types and shardings of `init`'s result."""
    state = jax.eval_shape(self._start, params, optimizer)
    return with_shardings(state, self._places(state))

  def _places(self, state: RoundState) -> RoundState:
    """Returns the shardings of a state, with the outer state in `outer_memory`.

    Small leaves stay on the device (`host_memory.is_worth_moving`).
    """
    places = self.replicas.state_shardings(state, self.axes)
    if self.outer_memory == host_memory.DEVICE:
      return places

    def moved(axis, leaf, place):
      # Shape of the part of one replica's leaf that one device holds.
      shape = place.shard_shape(leaf.shape)[0 if axis is None else 1 :]
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

  def with_outer_optimizer(self, state: RoundState, other: Tree) -> RoundState:
    """Returns the state with its outer optimizer state replaced by another.

    Args:
      state: State of all replicas.
      other: Outer optimizer state, with the same tree and shapes.
    """
    places = shardings_of(state.outer.optimizer)
    other = self.replicas.place_state(other, self.axes.outer.optimizer)
    placed = jax.jit(lambda tree: tree, out_shardings=places)(other)
    return state._replace(outer=state.outer._replace(optimizer=placed))

  def _start(self, params: Tree, optimizer: Tree) -> RoundState:
    start = RoundState(self.outer.init(params), ReplicaState(params, optimizer))
    return map_prefix(self.replicas.copies, self.axes, start)

  def round(
    self,
    state: RoundState,
    batches: Tree,
    windows: Sequence[Window],
    attendance: RoundAttendance | None = None,
  ) -> tuple[RoundState, round_program.StepMetrics, list]:
    """Runs windows of the plan.

    The new state reuses the memory of the old one, so the caller must not read
    the old state again.

    Args:
      state: State of all replicas.
      batches: Leaves [M, H, ...]. Where there are several processes, each
        passes the batches of its own replicas (`Replicas.own`).
      windows: Windows of a round of the method's schedule, or its first part.
      attendance: What each replica does in them; None: all the same. A replica
        that takes h steps reads the first h batches of the round.

    Returns:
      The new state; losses and gradient norms [M, H]; a drift for each window
      group with an apply, with axes as in `drift.axes_of`, then [num_windows].
    """
    shapes, tables = self.groups(windows, attendance)
    if attendance and attendance.returning:
      state = self.rejoined(state, attendance.returning, attendance.donor)
    batches = self.replicas.place_batches(batches)
    if self._threaded and not attendance and self._threaded.hides(shapes):
      return self._threaded.round(state, batches, shapes, tables)
    tables = self.replicas.place(tables, None)
    program = self.compiled(shapes, self._memories(state))
    return program(state, batches, tables)

  def groups(
    self,
    windows: Sequence[Window],
    attendance: RoundAttendance | None = None,
  ) -> tuple[tuple[WindowGroup, ...], tuple[WindowTable, ...]]:
    """Groups windows of the plan as the program runs them (`window_groups`)."""
    return window_groups(
      self.outer.method.schedule,
      windows,
      attendance,
      are_alike=self.outer.partition.fragments.are_alike,
    )

  def lowered(
    self, state: RoundState, batches: Tree, windows: Sequence[Window]
  ) -> jax.stages.Lowered:
    """Returns the program of `round`, not compiled yet.

    Args:
      state: Shapes, types and shardings of a state (`abstract`).
      batches: Shapes and types of batches, leaves [M, H, ...].
      windows: As for `round`.
    """
    shapes, tables = self.groups(windows)
    batches = jax.tree.map(
      lambda leaf: leaf.update(sharding=self.replicas.batch_sharding), batches
    )
    place = self.replicas.whole(None)
    tables = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
      tables,
    )
    program = self.compiled(shapes, self._memories(state))
    return program.lower(state, batches, tables)

  def _memories(self, state: RoundState):
    """Returns the argument `places` of `compiled`, if it is needed."""
    if self.outer_memory == host_memory.DEVICE:
      return None
    leaves, structure = jax.tree.flatten(state)
    return structure, tuple(leaf.sharding for leaf in leaves)

  @functools.cache  # noqa: B019 - programs live as long as the run.
  def compiled(self, shapes: tuple[WindowGroup, ...], places=None):
    """Returns the jitted program (state, batches, tables) of a round's shape.

    Args:
      shapes: Static shape of the round.
      places: Structure of the state and shardings of its leaves. Only needed
        where the leaves are in two memories. Without the shardings JAX would
        match donated leaves with new ones by shape alone. A leaf for the device
        could then get the host memory of a donated leaf, and the reverse.
    """

    def replica_program(state: RoundState, batches: Tree, tables):
      replicas = self.replicas
      has_links = replicas.layout == "mesh" and replicas.num_replicas > 1
      parts = self.outer, self.inner_step, shapes, state, batches, tables
      state, *reports = round_program.run_round(*parts, has_links)
      return replicas.divided(state), *reports

    drift_axes = axes_of(self.outer.aggregator.is_shared)
    drifts = [drift_axes for shape in shapes if shape.applied]
    axes = (self.axes, 0, None), (self.axes, 0, drifts)
    program = self.replicas.map(replica_program, *axes)
    out_places = None
    if places is not None:
      reports = jax.tree.map(self.replicas.whole, (0, drifts), is_leaf=is_none)
      out_places = (jax.tree.unflatten(*places), *reports)
    return jax.jit(program, donate_argnums=0, out_shardings=out_places)

  def rejoined(
    self, state: RoundState, returning: Sequence[int], donor: int
  ) -> RoundState:
    """Lets replicas begin as copies of another one.

    They go on from the outer parameters, with the donor's inner optimizer
    state, no residual and nothing in flight.

    Args:
      state: State of all replicas, whose memory is reused.
      returning: Indices of the replicas that begin.
      donor: Index of the replica whose optimizer state they copy.
    """
    begins = np.isin(np.arange(self.replicas.num_replicas), list(returning))
    placed = self.replicas.place((begins, np.int32(donor)), None)
    places = shardings_of(state)
    rejoin = jax.jit(self._rejoin, donate_argnums=0, out_shardings=places)
    return rejoin(state, *placed)

  def _rejoin(
    self, state: RoundState, begins: Array, donor: Index
  ) -> RoundState:
    """Takes what begins from a first state, leaf by leaf with an axis [M]."""
    inner = jax.tree.map(lambda leaf: leaf[donor], state.replica.optimizer)
    start = self._start(state.outer.params, inner)

    def chosen(axis, old, new):
      def choose(old, new):
        mask = begins.reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(mask, new, old)

      return old if axis is None else jax.tree.map(choose, old, new)

    return jax.tree.map(chosen, self.axes, state, start, is_leaf=is_none)

  def resized(self, state: RoundState) -> RoundState:
    """Returns the state of another number of replicas with this number.

    Who is too many is dropped. Who is new has a copy of replica 0's rows until
    it begins (`rejoined`).

    Args:
      state: State with leaves [M', ...].
    """
    count = len(jax.tree.leaves(state.replica)[0])
    rows = [m if m < count else 0 for m in range(self.replicas.num_replicas)]

    def resize(state: RoundState) -> RoundState:
      return map_prefix(lambda leaf: leaf[jnp.array(rows)], self.axes, state)

    places = self._places(jax.eval_shape(resize, state))
    return jax.jit(resize, out_shardings=places)(state)

  def flush(
    self,
    state: RoundState,
    step: int,
    attendance: RoundAttendance | None = None,
  ) -> tuple[RoundState, list[Drift]]:
    """Exchanges and applies every update that is pending or not yet sent.

    Args:
      state: State of all replicas. It stays valid after the call.
      step: Number of the schedule's inner steps that are finished.
      attendance: Who takes part in the flush; None: all replicas alike.

    Returns:
      The flushed state; the drift of every exchange of the flush, in the order
      of `SyncSchedule.flush_windows`, axes as in `drift.axes_of`, then [1].
    """
    return self._flush(step, attendance)(state)

  @functools.cache  # noqa: B019 - as above.
  def _flush(self, step: int, attendance: RoundAttendance | None):
    def replica_program(state: RoundState) -> tuple[RoundState, list[Drift]]:
      state, drifts = flush_program.run_flush(
        self.outer, step, state, attendance
      )
      return self.replicas.divided(state), drifts

    windows = self.outer.method.schedule.flush_windows(step)
    drift_axes = axes_of(self.outer.aggregator.is_shared)
    drifts = [drift_axes for window in windows if window.applied]
    axes = self.axes, drifts
    return jax.jit(self.replicas.map(replica_program, (self.axes,), axes))

  @functools.cached_property
  def _average(self):
    def replica_program(outer: OuterState) -> Tree:
      return self.replicas.divided(self.outer.params_to_keep(outer))

    axes = (self.axes.outer,), self.axes.outer.params
    return jax.jit(self.replicas.map(replica_program, *axes))

  def outer_params(self, state: RoundState) -> Tree:
    """Returns the outer parameters to evaluate and to keep, on the device.

    They are the average that the outer optimizer keeps, if it keeps one. If
    every replica has its own outer parameters, their mean is returned.
    """
    params = state.outer.params
    if self.outer.keeps_average(state.outer):
      params = self._average(state.outer)
    if self.outer.is_per_replica:
      return mean_of(params)
    return host_memory.on_device(params)


@jax.jit
def mean_of(tree: Tree) -> Tree:
  """Returns the mean of leaves [M, ...] over replicas."""
  tree = host_memory.on_device(tree)
  return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
