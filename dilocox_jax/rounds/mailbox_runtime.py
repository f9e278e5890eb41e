"""Exchanges pseudo-gradients through a mailbox. The host sends the messages.

The messages of the other replicas come from outside the compiled program. So an
exchange cannot be one compiled program. It consists of *turns*: in each turn
every replica sends a message and reads the messages of the other replicas. An
exchange with n turns is divided into n + 1 stages, each a program of its own.
The program of stage k gets the messages of the first k turns. It computes the
exchange from its start to the next message, or to the result. The compiler
removes computations whose values the stage does not use. For example, a
low-rank codec has two turns:

    stage 0    ()               -> left factors, which the host sends
    stage 1    (left,)          -> right factors, which the host sends
    stage 2    (left, right)    -> the mean, and the new state

If another number of replicas has sent a message, the shapes of the arguments
change, and JAX compiles the stage again.

A replica of one process runs the whole exchange in a thread beside the inner
steps. If a replica has several processes, a stage communicates between them as
the inner steps do, so all processes must dispatch both in the same order. The
main thread then dispatches the stages, and the thread only carries messages:

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
  """An exchange that is due.

  Attributes:
    fragment: Number of the fragment.
    num_steps: Inner steps that led to this replica's pseudo-gradient.
    state: State of the fragment.
    values: The oldest pseudo-gradient in flight of the fragment
      (`WindowInput.due`).
    fragments: States of all fragments.
  """

  fragment: int
  num_steps: int
  state: FragmentState
  values: Tree
  fragments: Sequence[FragmentState]


class MailboxRuntime:
  """Exchanges the fragments of the one replica of this program.

  Attributes:
    reuses_states: False, because a snapshot of the states may be written while
      later programs run.
    waits_for_exchanges: True.
    client: The mailbox, and how far the run has come.
  """

  reuses_states = False
  waits_for_exchanges = True

  def __init__(
    self, outer: OuterStep, replicas: Replicas, client: MailboxClient
  ):
    """Sends nothing yet.

    Args:
      outer: Measures, exchanges and applies pseudo-gradients.
      replicas: The replica and its devices.
      client: The mailbox, and how far the run has come.

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
    """Whether a result is applied right after its values were measured."""
    return not self._outer.method.schedule.depth

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Refuses outer steps that communicate over the axis of replicas.

    A program with one replica has no such axis.
    """
    trace_outer_step()

  def new_waits(self) -> Waits:
    """Returns when steps waited for exchanges since the last call."""
    return self._waiting.take()

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Runs the due exchange in a thread, and takes inner steps meanwhile."""
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
    """Returns the exchange that is due in a window; None if there is none.

    Its step count is taken from the client, so the measurement is in flight no
    longer. Call this once for each window.
    """
    if work.window.applied is None:
      return None
    fragment = work.window.applied.fragment
    return Due(
      fragment=fragment,
      num_steps=self.client.steps.take(fragment),
      state=work.given.applied,
      values=work.given.due,
      fragments=work.fragments,
    )

  def _exchange(self, due: Due) -> Arrived:
    """Exchanges a pseudo-gradient, and waits for the other replicas."""
    take_fingerprint = self._dispatch_fingerprint(due)
    turns = self._begin(due, take_fingerprint)
    return self._exchange_rest(due, turns, ())

  def _exchange_between_programs(
    self, due: Due, take_steps: Callable[[], InnerProgress]
  ) -> tuple[InnerProgress, Arrived]:
    """Exchanges a pseudo-gradient as one of several processes of a replica.

    The first turn runs beside the inner steps. Later turns, of codecs with
    several messages, come after the steps.

    Args:
      due: The exchange.
      take_steps: Takes the inner steps, and returns the progress after them.

    Returns:
      The progress, and the result of the exchange.
    """
    take_fingerprint = self._dispatch_fingerprint(due)
    leaving, result = self._run_stage(due, ())
    assert result is None, "an exchange has at least one message"

    def take_first_turn() -> tuple[ExchangeSession, Message]:
      turns = self._begin(due, take_fingerprint)
      return turns, self._send(due, turns, leaving)

    progress, (turns, message) = beside_steps(
      take_first_turn, take_steps, self._waiting
    )
    return progress, self._exchange_rest(due, turns, (message,))

  def _dispatch_fingerprint(self, due: Due) -> Callable[[], Fingerprint]:
    """Lets the devices compute the fingerprint of a fragment's shared state."""
    signs = self._replicas.place(self.client.signs(), None)
    return dispatch_fingerprint(shared_leaves(self._outer, due.state), signs)

  def _begin(
    self, due: Due, take_fingerprint: Callable[[], Fingerprint]
  ) -> ExchangeSession:
    """Begins the next exchange of the client."""
    return self.client.exchange(due.fragment, due.num_steps, take_fingerprint)

  def _exchange_rest(
    self, due: Due, turns: ExchangeSession, arrived: tuple[Message, ...]
  ) -> Arrived:
    """Takes the turns that are left, and returns the result.

    Args:
      due: The exchange.
      turns: Its session.
      arrived: The messages of the turns that were taken.
    """
    leaving, result = self._run_stage(due, arrived)
    while result is None:
      arrived = (*arrived, self._send(due, turns, leaving))
      leaving, result = self._run_stage(due, arrived)
    if turns.drops_all:
      return self._without_own_part(*result)
    if not turns.is_counted and not self.client.keeps:
      return self._without_own_measurement(*result)
    return result

  def _run_stage(
    self, due: Due, arrived: tuple[Message, ...]
  ) -> tuple[Any, Arrived | None]:
    """Dispatches a stage of an exchange.

    Args:
      due: The exchange.
      arrived: The messages of the turns before.

    Returns:
      What leaves next, and None; or None, and the result of the exchange.
    """
    rest = due.state._replace(exchange=None)
    placed = self._replicas.place(arrived, None)
    return self._stage(due.state.exchange, rest, due.values, placed)

  def _send(self, due: Due, turns: ExchangeSession, leaving: Any) -> Message:
    """Sends the message of a turn, and returns what all replicas average.

    It dispatches no program.

    Args:
      due: The exchange.
      turns: Its session.
      leaving: The `EncodedMessage` that leaves, and whether it is finite, with
        an axis of length 1.
    """
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
    return turns.send(
      [np.asarray(array[0]) for array in arrays],
      is_finite=bool(jax.device_get(is_finite)[0]),
      shared=lambda: self._snapshot(due),
      tables=message.tables,
    )

  def _without_own_part(self, result: Any, exchange: Tree) -> Arrived:
    """Returns a result after which nothing of this replica's message is left.

    If the message had wrong values, keeping them would make the next message
    wrong, too. If an earlier process of this replica has sent the same work,
    the work would count twice. So the residual becomes zero, and the parameters
    lose the measured pseudo-gradient as if it was sent.

    Args:
      result: The result of the exchange.
      exchange: State of the aggregator.
    """
    zeros = functools.partial(map_prefix, jnp.zeros_like)
    if result.retained is not None:
      nothing = jax.tree.map(jnp.zeros_like, result.retained)
      result = result._replace(retained=nothing)
    return result, zeros(self._outer.axes.exchange, exchange)

  def _without_own_measurement(self, result: Any, exchange: Tree) -> Arrived:
    """Returns a result whose mean does not contain this replica's message.

    Under the rule "continue" a replica takes its own pseudo-gradient back,
    because the mean contains it. This mean does not, so zero is taken back.

    Args:
      result: The result of the exchange.
      exchange: State of the aggregator.
    """
    zeros = jax.tree.map(jnp.zeros_like, result.own)
    return result._replace(own=zeros), exchange

  @functools.cached_property
  def _stage(self) -> Any:
    """The program (state, rest, due, arrived) -> (message, result).

    Either the message or the result is None (`_until_more_is_needed`). There is
    one replica, so the replica axis of each value has length 1.
    """
    rest = self._outer.axes._replace(exchange=None)
    arguments: Any = self._outer.axes.exchange, rest, 0, None

    def program(*values: Any) -> tuple[Any, Arrived | None]:
      stage = refusing_collectives(
        OUTER_STEP, self._until_more_is_needed, self._replicas
      )
      leaving, result = self._replicas.map(stage, arguments, 0)(*values)
      if result is not None:
        result = without_axis(arrived_axes(self._outer), result)
      return self._whole(leaving), result

    return jax.jit(program)

  def _whole(self, leaving: Any) -> Any:
    """Lets every device have the whole message, so that process 0 has it."""
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
      due: The pseudo-gradient.
      arrived: The messages of the turns so far, in order.

    Returns:
      The next message to send, and None. At the end of the exchange: None, and
      the result.
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
    """Returns the shared leaves of all fragments, in order (`shared_leaves`).

    The leaves stay on the devices, because a snapshot is rarely written.

    Args:
      due: The exchange. Its state takes the place of the fragment's state.
    """
    states = list(due.fragments)
    states[due.fragment] = due.state
    leaves = [shared_leaves(self._outer, state) for state in states]
    return [leaf for of_fragment in leaves for leaf in of_fragment]


def shared_leaves(outer: OuterStep, state: FragmentState) -> list[Array]:
  """Returns the leaves of a fragment's state that all replicas share."""
  return jax.tree.leaves(map_prefix(lambda leaf: None, outer.axes, state))
