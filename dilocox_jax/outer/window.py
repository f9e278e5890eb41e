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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.checks import require
from dilocox_jax.outer.cuts import Cuts
from dilocox_jax.outer.outer_step import (
  Drift,
  FragmentState,
  OuterStep,
  measure_drift,
  nothing,
)
from dilocox_jax.plan.collective import stretch_ends, stretches
from dilocox_jax.trees import Array, Index, Scalar, Tree

# Name of the loop over inner steps in a compiled program.
INNER_STEPS = "inner_steps"


class ReplicaState(NamedTuple):
  """Holds the parameters and the inner optimizer state of one replica."""

  params: Tree
  optimizer: Tree


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


InnerStep = Callable[[Tree, Tree, Tree], tuple[Tree, Tree, tuple]]
RunSteps = Callable[[InnerProgress, Index], InnerProgress]


@dataclasses.dataclass(frozen=True)
class WindowKind:
  """What decides the program of a window; all else is data.

  Attributes:
    applied: Group of the fragment that is applied (`cuts`), or None.
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
    places: Places of both fragments in their groups (`Cuts.place`).
    weight: Factor of this replica in the exchange; None: all have the same.
    arrived: Result of the exchange and new state of the aggregator, if another
      program has exchanged what is applied.
  """

  progress: Any
  batches: Any
  num_steps: Any
  applied: Any = None
  due: Any = None
  sent: Any = None
  places: tuple[Any, Any] = (None, None)
  weight: Any = None
  arrived: Any = None


@dataclasses.dataclass(frozen=True)
class WindowProgram:
  """Runs a window of one replica.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    cuts: Cuts fragments out of the replica's parameters.
    inner_step: Function (params, optimizer state, batch) -> (params, optimizer
      state, (loss, gradient norm)).
    kind: What the window has.
  """

  outer: OuterStep
  cuts: Cuts
  inner_step: InnerStep
  kind: WindowKind

  @property
  def _is_at_once(self) -> bool:
    """Whether what is applied is measured in this window, with no delay."""
    return self.kind.is_same and not self.outer.method.schedule.depth

  def run(
    self, given: WindowInput
  ) -> tuple[InnerProgress, FragmentState | None, FragmentState | None, Any]:
    """Runs the inner steps and the events.

    Returns:
      The replica, both fragments, and the drift of what was applied.
    """
    applied, sent, arrived = given.applied, given.sent, given.arrived
    run_steps = self._run_steps(given.batches)
    is_due = applied and not arrived and not self._is_at_once
    if is_due and self.kind.has_steps:
      progress, arrived = exchange_behind_steps(
        *(self.outer, run_steps, given.progress, applied, given.due),
        *(given.num_steps, given.weight),
      )
    else:
      progress = run_steps(given.progress, given.num_steps)
      if is_due:
        arrived = self.outer.exchange(applied, given.due, given.weight)
    params, drift = progress.replica.params, None
    if applied and self.kind.is_same:
      params, applied, drift = self._renew(params, applied, given, arrived)
    elif applied:
      fresh = self._fresh(applied, given.due)
      params, applied, drift = self._apply(
        self.kind.applied, params, applied, given.places[0], arrived, fresh
      )
    if sent:
      params, sent = self._send(params, sent, given.places[1])
    replica = progress.replica._replace(params=params)
    return progress._replace(replica=replica), applied, sent, drift

  def _run_steps(self, batches: Tree) -> RunSteps:
    if not self.kind.has_steps:
      return lambda progress, count: progress
    return inner_steps(self.inner_step, batches)

  def _fresh(self, state: FragmentState, due: Tree) -> Tree:
    """Returns what the window before measured on this step; zeros if nothing.

    Args:
      state: State of the fragment that is applied, without `due`.
      due: Its oldest pseudo-gradient in flight.
    """
    if not self.kind.follows_send:
      return jax.tree.map(jnp.zeros_like, state.params)
    return (due, *state.in_flight)[-1]

  def _renew(self, params: Tree, state: FragmentState, given, arrived):
    """Measures a fragment, applies what is due of it, and sends it."""
    place, due = given.places[0], () if given.due is None else (given.due,)
    own, pending = self._own(params, place), (*due, *state.in_flight)
    fresh = self.outer.measure(state, pending, own)
    if self._is_at_once:
      arrived = self.outer.exchange(state, fresh, given.weight)
    left = (*pending, fresh)[1:]
    params, state, drift = self._apply(
      self.kind.applied, params, state, place, arrived, fresh
    )
    return params, state._replace(in_flight=left), drift

  def _send(self, params: Tree, state: FragmentState, place):
    """Measures a fragment, which is in flight from now on."""
    own = self._own(params, place)
    fresh = self.outer.measure(state, state.in_flight, own)
    is_first_send = not state.in_flight
    if is_first_send and self.outer.rule.applies_at_first_send:
      # No exchange has ended yet. The result is then all zeros, and only this
      # replica's own new measurement changes the parameters.
      none = nothing(state.params), state.exchange
      params, state, _ = self._apply(
        self.kind.sent, params, state, place, none, fresh
      )
    return params, state._replace(in_flight=(*state.in_flight, fresh))

  def _own(self, params: Tree, place: Any) -> Tree:
    assert self.kind.sent is not None, "nothing is sent"
    return self.cuts.take(params, self.kind.sent, place)

  def _apply(
    self, group, params: Tree, state: FragmentState, place, arrived, fresh
  ) -> tuple[Tree, FragmentState, Drift]:
    """Applies what has arrived to the state and to the replica."""
    result, kept = arrived
    own = self.cuts.take(params, group, place)
    state = state._replace(exchange=kept)
    state, own = self.outer.apply(state, own, result, fresh)
    params = self.cuts.put(params, group, place, own)
    return params, state, measure_drift(result)


class WithFrozen(NamedTuple):
  """Batches, and parameters that nobody trains, which all replicas read.

  The second has no replica axis, so it is on a device once. An inner step gets
  both in the place of its batch.
  """

  batches: Tree
  frozen: Tree


def apart(batches: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
  """Returns batches alone, and what puts a batch beside what is frozen."""
  if not isinstance(batches, WithFrozen):
    return batches, lambda batch: batch
  frozen = batches.frozen
  return batches.batches, lambda batch: WithFrozen(batch, frozen)


def inner_steps(inner_step: InnerStep, batches: Tree) -> RunSteps:
  """Returns a function (progress, count) that runs `count` inner steps.

  Args:
    inner_step: Function as in `WindowProgram`.
    batches: Batches, leaves [n, ...], perhaps `WithFrozen`.
  """
  own, beside = apart(batches)

  def body(_, progress: InnerProgress) -> InnerProgress:
    replica, step, metrics = progress
    batch = beside(jax.tree.map(lambda leaf: leaf[step], own))
    params, optimizer, values = inner_step(*replica, batch)
    metrics = jax.tree.map(
      lambda buffer, value: buffer.at[step].set(value.astype(buffer.dtype)),
      metrics,
      StepMetrics(*values),
    )
    return InnerProgress(ReplicaState(params, optimizer), step + 1, metrics)

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
):
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
  run = outer.exchange_paused(state, own, weight)
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
