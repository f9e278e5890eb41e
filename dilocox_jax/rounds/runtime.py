"""Runtimes dispatch the exchange of a window beside its inner steps.

There are three runtimes, each a class in its own file:

    in_program        The program of the window also runs the exchange.
    exchange_thread   A second thread runs the exchange.
    mailbox_runtime   The host sends and reads the messages of a mailbox.

For each window `Rounds` calls `Runtime.run`. This method runs the exchange and
the inner steps, or leaves both to the window's program.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.outer_step import FragmentState
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.rounds.window import InnerProgress, WindowInput, WindowKind

# Spans of time (begin, end) on the clock of `time.perf_counter`, in seconds.
Waits = list[tuple[float, float]]


class WindowWork(NamedTuple):
  """Arguments of `Runtime.run`: a window, and what its exchange needs.

  Attributes:
    window: The window of the schedule.
    kind: The properties for which the window's program is compiled.
    given: Arguments of the window's program.
    fragments: States of all fragments before the window.
    take_steps: Function that takes the window's inner steps in a program of
      their own, and returns the progress after them.
  """

  window: Window
  kind: WindowKind
  given: WindowInput
  fragments: Sequence[FragmentState]
  take_steps: Callable[[], InnerProgress]


class Runtime(Protocol):
  """Interface of the objects that dispatch the exchanges of windows."""

  @property
  def splits_windows(self) -> bool:
    """Whether the steps, sends and applies of a window are separate programs.

    They are separate if the inner steps of a window cannot hide its exchange.
    Then each of the three is compiled once.
    """
    ...

  @property
  def reuses_states(self) -> bool:
    """Whether programs without inner steps may reuse their arguments' memory.

    Programs with inner steps always reuse it.
    """
    ...

  @property
  def waits_for_exchanges(self) -> bool:
    """Whether the host waits for an exchange before it dispatches its apply."""
    ...

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Refuses outer steps that this runtime cannot run.

    It is called before anything is compiled.

    Args:
      trace_outer_step: Function that traces the outer step with shapes alone.
        It raises ValueError if the step communicates over the replica axis
        although the other replicas are programs of their own.

    Raises:
      ValueError: If `trace_outer_step` raises it.
    """

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Runs the exchange of a window, or leaves it to the window's program.

    Args:
      work: The window, and the arguments of its program.

    Returns:
      Two values: the progress of the inner steps, and the result of the
      exchange with the aggregator's new state.

      If this call has run the exchange, it has also taken the window's inner
      steps, and the progress is the one after these steps. If the result is
      None, nothing was run: the progress is the one before the window, and the
      window's own program takes the steps and exchanges.
    """
    ...

  def new_waits(self) -> Waits | None:
    """Returns the spans in which inner steps waited for exchanges.

    In these spans the inner steps had ended, but the exchange beside them had
    not.

    Returns:
      The spans since the last call. None if the runtime cannot know them.
    """
