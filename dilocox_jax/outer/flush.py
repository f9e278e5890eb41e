"""The end of a run: everything pending and unsent is exchanged at once.

Methods that end with progress in flight would be judged on old parameters.
The schedule's next events are brought forward to now, without inner steps in
between, in the order in which they would have come.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.distributed import host_memory
from dilocox_jax.outer.round_program import RoundState
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.pytypes import Tree


def flush(outer: OuterTransform, step: int, state: RoundState) -> RoundState:
  """Applies what is in flight and exchanges what is not sent yet.

  Args:
    outer: The outer side.
    step: Inner steps finished, all events of that step done.
    state: State of this replica.

  Returns:
    The state with nothing in flight or unsent; replicas go on from the outer
    parameters.
  """
  for fragment in range(outer.method.schedule.num_fragments):
    state = _flush_fragment(outer, step, fragment, state)
  params = host_memory.on_device(state.outer.params)
  replica = state.replica._replace(params=params)
  return state._replace(replica=replica)


def _flush_fragment(
  outer: OuterTransform, step: int, fragment: int, state: RoundState
) -> RoundState:
  schedule = outer.method.schedule
  index = jnp.int32(fragment) if fragment else 0
  slots = [schedule.slot(e) for e in schedule.in_flight(step, fragment)]
  waits = np.isin(np.arange(schedule.depth), slots)
  measures_first = schedule.overlap_steps >= schedule.sync_interval
  has_unsent = schedule.unsent_steps(step, fragment) > 0

  fresh = outer.nothing(state.outer, index).own
  if measures_first and has_unsent:
    fresh = _measure(outer, index, state, jnp.asarray(waits))
  for slot in slots:
    own = outer.in_flight(state.outer, index, jnp.int32(slot))
    state = _exchange_and_apply(outer, index, state, own, fresh)
  if outer.rule.is_per_replica and has_unsent and not slots:
    state = _apply(outer, index, state, None, fresh)
  if not has_unsent:
    return state
  if not measures_first:
    fresh = _measure(outer, index, state, None)
  later = jax.tree.map(jnp.zeros_like, fresh)
  return _exchange_and_apply(outer, index, state, fresh, later)


def _measure(outer: OuterTransform, index, state: RoundState, waits) -> Tree:
  return outer.measure(state.outer, state.replica.params, index, waits)


def _exchange_and_apply(
  outer: OuterTransform, index, state: RoundState, own: Tree, fresh: Tree
) -> RoundState:
  outer_state, arrival = outer.exchange(state.outer, index, own)
  state = state._replace(outer=outer_state)
  return _apply(outer, index, state, arrival, fresh)


def _apply(
  outer: OuterTransform, index, state: RoundState, arrival, fresh: Tree
) -> RoundState:
  arrival = arrival or outer.nothing(state.outer, index)
  params = state.replica.params
  outer_state, params, _ = outer.apply(
    state.outer, params, index, arrival, fresh
  )
  replica = state.replica._replace(params=params)
  return RoundState(outer_state, replica)
