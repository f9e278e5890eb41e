"""Runs the flush at the end of a run, for one replica.

It is a program of its own, as it has no inner steps and no slots to reuse.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.distributed import host_memory
from dilocox_jax.outer.drift import Drift
from dilocox_jax.outer.partition import FragmentIndex
from dilocox_jax.outer.round_program import RoundState, apply_exchanged
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.schedule.membership import RoundAttendance
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule, Window


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
  # As in a round, what has a tree of its own is not scanned.
  if 0 in plans and not outer.partition.fragments.are_alike:
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
        state, _ = apply_exchanged(outer, state, index, nothing, measured)
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
    state, drift = apply_exchanged(outer, state, index, result, fresh)
    drifts.append(jax.tree.map(lambda leaf: leaf[None], drift))
  return state, drifts
