"""Shows how far a run is, as lines of a log or as a bar in a terminal.

Lines and bar also name the activity of the run, such as compiling, and its
duration.
"""

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  ProgressColumn,
  Task,
)
from rich.text import Text

from dilocox_jax.report.escape import terminal
from dilocox_jax.report.units import human_bytes
from dilocox_jax.training.states import TrainingProgress

_LOG_SHARE = 0.1  # Share of a run's steps between two lines, at most.
_LOG_S = 30.0  # Seconds between two lines, at most.
_BAR_WIDTH = 12  # Columns. The whole line fits into 80 columns.
_REFRESHES_PER_S = 4


class Speed:
  """Computes the speed of a run, and the time until its end.

  Both are computed from everything since this program started or resumed the
  run, without the time to compile.
  """

  def __init__(self, total_steps: int, start_progress: TrainingProgress):
    """Starts to measure time, from `start_progress` on."""
    self._total_steps = total_steps
    self._start_progress = start_progress
    self._start_s = time.monotonic()

  def leave_out(self, seconds: float) -> None:
    """Leaves the seconds of a compilation out of the speed of the run."""
    self._start_s += seconds

  def tokens_per_s(self, progress: TrainingProgress) -> float:
    """Returns the tokens per second of all replicas of this program.

    With a mailbox, this program has one replica.
    """
    tokens = progress.tokens - self._start_progress.tokens
    return tokens / (time.monotonic() - self._start_s)

  def minutes_left(self, progress: TrainingProgress) -> float:
    """Returns the minutes until the last step, at the mean speed so far.

    At least one step must have been finished since the start.
    """
    num_steps = progress.step - self._start_progress.step
    step_s = (time.monotonic() - self._start_s) / num_steps
    return (self._total_steps - progress.step) * step_s / 60


@contextlib.contextmanager
def repeating(
  action: Callable[[float], None], every_s: float
) -> Iterator[None]:
  """Calls a function again and again in a thread, inside a `with` block.

  Args:
    action: Function of the seconds since the start of the block.
    every_s: Seconds until the first call, and between two calls.
  """
  has_ended = threading.Event()
  start_s = time.monotonic()

  def repeat() -> None:
    while not has_ended.wait(every_s):
      action(time.monotonic() - start_s)

  thread = threading.Thread(target=repeat, daemon=True)
  thread.start()
  try:
    yield
  finally:
    has_ended.set()
    thread.join()


class ProgressLog:
  """Logs how far a run is.

  It logs a line at the first call of `update`. A later call logs a line if,
  since the last line, a tenth of the run's steps or 30 seconds have passed.
  """

  def __init__(
    self, title: str, total_steps: int, start_progress: TrainingProgress
  ):
    """Starts to measure time; logs nothing yet."""
    self._title = title
    self._total_steps = total_steps
    self._speed = Speed(total_steps, start_progress)
    # The minus infinity makes a line due at the first update.
    self._logged_step = start_progress.step
    self._logged_s = -math.inf

  def close(self) -> None:
    """Does nothing. A `ProgressBar` has to release the terminal here."""

  def leave_out(self, seconds: float) -> None:
    """Leaves the seconds of a compilation out of the speed of the run."""
    self._speed.leave_out(seconds)

  def activity(
    self, name: str, then: str
  ) -> contextlib.AbstractContextManager[None]:
    """Logs the run's activity every 30 seconds, inside a `with` block.

    Example: "compiling for 30 s; next: steps 1 to 30 of 600". In it, `name` is
    "compiling", and `then` is "steps 1 to 30 of 600".
    """

    def log(seconds: float) -> None:
      logging.getLogger(__name__).info(
        "%s for %.0f s; next: %s", name, seconds, then
      )

    return repeating(log, _LOG_S)

  def update(self, progress: TrainingProgress, loss: float, note: str) -> None:
    """Logs step, loss, speed, bytes sent and time left, if a line is due.

    The class says when a line is due. `note` is put into the line; "" for none.
    """
    step = progress.step
    now_s = time.monotonic()
    has_many_steps = step - self._logged_step >= _LOG_SHARE * self._total_steps
    if not has_many_steps and now_s - self._logged_s < _LOG_S:
      return
    self._logged_step = step
    self._logged_s = now_s
    sent = human_bytes(progress.total_sent_bytes)
    if note:
      sent += f" | {note}"
    logging.getLogger(__name__).info(
      "%s: step %d of %d | loss %.3f | %s tokens/s | sent %s | %.1f min left",
      self._title,
      step,
      self._total_steps,
      loss,
      f"{self._speed.tokens_per_s(progress):,.0f}",
      sent,
      self._speed.minutes_left(progress),
    )


