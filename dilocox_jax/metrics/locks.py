"""Locks on files, for what only one process at a time may do.

The kernel releases a lock when the last process that has the file open ends,
killed or not. A child process may inherit the open file and so keep the lock
when its parent is killed: the processes of a launch do. Lock libraries open
and close files by themselves and do not allow that, so these few lines use
flock directly.
"""

import fcntl
import logging
from typing import IO


def try_lock(file: IO) -> bool:
  """Locks an open file until it is closed.

  Args:
    file: Any open file; nothing is written to it.

  Returns:
    False if another process holds the lock. A file system that has no locks,
    as some network file systems, gets a warning and counts as locked.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    logging.warning("%s cannot be locked (%s)", file.name, error.strerror)
  return True
