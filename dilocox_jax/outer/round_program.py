"""A round as one program, and the flush at the end of a run, for one replica.

The program goes through the windows of the plan: inner steps, an apply, inner
steps, a send. A pseudo-gradient that is due at the end of a stretch of inner
steps is exchanged at the start of that stretch. No data passes between the
exchange and the steps, so the compiler may run the transfer behind them.

Steps, fragments and slots are numbers in tables (`WindowTable`). The program
has the same size however many there are.

Slots: a fragment keeps `depth` = ceil(tau / H) pseudo-gradients in flight.
H = 4 and tau = 6 give depth 2: what is sent after step 4 is applied after step
10, and by then step 8 has sent too. The sends of steps 4, 8, 12 take the
slots 1, 0, 1, so step 12 reuses the slot that step 10 has freed.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.distributed import host_memory
from dilocox_jax.outer.drift import Drift
from dilocox_jax.outer.partition import FragmentIndex
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.outer.transforms import OuterState, OuterTransform
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.plan.schedule.window_groups import WindowGroup, WindowTable
from dilocox_jax.pytypes import Array, Index, Tree


class ReplicaState(NamedTuple):
  """A replica's own parameters and inner optimizer state."""

  params: Tree
  optimizer: Tree


class RoundState(NamedTuple):
  """The whole training state between two rounds, for one replica."""

  outer: OuterState
  replica: ReplicaState


class StepMetrics(NamedTuple):
  """Metrics of every inner step of a round, [H] float32 each."""

  loss: Array
  grad_norm: Array


class _Carry(NamedTuple):
  """What one window hands to the next; `step` counts the round's steps."""

  state: RoundState
  step: Index
  metrics: StepMetrics


InnerStep = Callable[[Tree, Tree, Tree], tuple[Tree, Tree, tuple]]


def run_round(
  outer: OuterTransform,
  inner_step: InnerStep,
  groups: tuple[WindowGroup, ...],
  state: RoundState,
  batches: Tree,
  tables: tuple[WindowTable, ...],
) -> tuple[RoundState, StepMetrics, list[Drift]]:
  """Runs the inner steps and events of one round.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    inner_step: Function (params, optimizer state, batch) -> (params, optimizer
      state, (loss, gradient norm)).
    groups: Static shape of the round (`plan.schedule.window_groups`).
    state: State of this replica.
    batches: Batches of this replica, leaves [H, ...].
    tables: Numbers of the windows, one table for each group.

  Returns:
    The new state; metrics of every inner step; for every group with an apply
    the drift of its exchanges, leaves [num_windows, ...].
  """
  num_steps = jax.tree.leaves(batches)[0].shape[0]
  empty = jnp.zeros((num_steps,), jnp.float32)
  carry = _Carry(state, jnp.int32(0), StepMetrics(empty, empty))
  run_steps = _inner_steps(inner_step, batches)
  drifts = []
  for group, table in zip(groups, tables, strict=True):
    window = _window(outer, run_steps, group)
    # Fragment 0 has another tree than the layer fragments and occurs in one
    # window at most, which is run directly. Windows of layer fragments are
    # scanned even if there is only one, so that the program of P = 2 and that
    # of P = 8 are the same.
    if "first" in (group.applied, group.sent):
      carry, drift = window(carry, jax.tree.map(lambda x: x[0], table))
      drift = jax.tree.map(lambda x: x[None], drift)
    else:
      carry, drift = jax.lax.scan(window, carry, table)
    if group.applied:
      drifts.append(drift)
  return carry.state, carry.metrics, drifts


