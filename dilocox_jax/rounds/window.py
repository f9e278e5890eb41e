"""One window of a schedule, for one replica: inner steps, then their events.

The host goes from window to window (`rounds`). In a window a replica takes
inner steps, measures the fragment that is sent, applies the one that is due,
and keeps what it measured in flight. What is due is exchanged behind the
steps: each message leaves before a stretch of them and arrives after it. The
loop over the steps and the message have no data in common, so the compiler may
run them side by side.

For example H = 4, P = 1 and tau = 4 in the second round. The pseudo-gradient of
step 4 is exchanged while steps 5 to 8 run. After step 8 the replica measures a
new one, applies that of step 4, and the new one is in flight. With tau = 0 it
measures after step 8, exchanges that, waits for the result and applies it.
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
from dilocox_jax.plan.overlap import stretch_ends, stretches
from dilocox_jax.trees import Array, Index, Scalar, Tree

# Name of the loop over inner steps in a compiled program.
INNER_STEPS = "inner_steps"


class ReplicaState(NamedTuple):
  """State of one replica beside that of its fragments.

  Attributes:
    params: Parameters of the replica.
    optimizer: State of the inner optimizer.
    correction: What is added to the parameters after each inner step
      (`ApplyRule.correct`), a tree like them; None: nothing.
  """

  params: Tree
  optimizer: Tree
  correction: Tree | None = None


class StepMetrics(NamedTuple):
  """Holds metrics of inner steps. Each field is [num_steps] float32."""

  loss: Array
  grad_norm: Array


class InnerProgress(NamedTuple):
  """Holds what inner steps change.

  Attributes:
    replica: Parameters and inner optimizer of the replica.
    step: Number of the batches that were used.
    metrics: Metrics of these steps, and zeros for the steps to come.
  """

  replica: ReplicaState
  step: Index
  metrics: StepMetrics


InnerStep = Callable[..., tuple[Tree, Tree, tuple]]
RunSteps = Callable[[InnerProgress, Index], InnerProgress]


@dataclasses.dataclass(frozen=True)
class WindowKind:
  """What decides the program of a window; all else is data.

  Attributes:
    applied: Group of the fragment that is applied (`fragment_view`), or None.
    sent: Group of the fragment that is sent, or None.
    is_same: Whether one fragment is applied and sent.
    has_steps: Whether there are inner steps.
    follows_send: Whether what is applied follows a send of the same fragment
      on the same step (`plan.schedule.sync_schedule.Window`).
    has_arrived: Whether what is applied was exchanged by another program.
    differs: Whether replicas take different steps and have different weights.
  """

  applied: int | None = None
  sent: int | None = None
  is_same: bool = False
  has_steps: bool = True
  follows_send: bool = False
  has_arrived: bool = False
  differs: bool = False


class WindowInput(NamedTuple):
  """What a window of one replica is given.

  Attributes:
    progress: The replica before the window.
    batches: Batches that `progress.step` counts, leaves [n, ...].
    num_steps: Inner steps of the window.
    applied: State of the fragment that is applied, without `due`.
    due: Its oldest pseudo-gradient in flight, which is applied; None if what is
      applied is measured in this window.
    sent: State of the fragment that is sent, if it is another one.
    indices: Indices of both fragments in their groups (`FragmentView.index`).
    weight: Factor of this replica in the exchange; None: all have the same.
    arrived: Result of the exchange and new state of the aggregator, if another
      program has exchanged what is applied.
    frozen: Parameters that inner steps read and nobody trains; None: none.
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
  """Runs a window of one replica.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    view: Cuts fragments out of the replica's parameters.
    inner_step: Function (params, optimizer state, batch) -> (params, optimizer
      state, (loss, gradient norm)). If anything is frozen, it has an argument
      `frozen` too.
    kind: What the window has.
  """

  outer: OuterStep
  view: FragmentView
  inner_step: InnerStep
  kind: WindowKind

  @property
  def _is_at_once(self) -> bool:
    """Whether what is applied is measured in this window, with no delay."""
    return self.kind.is_same and not self.outer.method.schedule.depth

  def run(
    self, given: WindowInput
  ) -> tuple[
    InnerProgress, FragmentState | None, FragmentState | None, Drift | None
  ]:
    """Runs the inner steps and the events.

    Args:
      given: The replica, its batches, and the states of the fragments.

    Returns:
      The replica, both fragments, and the drift of what was applied.
    """
    progress, arrived = self._steps_and_exchange(given)
    replica = progress.replica
    applied = given.applied
    sent = given.sent
    drift = None
    if applied and self.kind.is_same:
      replica, applied, drift = self._apply_and_send(replica, given, arrived)
    elif applied:
      assert arrived is not None, "what is applied was exchanged"
      replica, applied, drift = self._apply(replica, given, arrived)
    if sent:
      replica, sent = self._send(replica, sent, given.indices[1])
    return progress._replace(replica=replica), applied, sent, drift

  @property
  def _applied_group(self) -> int:
    assert self.kind.applied is not None, "nothing is applied"
    return self.kind.applied

  def _steps_and_exchange(
    self, given: WindowInput
  ) -> tuple[InnerProgress, Arrived | None]:
    """Takes the inner steps, and exchanges what is due behind them."""
    run_steps = self._run_steps(given.batches, given.frozen)
    is_due = given.applied and not given.arrived and not self._is_at_once
    if is_due and self.kind.has_steps:
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
    if is_due:
      arrived = self.outer.exchange(given.applied, given.due, given.weight)
    return progress, arrived

  def _run_steps(self, batches: Tree, frozen: Tree | None) -> RunSteps:
    if not self.kind.has_steps:
      return lambda progress, count: progress
    return inner_steps(with_frozen(self.inner_step, frozen), batches)

  def _apply(
    self, replica: ReplicaState, given: WindowInput, arrived: Arrived
  ) -> tuple[ReplicaState, FragmentState, Drift]:
    """Applies a fragment that is not sent in this window."""
    state = given.applied
    group = self._applied_group
    index = given.indices[0]
    fresh = events.no_measurement(state)
    if self.kind.follows_send:  # The window before has measured it.
      fresh = (given.due, *state.in_flight)[-1]
    state, own, result = events.apply_arrived(self.outer, arrived)(
      state, self.view.extract(replica.params, group, index), fresh
    )
    assert result is not None, "something is applied"
    replica = self._with_fragment(replica, index, own, result)
    return replica, state, measure_drift(result)

  def _apply_and_send(
    self, replica: ReplicaState, given: WindowInput, arrived: Arrived | None
  ) -> tuple[ReplicaState, FragmentState, Drift]:
    """Measures a fragment, applies what is due of it, and sends it."""
    group = self._applied_group
    index = given.indices[0]
    due = () if given.due is None else (given.due,)
    apply = events.exchange_at_once(self.outer, given.weight)
    if arrived is not None:
      apply = events.apply_arrived(self.outer, arrived)
    state, own, result = events.measure_apply_send(
      self.outer,
      given.applied,
      self.view.extract(replica.params, group, index),
      in_flight=(*due, *given.applied.in_flight),
      apply=apply,
      num_arrived=1,
    )
    assert result is not None, "something is applied"
    replica = self._with_fragment(replica, index, own, result)
    return replica, state, measure_drift(result)

  def _with_fragment(
    self, replica: ReplicaState, index: Any, own: Tree, result: ExchangeResult
  ) -> ReplicaState:
    """Returns the replica after an apply.

    Args:
      replica: The replica before.
      index: Index of the fragment that was applied.
      own: New parameters of the fragment.
      result: Result of its exchange.
    """
    group = self._applied_group
    correction = replica.correction
    if correction is not None:
      of_fragment = self.outer.correct(
        self.view.extract(correction, group, index), result
      )
      correction = self.view.insert(correction, group, index, of_fragment)
    params = self.view.insert(replica.params, group, index, own)
    return replica._replace(params=params, correction=correction)

  def _send(
    self, replica: ReplicaState, state: FragmentState, index: Any
  ) -> tuple[ReplicaState, FragmentState]:
    """Measures a fragment, which is in flight from now on."""
    assert self.kind.sent is not None, "nothing is sent"
    group = self.kind.sent
    own = self.view.extract(replica.params, group, index)
    state, new, _ = events.measure_apply_send(
      self.outer,
      state,
      own,
      in_flight=state.in_flight,
      apply=self._apply_while_in_flight(state),
      num_arrived=0,
    )
    if new is not own:
      params = self.view.insert(replica.params, group, index, new)
      replica = replica._replace(params=params)
    return replica, state

  def _apply_while_in_flight(self, state: FragmentState) -> events.Apply:
    """Returns what a send applies: nothing, but by some rules the first."""
    if state.in_flight:
      return lambda state, own, fresh: (state, own, None)
    return events.apply_nothing_yet(self.outer)


