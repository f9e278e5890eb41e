"""One at a time: what two processes would spoil is held by a lock on a file.

The kernel lets go of it whenever the last process that has it open ends,
killed or not.
"""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from experiments.command_line import UsageError


@contextlib.contextmanager
def held(path: pathlib.Path, refusal: str) -> Iterator[int]:
  """Holds a lock for as long as the block lasts.

  Args:
    path: The lock's file; made if missing.
    refusal: What to say where another process has it.

  Yields:
    The file's descriptor: a process that inherits it holds the lock too.

  Raises:
    UsageError: Another process has it.
  """
  with path.open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise UsageError(refusal) from None
    except OSError:
      pass  # Some network file systems have no locks; the work goes on.
    yield file.fileno()
