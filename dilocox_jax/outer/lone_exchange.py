"""An exchange outside the programs of windows: in a thread, or by the host.

XLA's CPU backend runs no transfer beside the inner steps: there a collective
blocks the thread that runs the program, and programs that one thread dispatches
run one after the other. So a second thread dispatches the exchange of a window:

    main thread      | inner steps             | wait | apply, measure, send
    exchange thread  | exchange (slow link)           |

The programs consist of the same functions as a window's one program, in the
same order of data. They give the same bits, unless the compiler rounds
a * b + c once where both operations stand in one program. It does so on CPUs
with such an instruction, and the results then differ by about 1e-7 relative.

Where the host carries the messages, such as through a mailbox, an exchange
cannot be one compiled program, since what arrives comes from outside. So it
is cut into stages, one more than there are messages. Stage k is the whole
exchange from its start, which is given what k turns have brought and stops
where it needs more; the compiler drops what it does not need. Low rank:

    stage 0    ()               -> left factors, which the host sends
    stage 1    (left,)          -> right factors, which the host sends
    stage 2    (left, right)    -> the mean, and the new state

How many replicas have sent may change: the stage is then compiled again.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from dilocox_jax.distributed.replicas import Replicas, map_prefix, without_axis
from dilocox_jax.outer.alone import OUTER_STEP, refusing_collectives
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.threads import in_thread
from dilocox_jax.trees import Array, Tree

Averaged = tuple[ExchangeResult, Any]

# Function (aggregator's state, the rest of the fragment's state, its pseudo-
# gradient) -> the result and the aggregator's new state.
Exchange = Callable[[Tree, FragmentState, Tree], Averaged]


def arrived_axes(outer: OuterStep) -> Averaged:
  """Returns the replica axes of what an exchange returns, tree prefixes."""
  shared: Any = None
  own: Any = 0
  return ExchangeResult(shared, own, own, shared), outer.axes.exchange


def lone_exchange(outer: OuterStep, replicas: Replicas) -> Exchange:
  """Returns an exchange that is no part of a window's program.

  Args:
    outer: Exchanges pseudo-gradients.
    replicas: Number of replicas, and their devices.
  """
  if outer.is_carried:
    return CarriedExchange(outer, replicas)

  def replica_program(kept: Tree, rest: FragmentState, due: Tree) -> Averaged:
    arrived = outer.exchange(rest._replace(exchange=kept), due)
    return _divided(replicas, *arrived)

  given = outer.axes.exchange, outer.axes._replace(exchange=None), 0
  mapped = replicas.map(replica_program, given, arrived_axes(outer))
  return jax.jit(mapped, donate_argnums=0)


def _divided(
  replicas: Replicas, result: ExchangeResult, kept: Tree
) -> Averaged:
  """Returns a result whose trees a replica's devices divide."""
  trees = replicas.divided(result._replace(observed={}))
  return trees._replace(observed=result.observed), replicas.divided(kept)


class ExchangeThread:
  """The thread that dispatches exchanges, and the time spent waiting for it."""

  def __init__(self):
    """Starts no thread yet."""
    self._waits: list[tuple[float, float]] = []

  def start(self, exchange, *arguments) -> Future:
    """Runs an exchange in the thread; its error comes up in `wait`."""
    return in_thread(lambda: jax.block_until_ready(exchange(*arguments)))

  def wait(self, exchange: Future, beside: Tree):
    """Returns the result of an exchange.

    Args:
      exchange: What `start` returned.
      beside: Results of the inner steps that hide it.
    """
    jax.block_until_ready(beside)
    start_s = time.perf_counter()
    result = exchange.result()
    self._waits.append((start_s, time.perf_counter()))
    return result

  def new_waits(self) -> list[tuple[float, float]]:
    """Returns when steps waited for exchanges since the last call.

    In these spans of time inner steps had ended, and the exchange beside them
    had not: pairs of begin and end (`time.perf_counter`).
    """
    waits = self._waits
    self._waits = []
    return waits


