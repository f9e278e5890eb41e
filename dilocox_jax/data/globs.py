"""Finds the files that a glob pattern matches, each real file once.

Symbolic links are followed. So a folder can contain itself, and a file can have
several names. `glob.glob` would enter a folder that contains itself many times,
and return many names for each file.
"""

import contextlib
import glob
import os
import pathlib
import stat
from collections.abc import Iterator

# Device and inode number. They are the same for all names of a file or folder.
Identity = tuple[int, int]


def names_of(pattern: str, root: pathlib.Path) -> list[str]:
  """Returns the names of files and folders that a pattern matches.

  Wildcards work as in `glob.glob` with `recursive=True`. Exceptions: `**`
  matches each real folder only once, and a `**` at the end of the pattern does
  not match the folder in which it begins.

  Args:
    pattern: Glob pattern, relative to `root`; `**` matches folders of any
      depth. A wildcard does not match a dot at the start of a name.
    root: The folder in which names are matched.

  Returns:
    Names of files and folders, relative to `root`, without repeats.
  """
  parts = pathlib.PurePath(pattern).parts
  if parts[-1:] == ("**",):
    parts = (*parts, "*")
  names = [""]
  for part in parts:
    names_below = []
    for name in names:
      names_below += _names_below(root, name, part)
    names = list(dict.fromkeys(names_below))
  return names


def each_file_once(
  names: list[str], root: pathlib.Path
) -> list[tuple[str, pathlib.Path]]:
  """Returns the files among some names, each real file once.

  If a file has several names, the first one in alphabetical order that contains
  no symbolic link is chosen. If all of them contain such a link, the first one
  is chosen. Folders and other things are left out.

  Args:
    names: Names of files, folders and other things.
    root: The folder to which the names are relative.

  Returns:
    Pairs (name, path), in alphabetical order of the names.
  """
  names_by_file: dict[Identity, list[str]] = {}
  for name in sorted(names):
    # A file may be gone by now, or a link may lead to nothing.
    with contextlib.suppress(OSError):
      status = os.stat(root / name)
      if stat.S_ISREG(status.st_mode):
        identity = status.st_dev, status.st_ino
        names_by_file.setdefault(identity, []).append(name)
  chosen_names = sorted(
    _name_without_links(names_of_file, root)
    for names_of_file in names_by_file.values()
  )
  return [(name, root / name) for name in chosen_names]


def _name_without_links(names: list[str], root: pathlib.Path) -> str:
  """Returns the first name without a symbolic link, or else the first name."""
  if len(names) > 1:
    real_root = os.path.realpath(root)
    for name in names:
      if os.path.realpath(root / name) == os.path.join(real_root, name):
        return name
  return names[0]


def _names_below(root: pathlib.Path, folder: str, part: str) -> Iterator[str]:
  """Yields the names that one part of a pattern, e.g. "*.txt", matches.

  The part is matched in `folder`. All names are relative to `root`.
  """
  if part == "**":
    yield from _folders(root, folder)
  elif glob.has_magic(part):
    for name in glob.glob(part, root_dir=root / folder):
      yield os.path.join(folder, name)
  elif os.path.lexists(root / folder / part):
    yield os.path.join(folder, part)


def _folders(root: pathlib.Path, top: str) -> Iterator[str]:
  """Yields the names of a folder and of all folders below it, each folder once.

  Hidden folders below it are left out. Links are followed, but last, so that
  folders get names without links where possible.
  """
  seen: set[Identity] = set()
  folders = [top]
  links = []
  while folders or links:
    # A link is entered only when no folder is left.
    name = folders.pop() if folders else links.pop(0)
    # `glob` also skips a folder that cannot be read.
    with contextlib.suppress(OSError):
      status = os.stat(root / name)
      identity = status.st_dev, status.st_ino
      if identity in seen or not stat.S_ISDIR(status.st_mode):
        continue
      seen.add(identity)
      yield name
      entries = sorted(os.scandir(root / name), key=lambda entry: entry.name)
      for entry in entries:
        entry_name = os.path.join(name, entry.name)
        if entry.name.startswith("."):
          continue
        if entry.is_dir(follow_symlinks=False):
          folders.append(entry_name)
        elif entry.is_symlink():
          links.append(entry_name)
