"""One at a time: what two processes would spoil is held by a lock on a file.

The kernel lets go of it whenever the last process that has it open ends,
killed or not.
"""

import contextlib
import fcntl
import logging
import pathlib
from collections.abc import Iterator
from typing import IO

from experiments.runtime.command_line import TRY_AGAIN, StoppedError, UsageError


@contextlib.contextmanager
def held(path: pathlib.Path, refusal: str) -> Iterator[int]:
  """Holds a lock for as long as the block lasts.

  Args:
    path: The lock's file; made if missing.
    refusal: What to say where another process has it.

  Yields:
    The file's descriptor: a process that inherits it holds the lock too.

  Raises:
    StoppedError: Another process has it; later it may not.
    UsageError: There can be no such file.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
  except OSError as error:
    raise UsageError(f"{path} cannot be written: {error.strerror}") from error
  with file:
    lock(file, refusal)
    yield file.fileno()


def lock(file: IO, refusal: str) -> None:
  """Locks an open file until it is closed.

  Args:
    file: Any; nothing is written to it.
    refusal: What to say where another process has it.

  Raises:
    StoppedError: Another process has it; later it may not.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise StoppedError(refusal, TRY_AGAIN) from None
  except OSError as error:  # Some network file systems have no locks.
    logging.warning("%s cannot be locked (%s)", file.name, error.strerror)