@dataclasses.dataclass(eq=False)
class CarriedExchange:
  """Exchanges a fragment of the one replica of this runtime.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients. Its aggregator has
      a carrier.
    replicas: The replica and its devices.
    fragment: Number of the fragment that is exchanged next.
    num_steps: Inner steps behind this replica's message.
    fragments: States of all fragments.
  """

  outer: OuterStep
  replicas: Replicas
  fragment: int = 0
  num_steps: int = 0
  fragments: Sequence[FragmentState] = ()

  def __call__(self, kept: Tree, rest: FragmentState, due: Tree) -> Averaged:
    """Exchanges a pseudo-gradient, and waits for the other replicas.

    Args:
      kept: State of the aggregator.
      rest: State of the fragment beside it.
      due: Its pseudo-gradient.

    Returns:
      The result, and the new state of the aggregator.
    """
    carrier = self.outer.aggregator.carrier
    state = rest._replace(exchange=kept)
    shared = jax.device_get(shared_leaves(self.outer, state))
    turns = carrier.exchange(self.fragment, self.num_steps, shared)
    arrived: tuple[Any, ...] = ()
    leaving, result = self._stage(kept, rest, due, arrived)
    while result is None:
      arrays, is_finite = jax.device_get(leaving)
      message = [np.asarray(array[0]) for array in arrays]
      came = turns.send(message, bool(is_finite[0]), lambda: self._all(state))
      arrived += (tuple(came),)
      leaving, result = self._stage(kept, rest, due, arrived)
    found, kept = result
    if turns.drops_all:
      # Nothing of it may come back: wrong values would be left out again and
      # again, and work that an earlier life has sent would count twice. So the
      # residual is empty, and the parameters lose it as if it were sent.
      kept = map_prefix(jax.numpy.zeros_like, self.outer.axes.exchange, kept)
      if self.outer.aggregator.keep_unsent:
        found = found._replace(sent=found.own)
    elif not turns.is_counted and not carrier.keeps:
      # Under "continue" a replica takes its own part back from its parameters,
      # because the mean has it. This mean does not.
      zeros = jax.tree.map(jax.numpy.zeros_like, found.own)
      found = found._replace(own=zeros)
    return found, kept

  @functools.cached_property
  def _stage(self):
    """The program (state, rest, due, arrived) -> what leaves, or the result.

    There is one replica, so each value has an axis of length 1 at first.
    """
    none = self.outer.axes._replace(exchange=None)
    given: Any = self.outer.axes.exchange, none, 0, None

    def program(*arguments):
      stage = refusing_collectives(
        OUTER_STEP, self._until_more_is_needed, self.replicas
      )
      mapped = self.replicas.map(stage, given, 0)
      leaving, result = mapped(*arguments)
      if result is not None:
        result = without_axis(arrived_axes(self.outer), result)
      return leaving, result

    return jax.jit(program)

  def _until_more_is_needed(
    self, kept: Tree, rest: FragmentState, due: Tree, arrived: tuple[Any, ...]
  ):
    """Runs the exchange; returns what leaves next and no result, or (,)."""
    run = self.outer.exchange_paused(rest._replace(exchange=kept), due)
    leaving = next(run)
    try:
      for each in arrived:
        leaving = run.send(each)
    except StopIteration as stop:
      return None, _divided(self.replicas, *stop.value)
    run.close()
    return leaving, None

  def _all(self, state: FragmentState) -> list[Array]:
    """Returns what all replicas share of all fragments, in order.

    It stays on the devices, since few replicas need it, and rarely.

    Args:
      state: State of the fragment that is exchanged; the one that was given
        before may be used up.
    """
    states = list(self.fragments) or [state]
    states[self.fragment] = state
    leaves = [shared_leaves(self.outer, each) for each in states]
    return [leaf for each in leaves for leaf in each]


def shared_leaves(outer: OuterStep, state: FragmentState) -> list[Array]:
  """Returns the leaves of a fragment's state that all replicas share."""
  return jax.tree.leaves(map_prefix(lambda leaf: None, outer.axes, state))
