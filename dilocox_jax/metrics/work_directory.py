"""The stamp of a work directory, which says what program made it.

Several programs write files with the same names, such as `report.md`. So the
first file of a directory is `made_by.json`, and a program writes only into a
directory that is empty or has its own stamp. Hidden files do not count: they
are locks, halves of files, or those of a file browser.
"""

import json
import os
import pathlib
import uuid

from dilocox_jax.metrics.lines import Directory

STAMP = "made_by.json"


class RefusedDirectoryError(ValueError):
  """The directory cannot be the program's; its path begins the message."""


def claim(path: Directory, program: str) -> pathlib.Path:
  """Makes a directory, with the stamp of a program, or finds it so.

  Args:
    path: The directory; made if missing. Several processes of the program may
      claim it at once.
    program: Name of the program.

  Returns:
    The path.

  Raises:
    RefusedDirectoryError: If another program or a user made it, or its path is
      not UTF-8. It is as it was then.
    OSError: If the system refuses.
  """
  path = pathlib.Path(path)
  _check_name(path)
  path.mkdir(parents=True, exist_ok=True)
  # Listed first: whoever else claims it writes the stamp before other files.
  names = [name for name in os.listdir(path) if not name.startswith(".")]
  owner = _owner(path / STAMP)
  if owner is None and names:
    raise RefusedDirectoryError(
      f"{path} has files that {program} did not make: choose another --workdir"
    )
  if owner not in (None, program):
    raise RefusedDirectoryError(
      f"{path} was made by {owner}, and {program} would write over its files: "
      "choose another --workdir"
    )
  if owner is None:
    _write(path, program)
  return path


def _check_name(path: pathlib.Path) -> None:
  """Refuses a path that TensorBoard, Orbax and the pages cannot write."""
  whole = str(path.resolve())
  try:
    whole.encode()
  except UnicodeEncodeError as error:
    raise RefusedDirectoryError(
      f"{whole} is not named in UTF-8: choose another directory, or set "
      "PYTHONUTF8=1 if its name is UTF-8 and the locale is not"
    ) from error


def _owner(stamp: pathlib.Path) -> str | None:
  try:
    return str(json.loads(stamp.read_text())["program"])
  except (FileNotFoundError, ValueError, KeyError, TypeError):
    return None


def _write(path: pathlib.Path, program: str) -> None:
  """Writes the stamp, also if other processes do so at the same time."""
  partial = path / f".{STAMP}.{uuid.uuid4().hex}"
  with partial.open("x") as file:
    file.write(json.dumps({"program": program}) + "\n")
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path / STAMP)
