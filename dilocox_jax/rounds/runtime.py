"""Defines `Runtime`, the interface of three ways to run an exchange.

A window is some inner steps. After them, a mean may be applied, and a new
pseudo-gradient may be measured. The exchange of a window computes the mean that
the window applies. Each of these files has a class with the interface:

    in_program        The program of the window also runs the exchange.
    exchange_thread   A second thread runs the exchange.
    mailbox_runtime   The host exchanges messages through a folder or a bucket.
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
  """The arguments of `Runtime.run` for a window.

  Attributes:
    window: Some inner steps, after which a fragment (a part of the parameters)
      may be applied, sent or both.
    kind: The properties for which the window's program is compiled.
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
  """Interface of the objects that decide how exchanges run.

  A window is some inner steps, then perhaps an apply of a mean and a send,
  which only measures a pseudo-gradient. The exchange of a window computes the
  mean that the window applies.
  """

  @property
  def splits_windows(self) -> bool:
    """Whether a window's inner steps, apply and send are separate programs.

    They should be separate if inner steps cannot hide an exchange.
    """
    ...

  @property
  def reuses_states(self) -> bool:
    """Whether programs without inner steps may reuse their arguments' memory.

    Programs with inner steps always reuse it (`donate_argnums` of `jax.jit`).
    """
    ...

  @property
  def waits_for_exchanges(self) -> bool:
    """Whether the host waits for an exchange before it dispatches the apply."""
    ...

  def check(self, trace_outer_step: Callable[[], None]) -> None:
    """Refuses outer steps that this runtime cannot run.

    Args:
      trace_outer_step: Function that traces the outer step with shapes alone,
        and raises ValueError if the step cannot run in a program that has only
        one of the replicas (`RoundStates.check_outer`).

    Raises:
      ValueError: If `trace_outer_step` raises it.
    """

  def run(self, work: WindowWork) -> tuple[InnerProgress, Arrived | None]:
    """Runs the exchange and the inner steps of a window, or nothing.

    If it runs nothing, the window's own program runs the exchange and the
    steps. The apply and the send are always left to that program.

    Args:
      work: The window, and the arguments of its program.

    Returns:
      If this call has run the window's exchange: the replicas after the inner
      steps, and a pair of the exchange's result and the aggregator's new state.
      Otherwise: the replicas before the window, and None.
    """
    ...

  def new_waits(self) -> Waits | None:
    """Returns the waits for exchanges since the last call of this method.

    Each is a pair (begin, end) in seconds on the clock of `time.perf_counter`.
    The result is None if the runtime cannot know them.
    """
