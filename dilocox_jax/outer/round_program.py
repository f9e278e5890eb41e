"""Runs a round, and the flush at the end of a run, for one replica.

A round is one program. It goes through the windows of the plan. A window has
inner steps, an apply, more inner steps and a send. A pseudo-gradient that is
due at the end of some inner steps is exchanged behind them: each message leaves
before a stretch of these steps and arrives after it. A message that needs the
result of another has a stretch of its own. The loop over the steps and the
message have no data in common, so the compiler may run them side by side.

The numbers of steps, fragments and slots are in tables (`WindowTable`). So the
size of the program does not depend on how many steps and fragments there are.

A fragment has at most `depth` = ceil(tau / H) pseudo-gradients in flight, each
in a slot. With H = 4 and tau = 6 the depth is 2: the pseudo-gradient sent after
step 4 is applied after step 10, and another one is sent after step 8. The sends
of steps 4, 8 and 12 use the slots 1, 0 and 1. So the send of step 12 reuses the
slot that the apply of step 10 has freed.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.distributed import host_memory
from dilocox_jax.optimizers import advanced
from dilocox_jax.outer.drift import Drift
from dilocox_jax.outer.hidden_exchange import (
  exchange_before_steps,
  exchange_behind_steps,
)
from dilocox_jax.outer.partition import FragmentIndex
from dilocox_jax.outer.transforms import OuterState, OuterTransform
from dilocox_jax.plan.schedule.membership import RoundAttendance
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule, Window
from dilocox_jax.plan.schedule.window_groups import WindowGroup, WindowTable
from dilocox_jax.pytypes import Array, Index, Tree

# Name of the loop over inner steps in a compiled program.
INNER_STEPS = "inner_steps"


class ReplicaState(NamedTuple):
  """Holds the parameters and the inner optimizer state of one replica."""

  params: Tree
  optimizer: Tree


class RoundState(NamedTuple):
  """Holds the whole training state of one replica between two rounds."""

  outer: OuterState
  replica: ReplicaState


class StepMetrics(NamedTuple):
  """Holds metrics of every inner step of a round. Each field is [H] float32."""

  loss: Array
  grad_norm: Array


class _Carry(NamedTuple):
  """Holds the values that one window passes to the next one.

  Attributes:
    outer: Outer state, as in `RoundState`.
    replica: Inner state, as in `RoundState`.
    step: Number of the round's inner steps that are finished.
    metrics: Metrics of these steps, and zeros for the steps to come.
  """

  outer: OuterState
  replica: ReplicaState
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
  has_links: bool = True,
) -> tuple[RoundState, StepMetrics, list[Drift]]:
  """Runs the inner steps and events of one round.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    inner_step: Function (params, optimizer state, batch) -> (params, optimizer
      state, (loss, gradient norm)).
    groups: Window groups of the round (`plan.schedule.window_groups`). They
      are static, so each value has its own program.
    state: State of this replica.
    batches: Batches of this replica, leaves [H, ...].
    tables: Numbers of the windows, one table for each group.
    has_links: Whether replicas have devices of their own. On one device nothing
      travels, and a loop for each message would only be more to compile.

  Returns:
    The new state; the metrics of every inner step; the drifts of the exchanges,
    one for every group with an apply, leaves [num_windows, ...].
  """
  num_steps = jax.tree.leaves(batches)[0].shape[0]
  empty = jnp.zeros((num_steps,), jnp.float32)
  carry = _Carry(*state, jnp.int32(0), StepMetrics(empty, empty))
  differs = tables[0].weights is not None
  if differs:
    tables = tuple(_own_columns(outer, table) for table in tables)
  run_steps = _inner_steps(inner_step, batches)
  hide = exchange_behind_steps if has_links else exchange_before_steps
  exchange = functools.partial(hide, outer, run_steps)
  drifts = []
  for group, table in zip(groups, tables, strict=True):
    window = _window(outer, run_steps, exchange, group)
    # The tree of fragment 0 differs from that of the layer fragments, so a scan
    # cannot mix them. A group with fragment 0 has one window, which runs
    # directly. Windows of layer fragments are scanned even if there is only
    # one, so that P = 2 and P = 8 have programs of the same size.
    if "first" in (group.applied, group.sent):
      row = jax.tree.map(lambda column: column[0], table)
      carry, drift = window(carry, row)
      drift = jax.tree.map(lambda leaf: leaf[None], drift)
    else:
      carry, drift = jax.lax.scan(window, carry, table)
    if group.applied:
      drifts.append(drift)
  replica = carry.replica
  if differs:
    missed = jnp.int32(num_steps) - carry.step
    replica = replica._replace(optimizer=advanced(replica.optimizer, missed))
  return RoundState(carry.outer, replica), carry.metrics, drifts


def _own_columns(outer: OuterTransform, table: WindowTable) -> WindowTable:
  """Returns a table with the numbers of this replica alone."""
  own = jax.lax.axis_index(outer.axis_name)
  return table._replace(
    steps_before=table.steps_before[:, own],
    steps_after=table.steps_after[:, own],
    weights=table.weights[:, own],
  )


def _inner_steps(inner_step: InnerStep, batches: Tree):
  """Returns a function (carry, count) -> carry that runs `count` inner steps.

  Args:
    inner_step: Function as in `run_round`.
    batches: Batches of all H inner steps of the round, leaves [H, ...].
  """

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
    outer, *inner = carry
    with jax.named_scope(INNER_STEPS):
      inner = jax.lax.fori_loop(jnp.int32(0), count, body, tuple(inner))
    return _Carry(outer, *inner)

  return run_steps


def _window(outer: OuterTransform, run_steps, exchange, group: WindowGroup):
  """Returns the program (carry, table row) -> (carry, drift) of a window.

  For example take H = 6, P = 3 and tau = 1. Fragment 1 is sent after step 2.
  The next window runs step 3 while fragment 1 is exchanged, applies fragment 1,
  runs step 4 and sends fragment 2.
  """
  if outer.method.schedule.is_whole_rounds:
    return _whole_round_window(outer, run_steps, exchange, group)

  def window(carry: _Carry, row: WindowTable):
    drift = None
    if group.applied:
      index = _index(group.applied, row.applied)
      own = outer.in_flight(carry.outer, index, row.applied_slot)
      carry, result = exchange(carry, index, own, row.steps_before, row.weights)
      carry, drift = _apply(outer, carry, index, result, own)
    else:
      carry = run_steps(carry, row.steps_before)
    if group.has_steps_after:
      carry = run_steps(carry, row.steps_after)
    if group.sent:
      index = _index(group.sent, row.sent)
      measured = _measure(outer, carry, index, row.sent_slot)
      state = outer.send(carry.outer, index, row.sent_slot, measured)
      carry = carry._replace(outer=state)
    return carry, drift

  return window


def _whole_round_window(
  outer: OuterTransform, run_steps, exchange, group: WindowGroup
):
  """Returns the program of a window where tau is a multiple of H.

  A fragment is then applied after the same step after which it is sent again.
  The order is measure, apply, send. The measurement comes first because it must
  see the parameters before the apply changes them.

  For example take the second round with H = 4, P = 1 and tau = 4. The
  pseudo-gradient of step 4 is exchanged while steps 5 to 8 run. After step 8
  the replica measures a new pseudo-gradient, applies the one of step 4, and
  puts the new one into the slot that is now free.
  With H = 4 and tau = 0, the replica measures a pseudo-gradient after step 4,
  exchanges it, waits for the result and applies it.
  """
  overlaps = bool(outer.depth)

  def window(carry: _Carry, row: WindowTable):
    index, drift = _index(group.sent or "first", row.sent), None
    result = outer.nothing(carry.outer, index)
    if group.applied and overlaps:
      own = outer.in_flight(carry.outer, index, row.applied_slot)
      carry, result = exchange(carry, index, own, row.steps_before, row.weights)
    else:
      carry = run_steps(carry, row.steps_before)
    if not group.sent:
      return carry, drift
    measured = _measure(outer, carry, index, row.sent_slot)
    if group.applied and not overlaps:
      state, result = outer.exchange(carry.outer, index, measured, row.weights)
      carry = carry._replace(outer=state)
    # The eager rule applies after the first round too, where no exchange has
    # ended yet. `result` is then all zeros, and only this replica's own new
    # measurement changes the parameters.
    if group.applied or outer.rule.is_per_replica:
      carry, drift = _apply(outer, carry, index, result, measured)
    state = outer.send(carry.outer, index, row.sent_slot, measured)
    return carry._replace(outer=state), drift if group.applied else None

  return window


def run_flush(
  outer: OuterTransform,
  step: int,
  state: RoundState,
  attendance: RoundAttendance | None = None,
) -> tuple[RoundState, list[Drift]]:
  """Runs the flush at the end of a run (`SyncSchedule.flush_windows`).

  Without a flush, the last progress of a run would still be in flight, and a
  method would be judged on old parameters. So the flush applies every pending
  exchange. It also measures, exchanges and applies the progress not yet sent.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    step: Number of inner steps finished. All events of the last step have
      happened.
    state: State of this replica.
    attendance: Who takes part in the flush; None: all replicas alike.

  Returns:
    The state, in which nothing is in flight and the replica's parameters are
    the outer parameters; the drift of every exchange in order, leaves [1, ...].
  """
  plans = _flush_plans(outer.method.schedule, step, attendance)
  drifts = []
  # As in a round, fragments of layers are scanned and fragment 0 is not.
  if 0 in plans:
    state, drifts = _flush_fragment(outer, plans.pop(0), state, 0)
  for plan, fragments in itertools.groupby(plans, plans.__getitem__):
    numbers = jnp.asarray(list(fragments), jnp.int32)
    flush_one = functools.partial(_flush_fragment, outer, plan)
    state, found = jax.lax.scan(flush_one, state, numbers)
    drifts += [
      jax.tree.map(lambda leaf, place=place: leaf[place], drift)
      for place in range(len(numbers))
      for drift in found
    ]
  params = host_memory.on_device(state.outer.params)
  return state._replace(replica=state.replica._replace(params=params)), drifts


# What the flush does with a fragment, in order: "send" measures its progress, a
# number applies the pseudo-gradient in that slot, and "apply" the measured one.
# Beside it are the weights of all replicas in an exchange; None: equal ones.
_FlushPlan = tuple[tuple[str | int, tuple[float, ...] | None], ...]


def _flush_plans(
  schedule: SyncSchedule, step: int, attendance: RoundAttendance | None
) -> dict[int, _FlushPlan]:
  """Returns what is to be done with every fragment of the flush, in order.

  Example: H = 4, P = 1 and tau = 6 after step 9, where the pseudo-gradients of
  the steps 4 and 8 are in the slots 1 and 0. The plan of fragment 0 is "send",
  1, 0 and "apply".
  """
  plans = {}
  windows = schedule.flush_windows(step)
  shares = attendance.windows if attendance else [None] * len(windows)
  pairs = zip(windows, shares, strict=True)
  for fragment, group in itertools.groupby(pairs, _fragment):
    plan: list = [
      (
        schedule.slot(window.applied) if window.applied else "send",
        share and share.weights,
      )
      for window, share in group
    ]
    if any(entry == "send" for entry, _ in plan):
      plan[-1] = ("apply", plan[-1][1])
    plans[fragment] = tuple(plan)
  return plans


def _fragment(pair: tuple[Window, Any]) -> int:
  window, _ = pair
  event = window.sent or window.applied
  assert event, "a window of the flush has one event"
  return event.fragment


def _flush_fragment(
  outer: OuterTransform,
  plan: _FlushPlan,
  state: RoundState,
  index: FragmentIndex,
) -> tuple[RoundState, list[Drift]]:
  """Does what the flush has to do for one fragment.

  The program of a round cannot do it, because it stores a measurement in a
  slot. With H = 4 and tau = 6, both slots are in use after step 9, when the
  last progress is measured. So this function keeps the measurement in a
  variable.
  """
  pending = [slot for slot, _ in plan if isinstance(slot, int)]
  nothing = outer.nothing(state.outer, index)
  measured, drifts = nothing.own, []
  for entry, weights in plan:
    if entry == "send":
      slots = np.arange(outer.method.schedule.depth)
      unapplied = jnp.asarray(np.isin(slots, pending))
      measured = outer.measure(
        state.outer, state.replica.params, index, unapplied
      )
      # The eager rule applies without a result, as after the first round.
      if outer.rule.is_per_replica and not pending:
        state, _ = _apply(outer, state, index, nothing, measured)
      continue
    if entry == "apply":
      own, fresh = measured, jax.tree.map(jnp.zeros_like, measured)
    else:
      slot = jnp.int32(pending.pop(0))
      own, fresh = outer.in_flight(state.outer, index, slot), measured
    weight = None
    if weights is not None:
      weight = jnp.asarray(weights)[jax.lax.axis_index(outer.axis_name)]
    exchanged, result = outer.exchange(state.outer, index, own, weight)
    state = state._replace(outer=exchanged)
    state, drift = _apply(outer, state, index, result, fresh)
    drifts.append(jax.tree.map(lambda leaf: leaf[None], drift))
  return state, drifts


def _index(kind: str, number: Index) -> FragmentIndex:
  """Returns the static number 0, or the traced number of a layer fragment."""
  return 0 if kind == "first" else number


def _measure(outer: OuterTransform, carry: _Carry, index, slot: Index) -> Tree:
  """Measures what is about to be put into a slot."""
  slots = outer.unapplied_at_send(slot)
  return outer.measure(carry.outer, carry.replica.params, index, slots)


def _apply(outer: OuterTransform, state: Any, index, result, fresh):
  """Applies a result to a `RoundState` or a `_Carry`, which have both parts."""
  outer_state, params, drift = outer.apply(
    state.outer, state.replica.params, index, result, fresh
  )
  replica = state.replica._replace(params=params)
  return state._replace(outer=outer_state, replica=replica), drift
