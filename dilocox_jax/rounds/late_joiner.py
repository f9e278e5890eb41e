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
  return join(rounds, rounds.init(params, optimizer))


def join(
  rounds: Rounds, state: RoundState, last_step: int | None = None
) -> RoundState:
  """Returns the state with which a newcomer takes part (`join_rounds`).

  Args:
    rounds: Rounds whose exchange a mailbox carries.
    state: The first state.
    last_step: Inner steps of the schedule; None: it has no end.

  Raises:
    ReplicaStaleError: As `join_rounds`.
  """
  assert isinstance(rounds.runtime, MailboxRuntime)
  client = rounds.runtime.client
  snapshot = client.newest()
  walk = _Walk(rounds.outer.method.schedule, rounds.view.count, last_step)
  walk.pass_events(client.event)
  if snapshot is not None:
    walk.pass_sends()
  client.steps.restart(walk.in_flight)
  if snapshot is not None:
    state = _loaded(rounds, state, snapshot, walk.in_flight)
  while walk.window is not None:
    can_begin = walk.window.num_steps > 0
    if can_begin and client.take_part(sum(walk.in_flight)):
      break
    # The others have settled this event. It is applied without inner steps.
    event = dataclasses.replace(walk.window, num_steps=0)
    state = rounds.replay(state, [event])
    walk.go_on()
  has_ended = walk.window is None
  step = last_step if has_ended and last_step is not None else walk.step
  if has_ended:
    client.take_part(sum(walk.in_flight))
  # `rejoin` uses up the memory of its state. All first states share one cached
  # array with their step, so it gets an array of its own before.
  state = rounds.states.with_step(state, step)
  state = rounds.states.rejoin(state, returning=[0], source_replica=0)
  return rounds.states.advance_schedules(state, step)


class _Walk:
  """Goes through the windows of a schedule that have events.

  Attributes:
    window: The window that comes next; None at the end of the schedule.
    step: Inner steps before it.
    in_flight: Exchanges in flight of each fragment before it.
  """

  def __init__(
    self, schedule: SyncSchedule, num_fragments: int, last_step: int | None
  ):
    """Begins at the first window.

    Args:
      schedule: The schedule.
      num_fragments: Number of its fragments, P.
      last_step: Inner steps of the schedule; None: it has no end.
    """
    self._windows = _windows_with_events(schedule, last_step)
    self.step = 0
    self.in_flight = [0] * num_fragments
    self.window: Window | None = next(self._windows, None)

  def go_on(self) -> None:
    """Goes to the next window."""
    window = self.window
    assert window is not None, "the schedule has ended"
    if window.sent:
      self.in_flight[window.sent.fragment] += 1
    if window.applied:
      self.in_flight[window.applied.fragment] -= 1
    self.step += window.num_steps
    self.window = next(self._windows, None)

  def pass_events(self, count: int) -> None:
    """Goes behind the first windows that apply something.

    Args:
      count: How many of them.
    """
    while count:
      assert self.window is not None, "the others have gone on for longer"
      if self.window.applied:
        count -= 1
      self.go_on()

  def pass_sends(self) -> None:
    """Goes to the next window that applies something."""
    while self.window is not None and not self.window.applied:
      self.go_on()


def skip_windows(
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
  events = [
    dataclasses.replace(window, num_steps=0)
    for window in windows
    if window.applied or window.sent
  ]
  state = rounds.replay(state, events)
  state = rounds.states.advance_schedules(state, num_steps)
  return rounds.states.with_step(state, done + num_steps)


def _windows_with_events(
  schedule: SyncSchedule, last_step: int | None
) -> Iterator[Window]:
  """Yields the windows of a schedule that have events, in order."""
  last_event_step = 0
  for round_end in itertools.count(
    schedule.sync_interval, schedule.sync_interval
  ):
    stop = round_end if last_step is None else min(round_end, last_step)
    for window in schedule.windows(last_event_step, stop):
      if window.applied or window.sent:
        yield window
        last_event_step += window.num_steps
    if stop == last_step:
      return


def _loaded(
  rounds: Rounds,
  state: RoundState,
  arrays: Sequence[np.ndarray],
  counts: Sequence[int],
) -> RoundState:
  """Returns the state of a snapshot, with zeros in flight."""
  values = iter(arrays)

  def shared(axis: int | None, tree: Tree) -> Tree:
    if axis is not None:
      return tree
    return jax.tree.map(
      lambda leaf: jax.device_put(next(values), leaf.sharding), tree
    )

  def fragment(old: FragmentState, count: int) -> FragmentState:
    old = rounds.states.on_device(old)
    new = jax.tree.map(shared, rounds.outer.axes, old, is_leaf=is_none)
    zeros = jax.tree.map(
      lambda leaf: rounds.replicas.copies(jnp.zeros_like(leaf)), new.params
    )
    new = new._replace(in_flight=(zeros,) * count)
    placed = jax.device_put(new, rounds.states.shardings(new))
    return rounds.states.kept(placed)

  fragments = tuple(map(fragment, state.fragments, counts))
  newest = tuple(map(rounds.states.on_device, fragments))
  params = rounds.states.adopted(state.replica.params, newest)
  replica = state.replica._replace(params=params)
  return RoundState(replica, fragments, state.step)