class _Status(ProgressColumn):
  """A column of the progress bar that shows the result of a function."""

  def __init__(self, status: Callable[[], str]):
    """Stores the function, which is called each time the bar is drawn."""
    super().__init__()
    self._status = status

  def render(self, task: Task) -> Text:
    """Returns the text to show."""
    del task
    return terminal(self._status())


class ProgressBar:
  """Shows a bar with the time left, in a terminal or in a notebook.

  Log lines appear above the bar.
  """

  def __init__(
    self,
    title: str,
    total_steps: int,
    start_progress: TrainingProgress,
    console: Console,
  ):
    """Starts to measure time, and shows the bar."""
    self._title = title
    self._speed = Speed(total_steps, start_progress)
    self._result = ""  # Loss, speed and time left.
    # What the run does between two updates, e.g. an evaluation, since when, and
    # what comes after it. "": nothing to show.
    self._activity = ""
    self._activity_start_s = 0.0
    self._then = ""
    self._bar = Progress(
      _Status(lambda: title),
      BarColumn(_BAR_WIDTH),
      MofNCompleteColumn(),
      _Status(self._status),
      console=console,
      refresh_per_second=_REFRESHES_PER_S,
    )
    self._task = self._bar.add_task(
      "", total=total_steps, completed=start_progress.step
    )
    self._exit_stack = contextlib.ExitStack()
    streams = (sys.stdout, sys.stderr)
    self._exit_stack.enter_context(self._bar)
    # Rich has replaced the standard streams, and lines that are written to the
    # new ones appear above the bar.
    self._exit_stack.enter_context(_log_lines_to(sys.stderr, streams))

  def close(self) -> None:
    """Leaves the bar as it is, and releases the terminal."""
    self._exit_stack.close()

  def leave_out(self, seconds: float) -> None:
    """Leaves the seconds of a compilation out of the speed of the run."""
    self._speed.leave_out(seconds)

  @contextlib.contextmanager
  def activity(self, name: str, then: str) -> Iterator[None]:
    """Shows the run's activity and its duration, inside a `with` block.

    Example: "compiling for 30 s; next: steps 1 to 30 of 600". In it, `name` is
    "compiling", and `then` is "steps 1 to 30 of 600".
    """
    self._activity_start_s = time.monotonic()
    self._then = then
    self._activity = name
    try:
      yield
    finally:
      self._activity = ""

  def update(self, progress: TrainingProgress, loss: float, note: str) -> None:
    """Moves the bar, and shows loss, speed and the time left.

    `note` is shown after them; "" for none.
    """
    speed = self._speed.tokens_per_s(progress)
    minutes_left = self._speed.minutes_left(progress)
    self._result = (
      f"loss {loss:.3f}, {speed:,.0f} tokens/s, {minutes_left:.1f} min left"
    )
    if note:
      self._result += f", {note}"
    self._bar.update(self._task, completed=progress.step)

  def _status(self) -> str:
    """Returns the text after the bar: the activity, or else loss and speed."""
    if not self._activity:
      return self._result
    seconds = time.monotonic() - self._activity_start_s
    return f"{self._activity} for {seconds:.0f} s; next: {self._then}"


@contextlib.contextmanager
def _log_lines_to(stream, replaced_streams) -> Iterator[None]:
  """Lets log handlers write to another stream, inside a `with` block.

  Only handlers that write to one of `replaced_streams` are changed.
  """
  changed_handlers = {}
  handlers = [
    *logging.getLogger().handlers,
    *logging.getLogger("dilocox_jax").handlers,
  ]
  for handler in handlers:
    # The handler of absl passes its lines to a handler inside it.
    stream_handler = getattr(handler, "python_handler", handler)
    if not isinstance(stream_handler, logging.StreamHandler):
      continue
    if stream_handler.stream in replaced_streams:
      changed_handlers[stream_handler] = stream_handler.stream
      stream_handler.setStream(stream)
  try:
    yield
  finally:
    for handler, old_stream in changed_handlers.items():
      handler.setStream(old_stream)


ProgressDisplay = ProgressLog | ProgressBar


def progress_display(
  title: str,
  total_steps: int,
  start_progress: TrainingProgress,
  console: Console | None,
) -> ProgressDisplay:
  """Returns a bar if there is a console for it, or else a log of lines."""
  if console is None:
    return ProgressLog(title, total_steps, start_progress)
  return ProgressBar(title, total_steps, start_progress, console)
