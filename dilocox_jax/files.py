"""Files are written without following a symbolic link.

Whoever may write into the directory of a run, or of a cache, could put a link
under the name of one of its files. Opened for writing as usual, the file that
the link points to would be emptied, and it may be anybody's.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO, cast


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Replaces a file as a whole, so that no reader sees half of it.

  Example: what process 7 writes to `run.json` goes to `.run.json.7.partial`,
  which is flushed to the disk and then renamed. A kill before the rename leaves
  the old `run.json`, a kill after it leaves the new one. A link of that name is
  replaced, and what it points to stays.

  Args:
    path: File to replace; its directory must exist.

  Yields:
    The file to write to, which is empty. It has a name, for libraries that open
    files themselves.

  Raises:
    OSError: If the system refuses. The old file is unchanged.
  """
  path = pathlib.Path(path)
  partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
  partial.unlink(missing_ok=True)
  try:
    with partial.open("xb") as file:  # It fails if anything has the name.
      yield file
      file.flush()
      # Without this a power cut could leave the new name on an empty file.
      os.fsync(file.fileno())
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def opened_to_append(
  path: str | os.PathLike[str], buffering: int = -1
) -> BinaryIO:
  """Opens a file of ours to write at its end; it is made if missing.

  Args:
    path: The file.
    buffering: As in `open`; 0 writes at once.

  Raises:
    OSError: If it is a symbolic link, or the system refuses.
  """
  file = open(path, "ab", buffering=buffering, opener=_without_link)
  return cast(BinaryIO, file)


def _without_link(path: str, flags: int) -> int:
  try:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
  except OSError as error:
    if os.path.islink(path):
      error.strerror = "it is a symbolic link"
    raise