def with_frozen(function: Callable, frozen: Tree | None) -> Callable:
  """Gives a function its argument `frozen`, if there is anything frozen.

  Args:
    function: An inner step, a gradient or a loss.
    frozen: Parameters that it reads and nobody trains; None: it takes none.
  """
  if frozen is None:
    return function
  return functools.partial(function, frozen=frozen)


def inner_steps(inner_step: InnerStep, batches: Tree) -> RunSteps:
  """Returns a function (progress, count) that runs `count` inner steps.

  Args:
    inner_step: Function (params, optimizer state, batch) as in `WindowProgram`.
    batches: Batches, leaves [n, ...].
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
  own: Tree,
  num_steps: Index,
  weight: Scalar | None = None,
) -> tuple[Any, Arrived]:
  """Exchanges behind inner steps, a stretch of them for each message.

  Low rank: send the left factor, run steps, receive its mean, make it
  orthonormal, send the right factor, run the other steps, receive its mean.

  Left to itself, the compiler may end a transfer before the loop, or start it
  behind the loop. The barriers keep both ends in their places: the loop needs
  the step counter, which comes with what is sent, and what has arrived comes
  with the counter at the end of the loop.

  Args:
    outer: Exchanges pseudo-gradients.
    run_steps: Function (progress, count) -> progress.
    progress: NamedTuple with a counter `step` that the loop over inner steps
      needs and returns.
    state: State of the fragment.
    own: Its pseudo-gradient of this replica.
    num_steps: Inner steps behind the exchange.
    weight: Weight of this replica, as for `OuterStep.exchange`.

  Returns:
    The progress after the steps, and what `OuterStep.exchange` returns.
  """
  ends = stretch_ends((), 1)
  if outer.aggregator.has_turns and outer.aggregator.stretch_ends:
    ends = outer.aggregator.stretch_ends(state.params)
  run = outer.exchange_coroutine(state, own, weight)
  leaving = next(run)
  for turn, count in enumerate(stretches(num_steps, ends)):
    leaving, step = jax.lax.optimization_barrier((leaving, progress.step))
    arriving = run.send(leaving)
    progress = run_steps(progress._replace(step=step), count)
    arrived, step = jax.lax.optimization_barrier((arriving, progress.step))
    progress = progress._replace(step=step)
    try:
      leaving = run.send(arrived)
    except StopIteration as stop:
      require(
        turn == len(ends) - 1,
        f"the aggregator's stretch_ends is {tuple(ends)}, of {len(ends)} turns,"
        f" but its average ends after {turn + 1}: they must be as many",
      )
      return progress, stop.value
  try:
    while True:  # Turns that `stretch_ends` does not know of.
      leaving = run.send(leaving)
  except StopIteration as stop:
    return progress, stop.value
