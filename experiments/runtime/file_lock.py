"""Locks on files, for what only one process at a time may do.

The kernel releases a lock when the last process that has the file open ends,
killed or not. A child process may inherit the open file and so keep the lock
when its parent is killed: the processes of a launch do. Lock libraries open
and close files by themselves and do not allow that, so these few lines use
flock directly.
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
    path: File of the lock; made if missing.
    refusal: Message if another process holds the lock.

  Yields:
    Descriptor of the file. A process that inherits it holds the lock, too.

  Raises:
    StoppedError: If another process holds the lock; the exit code says that
      the same command may be tried again.
    UsageError: If the file cannot be made.
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
    file: Any open file; nothing is written to it.
    refusal: Message if another process holds the lock.

  Raises:
    StoppedError: If another process holds the lock.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise StoppedError(refusal, TRY_AGAIN) from None
  except OSError as error:  # Some network file systems have no locks.
    logging.warning("%s cannot be locked (%s)", file.name, error.strerror)
