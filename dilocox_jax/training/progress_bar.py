"""The bar that says how far a run is and when it will be done."""

import logging
import math
import time

from rich import get_console, progress

from dilocox_jax.report.units import human_bytes

_LOG_SHARE, _LOG_S = 0.1, 30.0  # Of a run's steps; seconds.
_WIDE = 110  # Columns of a terminal that has room for a bar beside the numbers.


class ProgressBar:
  """A progress bar with loss, speed, bytes and time left.

  A narrow terminal shows the numbers without the bar. Where there is no
  terminal and no notebook, a line is logged instead: after the first update,
  then after every tenth of the run or 30 seconds, whichever comes first.
  """

  def __init__(
    self,
    title: str,
    total_steps: int,
    first_step: int = 0,
    is_shown: bool = True,
  ):
    """Prepares the bar; it is drawn between `__enter__` and `__exit__`.

    Args:
      title: What is running.
      total_steps: Inner steps of the run.
      first_step: Steps done before.
      is_shown: Whether anything is drawn or logged at all.
    """
    console = get_console()
    is_drawn = console.is_terminal or console.is_jupyter
    self._title, self._is_logged = title, is_shown and not is_drawn
    is_wide = console.width >= _WIDE
    self._bar = progress.Progress(
      progress.TextColumn("[bold]{task.description}"),
      *([progress.BarColumn()] if is_wide else []),
      progress.MofNCompleteColumn(),
      progress.TextColumn("{task.fields[status]}"),
      *([progress.TimeElapsedColumn()] if is_wide else []),
      progress.TimeRemainingColumn(),
      progress.TextColumn("left"),
      console=console,
      disable=not (is_shown and is_drawn),
    )
    self._task = self._bar.add_task(
      title, total=total_steps, completed=first_step, status=""
    )
    self._total_steps = total_steps
    # Nothing was logged yet, so the first update is due.
    self._logged_step, self._logged_s = first_step, -math.inf

  def __enter__(self) -> "ProgressBar":
    """Starts drawing."""
    self._bar.start()
    return self

  def __exit__(self, *exception: object) -> None:
    """Stops drawing."""
    self._bar.stop()

  def update(
    self,
    step: int,
    loss: float,
    tokens_per_s: float,
    total_sent_bytes: int,
    note: str = "",
  ) -> None:
    """Shows how far the run is.

    Args:
      step: Inner steps finished.
      loss: Mean training loss of the last segment, in nats a token.
      tokens_per_s: Training speed of all replicas together.
      total_sent_bytes: Bytes that one replica has sent.
      note: What else there is to say.
    """
    status = (
      f"loss {loss:.3f} | {tokens_per_s:,.0f} tokens/s | "
      f"sent {human_bytes(total_sent_bytes)}{' | ' if note else ''}{note}"
    )
    self._bar.update(self._task, completed=step, status=status)
    is_due = (
      step - self._logged_step >= _LOG_SHARE * self._total_steps
      or time.monotonic() - self._logged_s >= _LOG_S
    )
    if self._is_logged and is_due:
      self._logged_step, self._logged_s = step, time.monotonic()
      logging.getLogger(__name__).info(
        "%s: step %d of %d | %s", self._title, step, self._total_steps, status
      )
