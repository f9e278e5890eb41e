"""Runtimes: three ways to run an exchange beside inner steps.

A window is some inner steps, then a send or an apply of a fragment. Its
exchange averages the fragment that is applied. There are three runtimes, each a
class in its own file:

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
  """What `Runtime.run` gets for a window.

  Attributes:
    window: The inner steps up to the next events, and these events: an apply, a
      send or both (`sync_schedule.Window`).
    kind: The properties for which the window's program is compiled; windows
      with equal properties run the same program.
    given: Arguments of the window's program.
    fragments: States of all fragments before the window.
    take_steps: Function that takes the window's inner steps in a program of
      their own, and returns the replicas after them.
  """

  window: Window
  kind: WindowKind
  given: WindowInput
  fragments: Sequence[FragmentState]
  take_steps: Callable[[], InnerProgress]


class Runtime(Protocol):
  """Interface of the objects that dispatch exchanges beside inner steps.

  The exchange of a window averages the fragment that the window applies. A
  window is some inner steps, then a send or an apply of a fragment.
  """

  @property
  def splits_windows(self) -> bool:
    """Whether inner steps, sends and applies are separate programs.

    They are separate if the inner steps of a window cannot hide its exchange,
    so that each of the three is compiled only once. Otherwise one program runs
    the whole window.
    """
    ...

  @property
  def reuses_states(self) -> bool:
    """Whether programs that only send or apply may reuse arguments' memory.

    Programs with inner steps always reuse it (`donate_argnums` of `jax.jit`).
    """
    ...

  @property
  def waits_for_exchanges(self) -> bool:
    """Whether the host waits for the end of an exchange.

    If so, it dispatches the program that applies the mean only then.
    """
    ...

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Refuses outer steps that this runtime cannot run.

    It is called before anything is compiled.

    Args:
      trace_outer_step: Function that traces the outer step with shapes alone.
        It raises ValueError if the step communicates over the replica axis
        although the other replicas are other processes that meet in a store.

    Raises:
      ValueError: If `trace_outer_step` raises it.
    """

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Runs the exchange and the inner steps of a window, or nothing.

    If it runs nothing, the window's own program does both.

    Args:
      work: The window, and the arguments of its program.

    Returns:
      If this call has run both: the replicas after the inner steps, and the
      result of the exchange with the aggregator's new state. Otherwise: the
      replicas before the window, and None.
    """
    ...

  def new_waits(self) -> Waits | None:
    """Returns the spans of time in which inner steps waited for exchanges.

    A span begins when the inner steps have ended, and ends with the exchange
    that ran beside them.

    Returns:
      Pairs (begin, end) since the last call, in seconds on the clock of
      `time.perf_counter`. None if the runtime cannot know them.
    """
