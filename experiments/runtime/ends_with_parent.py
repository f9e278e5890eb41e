"""Runs a command that ends when the process that started it ends (on Linux).

  python ends_with_parent.py PARENT COMMAND...

PARENT is the id of the process that starts this program. When the thread that
started it ends, for whatever reason, the kernel sends SIGKILL to the command.
On other systems than Linux the command goes on.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # Of <linux/prctl.h>.


def ending_with_this_process(command: Sequence[str]) -> list[str]:
  """Returns a command line that runs a command until this process ends.

  More exactly, the kernel of Linux kills the command when the thread that
  started it ends. Other systems do not kill it.
  """
  # Without the site's packages Python starts in a hundredth of a second.
  python = [sys.executable, "-I", "-S", __file__]
  return [*python, str(os.getpid()), *command]


def main(parent: str, *command: str) -> None:
  """Replaces this program by a command that Linux kills when `parent` ends.

  `parent` is the id of the process that started this program. The program exits
  with code 1 if the command cannot be started, or, on Linux, if `parent` has
  already ended.
  """
  prctl = getattr(ctypes.CDLL(None), "prctl", None)
  if prctl:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent ended before the call above, no signal comes.
    if os.getppid() != int(parent):
      sys.exit(f"error: the process {parent} that started this one has ended")
  try:
    os.execvp(command[0], command)
  except OSError as error:
    sys.exit(f"error: {command[0]}: {error.strerror}")


if __name__ == "__main__":
  main(*sys.argv[1:])
