"""Runs a window: inner steps beside an exchange whose mean is then applied.

A fragment is a part of the parameters. In a *window* one replica does the
following, or a part of it:

  1. It takes inner steps. Meanwhile the oldest pseudo-gradient in flight of one
     fragment is averaged over replicas.
  2. It measures a new pseudo-gradient of a fragment (*sends* the fragment).
  3. It goes on with the mean from 1 (*applies* the fragment).
  4. It puts the new pseudo-gradient in flight.

For example, take H = 4 steps a round, P = 1 fragment and a delay of tau = 4
steps. In the second round, the pseudo-gradient of step 4 is averaged while
steps 5 to 8 run. After step 8 the replica measures a new pseudo-gradient and
applies the mean of step 4. The new pseudo-gradient is then in flight.

With tau = 0 the replica measures after step 8, averages this pseudo-gradient at
once, waits for the result and applies it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.checks import require
from dilocox_jax.outer import events
from dilocox_jax.outer.drift import Drift, measure_drift
from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.plan.overlap import PARTS, stretches
from dilocox_jax.trees import Array, Index, Scalar, Tree

# Name of the loop over inner steps in a compiled program.
INNER_STEPS = "inner_steps"


class ReplicaState(NamedTuple):
  """Parameters and inner optimizer of one replica, without any outer state.

  If it stands for all replicas, its leaves have an axis [M] in front.

  Attributes:
    params: Parameters of the replica.
    optimizer: State of the inner optimizer.
    correction: Tree that is added to `params` after each inner step
      (`ApplyRule.correct`). None: nothing is added.
  """

  params: Tree
  optimizer: Tree
  correction: Tree | None = None


class StepMetrics(NamedTuple):
  """Metrics of inner steps of one replica.

  If they stand for all replicas, they have an axis [M] in front.

  Attributes:
    loss: Loss of each inner step, [num_steps] float32.
    grad_norm: Norm of each inner step's gradient, [num_steps] float32.
  """

  loss: Array
  grad_norm: Array


class InnerProgress(NamedTuple):
  """A replica between two inner steps: everything that inner steps change.

  Attributes:
    replica: Parameters and inner optimizer of the replica.
    step: Number of batches read since the call of `Rounds.run`, in all of its
      windows so far. The next step reads the batch of this index (int32
      scalar).
    metrics: Metrics of the inner steps since that call, then zeros for the
      steps to come.
  """

  replica: ReplicaState
  step: Index
  metrics: StepMetrics


# Function (params, optimizer state, batch) -> (params, optimizer state, (loss,
# gradient norm)); see `WindowProgram.inner_step`.
InnerStep = Callable[..., tuple[Tree, Tree, tuple]]
# Function (progress, number of inner steps) -> progress after these steps.
RunSteps = Callable[[InnerProgress, Index], InnerProgress]


@dataclasses.dataclass(frozen=True)
class WindowKind:
  """The properties of a window for which its program is compiled.

  A window is some inner steps, after which a fragment (a part of the
  parameters) may be *applied*, *sent* or both. To send it means to measure its
  pseudo-gradient. To apply it means to go on with the mean of an earlier one.
  Everything else, such as the number of steps, is an argument of the program.

  Attributes:
    applied_group: Number of the group of the fragment that is applied; None if
      no fragment is. Fragments of a group have equal shapes.
    sent_group: Number of the group of the fragment that is sent; None if no
      fragment is.
    is_same: Whether the same fragment is applied and sent.
    has_steps: Whether there are inner steps.
    follows_send: Whether the window before this one has sent the fragment that
      this one applies, with no inner step in between.
    has_arrived: Whether another program has exchanged the pseudo-gradient that
      is applied. `WindowInput.arrived` then has the result.
    differs: Whether replicas may differ from each other in their number of
      steps and their weight in the exchange.
  """

  applied_group: int | None = None
  sent_group: int | None = None
  is_same: bool = False
  has_steps: bool = True
  follows_send: bool = False
  has_arrived: bool = False
  differs: bool = False


# The fields have the type Any, because `Rounds` also puts the replica axis of
# each argument in its place.
class WindowInput(NamedTuple):
  """The arguments of the program of a window, for one replica.

  A window is some inner steps, after which a fragment (a part of the
  parameters) may be *applied*, *sent* or both. To send it means to measure its
  pseudo-gradient. To apply it means to go on with the mean of an earlier one.

  Attributes:
    progress: The replica before the window, an `InnerProgress`.
    batches: Batches of all windows of a call of `Rounds.run`, leaves [n, ...].
      This window begins with batch `progress.step`. None if there are no inner
      steps.
    num_steps: Number of inner steps of the window, int32 scalar.
    applied: `FragmentState` of the fragment that is applied, without the
      pseudo-gradient `due` and without parts that the window does not read;
      None if no fragment is applied.
    due: The oldest pseudo-gradient in flight of the applied fragment, whose
      mean is applied. None if no fragment is applied, or if the window itself
      measures the pseudo-gradient whose mean it applies.
    sent: `FragmentState` of the fragment that is sent; None if no fragment is
      sent, or if it is the applied fragment.
    indices: Index (`FragmentView.index`) of the applied fragment, and of the
      fragment `sent`, in its group of fragments of equal shapes. An index is
      None if there is no such fragment, or if the fragment needs no index.
    weight: Factor of this replica in the mean, float32 scalar
      (`OuterStep.exchange`); None: all weights are equal.
    arrived: Result of the exchange and new state of the aggregator, if another
      program has exchanged `due`; None otherwise.
    frozen: Parameters that inner steps read but do not train; None: there are
      none.
  """

  progress: Any
  batches: Any
  num_steps: Any
  applied: Any = None
  due: Any = None
  sent: Any = None
  indices: tuple[Any, Any] = (None, None)
  weight: Any = None
  arrived: Any = None
  frozen: Any = None


@dataclasses.dataclass(frozen=True)
class WindowProgram:
  """Runs a window of one replica: inner steps, and perhaps an exchange.

  The exchange averages the pseudo-gradient of a fragment (a part of the
  parameters), usually during the steps. After the steps, the window may *apply*
  a fragment (go on with the mean) and *send* a fragment (measure a new
  pseudo-gradient).

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    view: Cuts fragments out of the replica's parameters.
    inner_step: Function (params, optimizer state, batch) -> (params, optimizer
      state, (loss, gradient norm)). If there are frozen parameters, it also
      has a keyword argument `frozen`.
    kind: Whether the window has inner steps, and what it applies and sends.
  """

  outer: OuterStep
  view: FragmentView
  inner_step: InnerStep
  kind: WindowKind

  @property
  def _exchanges_at_once(self) -> bool:
    """Whether the window applies the mean of what it measures (tau = 0)."""
    return self.kind.is_same and not self.outer.method.schedule.depth

  def run(
    self, given: WindowInput
  ) -> tuple[
    InnerProgress, FragmentState | None, FragmentState | None, Drift | None
  ]:
    """Runs the inner steps, the exchange, the apply and the send of the window.

    The exchange averages a pseudo-gradient over replicas. If `given.arrived`
    has its result already, no exchange is run. The apply applies the mean. The
    send only measures a new pseudo-gradient, and keeps it in flight.

    Args:
      given: The replica, its batches, and the states of the fragments.

    Returns:
      The replica after the window; the new states of the fragments
      `given.applied` and `given.sent`, each None where the argument is None;
      norms of the pseudo-gradients whose mean was applied, None if none was.
    """
    progress, arrived = self._steps_and_exchange(given)
    replica = progress.replica
    applied = given.applied
    sent = given.sent
    drift = None
    if applied is not None and self.kind.is_same:
      replica, applied, drift = self._apply_and_send(replica, given, arrived)
    elif applied is not None:
      assert arrived is not None, "the applied fragment was exchanged"
      replica, applied, drift = self._apply(replica, given, arrived)
    if sent is not None:
      replica, sent = self._send(replica, sent, given.indices[1])
    return progress._replace(replica=replica), applied, sent, drift

  @property
  def _applied_group(self) -> int:
    """Number of the group of fragments to which the applied one belongs."""
    assert self.kind.applied_group is not None, "nothing is applied"
    return self.kind.applied_group

  def _steps_and_exchange(
    self, given: WindowInput
  ) -> tuple[InnerProgress, Arrived | None]:
    """Takes the inner steps, and averages `given.due` over replicas meanwhile.

    If another program has averaged it (`given.arrived`), only the steps are
    taken.

    Returns:
      The replica after the steps; the result of the exchange with the
      aggregator's new state, or None if nothing was due.
    """
    run_steps = self._run_steps(given.batches, given.frozen)
    # With tau = 0 nothing is due: `_apply_and_send` measures and exchanges.
    must_exchange = (
      given.applied is not None
      and given.arrived is None
      and not self._exchanges_at_once
    )
    if must_exchange and self.kind.has_steps:
      return exchange_behind_steps(
        self.outer,
        run_steps,
        given.progress,
        given.applied,
        given.due,
        num_steps=given.num_steps,
        weight=given.weight,
      )
    progress = run_steps(given.progress, given.num_steps)
    arrived = given.arrived
    if must_exchange:
      arrived = self.outer.exchange(given.applied, given.due, given.weight)
    return progress, arrived

  def _run_steps(self, batches: Tree, frozen: Tree | None) -> RunSteps:
    """Returns the function that takes the window's inner steps, if any."""
    if not self.kind.has_steps:
      return lambda progress, count: progress
    return inner_steps(with_frozen(self.inner_step, frozen), batches)

  def _apply(
    self, replica: ReplicaState, given: WindowInput, arrived: Arrived
  ) -> tuple[ReplicaState, FragmentState, Drift]:
    """Applies a mean to a fragment that this window does not also measure.

    The method returns the new replica, the fragment's new state, and the norms
    of its pseudo-gradients.
    """
    state = given.applied
    group = self._applied_group
    index = given.indices[0]
    newest = events.no_measurement(state)
    if self.kind.follows_send:
      # The window before has measured the newest pseudo-gradient on this very
      # step. It is `due` itself if nothing else is in flight.
      newest = (given.due, *state.in_flight)[-1]
    state, inner, result = events.apply_arrived(self.outer, arrived)(
      state, self.view.extract(replica.params, group, index), newest
    )
    assert result is not None, "an exchange is applied"
    replica = self._with_applied(replica, index, inner, result)
    return replica, state, measure_drift(result)

  def _apply_and_send(
    self, replica: ReplicaState, given: WindowInput, arrived: Arrived | None
  ) -> tuple[ReplicaState, FragmentState, Drift]:
    """Measures the applied fragment's pseudo-gradient, and applies a mean.

    If `arrived` is None, tau is 0: the new pseudo-gradient is averaged and
    applied at once. Otherwise the mean in `arrived` is applied, which is that
    of an earlier pseudo-gradient. The method returns the new replica, the
    fragment's new state, and the norms of its pseudo-gradients.
    """
    group = self._applied_group
    index = given.indices[0]
    due = () if given.due is None else (given.due,)
    apply = events.exchange_at_once(self.outer, given.weight)
    if arrived is not None:
      apply = events.apply_arrived(self.outer, arrived)
    state, inner, result = events.measure_apply_send(
      self.outer,
      given.applied,
      self.view.extract(replica.params, group, index),
      in_flight=(*due, *given.applied.in_flight),
      apply=apply,
      num_arrived=1,  # The one whose mean is applied is in flight no longer.
    )
    assert result is not None, "an exchange is applied"
    replica = self._with_applied(replica, index, inner, result)
    return replica, state, measure_drift(result)

  def _with_applied(
    self,
    replica: ReplicaState,
    index: Any,
    inner: Tree,
    result: ExchangeResult,
  ) -> ReplicaState:
    """Puts the new parameters `inner` of the applied fragment into the replica.

    The fragment's correction, if any, changes, too (`OuterStep.correct`).
    """
    group = self._applied_group
    correction = replica.correction
    if correction is not None:
      of_fragment = self.outer.correct(
        self.view.extract(correction, group, index), result
      )
      correction = self.view.insert(correction, group, index, of_fragment)
    params = self.view.insert(replica.params, group, index, inner)
    return replica._replace(params=params, correction=correction)

  def _send(
    self, replica: ReplicaState, state: FragmentState, index: Any
  ) -> tuple[ReplicaState, FragmentState]:
    """Measures the pseudo-gradient of a fragment, and puts it in flight.

    The replica's parameters change only under a rule that applies at the first
    send.
    """
    assert self.kind.sent_group is not None, "nothing is sent"
    group = self.kind.sent_group
    inner = self.view.extract(replica.params, group, index)
    state, new, _ = events.measure_apply_send(
      self.outer,
      state,
      inner,
      in_flight=state.in_flight,
      apply=self._apply_while_in_flight(state),
      num_arrived=0,
    )
    if new is not inner:
      params = self.view.insert(replica.params, group, index, new)
      replica = replica._replace(params=params)
    return replica, state

  def _apply_while_in_flight(self, state: FragmentState) -> events.Apply:
    """Returns the argument `apply` of `measure_apply_send` for a send alone.

    It is a function that changes nothing, except at the first send under a rule
    that takes an outer step there (`events.apply_nothing_yet`).
    """
    if state.in_flight:
      return lambda state, inner, fresh: (state, inner, None)
    return events.apply_nothing_yet(self.outer)


