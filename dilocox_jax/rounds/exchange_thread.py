"""Dispatches exchanges in a second thread, beside the inner steps.

On XLA's CPU backend, a collective blocks the thread that dispatches its
program. With a second thread, the main thread can dispatch the inner steps
meanwhile:

    main thread      | inner steps             | wait | apply the mean
    exchange thread  | exchange (slow link)           |
"""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.rounds.exchange_program import Exchange, exchange_program
from dilocox_jax.rounds.runtime import Waits, WindowWork
from dilocox_jax.rounds.window import InnerProgress
from dilocox_jax.threads import in_thread
from dilocox_jax.trees import Tree

T = TypeVar("T")


class WaitingTimes:
  """Waits for exchanges; records when it waited after the inner steps ended."""

  def __init__(self):
    """Starts with an empty record."""
    self._waits: Waits = []

  def result(self, exchange: Future, beside: Tree) -> Any:
    """Waits for inner steps, then for the result of an exchange.

    The time of the second wait is recorded. It is about 0 if the exchange ends
    before the steps.

    Args:
      exchange: An exchange that runs in a thread.
      beside: Results of the inner steps that run at the same time.

    Returns:
      The result of the exchange.
    """
    jax.block_until_ready(beside)
    start_s = time.perf_counter()
    result = exchange.result()
    self._waits.append((start_s, time.perf_counter()))
    return result

  def take(self) -> Waits:
    """Returns the waits since the last call, and forgets them.

    Each is a pair (begin, end) in seconds on the clock of `time.perf_counter`.
    """
    waits = self._waits
    self._waits = []
    return waits


def beside_steps(
  exchange: Callable[[], T],
  take_steps: Callable[[], InnerProgress],
  waiting: WaitingTimes,
) -> tuple[InnerProgress, T]:
  """Runs an exchange in a thread, and inner steps meanwhile.

  Args:
    exchange: Function that runs the exchange. If it raises, so does this
      function, after the inner steps.
    take_steps: Function that takes the inner steps, and returns the replicas
      after them.
    waiting: Records how long the exchange takes after the end of the steps.

  Returns:
    The result of `take_steps`, and the result of `exchange`.
  """
  # The thread waits for the devices, so the exchange is over when it ends.
  in_flight = in_thread(lambda: jax.block_until_ready(exchange()))
  progress = take_steps()
  return progress, waiting.result(in_flight, beside=progress)


class InThread:
  """Dispatches an exchange in a second thread, beside a window's inner steps.

  A window is some inner steps. After them, a mean may be applied, and a new
  pseudo-gradient may be measured. The exchange computes the mean that the
  window applies. For some windows no second thread is used (`run`).

  Attributes:
    splits_windows: False: a window is not divided into windows that do one
      thing each.
    reuses_states: True: programs may reuse the memory of the states.
    waits_for_exchanges: True: the host waits for the thread before it
      dispatches the apply.
  """

  splits_windows = False
  reuses_states = True
  waits_for_exchanges = True

  def __init__(self, outer: OuterStep, replicas: Replicas):
    """Stores the arguments. Each exchange starts a thread of its own later."""
    self._outer = outer
    self._replicas = replicas
    self._waiting = WaitingTimes()

  @functools.cached_property
  def _exchange(self) -> Exchange:
    """The jitted program that exchanges one pseudo-gradient."""
    return exchange_program(self._outer, self._replicas)

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Accepts every outer step, as all replicas are in this JAX runtime."""

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Runs a window's exchange in a thread, and its inner steps meanwhile.

    The exchange computes the mean that the window applies. In three cases this
    method runs nothing, and the window's own program later runs the exchange
    and the inner steps:

    - The window has no earlier pseudo-gradient to average.
    - The window has no inner steps.
    - Replicas may have different numbers of steps or different weights.

    Args:
      work: The window, and the arguments of its program.

    Returns:
      The replicas after the inner steps, and a pair: the result of the exchange
      and the aggregator's new state. If nothing was run: the replicas before
      the window, and None.
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
    """Returns the waits for exchanges since the last call of this method.

    Each is a pair (begin, end) in seconds on the clock of `time.perf_counter`.
    """
    return self._waiting.take()
