"""Runs a method's rounds for all replicas, window by window.

The host goes through the windows of the schedule. The program of a window
(`window.WindowProgram`) is mapped over the replica axis and compiled once for
every kind of window; step counts and the numbers of fragments are data. A
window is given the states of its own fragments. The flush at the end of a run
is the same programs without inner steps.

On one device nothing travels that steps could hide. There the steps, the sends
and the applies of a window are programs of their own, each compiled once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import Replicas, with_shardings
from dilocox_jax.outer.drift import Drift, drift_axes
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.plan.schedule.membership import (
  RoundParticipation,
  WindowParticipation,
)
from dilocox_jax.plan.schedule.sync_schedule import Event, Window
from dilocox_jax.rounds.alone import (
  INNER_STEP,
  OUTER_STEP,
  refusing_collectives,
)
from dilocox_jax.rounds.exchange_program import arrived_axes
from dilocox_jax.rounds.in_program import InProgram
from dilocox_jax.rounds.runtime import Runtime, WindowWork
from dilocox_jax.rounds.states import RoundState, RoundStates
from dilocox_jax.rounds.window import (
  InnerProgress,
  InnerStep,
  ReplicaState,
  StepMetrics,
  WindowInput,
  WindowKind,
  WindowProgram,
  with_frozen,
)
from dilocox_jax.trees import Tree, leaves_by_path, shardings_of

MakeRuntime = Callable[[OuterStep, Replicas], Runtime]


def in_program(outer: OuterStep, replicas: Replicas) -> Runtime:
  """Returns the runtime in which the window's own program exchanges."""
  del outer
  return InProgram(replicas)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rounds:
  """Runs the windows of a method for all replicas.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    view: Cuts fragments out of the parameters.
    replicas: Number of replicas, and their devices.
    inner_step: Optimizer step of one replica.
    outer_memory: Memory of the fragments' states, "device" or "pinned_host".
    make_runtime: Function from `outer` and `replicas` to what dispatches the
      exchanges (`runtime`).
    frozen: Parameters that inner steps read and nobody trains.
  """

  outer: OuterStep
  view: FragmentView
  replicas: Replicas
  inner_step: InnerStep
  outer_memory: str = host_memory.DEVICE
  make_runtime: MakeRuntime = in_program
  frozen: Tree | None = None

  @functools.cached_property
  def states(self) -> RoundStates:
    """Makes and changes the states of all replicas."""
    return RoundStates(self.outer, self.view, self.replicas, self.outer_memory)

  @functools.cached_property
  def runtime(self) -> Runtime:
    """What dispatches the exchanges."""
    return self.make_runtime(self.outer, self.replicas)

  def init(self, params: Tree, optimizer: Tree) -> RoundState:
    """Returns the first state, as `RoundStates.init`.

    Args:
      params: Parameters of the model, without a replica axis.
      optimizer: Inner optimizer state of one replica to start from.

    Raises:
      ValueError: As `RoundStates.init`, or if the outer step needs replicas
        that are programs of their own (`rounds.alone`).
    """
    self.runtime.check(lambda: self.states.check_outer(params))
    return self.states.init(params, optimizer)

  def outer_params(self, state: RoundState) -> Tree:
    """Returns the outer parameters to evaluate and to keep, on the device."""
    return self.states.outer_params(state)

  def run(
    self,
    state: RoundState,
    batches: Tree,
    windows: Sequence[Window] | None = None,
    participation: RoundParticipation | None = None,
    *,
    one_at_a_time: bool = False,
  ) -> tuple[RoundState, StepMetrics, list[Drift]]:
    """Runs inner steps and the events of the schedule that follow them.

    The new state reuses the memory of the old one, so the caller must not read
    the old state again.

    Args:
      state: State of all replicas.
      batches: Leaves [M, n, ...]: a batch for every replica and inner step.
        Where there are several processes, each passes the batches of its own
        replicas (`Replicas.own`).
      windows: Windows of these n steps; None: those of the schedule after the
        steps that the state has done.
      participation: What each replica does in them; None: all the same. A
        replica that takes h steps reads its first h batches.
      one_at_a_time: Whether a window is only dispatched when the one before has
        ended. Then a program runs while none is compiled, and the two can be
        timed apart.

    Returns:
      The new state; losses and gradient norms [M, n]; a drift for each apply,
      with axes as in `drift_axes`.

    Raises:
      ValueError: If leaves of `batches` do not begin with the same two axes.
    """
    num_steps = self._num_steps(batches)
    done = int(jax.device_get(state.step))
    if windows is None:
      schedule = self.outer.method.schedule
      windows = schedule.windows(done, done + num_steps)
    if participation and participation.returning:
      state = self.states.rejoin(
        state, participation.returning, participation.source_replica
      )
    batches = self.replicas.place_batches(batches)
    state, progress, drifts = self._windows(
      state,
      batches,
      num_steps,
      windows,
      participation,
      one_at_a_time=one_at_a_time,
    )
    if participation:
      state = self.states.advance_schedules(state, num_steps, progress.step)
    state = self.states.with_step(state, done + num_steps)
    return state, progress.metrics, drifts

  def _num_steps(self, batches: Tree) -> int:
    """Returns how many batches there are for each replica of this process."""
    sizes = {k: np.shape(x)[:2] for k, x in leaves_by_path(batches).items()}
    require(bool(sizes), "batches: there is no leaf")
    wanted = (len(self.replicas.own), *next(iter(sizes.values()))[1:])
    for path, size in sizes.items():
      require(
        size == wanted and len(size) == 2,
        f"batches: leaf {path!r} begins with axes of {size} instead of "
        f"{wanted}: a batch for every replica and inner step",
      )
    return wanted[1]

  def flush(
    self, state: RoundState, participation: RoundParticipation | None = None
  ) -> tuple[RoundState, list[Drift]]:
    """Exchanges and applies every update that is pending or not yet sent.

    Without a flush, the last progress of a run would still be in flight, and a
    method would be judged on old parameters.

    Args:
      state: State of all replicas. It stays valid after the call.
      participation: Who takes part in the flush; None: all replicas alike.

    Returns:
      The flushed state, in which nothing is in flight and the replicas'
      parameters are the outer parameters; the drift of every exchange, in the
      order of `SyncSchedule.flush_windows`.
    """
    step = int(jax.device_get(state.step))
    windows = self.outer.method.schedule.flush_windows(step)
    # A copy, since the programs of windows use the memory of their state again.
    state = jax.device_put(state, shardings_of(state), may_alias=False)
    state, progress, drifts = self._windows(
      state,
      batches=None,
      num_steps=0,
      windows=windows,
      participation=participation,
    )
    newest = tuple(map(self.states.on_device, state.fragments))
    params = self.states.adopted(progress.replica.params, newest)
    replica = state.replica._replace(params=params)
    return state._replace(replica=replica), drifts

  def replay(self, state: RoundState, windows: Sequence[Window]) -> RoundState:
    """Returns the state after windows without inner steps.

    Args:
      state: State of all replicas.
      windows: Windows whose `num_steps` is 0.
    """
    state, _, _ = self._windows(
      state, batches=None, num_steps=0, windows=windows, participation=None
    )
    return state

  def _windows(
    self,
    state: RoundState,
    batches: Tree | None,
    num_steps: int,
    windows: Sequence[Window],
    participation: RoundParticipation | None,
    *,
    one_at_a_time: bool = False,
  ) -> tuple[RoundState, InnerProgress, list[Drift]]:
    """Runs windows one after the other."""
    progress = self._progress(
      state.replica, num_steps, participation is not None
    )
    shares = participation.windows if participation else [None] * len(windows)
    pairs = list(zip(windows, shares, strict=True))
    if self.runtime.splits_windows:
      pairs = [(part, share) for each, share in pairs for part in each.parts]
    fragments = list(state.fragments)
    drifts = []
    for window, share in pairs:
      given = self._given(window, share, progress, batches, fragments)
      kind = self.kind(window, share)
      if one_at_a_time:
        jax.block_until_ready(given)
      progress, applied, sent, drift = self._run(window, kind, given, fragments)
      for event, new in ((window.applied, applied), (window.sent, sent)):
        if event and new is not None:
          left = new.in_flight or fragments[event.fragment].in_flight[1:]
          new = new._replace(in_flight=left)
          fragments[event.fragment] = self.states.kept(new)
      if window.applied:
        drifts.append(drift)
    state = RoundState(progress.replica, tuple(fragments), state.step)
    return state, progress, drifts

  def _progress(
    self, replica: ReplicaState, num_steps: int, differs: bool
  ) -> InnerProgress:
    """Returns the progress with which the windows of a round begin.

    Args:
      replica: State of all replicas.
      num_steps: Inner steps of the round, n.
      differs: Whether replicas take different steps, so that each has a counter
        of its own.
    """
    count = self.replicas.num_replicas
    zeros: Any = np.zeros((count, num_steps), np.float32)
    metrics = self.replicas.place(StepMetrics(zeros, zeros), 0)
    # New zeros, since the programs of windows use their memory again.
    zero = np.zeros((count,) if differs else (), np.int32)
    step = self.replicas.place(zero, 0 if differs else None)
    return InnerProgress(replica, step, metrics)

  def kind(
    self, window: Window, share: WindowParticipation | None = None
  ) -> WindowKind:
    """Returns what decides the program of a window.

    Args:
      window: The window.
      share: What each replica does in it; None: all do the same.
    """
    return WindowKind(
      applied=self._group_of(window.applied),
      sent=self._group_of(window.sent),
      is_same=window.is_same,
      has_steps=window.num_steps > 0,
      follows_send=window.follows_send,
      differs=share is not None,
    )

  def _group_of(self, event: Event | None) -> int | None:
    """Returns the group of an event's fragment; None if there is no event."""
    if event is None:
      return None
    return self.view.groups[event.fragment]

  def _given(
    self,
    window: Window,
    share: WindowParticipation | None,
    progress: InnerProgress,
    batches: Tree | None,
    fragments: Sequence[FragmentState],
  ) -> WindowInput:
    """Returns what the program of a window is given.

    Args:
      window: The window.
      share: What each replica does in it; None: all do the same.
      progress: The replicas before it.
      batches: Batches of the round, leaves [M, n, ...].
      fragments: States of all fragments before it.
    """
    count = self.states.number(window.num_steps)
    weight = None
    if share:
      count = self.replicas.place(np.array(share.num_steps, np.int32), 0)
    if share and share.weights and window.applied:
      weight = self.replicas.place(np.array(share.weights), 0)
    given = WindowInput(progress, None, count)
    if window.num_steps:
      given = given._replace(batches=batches, frozen=self.frozen)
    return self._with_fragments(
      given._replace(weight=weight),
      window,
      lambda fragment: self.states.on_device(fragments[fragment]),
      self.states.index,
    )

  def _run(
    self,
    window: Window,
    kind: WindowKind,
    given: WindowInput,
    fragments: Sequence[FragmentState],
  ) -> tuple:
    """Runs what the runtime takes of a window, then the rest in its program."""
    work = WindowWork(
      window=window,
      kind=kind,
      given=given,
      fragments=tuple(fragments),
      take_steps=lambda: self._take_steps(kind, given),
    )
    progress, arrived = self.runtime.run(work)
    if arrived is not None:
      kind = dataclasses.replace(kind, has_steps=False, has_arrived=True)
      given = given._replace(
        progress=progress,
        batches=None,
        frozen=None,
        applied=given.applied._replace(exchange=None),
        arrived=arrived,
      )
    return self._run_program(kind, given)

  def _take_steps(self, kind: WindowKind, given: WindowInput) -> InnerProgress:
    """Takes the inner steps of a window in a program of their own."""
    if not kind.has_steps:
      return given.progress
    steps = WindowInput(
      given.progress, given.batches, given.num_steps, frozen=given.frozen
    )
    progress, *_ = self.program(WindowKind())(*steps)
    return progress

  def _run_program(self, kind: WindowKind, given: WindowInput) -> tuple:
    """Runs the program of a window; without steps, on the parameters alone.

    So it is compiled once, however many steps a round has.
    """
    if kind.has_steps:
      return self.program(kind)(*given)
    none: Any = None
    before = given.progress
    alone = before.replica._replace(optimizer=none)
    given = given._replace(progress=InnerProgress(alone, none, none))
    found, *events = self.program(kind)(*given)
    replica = found.replica._replace(optimizer=before.replica.optimizer)
    return before._replace(replica=replica), *events

  @functools.cache  # noqa: B019 - programs live as long as the run.
  def program(self, kind: WindowKind):
    """The jitted program of all windows of a kind (`WindowProgram.run`)."""
    window = WindowProgram(self.outer, self.view, self._alone_step, kind)
    run_window = refusing_collectives(OUTER_STEP, window.run, self.replicas)
    divided = self.replicas.divided

    def replica_program(*args):
      progress, applied, sent, drift = run_window(WindowInput(*args))
      progress = progress._replace(replica=divided(progress.replica))
      return progress, divided(applied), divided(sent), drift

    mapped = self.replicas.map(replica_program, *self._program_axes(kind))
    donated = ["progress", "applied", "sent"]
    if kind.sent == kind.applied and not kind.has_arrived:
      donated += ["due"]  # What is sent takes its place.
    if not kind.has_steps and not self.runtime.reuses_states:
      donated = []
    numbers = tuple(map(WindowInput._fields.index, donated))
    return jax.jit(mapped, donate_argnums=numbers)

  @property
  def _alone_step(self) -> InnerStep:
    """The inner step, which refuses collectives of replicas that are apart."""
    return refusing_collectives(INNER_STEP, self.inner_step, self.replicas)

  def check_alone(self, params: Tree, optimizer: Tree, batch: Tree) -> None:
    """Refuses code that needs an axis of replicas which are apart.

    Everything is traced with shapes alone, so nothing is computed or compiled.

    Args:
      params: Parameters of the model, or their shapes and types.
      optimizer: Inner optimizer state of one replica, or its shapes and types.
      batch: Batch of one inner step, or its shapes and types, leaves [B, ...].

    Raises:
      ValueError: One line (`rounds.alone`).
    """
    self.states.check_outer(params)
    replica = self.states.abstract(params, optimizer).replica
    batch = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), batch
    )
    per_replica = 0
    step = self.replicas.map(
      with_frozen(self._alone_step, self.frozen),
      (per_replica, per_replica, per_replica),
      per_replica,
    )
    jax.eval_shape(step, replica.params, replica.optimizer, batch)

  def _program_axes(self, kind: WindowKind) -> tuple[Any, Any]:
    """Replica axes of a window's arguments and results, tree prefixes."""
    own: Any = 0 if kind.differs else None
    per_replica: Any = 0
    axes = self.outer.axes
    has_arrived = kind.has_arrived
    applied = None if kind.applied is None else axes
    has_other = kind.sent is not None and not kind.is_same
    sent = axes if has_other else None
    given = WindowInput(
      InnerProgress(self.states.axes.replica, own, per_replica),
      per_replica if kind.has_steps else None,
      own,
      applied=axes._replace(exchange=None) if has_arrived else applied,
      due=0,
      sent=sent,
      weight=own,
      arrived=arrived_axes(self.outer) if has_arrived else None,
    )
    drift = applied and drift_axes(self.outer.aggregator.is_shared)
    return tuple(given), (given.progress, applied, sent, drift)

  def lowered(
    self, state: RoundState, batches: Tree, window: Window
  ) -> jax.stages.Lowered:
    """Returns the program of a window, not compiled yet.

    Args:
      state: Shapes, types and shardings of the state before it (`abstract`).
      batches: Shapes and types of batches, leaves [M, n, ...].
      window: A window of the schedule.
    """
    replicas = self.replicas

    def shape(sizes, axis=None, dtype: Any = jnp.int32) -> Any:
      sharding = replicas.whole(axis)
      return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def fragment(number: int) -> FragmentState:
      old = state.fragments[number]
      return with_shardings(old, self.states.shardings(old))

    def index(number: int) -> Any:
      found = self.view.index(number)
      return None if found is None else shape(found.shape)

    batches = jax.tree.map(
      lambda leaf: leaf.update(sharding=replicas.batch_sharding), batches
    )
    num_steps = jax.tree.leaves(batches)[0].shape[1]
    values = shape((replicas.num_replicas, num_steps), 0, jnp.float32)
    metrics = StepMetrics(values, values)
    progress = InnerProgress(state.replica, shape(()), metrics)
    given = WindowInput(progress, batches, shape(()), frozen=self.frozen)
    given = self._with_fragments(given, window, fragment, index)
    return self.program(self.kind(window)).lower(*given)

  def _with_fragments(
    self,
    given: WindowInput,
    window: Window,
    state_of: Callable[[int], FragmentState],
    index_of: Callable[[int], Any],
  ) -> WindowInput:
    """Adds what is applied in a window, and what else is sent.

    What is applied is apart from its oldest pseudo-gradient in flight, and from
    the others where the window does not read them.
    """
    indices: list[Any] = [None, None]
    if window.applied:
      state = state_of(window.applied.fragment)
      due, *left = state.in_flight or (None,)
      if not window.is_same and not window.follows_send:
        left = ()
      indices[0] = index_of(window.applied.fragment)
      applied = state._replace(in_flight=tuple(left))
      given = given._replace(applied=applied, due=due)
    if window.sent and not window.is_same:
      indices[1] = index_of(window.sent.fragment)
      given = given._replace(sent=state_of(window.sent.fragment))
    return given._replace(indices=tuple(indices))