def with_frozen(function: Callable, frozen: Tree | None) -> Callable:
  """Fills in the keyword argument `frozen` of a function.

  Args:
    function: An inner step, a gradient or a loss.
    frozen: Parameters that the function reads but that are not trained. None:
      the function has no argument `frozen`, and is returned as it is.
  """
  if frozen is None:
    return function
  return functools.partial(function, frozen=frozen)


def inner_steps(inner_step: InnerStep, batches: Tree) -> RunSteps:
  """Makes a function that takes a given number of inner steps.

  Args:
    inner_step: Function (params, optimizer state, batch) -> (params, optimizer
      state, (loss, gradient norm)).
    batches: Batches of one replica, leaves [n, ...]. The next step takes the
      batch with the index `InnerProgress.step`.

  Returns:
    Function (progress, count) -> progress after `count` more inner steps.
  """

  def body(_, progress: InnerProgress) -> InnerProgress:
    replica, step, metrics = progress
    batch = jax.tree.map(lambda leaf: leaf[step], batches)
    params, optimizer, values = inner_step(
      replica.params, replica.optimizer, batch
    )
    if replica.correction is not None:
      params = optax.apply_updates(params, replica.correction)
    metrics = jax.tree.map(
      lambda buffer, value: buffer.at[step].set(value.astype(buffer.dtype)),
      metrics,
      StepMetrics(*values),
    )
    replica = replica._replace(params=params, optimizer=optimizer)
    return InnerProgress(replica, step + 1, metrics)

  def run_steps(progress: InnerProgress, count: Index) -> InnerProgress:
    with jax.named_scope(INNER_STEPS):
      return jax.lax.fori_loop(jnp.int32(0), count, body, progress)

  return run_steps


