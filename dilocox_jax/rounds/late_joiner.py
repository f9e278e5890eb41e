"""A replica that begins, or begins again, while others are on their way.

It takes the newest snapshot of what all replicas share, and follows the events
since, without inner steps, until its own measurements can still count.

For example P = 1, H = tau = 4, and a snapshot before event 6, which applies
what was measured in step 24 after step 28. The others have settled event 7. The
newcomer has zeros in flight, applies 6 and 7, and goes on with the inner steps
33 to 36. Event 8 averages what was measured after step 32, without it, and
event 9 is the first that has its own.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.distributed.replicas import is_none
from dilocox_jax.outer.outer_step import FragmentState
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule, Window
from dilocox_jax.rounds.mailbox_runtime import MailboxRuntime
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.trees import Tree


def join_rounds(rounds: Rounds, params: Tree, optimizer: Tree) -> RoundState:
  """Returns the state with which a replica of a mailbox takes part.

  It stands in place of `rounds.init`, at the start and after a
  `dilocox_jax.ReplicaStaleError`. `state.step` says how many inner steps of the
  schedule count as done.

  Args:
    rounds: What `dilocox_jax.make_rounds` made with `dilocox_jax.mailbox`.
    params: The first parameters, equal in all replicas.
    optimizer: A new state of the inner optimizer. A learning rate that it
      schedules goes on at that step.

  Raises:
    ValueError: If the rounds have no mailbox, or the outer step uses the axis
      of replicas that share none (`rounds.alone`).
    ReplicaStaleError: If the others deleted what this replica was about to
      follow; it has to call this again.
  """
  require(
    isinstance(rounds.runtime, MailboxRuntime),
    "rounds: they have no dilocox_jax.mailbox",
  )
  return joined(rounds, rounds.init(params, optimizer))


def joined(
  rounds: Rounds, state: RoundState, last_step: int | None = None
) -> RoundState:
  """Returns the state with which a newcomer takes part (`join_rounds`).

  Args:
    rounds: Rounds whose exchange a mailbox carries.
    state: The first state.
    last_step: Inner steps of the schedule; None: it has no end.
  """
  assert isinstance(rounds.runtime, MailboxRuntime)
  client = rounds.runtime.client
  found = client.newest()
  windows = _windows(rounds.outer.method.schedule, last_step)
  counts = [0] * rounds.cuts.count
  step = 0
  window = next(windows)
  left = client.event
  while left or (found is not None and window and not window.applied):
    left -= window.applied is not None
    _count(counts, window)
    step = step + window.num_steps
    window = next(windows)
  client.steps.restart(counts)
  if found is not None:
    state = _loaded(rounds, state, found, counts)
  while window and (window.num_steps == 0 or not client.take_part(sum(counts))):
    state = rounds.follow(state, [dataclasses.replace(window, num_steps=0)])
    _count(counts, window)
    step = step + window.num_steps
    window = next(windows)
  if window is None and last_step is not None:  # The run has come to its end.
    step = last_step
    client.take_part(sum(counts))
  # Not to use up the number that every first state has.
  state = rounds.states.rejoined(rounds.states.at_step(state, step), [0], 0)
  return rounds.states.moved_on(state, step)


def passed_over(
  rounds: Rounds, state: RoundState, windows: Sequence[Window], num_steps: int
) -> RoundState:
  """Returns the state of a replica after windows in which it was away.

  What it has not sent stays with it.

  Args:
    rounds: Rounds whose exchange a mailbox carries.
    state: State of the replica before.
    windows: The windows that the others have gone through.
    num_steps: Inner steps of these windows.
  """
  done = int(jax.device_get(state.step))
  still = [dataclasses.replace(window, num_steps=0) for window in windows]
  events = [window for window in still if window.applied or window.sent]
  state = rounds.states.moved_on(rounds.follow(state, events), num_steps)
  return rounds.states.at_step(state, done + num_steps)


def _windows(schedule: SyncSchedule, last_step: int | None) -> Iterator[Any]:
  """Yields the windows of a schedule that have events, then None for ever."""
  start = 0  # Step of the last event.
  for stop in itertools.count(schedule.sync_interval, schedule.sync_interval):
    stop = stop if last_step is None else min(stop, last_step)
    for window in schedule.windows(start, stop):
      if window.applied or window.sent:
        yield window
        start += window.num_steps
    if stop == last_step:
      break
  yield from itertools.repeat(None)


def _count(counts: list[int], window: Window) -> None:
  """Counts what is in flight of each fragment after a window."""
  for event, change in ((window.sent, 1), (window.applied, -1)):
    if event:
      counts[event.fragment] += change


def _loaded(
  rounds: Rounds,
  state: RoundState,
  arrays: Sequence[np.ndarray],
  counts: Sequence[int],
) -> RoundState:
  """Returns the state of a snapshot, with zeros in flight."""
  values = iter(arrays)

  def shared(axis: int | None, tree: Tree) -> Tree:
    put = lambda leaf: jax.device_put(next(values), leaf.sharding)  # noqa: E731
    return jax.tree.map(put, tree) if axis is None else tree

  def fragment(old: FragmentState, count: int) -> FragmentState:
    axes = rounds.outer.axes
    old = rounds.states.on_device(old)
    new = jax.tree.map(shared, axes, old, is_leaf=is_none)
    zeros = jax.tree.map(
      lambda leaf: rounds.replicas.copies(jnp.zeros_like(leaf)), new.params
    )
    new = new._replace(in_flight=(zeros,) * count)
    return rounds.states.kept(jax.device_put(new, rounds.states.shardings(new)))

  fragments = tuple(map(fragment, state.fragments, counts))
  newest = tuple(map(rounds.states.on_device, fragments))
  params = rounds.states.adopted(state.replica.params, newest)
  return RoundState(
    state.replica._replace(params=params), fragments, state.step
  )
