"""A lock on a run directory, as two runs at once would mix their rows."""

import contextlib
import pathlib
from collections.abc import Iterator

from dilocox_jax import files
from dilocox_jax.distributed import processes
from dilocox_jax.metrics import work_directory
from dilocox_jax.metrics.lines import try_lock
from dilocox_jax.training.checkpoint import RefusedError

LOCK = ".train.lock"
PROGRAM = "train"  # The stamp of all runs, whatever program trains them.


class BusyError(RuntimeError):
  """Another run is at work in the directory; the same call works later."""


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a run directory for as long as the block lasts.

  Of several processes only the main one holds the lock.

  Args:
    workdir: The run directory; made if missing.

  Raises:
    BusyError: If another run holds it.
    RefusedError: If the directory is not that of a run, or the lock's file
      cannot be made.
  """
  if not processes.is_main():
    yield
    return
  path = workdir / LOCK
  try:
    work_directory.claim(workdir, PROGRAM)
    file = files.opened_to_append(path)
  except work_directory.RefusedDirectoryError as error:
    raise RefusedError(f"workdir={error}") from error
  except OSError as error:
    raise RefusedError(f"{path} cannot be written: {error.strerror}") from error
  with file:
    if not try_lock(file):
      raise BusyError(
        f"another run is at work in workdir={workdir}: wait for its end"
      )
    yield
