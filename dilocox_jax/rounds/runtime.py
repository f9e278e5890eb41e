"""Runtimes dispatch the exchange of a window beside its inner steps.

There are three of them, each a class in a file of its own: the window's own
program exchanges (`in_program`); a second thread does (`exchange_thread`); or
the host carries messages to a mailbox (`mailbox_runtime`). `Rounds` calls one
method, `Runtime.run`, which exchanges for a window and returns the progress and
the result that has arrived.
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
  """A window, as `Runtime.run` gets it.

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
  """One way to dispatch exchanges."""

  @property
  def splits_windows(self) -> bool:
    """Whether the inner steps of a window cannot hide its exchange.

    Then the steps, the sends and the applies of a window are programs of their
    own, each compiled once.
    """
    ...

  @property
  def reuses_states(self) -> bool:
    """Whether programs without inner steps may reuse their arguments' memory.

    Programs with inner steps always do.
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
      ValueError: As `trace_outer_step`.
    """

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Exchanges for a window, or leaves the exchange to the window's program.

    Args:
      work: The window, and the arguments of its program.

    Returns:
      The progress, and the result of the exchange with the aggregator's new
      state. If the result is not None, the progress is that after the inner
      steps. If it is None, the window's own program takes the steps and
      exchanges.
    """
    ...

  def new_waits(self) -> Waits | None:
    """Returns the spans of waiting for exchanges since the last call.

    In these spans the inner steps had ended, but the exchange beside them had
    not. None: the runtime cannot know.
    """
