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


class ForeignDirectoryError(ValueError):
  """The directory is not the program's; the message begins with its path."""


def claim(path: Directory, program: str) -> pathlib.Path:
  """Makes a directory, with the stamp of a program, or finds it so.

  Args:
    path: The directory; made if missing. Several processes of the program may
      claim it at once.
    program: Name of the program.

  Returns:
    The path.

  Raises:
    ForeignDirectoryError: If another program or a user made it. It is as it
      was then.
    OSError: If the system refuses.
  """
  path = pathlib.Path(path)
  path.mkdir(parents=True, exist_ok=True)
  # Listed first: whoever else claims it writes the stamp before other files.
  names = [name for name in os.listdir(path) if not name.startswith(".")]
  owner = _owner(path / STAMP)
  if owner is None and names:
    raise ForeignDirectoryError(
      f"{path} has files that {program} did not make: choose another --workdir"
    )
  if owner not in (None, program):
    raise ForeignDirectoryError(
      f"{path} was made by {owner}, and {program} would write over its files: "
      "choose another --workdir"
    )
  if owner is None:
    _write(path, program)
  return path


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
