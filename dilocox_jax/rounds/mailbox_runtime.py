"""Exchanges pseudo-gradients through a mailbox: a folder or a bucket.

Replicas that are separate programs leave messages for each other there. An
exchange consists of *turns*: in each turn every replica sends a message and
reads the messages of the others. The host does this, outside compiled programs.
So an exchange with n turns is divided into n + 1 *stages*, each a program of
its own. Stage k gets the messages of the first k turns, and computes the
exchange from its start to the next message, or to the result. For example, a
low-rank codec has two turns:

    stage 0    ()               -> left factors, which the host sends
    stage 1    (left,)          -> right factors, which the host sends
    stage 2    (left, right)    -> the mean, and the new state

A replica of one process runs the whole exchange in a thread beside the inner
steps. If a replica has several processes, a stage communicates between them, so
all processes must dispatch stages and inner steps in the same order. The main
thread then dispatches the stages, and the other thread only sends and reads the
messages of the first turn:

    main thread      stage 0 | inner steps       | wait | stage 1, its turn, ...
    exchange thread          | first turn               |
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.distributed.replicas import Replicas, map_prefix, without_axis
from dilocox_jax.mailbox_protocol.client import ExchangeSession, MailboxClient
from dilocox_jax.mailbox_protocol.fingerprints import Fingerprint
from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.rounds.alone import OUTER_STEP, refusing_collectives
from dilocox_jax.rounds.exchange_program import arrived_axes, divided_arrived
from dilocox_jax.rounds.exchange_thread import WaitingTimes, beside_steps
from dilocox_jax.rounds.runtime import Waits, WindowWork
from dilocox_jax.rounds.state_sums import dispatch_fingerprint
from dilocox_jax.rounds.window import InnerProgress
from dilocox_jax.trees import Array, Tree

# What `ExchangeSession.send` returns.
Message = tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]


class Due(NamedTuple):
  """An exchange that has to take place now, because its mean is applied next.

  Attributes:
    fragment: Number of the fragment.
    num_steps: Number of inner steps that led to this replica's pseudo-gradient.
    state: State of the fragment.
    values: The pseudo-gradient to average.
    fragments: States of all fragments.
  """

  fragment: int
  num_steps: int
  state: FragmentState
  values: Tree
  fragments: Sequence[FragmentState]


class MailboxRuntime:
  """Runs the exchanges of this program's only replica through a mailbox.

  Attributes:
    reuses_states: False: programs without inner steps leave the memory of the
      states alone, so that after an error the same state can be passed again.
    waits_for_exchanges: True: the host waits for the messages.
    client: Sends this replica's messages, and returns those that all replicas
      average. It also counts the exchanges so far.
  """

  reuses_states = False
  waits_for_exchanges = True

  def __init__(
    self, outer: OuterStep, replicas: Replicas, client: MailboxClient
  ):
    """Stores the arguments, and sends nothing yet.

    Raises:
      ValueError: If the replicas would have outer parameters of their own.
    """
    require(
      outer.is_shared,
      f"rule={outer.method.rule!r} gives each replica outer parameters of its "
      "own, which replicas that meet in a store cannot have: take rule "
      "'continue'",
    )
    self.client = client
    self._outer = outer
    self._replicas = replicas
    self._waiting = WaitingTimes()

  @property
  def splits_windows(self) -> bool:
    """Whether a window's inner steps, apply and send are separate programs.

    An apply applies a mean, and a send measures a pseudo-gradient. The programs
    are separate if tau = 0: a mean is then applied right after its
    pseudo-gradients are measured, so no inner steps can hide the exchange.
    """
    return not self._outer.method.schedule.depth

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Calls `trace_outer_step`, which refuses collectives between replicas.

    Raises:
      ValueError: If `trace_outer_step` raises it.
    """
    trace_outer_step()

  def new_waits(self) -> Waits:
    """Returns the waits for exchanges since the last call of this method.

    Each is a pair (begin, end) in seconds on the clock of `time.perf_counter`.
    """
    return self._waiting.take()

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Runs the exchange of a window, and its inner steps meanwhile.

    The exchange computes the mean that the window applies. If the window
    applies nothing, this method only counts the window's steps, on which the
    weight of a later message depends.

    Args:
      work: The window, and the arguments of its program.

    Returns:
      The replica after the inner steps, and a pair: the result of the exchange
      and the aggregator's new state. If nothing was run: the replica before the
      window, and None.

    Raises:
      ReplicaStaleError: If the replica must join the run again, because the
        other replicas have gone on without it or its state differs from theirs.
      StoppedError: If joining again would not help.
    """
    steps = self.client.steps
    steps.add(work.window.num_steps)
    due = self._take_due(work)
    if work.window.sent:
      steps.measure(work.window.sent.fragment)
    if due is None:
      return work.given.progress, None
    if self._has_several_processes:
      return self._exchange_between_programs(due, work.take_steps)
    return beside_steps(
      lambda: self._exchange(due), work.take_steps, self._waiting
    )

  @property
  def _has_several_processes(self) -> bool:
    """Whether the devices of the replica belong to several processes."""
    replicas = self._replicas
    return replicas.layout == "mesh" and replicas.mesh.is_multi_process

  def _take_due(self, work: WindowWork) -> Due | None:
    """Returns the exchange whose mean a window applies; None if it has none."""
    if work.window.applied is None:
      return None
    fragment = work.window.applied.fragment
    # `steps.take` forgets the number that it returns.
    return Due(
      fragment=fragment,
      num_steps=self.client.steps.take(fragment),
      state=work.given.applied,
      values=work.given.due,
      fragments=work.fragments,
    )

  def _exchange(self, due: Due) -> Arrived:
    """Runs a whole exchange, and waits for the other replicas."""
    take_fingerprint = self._dispatch_fingerprint(due)
    session = self._begin(due, take_fingerprint)
    return self._exchange_rest(due, session, ())

  def _exchange_between_programs(
    self, due: Due, take_steps: Callable[[], InnerProgress]
  ) -> tuple[InnerProgress, Arrived]:
    """Runs an exchange and inner steps of a replica of several processes.

    The first message travels during the inner steps. The other messages travel
    after the steps. The method returns the replica after the inner steps, and
    the exchange's result.
    """
    take_fingerprint = self._dispatch_fingerprint(due)
    leaving, result = self._run_stage(due, ())
    assert result is None, "an exchange has at least one message"

    def take_first_turn() -> tuple[ExchangeSession, Message]:
      session = self._begin(due, take_fingerprint)
      return session, self._send(due, session, leaving)

    progress, (session, message) = beside_steps(
      take_first_turn, take_steps, self._waiting
    )
    return progress, self._exchange_rest(due, session, (message,))

  def _dispatch_fingerprint(self, due: Due) -> Callable[[], Fingerprint]:
    """Lets the devices compute the fingerprint of a fragment's shared state.

    A fingerprint is a few random sums, by which replicas find out whether they
    still agree. The returned function waits for the fingerprint.
    """
    signs = self._replicas.place(self.client.signs(), None)
    return dispatch_fingerprint(shared_leaves(self._outer, due.state), signs)

  def _begin(
    self, due: Due, take_fingerprint: Callable[[], Fingerprint]
  ) -> ExchangeSession:
    """Begins the next exchange with the mailbox, and returns its session."""
    return self.client.exchange(due.fragment, due.num_steps, take_fingerprint)

  def _exchange_rest(
    self, due: Due, session: ExchangeSession, arrived: tuple[Message, ...]
  ) -> Arrived:
    """Sends the remaining messages of an exchange, and computes its result.

    `arrived` has the results of `_send` for the messages of this exchange that
    were sent already.
    """
    leaving, result = self._run_stage(due, arrived)
    while result is None:
      arrived = (*arrived, self._send(due, session, leaving))
      leaving, result = self._run_stage(due, arrived)
    # The others refused this replica's message, or count an older one instead.
    if session.drops_all:
      return self._without_own_part(*result)
    # The mean does not contain this replica's message. Error feedback and
    # `keep_unsent` send its values again later. Otherwise they must stay in
    # the replica's parameters.
    if not session.is_counted and not self.client.keeps:
      return self._without_own_measurement(*result)
    return result

  def _run_stage(
    self, due: Due, arrived: tuple[Message, ...]
  ) -> tuple[Any, Arrived | None]:
    """Dispatches the program that computes the next message or the result.

    The method returns the next message and None, or None and the result.
    """
    rest = due.state._replace(exchange=None)
    placed = self._replicas.place(arrived, None)
    return self._stage(due.state.exchange, rest, due.values, placed)

  def _send(self, due: Due, session: ExchangeSession, leaving: Any) -> Message:
    """Sends a message, and returns the messages that all replicas average.

    `leaving` is a pair: an `EncodedMessage`, and whether its values are finite.
    The result has the arrays of the averaged replicas, their weights, and
    whether this replica is one of them.
    """
    # No program is dispatched here, so any thread may call this function.
    message, is_finite = leaving
    arrays = message.arrays
    if self.client.processes.is_main:
      arrays = jax.device_get(arrays)
    else:
      # Only process 0 sends. The others need no values.
      arrays = [
        np.broadcast_to(np.zeros((), array.dtype), array.shape)
        for array in arrays
      ]
    # The replica axis, of length 1, is not sent.
    return session.send(
      [np.asarray(array[0]) for array in arrays],
      is_finite=bool(jax.device_get(is_finite)[0]),
      shared=lambda: self._snapshot(due),
      tables=message.tables,
    )

  def _without_own_part(self, result: Any, exchange: Tree) -> Arrived:
    """Drops the part of this replica's message that is not in the mean.

    Usually a replica keeps this part, as the residual of error feedback or in
    its parameters. Here the part becomes zero, so the replica keeps nothing.
    """
    # If the message had wrong values, keeping them would make the next message
    # wrong, too. If an earlier process of this replica has already sent this
    # work, it would count twice.
    if result.retained is not None:
      result = result._replace(retained=_zeros(0, result.retained))
    return result, _zeros(self._outer.axes.exchange, exchange)

  def _without_own_measurement(self, result: Any, exchange: Tree) -> Arrived:
    """Sets this replica's own pseudo-gradient in a result to zero."""
    # Under the rule "continue" a replica adds its own pseudo-gradient to its
    # parameters again, because the mean contains it. This mean does not.
    return result._replace(own=_zeros(0, result.own)), exchange

  @functools.cached_property
  def _stage(self) -> Any:
    """The jitted program of one stage of an exchange.

    It takes the arguments of `_until_more_is_needed`, and returns the next
    message and None, or None and the result. Values that replicas do not share
    have an axis of length 1 in front.
    """
    rest = self._outer.axes._replace(exchange=None)
    in_axes: Any = self._outer.axes.exchange, rest, 0, None

    def program(*values: Any) -> tuple[Any, Arrived | None]:
      stage = refusing_collectives(
        OUTER_STEP, self._until_more_is_needed, self._replicas
      )
      # `map` needs the axes of what a stage returns before it is known whether
      # that is a message or a result. So every leaf gets the replica axis. Then
      # the leaves of a result that replicas share lose it again.
      leaving, result = self._replicas.map(stage, in_axes, 0)(*values)
      if result is not None:
        result = without_axis(arrived_axes(self._outer), result)
      return self._whole(leaving), result

    return jax.jit(program)

  def _whole(self, leaving: Any) -> Any:
    """Gives every device the whole message, as process 0 needs all of it."""
    if self._replicas.layout == "stacked":
      return leaving
    return jax.lax.with_sharding_constraint(leaving, self._replicas.whole(None))

  def _until_more_is_needed(
    self, kept: Tree, rest: FragmentState, due: Tree, arrived: tuple[Any, ...]
  ) -> tuple[Any, Arrived | None]:
    """Runs the exchange until it needs a message that has not arrived.

    Args:
      kept: State of the aggregator.
      rest: State of the fragment without the aggregator's state.
      due: The pseudo-gradient to average.
      arrived: What has been read after each message so far, in order.

    Returns:
      The next message and None. At the end of the exchange: None, and a pair of
      the result and the aggregator's new state.
    """
    run = self._outer.exchange_coroutine(rest._replace(exchange=kept), due)
    leaving = next(run)
    try:
      for message in arrived:
        leaving = run.send(message)
    except StopIteration as stop:
      return None, divided_arrived(self._replicas, *stop.value)
    run.close()
    return leaving, None

  def _snapshot(self, due: Due) -> list[Any]:
    """Returns the leaves that all replicas share, of all fragments in order."""
    states = list(due.fragments)
    states[due.fragment] = due.state
    leaves = [shared_leaves(self._outer, state) for state in states]
    return [leaf for of_fragment in leaves for leaf in of_fragment]


def _zeros(axes: Tree, tree: Tree) -> Tree:
  """Replaces by zeros the leaves whose entry in the prefix `axes` is 0."""
  # A compiled program makes the zeros: the trainer refuses transfers from the
  # host while it dispatches, and no process alone could make an array that is
  # divided among several processes.
  make = functools.partial(map_prefix, jnp.zeros_like, axes)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, tree)
  return jax.jit(make, out_shardings=shardings)(tree)


def shared_leaves(outer: OuterStep, state: FragmentState) -> list[Array]:
  """Returns the leaves of a fragment's state that all replicas share.

  Args:
    outer: The outer step, whose `axes` say which leaves are shared.
    state: State of the fragment.
  """
  # None takes the place of each leaf that is not shared, and is no leaf itself.
  return jax.tree.leaves(map_prefix(lambda leaf: None, outer.axes, state))
