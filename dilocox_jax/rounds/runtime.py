"""What dispatches the exchange of a window, and the inner steps that hide it.

There are three ways, each a class in a file of its own: in the window's own
program (`in_program`), in a second thread (`exchange_thread`), and by a mailbox
that the host carries messages to (`mailbox_runtime`). Rounds ask them one
question: run this window's exchange, and return the progress and what arrived.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dilocox_jax.outer.events import Arrived
from dilocox_jax.outer.outer_step import FragmentState
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.rounds.window import InnerProgress, WindowInput, WindowKind

# Spans of time (begin, end) as by `time.perf_counter` (seconds).
Waits = list[tuple[float, float]]


class WindowWork(NamedTuple):
  """What a runtime is given of a window.

  Attributes:
    window: The window of the schedule.
    kind: What decides its program.
    given: What its program is given.
    fragments: States of all fragments before it.
    take_steps: Function that takes the window's inner steps in a program of
      their own, and returns the progress.
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
    """Whether no inner steps of a window can hide what is exchanged in it.

    Then the steps, the sends and the applies of a window are programs of their
    own, each compiled once.
    """
    ...

  @property
  def reuses_states(self) -> bool:
    """Whether programs without inner steps may reuse their states' memory."""
    ...

  @property
  def waits_for_exchanges(self) -> bool:
    """Whether a window is dispatched when its exchange has ended."""
    ...

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Refuses outer steps that cannot be run so, before anything is compiled.

    Args:
      trace_outer_step: Traces the outer step with shapes alone. It raises
        ValueError if the step uses an axis of replicas that is not there.
    """

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Runs what the program of a window leaves to the runtime.

    Args:
      work: The window, and what its program would be given.

    Returns:
      The progress, and what has arrived; None if steps and exchange are left to
      the window's own program. If something has arrived, the inner steps are
      done.
    """
    ...

  def new_waits(self) -> Waits | None:
    """Returns when steps waited for exchanges since the last call.

    In these spans inner steps had ended, and the exchange beside them had not.
    None: the runtime does not know.
    """