def exchange_behind_steps(
  outer: OuterStep,
  run_steps,
  progress: Any,
  state: FragmentState,
  pseudo_gradient: Tree,
  num_steps: Index,
  weight: Scalar | None = None,
) -> tuple[Any, Arrived]:
  """Averages a pseudo-gradient over replicas while inner steps run.

  The aggregator's `stretch_ends` divides the steps among the messages of the
  exchange; without it, all steps run beside the first message. For example,
  with a codec of low rank: send the left factor, run some steps, receive the
  mean of the left factors, make it orthonormal, send the right factor, run the
  other steps, receive the mean of the right factors.

  Args:
    outer: Exchanges pseudo-gradients.
    run_steps: Function (progress, count) -> progress, which takes `count` inner
      steps.
    progress: The replica before the steps, a NamedTuple with their counter
      `step` (`InnerProgress`).
    state: State of the fragment.
    pseudo_gradient: This replica's pseudo-gradient of the fragment.
    num_steps: Number of inner steps that run meanwhile.
    weight: Factor of this replica in the mean, float scalar; None: all weights
      are equal.

  Returns:
    The replica after the steps, and a pair: the result of the exchange and the
    aggregator's new state.

  Raises:
    ValueError: If the exchange has fewer turns (messages that come one after
      the other) than `stretch_ends` has entries.
  """
  # In 1024ths of the steps. By default all steps hide the first turn.
  ends: tuple[int, ...] = (PARTS,)
  if outer.aggregator.has_turns and outer.aggregator.stretch_ends:
    ends = outer.aggregator.stretch_ends(state.params)
  exchange = outer.exchange_coroutine(state, pseudo_gradient, weight)
  leaving = next(exchange)
  # Left to itself, the compiler may end a transfer before the loop over the
  # steps, or start it after the loop. The barriers tie a message that leaves to
  # the counter with which the loop begins, and one that arrives to its end.
  for turn, count in enumerate(stretches(num_steps, ends)):
    leaving, step = jax.lax.optimization_barrier((leaving, progress.step))
    # The coroutine runs the collective, and yields its result before using it.
    arriving = exchange.send(leaving)
    progress = run_steps(progress._replace(step=step), count)
    arrived, step = jax.lax.optimization_barrier((arriving, progress.step))
    progress = progress._replace(step=step)
    try:
      leaving = exchange.send(arrived)
    except StopIteration as stop:
      require(
        turn == len(ends) - 1,
        f"the aggregator's stretch_ends is {tuple(ends)}, of {len(ends)} turns,"
        f" but its average ends after {turn + 1}: they must be as many",
      )
      return progress, stop.value
  try:
    # The turns beyond `stretch_ends` come after all inner steps.
    while True:
      leaving = exchange.send(leaving)
  except StopIteration as stop:
    return progress, stop.value