def _inner_steps(inner_step: InnerStep, batches: Tree):
  """Returns a function (carry, count) -> carry after `count` inner steps."""

  def body(_, carry: tuple[ReplicaState, Index, StepMetrics]):
    replica, step, metrics = carry
    batch = jax.tree.map(lambda leaf: leaf[step], batches)
    params, optimizer, values = inner_step(*replica, batch)
    metrics = jax.tree.map(
      lambda buffer, value: buffer.at[step].set(value.astype(buffer.dtype)),
      metrics,
      StepMetrics(*values),
    )
    return ReplicaState(params, optimizer), step + 1, metrics

  def run_steps(carry: _Carry, count: Index) -> _Carry:
    # The loop does not carry the outer state. An exchange that runs beside
    # these steps writes its own state there, and a loop that carried it would
    # have to wait for the exchange.
    (outer, replica), step, metrics = carry
    replica, step, metrics = jax.lax.fori_loop(
      jnp.int32(0), count, body, (replica, step, metrics)
    )
    return _Carry(RoundState(outer, replica), step, metrics)

  return run_steps


def _window(outer: OuterTransform, run_steps, group: WindowGroup):
  """Returns the program (carry, table row) -> (carry, drift) of a window.

  H = 6, P = 3, tau = 1: the window after step 2, where fragment 1 was sent, is
  one step (behind which fragment 1 is exchanged), apply 1, one step, send 2.
  """
  if outer.method.schedule.is_whole_rounds:
    return _whole_round_window(outer, run_steps, group)

  def window(carry: _Carry, row: WindowTable):
    drift = None
    if group.applied:
      index = _index(group.applied, row.applied)
      own = outer.in_flight(carry.state.outer, index, row.applied_slot)
      state, result = _exchange(outer, carry.state, index, own)
      carry = run_steps(carry._replace(state=state), row.steps_before)
      state, drift = _apply(outer, carry.state, index, result, own)
      carry = carry._replace(state=state)
    else:
      carry = run_steps(carry, row.steps_before)
    carry = run_steps(carry, row.steps_after)
    if group.sent:
      index = _index(group.sent, row.sent)
      unapplied = outer.unapplied_at_send(row.sent_slot)
      measured = _measure(outer, carry.state, index, unapplied)
      state = _send(outer, carry.state, index, row.sent_slot, measured)
      carry = carry._replace(state=state)
    return carry, drift

  return window


def _whole_round_window(outer: OuterTransform, run_steps, group: WindowGroup):
  """Returns the program of a window where tau is a multiple of H.

  A fragment is then applied on the very step on which it is sent again, in
  this order: measure, apply, send. The measurement comes first because it must
  see the parameters before the apply changes them.

  H = 4, P = 1, tau = 4, second round: the content of step 4 is exchanged
  behind steps 5 to 8. After step 8 the replica measures, applies the content
  of step 4, and puts the new measurement into the slot this has freed.
  H = 4, tau = 0: after step 4 the replica measures, exchanges what it has just
  measured, waits for it, and applies it.
  """
  overlaps = bool(outer.depth)

  def window(carry: _Carry, row: WindowTable):
    index, drift = _index(group.sent or "first", row.sent), None
    result = outer.nothing(carry.state.outer, index)
    if group.applied and overlaps:
      own = outer.in_flight(carry.state.outer, index, row.applied_slot)
      state, result = _exchange(outer, carry.state, index, own)
      carry = carry._replace(state=state)
    carry = run_steps(carry, row.steps_before)
    if not group.sent:
      return carry, drift
    state = carry.state
    unapplied = outer.unapplied_at_send(row.sent_slot)
    measured = _measure(outer, state, index, unapplied)
    if group.applied and not overlaps:
      state, result = _exchange(outer, state, index, measured)
    # Eager updates step at their first boundary too, where nothing has come
    # back yet: the result is then zeros, and the replica's own part is fresh.
    if group.applied or outer.rule.is_per_replica:
      state, applied_drift = _apply(outer, state, index, result, measured)
      drift = applied_drift if group.applied else None
    state = _send(outer, state, index, row.sent_slot, measured)
    return carry._replace(state=state), drift

  return window


