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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.optimizers import advanced
from dilocox_jax.outer.drift import Drift
from dilocox_jax.outer.hidden_exchange import (
  exchange_before_steps,
  exchange_behind_steps,
)
from dilocox_jax.outer.partition import FragmentIndex
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.outer.transforms import OuterState, OuterTransform
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


class Carry(NamedTuple):
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
RunSteps = Callable[[Carry, Index], Carry]


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
  carry = Carry(*state, jnp.int32(0), StepMetrics(empty, empty))
  differs = tables[0].weights is not None
  if differs:
    tables = tuple(_own_columns(outer, table) for table in tables)
  run_steps = inner_steps(inner_step, batches)
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


def inner_steps(inner_step: InnerStep, batches: Tree) -> RunSteps:
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

  def run_steps(carry: Carry, count: Index) -> Carry:
    # The loop does not carry the outer state. An exchange that runs beside
    # these steps writes its own state there, and a loop that carried it would
    # have to wait for the exchange.
    outer, *inner = carry
    with jax.named_scope(INNER_STEPS):
      inner = jax.lax.fori_loop(jnp.int32(0), count, body, tuple(inner))
    return Carry(outer, *inner)

  return run_steps


def _window(
  outer: OuterTransform, run_steps: RunSteps, exchange, group: WindowGroup
):
  """Returns the program (carry, table row) -> (carry, drift) of a window.

  For example take H = 6, P = 3 and tau = 1. Fragment 1 is sent after step 2.
  The next window runs step 3 while fragment 1 is exchanged, applies fragment 1,
  runs step 4 and sends fragment 2.
  """

  def window(carry: Carry, row: WindowTable):
    if not starts_exchange(outer, group):
      carry = run_steps(carry, row.steps_before)
      return end_window(outer, run_steps, group, carry, row, None)
    index, own = _due(outer, group, carry.outer, row)
    carry, result = exchange(carry, index, own, row.steps_before, row.weights)
    return end_window(outer, run_steps, group, carry, row, result)

  return window


def starts_exchange(outer: OuterTransform, group: WindowGroup) -> bool:
  """Whether the windows of a group begin with an exchange."""
  return bool(group.applied and outer.depth)


def start_exchange(
  outer: OuterTransform,
  group: WindowGroup,
  state: OuterState,
  row: WindowTable,
) -> tuple[OuterState, ExchangeResult]:
  """Exchanges what a window applies after its first inner steps."""
  return outer.exchange(state, *_due(outer, group, state, row))


def _due(
  outer: OuterTransform,
  group: WindowGroup,
  state: OuterState,
  row: WindowTable,
) -> tuple[FragmentIndex, Tree]:
  """Returns the fragment that a window exchanges first, and what was sent."""
  assert group.applied, "see `starts_exchange`"
  index = _fragment_index(group.applied, row.applied)
  return index, outer.in_flight(state, index, row.applied_slot)


def end_window(
  outer: OuterTransform,
  run_steps: RunSteps,
  group: WindowGroup,
  carry: Carry,
  row: WindowTable,
  result: ExchangeResult | None,
) -> tuple[Carry, Drift | None]:
  """Does what follows the first inner steps of a window.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    run_steps: Runs the inner steps after the apply (`inner_steps`).
    group: Window group of the window.
    carry: Values after the first inner steps.
    row: Numbers of the window.
    result: Result of the exchange that the window began with; None if none.

  Returns:
    The values after the window, and the drift of what it applied.
  """
  if outer.method.schedule.is_whole_rounds:
    return _end_whole_round(outer, group, carry, row, result)
  drift = None
  if group.applied:
    assert result, "what is applied was exchanged"
    index = _fragment_index(group.applied, row.applied)
    carry, drift = apply_exchanged(outer, carry, index, result, result.own)
  if group.has_steps_after:
    carry = run_steps(carry, row.steps_after)
  if group.sent:
    index = _fragment_index(group.sent, row.sent)
    measured = _measure(outer, carry, index, row.sent_slot)
    state = outer.send(carry.outer, index, row.sent_slot, measured)
    carry = carry._replace(outer=state)
  return carry, drift


def _end_whole_round(
  outer: OuterTransform,
  group: WindowGroup,
  carry: Carry,
  row: WindowTable,
  result: ExchangeResult | None,
) -> tuple[Carry, Drift | None]:
  """Does what follows the inner steps of a window where tau is a multiple of H.

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
  if not group.sent:
    return carry, None
  index, drift = _fragment_index(group.sent, row.sent), None
  measured = _measure(outer, carry, index, row.sent_slot)
  if group.applied and result is None:
    state, result = outer.exchange(carry.outer, index, measured, row.weights)
    carry = carry._replace(outer=state)
  # The eager rule applies after the first round too, where no exchange has
  # ended yet. The result is then all zeros, and only this replica's own new
  # measurement changes the parameters.
  if group.applied or outer.rule.is_per_replica:
    result = result or outer.nothing(carry.outer, index)
    carry, drift = apply_exchanged(outer, carry, index, result, measured)
  state = outer.send(carry.outer, index, row.sent_slot, measured)
  return carry._replace(outer=state), drift if group.applied else None


def _fragment_index(kind: str, number: Index) -> FragmentIndex:
  """Returns the static number 0, or the traced number of a layer fragment."""
  return 0 if kind == "first" else number


def _measure(outer: OuterTransform, carry: Carry, index, slot: Index) -> Tree:
  """Measures what is about to be put into a slot."""
  slots = outer.unapplied_at_send(slot)
  return outer.measure(carry.outer, carry.replica.params, index, slots)


def apply_exchanged(outer: OuterTransform, state: Any, index, result, fresh):
  """Applies a result to a `RoundState` or a `Carry`, which have both parts."""
  outer_state, params, drift = outer.apply(
    state.outer, state.replica.params, index, result, fresh
  )
  replica = state.replica._replace(params=params)
  return state._replace(outer=outer_state, replica=replica), drift
