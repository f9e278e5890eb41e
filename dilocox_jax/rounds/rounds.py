"""Runs rounds of inner and outer steps for the replicas of a JAX runtime.

A round consists of *windows*: some inner steps, after which a fragment (a part
of the parameters) may be *applied*, *sent* or both. To send a fragment means to
measure its pseudo-gradient, which is then in flight. To apply a fragment means
to go on with the mean of its oldest pseudo-gradient in flight.

`window.WindowProgram` is the program of a window for one replica. It is mapped
over the replicas, and compiled once for each kind of window. If inner steps
cannot hide an exchange, e.g. because all replicas are on one device, a window
is first divided into windows that do one thing each.
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

# Function (outer step, replicas) -> runtime that dispatches the exchanges.
MakeRuntime = Callable[[OuterStep, Replicas], Runtime]


def in_program(outer: OuterStep, replicas: Replicas) -> Runtime:
  """Returns an `InProgram`, which leaves exchanges to compiled programs."""
  del outer
  return InProgram(replicas)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rounds:
  """Runs inner and outer steps for all replicas in this JAX runtime.

  A round consists of windows: some inner steps, after which a fragment (a part
  of the parameters) may be applied, sent or both. To send it means to measure
  its pseudo-gradient. To apply it means to go on with the mean of an earlier
  one.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    view: Cuts fragments out of the parameters.
    replicas: Number of replicas, and their devices.
    inner_step: Optimizer step of one replica: function (params, optimizer
      state, batch) -> (params, optimizer state, (loss, gradient norm)).
    outer_memory: Where the states of fragments are kept while no program uses
      them: "device", or "pinned_host", the memory of the host.
    make_runtime: Function (outer, replicas) -> object that decides how
      exchanges run (`rounds.runtime`).
    frozen: Parameters that are not trained. `inner_step` gets them as one more
      argument, `frozen`. None: all parameters are trained.
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
    """The object that makes and changes the states of all replicas."""
    return RoundStates(self.outer, self.view, self.replicas, self.outer_memory)

  @functools.cached_property
  def runtime(self) -> Runtime:
    """The object that decides how exchanges run (`rounds.runtime`)."""
    return self.make_runtime(self.outer, self.replicas)

  def init(self, params: Tree, optimizer: Tree) -> RoundState:
    """Builds the first state, in which all replicas have equal parameters.

    Args:
      params: Parameters of the model, without a replica axis.
      optimizer: Inner optimizer state of one replica to start from.

    Raises:
      ValueError: If `RoundStates.init` refuses the parameters or the outer
        optimizer. If replicas meet in a mailbox (a folder or a bucket), also in
        one of these cases:

        - The outer step uses a collective over replicas.
        - The apply rule gives each replica outer parameters of its own.
        - `keep_unsent` is True with a rule and a delay that do not allow it.
    """
    self.runtime.check(lambda: self.states.check_outer(params))
    return self.states.init(params, optimizer)

  def outer_params(self, state: RoundState) -> Tree:
    """Returns the outer parameters to evaluate and to keep, on the devices.

    They have no replica axis: if every replica has its own, the mean over the
    replicas is returned. If the outer optimizer keeps a running average of the
    outer parameters (`outer.average`), this average takes their place.

    Raises:
      ValueError: If `state` is no `RoundState`.
    """
    _check_state(state)
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
    """Runs n inner steps, and the sends and applies among them.

    A send measures a pseudo-gradient, and an apply applies a mean. The new
    state reuses the memory of the old one, which must not be read again.

    Args:
      state: State of all replicas.
      batches: Leaves [M, n, ...]: a batch for every replica and inner step. One
        of several processes passes only the rows of its own replicas
        (`Replicas.own`).
      windows: The n steps divided into windows: some inner steps each, then
        perhaps an apply and a send. None: windows as the schedule says.
      participation: Which replicas first begin again from the outer parameters,
        and what each replica does in the windows. A replica that takes h steps
        reads its first h batches. None: all replicas do the same.
      one_at_a_time: Whether a window is dispatched only after the window before
        it has ended, so that compiling and running can be timed apart.

    Returns:
      The new state; the losses and gradient norms, [M, n], with zeros for the
      steps that a replica does not take; for each apply, in order, the norms of
      the pseudo-gradients (`Drift`).

    Raises:
      ValueError: In one of these cases:

        - `state` is no `RoundState`, for example because it is the whole tuple
          that an earlier call returned.
        - `batches` has no leaf, or the first two axes of a leaf have other
          lengths than described above.
        - `participation` has another number of windows than `windows`.
        - `keep_unsent` is True with a rule and a delay that do not allow it.
      ReplicaStaleError: With a mailbox (a folder or a bucket), if this replica
        has fallen behind or its state differs from that of the others. Call
        `join_rounds`.
      StoppedError: With a mailbox, if joining again would not help.
    """
    _check_state(state)
    num_steps = self._num_steps(batches)
    steps_done = int(jax.device_get(state.step))
    if windows is None:
      schedule = self.outer.method.schedule
      windows = schedule.windows(steps_done, steps_done + num_steps)
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
    state = self.states.with_step(state, steps_done + num_steps)
    return state, progress.metrics, drifts

  def _num_steps(self, batches: Tree) -> int:
    """Returns n; raises ValueError unless leaves are [own replicas, n, ...]."""
    first_axes = {
      path: np.shape(leaf)[:2] for path, leaf in leaves_by_path(batches).items()
    }
    require(bool(first_axes), "batches: there is no leaf")
    # The first leaf says what n is.
    any_axes = next(iter(first_axes.values()))
    num_steps = any_axes[1] if len(any_axes) == 2 else "n"
    expected = (len(self.replicas.own), num_steps)
    for path, axes in first_axes.items():
      require(
        axes == expected,
        f"batches: leaf {path!r} begins with axes of {axes} instead of "
        f"({expected[0]}, {num_steps}): a batch for every replica and inner "
        "step",
      )
    return any_axes[1]

  def flush(
    self, state: RoundState, participation: RoundParticipation | None = None
  ) -> tuple[RoundState, list[Drift]]:
    """Averages and applies progress that is not in the outer parameters yet.

    Call it at the end of a run. The progress is in the pseudo-gradients in
    flight, or was not measured yet.

    Args:
      state: State of all replicas. It stays valid after the call.
      participation: Which replicas take part, and with which weight; None: all
        replicas do.

    Returns:
      The new state, in which nothing is in flight and the replicas' parameters
      are the outer parameters; for each exchange, in order, the norms of the
      pseudo-gradients (`Drift`).

    Raises:
      ValueError: If `state` is no `RoundState`.
      ReplicaStaleError: With a mailbox (a folder or a bucket), if this replica
        has fallen behind or its state differs from that of the others. Call
        `join_rounds`.
      StoppedError: With a mailbox, if joining again would not help.
    """
    _check_state(state)
    step = int(jax.device_get(state.step))
    windows = self.outer.method.schedule.flush_windows(step)
    # A copy, because the programs of windows reuse the memory of their state.
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
    """Measures pseudo-gradients and applies means, without inner steps.

    The result has the `step` of `state`.

    Args:
      state: State of all replicas, whose memory may be reused.
      windows: Windows whose `num_steps` is 0. Each has a send (a measurement),
        an apply, or both.
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
    """Runs windows (inner steps, then perhaps an apply and a send) in order.

    `batches` are on their devices, leaves [M, n, ...] with n = `num_steps`;
    None if the windows have no inner steps.

    Returns:
      The new state, but with the old counter `step`; the replicas after the
      last window, with their metrics; a `Drift` for each apply, in order.
    """
    progress = self._first_progress(
      state.replica, num_steps, participation is not None
    )
    by_window: Sequence[WindowParticipation | None] = [None] * len(windows)
    if participation:
      by_window = participation.windows
    pairs = list(zip(windows, by_window, strict=True))
    if self.runtime.splits_windows:
      # A window becomes up to three: its inner steps, its apply and its send.
      pairs = [
        (part, window_participation)
        for window, window_participation in pairs
        for part in window.parts
      ]
    fragments = list(state.fragments)
    drifts = []
    for window, window_participation in pairs:
      given = self._window_input(
        window, window_participation, progress, batches, fragments
      )
      kind = self.kind(window, window_participation)
      if one_at_a_time:
        jax.block_until_ready(given)
      progress, applied, sent, drift = self._run_window(
        window, kind, given, fragments
      )
      # If the same fragment is applied and sent, its new state is in `applied`,
      # and `sent` is None.
      for event, new in ((window.applied, applied), (window.sent, sent)):
        if event is None or new is None:
          continue
        in_flight = new.in_flight
        if not in_flight:
          # A program that only applies the oldest pseudo-gradient in flight
          # does not get the newer ones (`_with_fragments`), so it cannot return
          # them. They stay in flight.
          in_flight = fragments[event.fragment].in_flight[1:]
        new = new._replace(in_flight=in_flight)
        fragments[event.fragment] = self.states.in_outer_memory(new)
      if window.applied:
        drifts.append(drift)
    state = RoundState(progress.replica, tuple(fragments), state.step)
    return state, progress, drifts

  def _first_progress(
    self, replica: ReplicaState, num_steps: int, differs: bool
  ) -> InnerProgress:
    """Returns the replicas before the first step, with metrics of zeros [M, n].

    If replicas may take different numbers of steps (`differs`), the counter of
    steps has an axis [M].
    """
    count = self.replicas.num_replicas
    zeros: Any = np.zeros((count, num_steps), np.float32)
    metrics = self.replicas.place(StepMetrics(zeros, zeros), 0)
    # New zeros every time, because the programs of windows reuse their memory.
    zero = np.zeros((count,) if differs else (), np.int32)
    step = self.replicas.place(zero, 0 if differs else None)
    return InnerProgress(replica, step, metrics)

  def kind(
    self, window: Window, participation: WindowParticipation | None = None
  ) -> WindowKind:
    """Returns the properties for which a window's program is compiled.

    A window is some inner steps, then perhaps an apply and a send. Windows with
    equal properties run the same program. None as `participation` means that
    all replicas do the same.
    """
    return WindowKind(
      applied_group=self._group_of(window.applied),
      sent_group=self._group_of(window.sent),
      is_same=window.is_same,
      has_steps=window.num_steps > 0,
      follows_send=window.follows_send,
      differs=participation is not None,
    )

  def _group_of(self, event: Event | None) -> int | None:
    """Returns the group of an event's fragment; None if there is no event.

    Fragments of a group have equal shapes. An event is a send or an apply.
    """
    if event is None:
      return None
    return self.view.groups[event.fragment]

  def _window_input(
    self,
    window: Window,
    participation: WindowParticipation | None,
    progress: InnerProgress,
    batches: Tree | None,
    fragments: Sequence[FragmentState],
  ) -> WindowInput:
    """Returns the arguments of a window's program, for all replicas."""
    count = self.states.number(window.num_steps)
    weight = None
    if participation:
      num_steps = np.array(participation.num_steps, np.int32)
      count = self.replicas.place(num_steps, 0)
    if participation and participation.weights and window.applied:
      weight = self.replicas.place(np.array(participation.weights), 0)
    given = WindowInput(progress=progress, batches=None, num_steps=count)
    if window.num_steps:
      given = given._replace(batches=batches, frozen=self.frozen)
    return self._with_fragments(
      given._replace(weight=weight),
      window,
      lambda fragment: self.states.on_device(fragments[fragment]),
      self.states.index,
    )

  def _run_window(
    self,
    window: Window,
    kind: WindowKind,
    given: WindowInput,
    fragments: Sequence[FragmentState],
  ) -> tuple:
    """Runs a window; returns `WindowProgram.run`'s results of all replicas."""
    # The runtime runs the exchange and the steps, or neither of them.
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
    """Takes the inner steps of a window, if any, in a program of their own."""
    if not kind.has_steps:
      return given.progress
    steps = WindowInput(
      given.progress, given.batches, given.num_steps, frozen=given.frozen
    )
    progress, *_ = self.program(WindowKind())(*steps)
    return progress

  def _run_program(self, kind: WindowKind, given: WindowInput) -> tuple:
    """Runs a window's program; returns `WindowProgram.run`'s results."""
    if kind.has_steps:
      return self.program(kind)(*given)
    # Without inner steps, metrics, optimizer states and step counters do not
    # change. If the program got the metrics [M, n], it would be compiled again
    # for each n.
    none: Any = None
    before = given.progress
    without_optimizer = before.replica._replace(optimizer=none)
    short = InnerProgress(without_optimizer, step=none, metrics=none)
    after, *fragments_and_drift = self.program(kind)(
      *given._replace(progress=short)
    )
    replica = after.replica._replace(optimizer=before.replica.optimizer)
    return before._replace(replica=replica), *fragments_and_drift

  @functools.cache  # noqa: B019 - programs live as long as the run.
  def program(self, kind: WindowKind):
    """Returns the jitted program that runs a kind of window for all replicas.

    It takes the fields of a `WindowInput`, in order, and may reuse their
    memory. It returns the results of `WindowProgram.run`.
    """
    window = WindowProgram(self.outer, self.view, self._guarded_step, kind)
    run_window = refusing_collectives(OUTER_STEP, window.run, self.replicas)
    divided = self.replicas.divided

    def replica_program(*args):
      progress, applied, sent, drift = run_window(WindowInput(*args))
      progress = progress._replace(replica=divided(progress.replica))
      return progress, divided(applied), divided(sent), drift

    mapped = self.replicas.map(replica_program, *self._program_axes(kind))
    donated = ["progress", "applied", "sent"]
    if kind.sent_group == kind.applied_group and not kind.has_arrived:
      # The new pseudo-gradient in flight, of equal shapes, takes this memory.
      donated += ["due"]
    if not kind.has_steps and not self.runtime.reuses_states:
      donated = []
    numbers = tuple(map(WindowInput._fields.index, donated))
    return jax.jit(mapped, donate_argnums=numbers)

  @property
  def _guarded_step(self) -> InnerStep:
    """`inner_step`, but collectives between programs raise ValueError."""
    return refusing_collectives(INNER_STEP, self.inner_step, self.replicas)

  def check_alone(self, params: Tree, optimizer: Tree, batch: Tree) -> None:
    """Refuses steps with collectives that cannot reach the other replicas.

    The inner and the outer step are only traced.

    Args:
      params: Parameters of the model, or their shapes and types.
      optimizer: Inner optimizer state of one replica, or its shapes and types.
      batch: Batch of one inner step, or its shapes and types, leaves [B, ...].

    Raises:
      ValueError: If a step uses the replica axis although the other replicas
        are other programs that meet in a store (a folder or a bucket). Also if
        `keep_unsent` is True with a rule and a delay that do not allow it.
    """
    self.states.check_outer(params)
    replica = self.states.abstract(params, optimizer).replica
    # The replica axis has length 1, as this program has one replica.
    batch = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), batch
    )
    per_replica = 0
    step = self.replicas.map(
      with_frozen(self._guarded_step, self.frozen),
      (per_replica, per_replica, per_replica),
      per_replica,
    )
    jax.eval_shape(step, replica.params, replica.optimizer, batch)

  def _program_axes(self, kind: WindowKind) -> tuple[Any, Any]:
    """Returns `in_axes` and `out_axes` of a window's program over replicas.

    They are tree prefixes of a `WindowInput` and of `WindowProgram.run`'s
    results: 0 where leaves have a replica axis, None where replicas share them.
    """
    per_replica: Any = 0
    # Number of steps, counter and weight of each replica, if they may differ.
    if_differs: Any = per_replica if kind.differs else None
    axes = self.outer.axes
    applied = None if kind.applied_group is None else axes
    drift = None
    if applied is not None:
      drift = drift_axes(self.outer.aggregator.is_shared)
    # If the same fragment is sent and applied, its state is in `applied`.
    has_other = kind.sent_group is not None and not kind.is_same
    sent = axes if has_other else None
    # The fields that are not named here are shared by all replicas: None.
    arguments = WindowInput(
      progress=InnerProgress(
        self.states.axes.replica, step=if_differs, metrics=per_replica
      ),
      batches=per_replica if kind.has_steps else None,
      num_steps=if_differs,
      applied=applied,
      due=per_replica,
      sent=sent,
      weight=if_differs,
    )
    if kind.has_arrived:
      arguments = arguments._replace(
        applied=axes._replace(exchange=None), arrived=arrived_axes(self.outer)
      )
    return tuple(arguments), (arguments.progress, applied, sent, drift)

  def lowered(
    self, state: RoundState, batches: Tree, window: Window
  ) -> jax.stages.Lowered:
    """Returns the program of a window, traced but not compiled yet.

    In this program all replicas take the same number of steps. It also runs the
    window's exchange, if there is one.

    Args:
      state: Shapes, types and shardings of the state before the window
        (`RoundStates.abstract`).
      batches: Shapes and types of the batches, leaves [M, n, ...], where n is
        the number of inner steps of the whole round.
      window: A window of the schedule, with inner steps.
    """
    replicas = self.replicas

    def shape(sizes, axis=None, dtype: Any = jnp.int32) -> Any:
      sharding = replicas.whole(axis)
      return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    # A program gets these states on the devices, also if they are kept in the
    # memory of the host.
    def fragment(number: int) -> FragmentState:
      old = state.fragments[number]
      return with_shardings(old, self.states.shardings(old))

    def index(number: int) -> Any:
      numbers = self.view.index(number)
      return None if numbers is None else shape(numbers.shape)

    batches = jax.tree.map(
      lambda leaf: leaf.update(sharding=replicas.batch_sharding), batches
    )
    num_steps = jax.tree.leaves(batches)[0].shape[1]
    values = shape((replicas.num_replicas, num_steps), 0, jnp.float32)
    metrics = StepMetrics(values, values)
    progress = InnerProgress(state.replica, step=shape(()), metrics=metrics)
    given = WindowInput(
      progress, batches, num_steps=shape(()), frozen=self.frozen
    )
    given = self._with_fragments(given, window, fragment, index)
    return self.program(self.kind(window)).lower(*given)

  def _with_fragments(
    self,
    given: WindowInput,
    window: Window,
    state_of: Callable[[int], FragmentState],
    index_of: Callable[[int], Any],
  ) -> WindowInput:
    """Adds the states and indices of a window's fragments to its arguments.

    The oldest pseudo-gradient in flight of the applied fragment becomes the
    argument `due`. The newer ones are passed in the fragment's state only if
    the window reads them.
    """
    applied_index = None
    sent_index = None
    if window.applied:
      state = state_of(window.applied.fragment)
      # If nothing is in flight, the window measures what it applies (tau = 0).
      due, *newer = state.in_flight or (None,)
      # The newer ones are read if the window measures the fragment itself, or
      # if the window before it has just measured the newest one.
      if not window.is_same and not window.follows_send:
        newer = ()
      applied = state._replace(in_flight=tuple(newer))
      applied_index = index_of(window.applied.fragment)
      given = given._replace(applied=applied, due=due)
    if window.sent and not window.is_same:
      sent_index = index_of(window.sent.fragment)
      given = given._replace(sent=state_of(window.sent.fragment))
    return given._replace(indices=(applied_index, sent_index))


def _check_state(state: Any) -> None:
  """Raises ValueError unless a value is the state of all replicas."""
  require(
    isinstance(state, RoundState),
    f"state is a {type(state).__name__} and no RoundState: pass what init "
    "returns, or the first of the values that run and flush return",
  )