def run_flush(
  outer: OuterTransform, step: int, state: RoundState
) -> tuple[RoundState, list[Drift]]:
  """Runs `SyncSchedule.flush_windows`: the end of a run.

  A method that ends with progress in flight would be judged on old
  parameters. So everything pending is applied, and everything unsent is
  measured, exchanged and applied.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    step: Inner steps finished, all events of that step done.
    state: State of this replica.

  Returns:
    The state with nothing in flight or unsent, in which the replica has the
    outer parameters; the drift of every exchange in order, leaves [1, ...].
  """
  windows = outer.method.schedule.flush_windows(step)
  drifts = []
  for fragment, group in itertools.groupby(windows, _fragment):
    state, fragment_drifts = _flush_fragment(outer, fragment, [*group], state)
    drifts += fragment_drifts
  params = host_memory.on_device(state.outer.params)
  return state._replace(replica=state.replica._replace(params=params)), drifts


def _fragment(window: Window) -> int:
  event = window.sent or window.applied
  assert event, "a window of the flush has one event"
  return event.fragment


def _flush_fragment(
  outer: OuterTransform,
  fragment: int,
  windows: Sequence[Window],
  state: RoundState,
) -> tuple[RoundState, list[Drift]]:
  """Runs the flush windows of one fragment.

  A round's program cannot run them: with H = 4 and tau = 6, after step 9, both
  slots are taken while step 9 is measured. So the measurement is kept here
  instead of in a slot.
  """
  schedule = outer.method.schedule
  index = jnp.int32(fragment) if fragment else 0
  pending = [window.applied for window in windows if window.applied]
  if any(window.sent for window in windows):
    pending.pop()  # The last apply is of what is measured here.
  nothing = outer.nothing(state.outer, index)
  measured, drifts = nothing.own, []
  for window in windows:
    if window.sent:
      slots = [schedule.slot(event) for event in pending]
      unapplied = jnp.asarray(np.isin(np.arange(schedule.depth), slots))
      measured = _measure(outer, state, index, unapplied)
      if outer.rule.is_per_replica and not pending:  # As in a first round.
        state, _ = _apply(outer, state, index, nothing, measured)
      continue
    if window.applied in pending:
      slot = jnp.int32(schedule.slot(pending.pop(0)))
      own, fresh = outer.in_flight(state.outer, index, slot), measured
    else:
      own, fresh = measured, jax.tree.map(jnp.zeros_like, measured)
    state, result = _exchange(outer, state, index, own)
    state, drift = _apply(outer, state, index, result, fresh)
    drifts.append(jax.tree.map(lambda leaf: leaf[None], drift))
  return state, drifts


def _index(kind: str, number: Index) -> FragmentIndex:
  """Fragment 0 by its static number, a layer fragment by a traced one."""
  return 0 if kind == "first" else number


def _measure(
  outer: OuterTransform,
  state: RoundState,
  index: FragmentIndex,
  unapplied: Array | None,
) -> Tree:
  return outer.measure(state.outer, state.replica.params, index, unapplied)


def _exchange(
  outer: OuterTransform, state: RoundState, index: FragmentIndex, own: Tree
) -> tuple[RoundState, ExchangeResult]:
  outer_state, result = outer.exchange(state.outer, index, own)
  return state._replace(outer=outer_state), result


def _apply(
  outer: OuterTransform,
  state: RoundState,
  index: FragmentIndex,
  result: ExchangeResult,
  fresh: Tree,
) -> tuple[RoundState, Drift]:
  outer_state, params, drift = outer.apply(
    state.outer, state.replica.params, index, result, fresh
  )
  replica = state.replica._replace(params=params)
  return RoundState(outer_state, replica), drift


def _send(
  outer: OuterTransform,
  state: RoundState,
  index: FragmentIndex,
  slot: Index,
  own: Tree,
) -> RoundState:
  return state._replace(outer=outer.send(state.outer, index, slot, own))
