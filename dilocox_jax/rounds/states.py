"""The training state of all replicas: how it begins, changes and ends.

Every fragment has a state of its own. So what a window needs of it can be given
to its program alone, and the rest may lie in the host's memory meanwhile.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from dilocox_jax.optimizers import advanced
from dilocox_jax.outer.average import parameters_to_keep
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.rounds.alone import OUTER_STEP, refusing_collectives
from dilocox_jax.rounds.window import ReplicaState
from dilocox_jax.trees import Array, Index, Tree, has_values, shardings_of


class RoundState(NamedTuple):
  """Holds the whole training state of all replicas between two windows.

  Attributes:
    replica: Parameters and inner optimizers, leaves [M, ...].
    fragments: State of every fragment.
    step: Inner steps of the schedule that are done (int32 scalar).
  """

  replica: ReplicaState
  fragments: tuple[FragmentState, ...]
  step: Array


@dataclasses.dataclass(frozen=True, eq=False)
class RoundStates:
  """Makes and changes the states of all replicas.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    view: Cuts fragments out of the parameters.
    replicas: Number of replicas, and their devices.
    outer_memory: Memory of the fragments' states, "device" or "pinned_host".
  """

  outer: OuterStep
  view: FragmentView
  replicas: Replicas
  outer_memory: str = host_memory.DEVICE

  @property
  def axes(self) -> RoundState:
    """Replica axes of the state as a tree prefix: 0, or None where shared."""
    per_replica: Any = 0
    shared: Any = None
    fragments = (self.outer.axes,) * self.view.count
    replica = ReplicaState(per_replica, per_replica, per_replica)
    return RoundState(replica, fragments, shared)

  def init(self, params: Tree, optimizer: Tree) -> RoundState:
    """Returns the first state, in which all replicas have equal parameters.

    Args:
      params: Parameters of the model, without a replica axis.
      optimizer: Inner optimizer state of one replica to start from.

    Raises:
      ValueError: If a leaf is no array of real floats, or the fragments do not
        fit. What a step counts belongs into the state of the optimizer.
    """
    require(
      has_values(params),
      "the parameters have no values: there is nothing to train",
    )
    self.view.check(params)
    replicated = self._jitted(self._replicated, params, optimizer)
    programs = {}
    fragments = []
    for fragment, group in enumerate(self.view.groups):
      given = params, self.index(fragment)
      if group not in programs:
        programs[group] = self._jitted(self._first(group), *given)
      fragments.append(self.kept(programs[group](*given)))
    replica = replicated(params, optimizer)
    return RoundState(replica, tuple(fragments), self.number(0))

  def check_outer(self, params: Tree) -> None:
    """Refuses an outer step that needs an axis of replicas which are apart.

    It is traced with shapes alone, so nothing is computed or compiled.

    Args:
      params: Parameters of the model, or their shapes and types.

    Raises:
      ValueError: One line (`rounds.alone`).
    """
    trace = refusing_collectives(OUTER_STEP, self._outer_step, self.replicas)
    mapped = self.replicas.map(trace, (self.outer.axes,), 0)
    for group in set(self.view.groups):
      fragment = self.view.groups.index(group)
      jax.eval_shape(mapped, self._abstract(params, fragment, 0))

  def _outer_step(self, state: FragmentState) -> FragmentState:
    """Measures, exchanges and applies a fragment, as if nobody else sent."""
    fresh = self.outer.measure(state, (), state.params)
    exchange = self.outer.exchange_coroutine(state, fresh)
    leaving = next(exchange)
    try:
      while True:
        leaving = exchange.send(_arrived_alone(leaving))
    except StopIteration as stop:
      result, kept = stop.value
    state = state._replace(exchange=kept)
    return self.outer.apply(state, state.params, result, fresh)[0]

  def _replicated(self, params: Tree, optimizer: Tree) -> ReplicaState:
    correction = self.outer.first_correction(params)
    state = ReplicaState(params, optimizer, correction)
    return jax.tree.map(self.replicas.copies, state)

  def _jitted(self, function: Callable, *args: Any) -> Callable:
    """Returns a program of which the result is a part of the state."""
    shardings = self.shardings(jax.eval_shape(function, *args))
    return jax.jit(function, out_shardings=shardings)

  @functools.cache  # noqa: B019 - programs live as long as the run.
  def _first(self, group: int) -> Callable:
    """Returns a function (parameters, index) -> first state of a fragment."""

    def first(params: Tree, index: Any) -> FragmentState:
      state = self.outer.init(self.view.extract(params, group, index))
      return map_prefix(self.replicas.copies, self.outer.axes, state)

    return first

  def shardings(self, part: Any) -> Any:
    """Returns where a `ReplicaState` or a `FragmentState` lies on devices."""
    is_replica = isinstance(part, ReplicaState)
    axes = self.axes.replica if is_replica else self.outer.axes
    return self.replicas.state_shardings(part, axes)

  def abstract(
    self, params: Tree, optimizer: Tree, in_flight: Sequence[int] = ()
  ) -> RoundState:
    """Returns shapes, types and shardings of a state.

    Args:
      params: Shapes and types of the parameters.
      optimizer: Shapes and types of the inner optimizer's state.
      in_flight: Number of pseudo-gradients in flight of every fragment
        (`SyncSchedule.num_in_flight`); empty: none, as in `init`'s result.
    """
    counts = in_flight or (0,) * self.view.count
    replica = jax.eval_shape(self._replicated, params, optimizer)
    step: Any = jax.ShapeDtypeStruct(
      (), jnp.int32, sharding=self.replicas.whole(None)
    )
    return RoundState(
      with_shardings(replica, self.shardings(replica)),
      tuple(self._abstract(params, p, n) for p, n in enumerate(counts)),
      step,
    )

  def _abstract(self, params: Tree, fragment: int, count: int) -> FragmentState:
    group = self.view.groups[fragment]
    index = self.view.index(fragment)

    def make(params: Tree, index: Any) -> FragmentState:
      own = self.view.extract(params, group, index)
      sent = jax.tree.map(self.replicas.copies, own)
      first = self._first(group)(params, index)
      return first._replace(in_flight=(sent,) * count)

    state = jax.eval_shape(make, params, index)
    shardings = self.shardings(state)
    if self.outer_memory != host_memory.DEVICE:
      shardings = host_memory.with_memory_kind(shardings, self.outer_memory)
    return with_shardings(state, shardings)

  @functools.cache  # noqa: B019 - a few numbers.
  def number(self, value: int) -> Array:
    """Returns a number on all devices, where it stays for the next time."""
    return self.replicas.place(np.asarray(value, np.int32), None)

  @functools.cache  # noqa: B019 - P small arrays.
  def index(self, fragment: int) -> Any:
    """Returns `FragmentView.index` of a fragment, on all devices."""
    index = self.view.index(fragment)
    return None if index is None else self.replicas.place(index, None)

  def on_device(self, state: FragmentState) -> FragmentState:
    """Returns the state of a fragment in the devices' own memory."""
    if self.outer_memory == host_memory.DEVICE:
      return state
    return host_memory.moved(state, host_memory.DEVICE)

  def kept(self, state: FragmentState) -> FragmentState:
    """Returns the state of a fragment in the memory in which it is kept."""
    if self.outer_memory == host_memory.DEVICE:
      return state
    return host_memory.moved(state, self.outer_memory)

  def with_step(self, state: RoundState, step: int) -> RoundState:
    """Returns the state at another step of a schedule.

    Args:
      state: State of all replicas.
      step: Inner steps of the schedule that count as done.
    """
    placed = self.replicas.place(np.asarray(step, np.int32), None)
    return state._replace(step=placed)

  def outer_params(self, state: RoundState) -> Tree:
    """Returns the outer parameters to evaluate and to keep, on the device.

    They are the average that the outer optimizer keeps, if it keeps one. If
    every replica has its own outer parameters, their mean is returned.
    """
    fragments = tuple(map(self.on_device, state.fragments))
    params = self._joined(state.replica.params, fragments)
    return params if self.outer.is_shared else mean_of(params)

  @functools.cached_property
  def _joined(self):
    """The jitted program (parameters, fragments) -> parameters to keep."""
    out = None if self.outer.is_shared else 0
    return self._joining(
      lambda f: parameters_to_keep(f.optimizer, f.params), out
    )

  @functools.cached_property
  def adopted(self):
    """The jitted program (parameters, fragments) -> outer ones for all."""
    return self._joining(lambda fragment: fragment.params, 0)

  def _joining(self, part: Callable[[FragmentState], Tree], out: int | None):
    def replica_program(params: Tree, fragments: tuple[FragmentState, ...]):
      joined = self.view.merge(params, list(map(part, fragments)))
      return self.replicas.divided(joined)

    axes = 0, self.axes.fragments
    return jax.jit(self.replicas.map(replica_program, axes, out))

  def rejoin(
    self, state: RoundState, returning: Sequence[int], source_replica: int
  ) -> RoundState:
    """Lets replicas begin as copies of another one.

    They go on from the outer parameters, with the inner optimizer state of the
    source replica, no residual and nothing in flight.

    Args:
      state: State of all replicas, whose memory is reused.
      returning: Indices of the replicas that begin.
      source_replica: Index of the replica whose optimizer state they copy.
    """
    begins = np.isin(np.arange(self.replicas.num_replicas), list(returning))
    placed = self.replicas.place((begins, np.int32(source_replica)), None)
    shardings = shardings_of(state)
    rejoin = jax.jit(self._rejoin, donate_argnums=0, out_shardings=shardings)
    return rejoin(state, *placed)

  def _rejoin(
    self, state: RoundState, begins: Array, source_replica: Index
  ) -> RoundState:
    """Gives the replicas that begin the values of a first state.

    Only leaves with an axis [M] change; the others are shared by all replicas.

    Args:
      state: State of all replicas.
      begins: Whether each replica begins, [M].
      source_replica: Index of the replica whose optimizer state they copy.
    """
    inner = jax.tree.map(
      lambda leaf: leaf[source_replica], state.replica.optimizer
    )
    like = jax.tree.map(lambda leaf: leaf[0], state.replica.params)
    params = self.view.merge(like, [each.params for each in state.fragments])

    def first(old: FragmentState) -> FragmentState:
      new = self.outer.init(old.params)
      new = map_prefix(self.replicas.copies, self.outer.axes, new)
      return new._replace(in_flight=jax.tree.map(jnp.zeros_like, old.in_flight))

    fragments = tuple(map(first, state.fragments))
    start = RoundState(self._replicated(params, inner), fragments, state.step)

    def chosen(axis, old, new):
      def choose(old, new):
        mask = begins.reshape(-1, *(1,) * (old.ndim - 1))
        return jnp.where(mask, new, old)

      return old if axis is None else jax.tree.map(choose, old, new)

    return jax.tree.map(chosen, self.axes, state, start, is_leaf=is_none)

  def advance_schedules(
    self, state: RoundState, num_steps: int, taken: Array | None = None
  ) -> RoundState:
    """Lets learning rates go on as if inner steps had been taken.

    Args:
      state: State of all replicas.
      num_steps: Inner steps by which they go on.
      taken: Those that each replica has taken, [M]; None: none.
    """
    if taken is None:
      zeros = np.zeros(self.replicas.num_replicas, np.int32)
      taken = self.replicas.place(zeros, 0)
    replica = self._advance(state.replica, taken, self.number(num_steps))
    return state._replace(replica=replica)

  @functools.cached_property
  def _advance(self):
    """The jitted program that moves on schedules of steps not taken."""

    def replica_program(replica: ReplicaState, taken: Index, due: Index):
      optimizer = advanced(replica.optimizer, due - taken)
      return replica._replace(optimizer=optimizer)

    axes = self.axes.replica
    mapped = self.replicas.map(replica_program, (axes, 0, None), axes)
    return jax.jit(mapped, donate_argnums=0)


def _arrived_alone(leaving: Tree) -> Tree:
  """Returns what a store would bring if this replica alone had sent.

  Args:
    leaving: The arrays that are sent, and whether they are finite. An exchange
      that does not send by a store may yield anything, which comes back.
  """
  if not isinstance(leaving, tuple) or not isinstance(leaving[0], Sequence):
    return leaving
  arrays, is_finite = leaving
  weights = jnp.ones(1, jnp.float32)
  return [array[None] for array in arrays], weights, is_finite


@jax.jit
def mean_of(tree: Tree) -> Tree:
  """Returns the mean of leaves [M, ...] over replicas."""
  return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
