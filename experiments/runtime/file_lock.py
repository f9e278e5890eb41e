"""Locks on files, for what only one process at a time may do."""

import contextlib
import pathlib
from collections.abc import Iterator

from dilocox_jax import files
from dilocox_jax.metrics.work_directory import try_lock
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
    file = files.opened_to_append(path)
  except OSError as error:
    raise UsageError(f"{path} cannot be written: {error.strerror}") from error
  with file:
    if not try_lock(file):
      raise StoppedError(refusal, TRY_AGAIN)
    yield file.fileno()
