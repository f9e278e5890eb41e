"""Makes and changes the training state of all replicas in this JAX runtime.

Every fragment (a part of the parameters) has an outer state of its own. So a
program for one fragment need not get the states of the others.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.aggregators.mailbox_mean import EncodedMessage
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
from dilocox_jax.trees import (
  Array,
  Index,
  Tree,
  check_trainable,
  has_values,
  shardings_of,
)


class RoundState(NamedTuple):
  """The whole training state of all replicas in this JAX runtime.

  Attributes:
    replica: Parameters and inner optimizer states, leaves [M, ...].
    fragments: Outer state of each of the P fragments (parts of the parameters).
    step: Inner steps of the schedule that are done (int32 scalar).
  """

  replica: ReplicaState
  fragments: tuple[FragmentState, ...]
  step: Array


@dataclasses.dataclass(frozen=True, eq=False)
class RoundStates:
  """Makes and changes the states of all replicas in this JAX runtime.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    view: Cuts fragments (parts of the parameters) out of a tree.
    replicas: Number of replicas, and their devices.
    outer_memory: Where the fragments' states are kept while no program uses
      them: "device", or "pinned_host", the memory of the host.
  """

  outer: OuterStep
  view: FragmentView
  replicas: Replicas
  outer_memory: str = host_memory.DEVICE

  @property
  def axes(self) -> RoundState:
    """Replica axis of each part of a `RoundState`, as a prefix of its tree.

    It is 0 for arrays [M, ...], and None for arrays that all replicas share.
    """
    per_replica: Any = 0
    shared: Any = None
    fragments = (self.outer.axes,) * self.view.count
    replica = ReplicaState(per_replica, per_replica, per_replica)
    return RoundState(replica, fragments, shared)

  def init(self, params: Tree, optimizer: Tree) -> RoundState:
    """Builds the first state, in which all replicas have equal parameters.

    Args:
      params: Parameters of the model, without a replica axis.
      optimizer: Inner optimizer state of one replica to start from.

    Raises:
      ValueError: In one of these cases:

        - The parameters have no values, or do not fit the fragments.
        - A leaf of the parameters is no array of real floats.
        - The outer optimizer is schedule-free without
          `dilocox_jax.schedule_free`, or keeps an average inside another
          transformation.
    """
    check_trainable(params)
    require(
      has_values(params),
      "the parameters have no values: there is nothing to train",
    )
    self.view.check(params)
    replicated = self._jitted(self._replicated, params, optimizer)
    programs = {}  # By group: fragments of a group have equal shapes.
    fragments = []
    for fragment, group in enumerate(self.view.groups):
      index = self.index(fragment)
      if group not in programs:
        programs[group] = self._jitted(
          self._first_fragment(group), params, index
        )
      fragments.append(self.in_outer_memory(programs[group](params, index)))
    replica = replicated(params, optimizer)
    return RoundState(replica, tuple(fragments), self.number(0))

  def check_outer(self, params: Tree) -> None:
    """Refuses outer steps with collectives that cannot reach other replicas.

    The outer step is only traced.

    Args:
      params: Parameters of the model, or their shapes and types.

    Raises:
      ValueError: If the outer step uses the replica axis although the other
        replicas are other programs that meet in a store (a folder or a
        bucket). Also if `keep_unsent` is True with a rule and a delay that do
        not allow it.
    """
    trace = refusing_collectives(OUTER_STEP, self._outer_step, self.replicas)
    mapped = self.replicas.map(trace, (self.outer.axes,), 0)
    for group in set(self.view.groups):
      fragment = self.view.groups.index(group)
      jax.eval_shape(mapped, self._abstract(params, fragment, 0))

  def _outer_step(self, state: FragmentState) -> FragmentState:
    """Measures, exchanges and applies a fragment; only traced, never run."""
    # The outer parameters stand in for the replica's own, of equal shapes.
    fresh = self.outer.measure(state, (), state.params)
    exchange = self.outer.exchange_coroutine(state, fresh)
    leaving = next(exchange)
    try:
      while True:
        leaving = exchange.send(_arrived_alone(leaving))
    except StopIteration as stop:
      result, aggregator_state = stop.value
    state = state._replace(exchange=aggregator_state)
    return self.outer.apply(state, state.params, result, fresh)[0]

  def _replicated(self, params: Tree, optimizer: Tree) -> ReplicaState:
    """Returns M copies of one replica's first state, leaves [M, ...]."""
    correction = self.outer.first_correction(params)
    state = ReplicaState(params, optimizer, correction)
    return jax.tree.map(self.replicas.copies, state)

  def _jitted(self, function: Callable, *args: Any) -> Callable:
    """Jits a function that returns a part of the state, with its shardings.

    The part is a `ReplicaState` or a `FragmentState`. Of `args` only the shapes
    are read.
    """
    shardings = self.shardings(jax.eval_shape(function, *args))
    return jax.jit(function, out_shardings=shardings)

  @functools.cache  # noqa: B019 - programs live as long as the run.
  def _first_fragment(self, group: int) -> Callable:
    """Returns a function that makes the first state of a fragment of a group.

    Fragments of a group have equal shapes. The function takes the parameters
    and the index of the fragment in its group.
    """

    def first(params: Tree, index: Any) -> FragmentState:
      state = self.outer.init(self.view.extract(params, group, index))
      return map_prefix(self.replicas.copies, self.outer.axes, state)

    return first

  def shardings(self, part: Any) -> Any:
    """Returns the sharding of each leaf of a part of the state.

    The part is a `ReplicaState` or a `FragmentState`, or their shapes.
    """
    is_replica = isinstance(part, ReplicaState)
    axes = self.axes.replica if is_replica else self.outer.axes
    return self.replicas.state_shardings(part, axes)

  def abstract(
    self, params: Tree, optimizer: Tree, in_flight: Sequence[int] = ()
  ) -> RoundState:
    """Returns shapes, types and shardings of a state.

    Args:
      params: Shapes and types of the parameters, without a replica axis.
      optimizer: Shapes and types of one replica's inner optimizer state.
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
    """Returns shapes, types and shardings of a fragment's state.

    `count` is the number of its pseudo-gradients in flight.
    """
    group = self.view.groups[fragment]
    index = self.view.index(fragment)

    def make(params: Tree, index: Any) -> FragmentState:
      values = self.view.extract(params, group, index)
      sent = jax.tree.map(self.replicas.copies, values)
      first = self._first_fragment(group)(params, index)
      return first._replace(in_flight=(sent,) * count)

    state = jax.eval_shape(make, params, index)
    shardings = self.shardings(state)
    if self.outer_memory != host_memory.DEVICE:
      shardings = host_memory.with_memory_kind(shardings, self.outer_memory)
    return with_shardings(state, shardings)

  @functools.cache  # noqa: B019 - a few numbers.
  def number(self, value: int) -> Array:
    """Returns an int32 scalar on all devices.

    Equal numbers share one array, so a program must not reuse its memory.
    """
    return self.replicas.place(np.asarray(value, np.int32), None)

  @functools.cache  # noqa: B019 - P small arrays.
  def index(self, fragment: int) -> Any:
    """Returns the index of a fragment in its group, as an array on all devices.

    Fragments of equal shapes are a group. The result is None if the fragment
    needs no index (`FragmentView.index`).
    """
    index = self.view.index(fragment)
    return None if index is None else self.replicas.place(index, None)

  def on_device(self, state: FragmentState) -> FragmentState:
    """Returns a fragment's state, moved to the devices' memory if needed."""
    if self.outer_memory == host_memory.DEVICE:
      return state
    return host_memory.moved(state, host_memory.DEVICE)

  def in_outer_memory(self, state: FragmentState) -> FragmentState:
    """Returns a fragment's state, moved to `outer_memory` if needed."""
    if self.outer_memory == host_memory.DEVICE:
      return state
    return host_memory.moved(state, self.outer_memory)

  def with_step(self, state: RoundState, step: int) -> RoundState:
    """Returns the state with another value of its counter `step`."""
    placed = self.replicas.place(np.asarray(step, np.int32), None)
    return state._replace(step=placed)

  def outer_params(self, state: RoundState) -> Tree:
    """Returns the outer parameters to evaluate and to keep, on the devices.

    They have no replica axis: if every replica has its own, the mean over the
    replicas is returned. If the outer optimizer keeps a running average of the
    outer parameters (`outer.average`), this average takes their place.
    """
    fragments = tuple(map(self.on_device, state.fragments))
    params = self._joined(state.replica.params, fragments)
    return params if self.outer.is_shared else mean_of(params)

  @functools.cached_property
  def _joined(self):
    """The jitted program that joins the outer parameters of all fragments.

    It takes the parameters [M, ...] and the states of all fragments. If the
    outer optimizer keeps a running average of the outer parameters, the program
    joins this average instead.
    """
    out = None if self.outer.is_shared else 0
    return self._joining(
      lambda fragment: parameters_to_keep(fragment.optimizer, fragment.params),
      out,
    )

  @functools.cached_property
  def adopted(self):
    """The jitted program that gives each replica the outer parameters.

    It takes the parameters [M, ...] and the states of all fragments, and
    returns new parameters [M, ...].
    """
    return self._joining(lambda fragment: fragment.params, 0)

  def _joining(self, part: Callable[[FragmentState], Tree], out: int | None):
    """Returns a jitted program that joins `part` of each fragment's state.

    The program takes the parameters [M, ...] and the states of all fragments.
    The joined tree has leaves [M, ...] if `out` is 0, and leaves [...] that all
    replicas share if it is None.
    """

    def replica_program(params: Tree, fragments: tuple[FragmentState, ...]):
      joined = self.view.merge(params, list(map(part, fragments)))
      return self.replicas.divided(joined)

    axes = 0, self.axes.fragments
    return jax.jit(self.replicas.map(replica_program, axes, out))

  def rejoin(
    self, state: RoundState, returning: Sequence[int], source_replica: int
  ) -> RoundState:
    """Lets replicas begin again from the outer parameters.

    These replicas get a copy of the source replica's inner optimizer state.
    Their own state of the aggregator, e.g. a residual of error feedback, begins
    anew. Their correction and their pseudo-gradients in flight become zeros.
    The replicas that are not in `returning` stay as they are.

    Args:
      state: State of all replicas, whose memory is reused.
      returning: Indices of the replicas that begin again.
      source_replica: Index of the replica whose optimizer state is copied; it
        may be in `returning`.
    """
    begins = np.isin(np.arange(self.replicas.num_replicas), list(returning))
    placed = self.replicas.place((begins, np.int32(source_replica)), None)
    shardings = shardings_of(state)
    rejoin = jax.jit(self._rejoin, donate_argnums=0, out_shardings=shardings)
    return rejoin(state, *placed)

  def _rejoin(
    self, state: RoundState, begins: Array, source_replica: Index
  ) -> RoundState:
    """Does the work of `rejoin`, as a function that can be compiled.

    `begins` [M] says whether each replica begins again.
    """
    source_optimizer = jax.tree.map(
      lambda leaf: leaf[source_replica], state.replica.optimizer
    )
    like = jax.tree.map(lambda leaf: leaf[0], state.replica.params)
    params = self.view.merge(like, [each.params for each in state.fragments])

    def first_fragment(old: FragmentState) -> FragmentState:
      new = self.outer.init(old.params)
      new = map_prefix(self.replicas.copies, self.outer.axes, new)
      return new._replace(in_flight=jax.tree.map(jnp.zeros_like, old.in_flight))

    start = RoundState(
      replica=self._replicated(params, source_optimizer),
      fragments=tuple(map(first_fragment, state.fragments)),
      step=state.step,
    )

    # `choose` takes the new values of the replicas that begin again. `begins`
    # [M] gets as many axes as the leaf [M, ...].
    def choose(old: Array, new: Array) -> Array:
      other_axes = tuple(range(1, old.ndim))
      return jnp.where(jnp.expand_dims(begins, other_axes), new, old)

    def choose_subtree(axis: int | None, old: Tree, new: Tree) -> Tree:
      if axis is None:
        return old
      return jax.tree.map(choose, old, new)

    # Only leaves with an axis [M] change; all replicas share the other leaves.
    return jax.tree.map(
      choose_subtree, self.axes, state, start, is_leaf=is_none
    )

  def advance_schedules(
    self, state: RoundState, num_steps: int, taken: Array | None = None
  ) -> RoundState:
    """Moves learning-rate schedules on by the steps that each replica missed.

    All replicas then have the same learning rate again.

    Args:
      state: State of all replicas, whose memory is reused.
      num_steps: Number of inner steps by which the run has gone on.
      taken: How many of these steps each replica has taken, [M] int32. None: no
        replica took any.
    """
    if taken is None:
      zeros = np.zeros(self.replicas.num_replicas, np.int32)
      taken = self.replicas.place(zeros, 0)
    replica = self._advance(state.replica, taken, self.number(num_steps))
    return state._replace(replica=replica)

  @functools.cached_property
  def _advance(self):
    """The jitted program (replica, taken, num_steps) -> replica.

    It moves learning-rate schedules on by the `num_steps` - `taken` [M] steps
    that each replica missed.
    """

    def replica_program(replica: ReplicaState, taken: Index, num_steps: Index):
      optimizer = advanced(replica.optimizer, num_steps - taken)
      return replica._replace(optimizer=optimizer)

    axes = self.axes.replica
    mapped = self.replicas.map(replica_program, (axes, 0, None), axes)
    return jax.jit(mapped, donate_argnums=0)


def _arrived_alone(leaving: Tree) -> Tree:
  """Returns what an exchange would receive if no other replica had sent.

  It differs from `leaving` only if the exchange is through a mailbox (a folder
  or a bucket).
  """
  if not isinstance(leaving, tuple):
    return leaving
  if not isinstance(leaving[0], EncodedMessage):
    return leaving
  message, is_finite = leaving
  weights = jnp.ones(1, jnp.float32)
  return [array[None] for array in message.arrays], weights, is_finite


@jax.jit
def mean_of(tree: Tree) -> Tree:
  """Returns the mean of each leaf [M, ...] over all replicas."""
  return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
