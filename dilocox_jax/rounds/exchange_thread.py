"""A second thread dispatches exchanges beside the inner steps.

XLA's CPU backend runs no transfer beside the inner steps: there a collective
blocks the thread that runs the program, and programs that one thread dispatches
run one after the other. So a second thread dispatches the exchange of a window:

    main thread      | inner steps             | wait | apply, measure, send
    exchange thread  | exchange (slow link)           |
"""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.rounds.exchange_program import Exchange, exchange_program
from dilocox_jax.rounds.runtime import Waits, WindowWork
from dilocox_jax.rounds.window import InnerProgress
from dilocox_jax.threads import in_thread
from dilocox_jax.trees import Tree


class WaitingTimes:
  """Waits for exchanges, and remembers how long inner steps waited."""

  def __init__(self):
    """Has waited for nothing yet."""
    self._waits: Waits = []

  def result(self, exchange: Future, beside: Tree) -> Any:
    """Returns the result of an exchange.

    Args:
      exchange: An exchange that runs in a thread.
      beside: Results of the inner steps that hide it.
    """
    jax.block_until_ready(beside)
    start_s = time.perf_counter()
    result = exchange.result()
    self._waits.append((start_s, time.perf_counter()))
    return result

  def take(self) -> Waits:
    """Returns the spans since the last call."""
    waits = self._waits
    self._waits = []
    return waits


def beside_steps(
  exchange: Callable[[], Arrived],
  take_steps: Callable[[], InnerProgress],
  waiting: WaitingTimes,
) -> tuple[InnerProgress, Arrived]:
  """Runs an exchange in a thread, and inner steps meanwhile.

  Args:
    exchange: Runs the exchange; its error comes up here.
    take_steps: Takes the inner steps, and returns the progress.
    waiting: Remembers how long the steps waited.
  """
  in_flight = in_thread(lambda: jax.block_until_ready(exchange()))
  progress = take_steps()
  return progress, waiting.result(in_flight, beside=progress)


class InThread:
  """Dispatches exchanges in a second thread, where steps can hide them.

  Attributes:
    splits_windows: False, as inner steps hide exchanges.
    reuses_states: True.
    waits_for_exchanges: True.
  """

  splits_windows = False
  reuses_states = True
  waits_for_exchanges = True

  def __init__(self, outer: OuterStep, replicas: Replicas):
    """Starts no thread yet.

    Args:
      outer: Exchanges pseudo-gradients.
      replicas: Number of replicas, and their devices.
    """
    self._outer = outer
    self._replicas = replicas
    self._waiting = WaitingTimes()

  @functools.cached_property
  def _exchange(self) -> Exchange:
    return exchange_program(self._outer, self._replicas)

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Refuses nothing: the replicas of one runtime share an axis."""

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Exchanges beside the steps, if there are any that are alike.

    Replicas that take different steps exchange in the window's own program.
    """
    given = work.given
    hides_exchange = work.kind.has_steps and not work.kind.differs
    if given.due is None or not hides_exchange:
      return given.progress, None
    state = given.applied
    rest = state._replace(exchange=None)
    return beside_steps(
      lambda: self._exchange(state.exchange, rest, given.due),
      work.take_steps,
      self._waiting,
    )

  def new_waits(self) -> Waits:
    """Returns when steps waited for exchanges since the last call."""
    return self._waiting.take()
