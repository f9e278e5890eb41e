"""A round as one program, for one replica.

The program walks the pieces of the plan: inner steps, an apply, inner steps,
a send. What comes back at the end of a stretch of inner steps is exchanged at
its start, with no data passing between the two, so the compiler may run the
transfer behind the steps. Steps, fragments and slots are numbers in tables;
the program is the same however many there are.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dilocox_jax.outer.drift import Drift
from dilocox_jax.outer.transforms import OuterState, OuterTransform
from dilocox_jax.plan.schedule.window_groups import WindowGroup, WindowTable
from dilocox_jax.pytypes import Array, Index, Tree


class ReplicaState(NamedTuple):
  """A replica's own parameters and inner optimizer state."""

  params: Tree
  optimizer: Tree


class RoundState(NamedTuple):
  """The whole state between two rounds, for one replica."""

  outer: OuterState
  replica: ReplicaState


class StepMetrics(NamedTuple):
  """What every inner step reports, [H] float32 over a round."""

  loss: Array
  grad_norm: Array


class _Carry(NamedTuple):
  state: RoundState
  step: Index
  metrics: StepMetrics


InnerStep = Callable[[Tree, Tree, Tree], tuple[Tree, Tree, tuple]]


def run_round(
  outer: OuterTransform,
  inner_step: InnerStep,
  pieces: tuple[WindowGroup, ...],
  state: RoundState,
  batches: Tree,
  tables: tuple[WindowTable, ...],
) -> tuple[RoundState, StepMetrics, list[Drift]]:
  """Runs the inner steps and events of one round.

  Args:
    outer: The outer side.
    inner_step: (params, optimizer state, batch) -> the same two and (loss,
      gradient norm).
    pieces: Static shape of the round (`plan.pieces`).
    state: State of this replica.
    batches: This replica's batches, leaves [H, ...].
    tables: The numbers that go with `pieces`.

  Returns:
    The new state; metrics of every inner step; for every piece with an
    arrival the drift, leaves [num_windows, ...].
  """
  num_steps = jax.tree.leaves(batches)[0].shape[0]
  empty = jnp.zeros((num_steps,), jnp.float32)
  carry = _Carry(state, jnp.int32(0), StepMetrics(empty, empty))
  steps = _inner_steps(inner_step, batches)
  drifts = []
  for piece, table in zip(pieces, tables, strict=True):
    window = _window(outer, steps, piece)
    # Of windows with fragment 0 there is never more than one; the others are
    # scanned even if there is one, so that P does not show in the program.
    if "first" in (piece.applied, piece.sent):
      carry, out = window(carry, jax.tree.map(lambda x: x[0], table))
      out = jax.tree.map(lambda x: x[None], out)
    else:
      carry, out = jax.lax.scan(window, carry, table)
    if piece.applied:
      drifts.append(out)
  return carry.state, carry.metrics, drifts


def _inner_steps(inner_step: InnerStep, batches: Tree):
  """Builds (carry, count) -> carry after that many inner steps."""

  def body(_, carry: tuple[ReplicaState, Index, StepMetrics]):
    replica, step, metrics = carry
    batch = jax.tree.map(lambda leaf: leaf[step], batches)
    params, optimizer, seen = inner_step(*replica, batch)
    metrics = jax.tree.map(
      lambda buffer, value: buffer.at[step].set(value.astype(buffer.dtype)),
      metrics,
      StepMetrics(*seen),
    )
    return ReplicaState(params, optimizer), step + 1, metrics

  def run(carry: _Carry, count: Index) -> _Carry:
    # The outer state stays outside the loop: an exchange leaves its own state
    # there, and steps that carried it would have to wait.
    (outer, replica), step, metrics = carry
    replica, step, metrics = jax.lax.fori_loop(
      jnp.int32(0), count, body, (replica, step, metrics)
    )
    return _Carry(RoundState(outer, replica), step, metrics)

  return run


def _window(outer: OuterTransform, steps, piece: WindowGroup):
  """The program of one window, by what arrives and what leaves."""
  if outer.method.schedule.is_whole_rounds:
    return _whole_round_window(outer, steps, piece)

  def window(carry: _Carry, row: WindowTable):
    out = None
    if piece.applied:
      index = _index(piece.applied, row.applied)
      own = outer.in_flight(carry.state.outer, index, row.applied_slot)
      state, arrival = outer.exchange(carry.state.outer, index, own)
      carry = steps(_with_outer(carry, state), row.steps_before)
      carry, out = _apply(outer, carry, index, arrival, own)
    else:
      carry = steps(carry, row.steps_before)
    carry = steps(carry, row.steps_after)
    if piece.sent:
      index = _index(piece.sent, row.sent)
      fresh = _measure(outer, carry, index, row.sent_slot)
      carry = _send(outer, carry, index, row.sent_slot, fresh)
    return carry, out

  return window


def _whole_round_window(outer: OuterTransform, steps, piece: WindowGroup):
  """A window that ends with measuring, applying and sending one fragment."""

  def window(carry: _Carry, row: WindowTable):
    overlaps = bool(outer.depth)
    index = _index(piece.sent or "first", row.sent)
    arrival, out = outer.nothing(carry.state.outer, index), None
    if piece.applied and overlaps:
      own = outer.in_flight(carry.state.outer, index, row.applied_slot)
      state, arrival = outer.exchange(carry.state.outer, index, own)
      carry = _with_outer(carry, state)
    carry = steps(carry, row.steps_before)
    if not piece.sent:
      return carry, out
    fresh = _measure(outer, carry, index, row.sent_slot)
    if piece.applied and not overlaps:
      state, arrival = outer.exchange(carry.state.outer, index, fresh)
      carry = _with_outer(carry, state)
    if piece.applied or outer.rule.is_per_replica:
      carry, seen = _apply(outer, carry, index, arrival, fresh)
      out = seen if piece.applied else None
    carry = _send(outer, carry, index, row.sent_slot, fresh)
    return carry, out

  return window


def _index(kind: str, number: Index) -> int | Index:
  return 0 if kind == "first" else number


def _with_outer(carry: _Carry, outer: OuterState) -> _Carry:
  return carry._replace(state=carry.state._replace(outer=outer))


def _measure(outer: OuterTransform, carry: _Carry, index, slot) -> Tree:
  unapplied = outer.unapplied_at_send(slot)
  state, replica = carry.state
  return outer.measure(state, replica.params, index, unapplied)


def _send(outer: OuterTransform, carry: _Carry, index, slot, own) -> _Carry:
  return _with_outer(carry, outer.send(carry.state.outer, index, slot, own))


def _apply(outer: OuterTransform, carry: _Carry, index, arrival, fresh):
  state, replica = carry.state
  state, params, seen = outer.apply(
    state, replica.params, index, arrival, fresh
  )
  replica = replica._replace(params=params)
  return carry._replace(state=RoundState(state, replica)), seen
