"""Keeps tracebacks of background threads off a terminal.

Libraries write files in threads of their own. When a disk is full, each of
these threads ends with a traceback, and the thread that waits for them ends the
run with one line. What the line would say twice is left out here, and any other
error is shown as Python shows it.
"""

import sys
import threading
from types import TracebackType


def shorten() -> None:
  """Shows errors of the disk in threads as one line, late results not at all.

  A result is late if it arrives when the event loop that asked for it is
  closed, since another write had failed. TensorStore finds this out in C++,
  where no caller could handle the error.
  """
  sys.excepthook = _except_late_results
  sys.unraisablehook = _except_late_unraisable
  threading.excepthook = _in_one_line


def _except_late_results(
  kind: type[BaseException],
  error: BaseException,
  frames: TracebackType | None,
) -> None:
  if not _is_late(error):
    sys.__excepthook__(kind, error, frames)


def _except_late_unraisable(failed: "sys.UnraisableHookArgs") -> None:
  if not _is_late(failed.exc_value):
    sys.__unraisablehook__(failed)


def _is_late(error: BaseException | None) -> bool:
  return isinstance(error, RuntimeError) and "loop is closed" in str(error)


def _in_one_line(failed: threading.ExceptHookArgs) -> None:
  if isinstance(failed.exc_value, OSError):
    print(f"a thread could not write: {failed.exc_value}", file=sys.stderr)
  else:
    threading.__excepthook__(failed)
