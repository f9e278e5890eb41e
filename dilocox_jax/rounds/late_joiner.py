"""Lets a replica join a run late, or again, through a folder or a bucket.

The replicas of such a run are separate programs, which exchange through this
*mailbox*. An *event* is one exchange of the run's schedule. An event is
*settled* when the replicas have agreed on the messages that it averages. The
newcomer loads the newest snapshot of the state that all replicas share. Then it
applies the means of the settled events since the snapshot, without inner steps.
It begins with inner steps as soon as its first own message would belong to an
event that is not settled yet.

For example, take P = 1 fragment (all parameters) and H = tau = 4 steps. Event k
averages the pseudo-gradients of step 4 k + 4, and its mean is applied after
step 4 k + 8. There is a snapshot before event 6, and the other replicas have
settled event 8:

    inner steps         what the newcomer does
    up to 32            loads the snapshot, applies the mean of event 6
    33 to 36            takes no inner steps, applies the mean of event 7
    37 to 40            takes inner steps, measures for event 9, and applies the
                        mean of event 8, in which it has no part
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.distributed.replicas import is_none, put_on
from dilocox_jax.outer.outer_step import FragmentState
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule, Window
from dilocox_jax.rounds.mailbox_runtime import MailboxRuntime
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.trees import Tree


def join_rounds(rounds: Rounds, params: Tree, optimizer: Tree) -> RoundState:
  """Joins a run of replicas that are separate programs, and makes the state.

  The replicas exchange through a mailbox: a folder or a bucket. Call this
  function instead of `rounds.init`: at the start, and again after a
  `dilocox_jax.ReplicaStaleError`. The call waits until this replica can take
  part.

  Args:
    rounds: Result of `dilocox_jax.make_rounds` with `dilocox_jax.mailbox` as
      its exchange.
    params: The first parameters of the model, equal in all replicas.
    optimizer: A new state of the inner optimizer. In the result, its
      learning-rate schedule has moved on to the `step` of the result.

  Returns:
    The state of this replica. Its `step` is 0 at the start of a run, and
    usually more if the other replicas have begun already.

  Raises:
    ValueError: If the rounds have no mailbox, or `Rounds.init` raises it.
    ReplicaStaleError: If the other replicas have deleted messages that this
      replica needs, or its state differs from theirs. Call this function again.
    StoppedError: If calling again would not help.
  """
  require(
    isinstance(rounds.runtime, MailboxRuntime),
    "rounds: they have no dilocox_jax.mailbox",
  )
  return join(rounds, rounds.init(params, optimizer))


def join(
  rounds: Rounds, state: RoundState, last_step: int | None = None
) -> RoundState:
  """Brings this replica from its first state to where the run is now.

  Args:
    rounds: Rounds that exchange through a mailbox (a folder or a bucket).
    state: The first state (`Rounds.init`). Its memory may be reused by a call
      that returns, but not by a call that raises.
    last_step: Number of inner steps of the whole run; None: the run has no end.

  Returns:
    The state of this replica. Its `step` is the number of inner steps of the
    schedule that count as done. If the schedule has ended already, the result
    is the state after the schedule's last exchange.

  Raises:
    ReplicaStaleError: If the other replicas have deleted messages that this
      replica needs, or its state differs from theirs. Call this function again.
    StoppedError: If calling again would not help.
  """
  assert isinstance(rounds.runtime, MailboxRuntime)
  client = rounds.runtime.client
  snapshot = client.newest()
  walk = _Walk(rounds.outer.method.schedule, rounds.view.count, last_step)
  # The snapshot has the shared state before the window that applies the mean of
  # event `client.event`. So all earlier windows are done.
  walk.pass_events(client.event)
  if snapshot is not None:
    walk.pass_sends()
  # This replica has taken no step toward the measurements in flight.
  client.steps.restart(walk.in_flight)
  if snapshot is not None:
    state = _from_snapshot(rounds, state, snapshot, walk.in_flight)
  while walk.window is not None:
    # This replica's first message comes after all that is in flight now.
    can_begin = walk.window.num_steps > 0
    if can_begin and client.take_part(sum(walk.in_flight)):
      break
    # The window has no inner steps, or the others have already settled the
    # event that would average them. So it is run without inner steps.
    without_steps = dataclasses.replace(walk.window, num_steps=0)
    # This leaves the memory of its arguments alone, so that the caller can pass
    # the same state again if it raises (`MailboxRuntime.reuses_states`).
    state = rounds.replay(state, [without_steps])
    walk.go_on()
  has_ended = walk.window is None
  step = last_step if has_ended and last_step is not None else walk.step
  if has_ended:
    # The flush of the run may measure and exchange once more.
    client.take_part(sum(walk.in_flight))
  # `rejoin` reuses the memory of its argument. All first states share one
  # cached array as their `step`, so this state first gets an array of its own.
  state = rounds.states.with_step(state, step)
  state = rounds.states.rejoin(state, returning=[0], source_replica=0)
  return rounds.states.advance_schedules(state, step)


class _Walk:
  """Goes through the windows of a schedule, one by one.

  A window is some inner steps, then a send (a fragment's pseudo-gradient is
  measured), an apply of a mean, or both.

  Attributes:
    window: The window that comes next; None at the end of the schedule.
    step: Number of inner steps before that window.
    in_flight: For each fragment, the number of pseudo-gradients that were sent
      before that window, and whose mean was not applied before it, [P].
  """

  def __init__(
    self, schedule: SyncSchedule, num_fragments: int, last_step: int | None
  ):
    """Begins at the first window; a `last_step` of None means no end."""
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
    """Goes past windows until `count` of those passed have applied a mean."""
    while count:
      assert self.window is not None, "the others have gone on for longer"
      if self.window.applied:
        count -= 1
      self.go_on()

  def pass_sends(self) -> None:
    """Goes past windows that only measure, to the next that applies a mean."""
    while self.window is not None and not self.window.applied:
      self.go_on()


def skip_windows(
  rounds: Rounds, state: RoundState, windows: Sequence[Window], num_steps: int
) -> RoundState:
  """Goes through windows without their inner steps.

  Where a window says so, a pseudo-gradient is measured or a mean is applied.

  A replica that has fallen behind follows the other replicas in this way. If
  the others have agreed on a mean without this replica's pseudo-gradient, the
  pseudo-gradient is treated like a message that came too late.

  Args:
    rounds: Rounds that exchange through a mailbox (a folder or a bucket).
    state: State of the replica before these windows. Its memory may be
      reused by a call that returns, but not by a call that raises.
    windows: Windows as the schedule gives them. Each is some inner steps, then
      a send (a measurement), an apply of a mean, both or neither.
    num_steps: Number of inner steps of these windows together.

  Returns:
    The state after the windows. Its learning-rate schedule and its `step` have
    moved on by `num_steps`.

  Raises:
    ReplicaStaleError: If the replica must join again (`join`).
    StoppedError: If joining again would not help.
  """
  steps_done = int(jax.device_get(state.step))
  without_steps = [
    dataclasses.replace(window, num_steps=0)
    for window in windows
    if window.applied or window.sent
  ]
  state = rounds.replay(state, without_steps)
  state = rounds.states.advance_schedules(state, num_steps)
  return rounds.states.with_step(state, steps_done + num_steps)


def _windows_with_events(
  schedule: SyncSchedule, last_step: int | None
) -> Iterator[Window]:
  """Yields the windows of a schedule up to the last send or apply, in order.

  A window is some inner steps, then a send (measurement), an apply or both. If
  `last_step` is None, the windows never end.
  """
  last_event_step = 0
  for round_end in itertools.count(
    schedule.sync_interval, schedule.sync_interval
  ):
    stop = round_end if last_step is None else min(round_end, last_step)
    for window in schedule.windows(last_event_step, stop):
      # Steps after the last event belong to the first window of the next round.
      if window.applied or window.sent:
        yield window
        last_event_step += window.num_steps
    if stop == last_step:
      return


def _from_snapshot(
  rounds: Rounds,
  state: RoundState,
  arrays: Sequence[np.ndarray],
  counts: Sequence[int],
) -> RoundState:
  """Puts the values of a snapshot into the first state of a replica.

  Args:
    rounds: Rounds that exchange through a mailbox.
    state: The first state. Its inner optimizer stays.
    arrays: The snapshot: the leaves that all replicas share, of all fragments
      in order.
    counts: Number of pseudo-gradients in flight of each fragment, [P]. Those in
      the result are zeros, as this replica has sent none.

  Returns:
    The state, whose parameters are the outer parameters of the snapshot.
  """
  # They come in the order in which `MailboxRuntime` has written them.
  values = iter(arrays)

  def load_shared(axis: int | None, tree: Tree) -> Tree:
    if axis is not None:  # Each replica has its own values, which stay.
      return tree
    return jax.tree.map(lambda leaf: put_on(next(values), leaf.sharding), tree)

  def load_fragment(old: FragmentState, count: int) -> FragmentState:
    old = rounds.states.on_device(old)
    new = jax.tree.map(load_shared, rounds.outer.axes, old, is_leaf=is_none)
    zeros = jax.tree.map(
      lambda leaf: rounds.replicas.copies(jnp.zeros_like(leaf)), new.params
    )
    new = new._replace(in_flight=(zeros,) * count)
    placed = jax.device_put(new, rounds.states.shardings(new))
    return rounds.states.in_outer_memory(placed)

  fragments = tuple(map(load_fragment, state.fragments, counts))
  newest = tuple(map(rounds.states.on_device, fragments))
  params = rounds.states.adopted(state.replica.params, newest)
  replica = state.replica._replace(params=params)
  return RoundState(replica, fragments, state.step)
