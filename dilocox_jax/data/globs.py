"""Finds the files that a glob pattern matches, each real file once.

A folder of texts may hold links, as the snapshots of Hugging Face do, and they
are followed. So a folder can contain itself, and a file can have several names.
The function `glob.glob` would go through such a folder forty times, and give
its files forty names each.
"""

import contextlib
import glob
import os
import pathlib
import stat
from collections.abc import Iterator

Identity = tuple[int, int]  # Device and number of a file or folder.


def names_of(pattern: str, root: pathlib.Path) -> list[str]:
  """Returns the names that a pattern matches below a folder, as `glob` does.

  Args:
    pattern: Glob pattern; `**` matches folders of any depth, each real folder
      once. Hidden names match only if the pattern names the dot.
    root: The folder.
  """
  parts = pathlib.PurePath(pattern).parts
  if parts[-1:] == ("**",):
    parts = (*parts, "*")
  names = [""]
  for part in parts:
    found = (each for name in names for each in _below(root, name, part))
    names = list(dict.fromkeys(found))
  return names


def each_file_once(
  names: list[str], root: pathlib.Path
) -> list[tuple[str, pathlib.Path]]:
  """Returns the files among names with their paths, in the order of the names.

  A file that has several of them has the one that leads through no link.

  Args:
    names: Names of files, folders and others.
    root: The folder that they are in.
  """
  of_file: dict[Identity, list[str]] = {}
  for name in sorted(names):
    with contextlib.suppress(OSError):  # Gone, or a link to nothing.
      found = os.stat(root / name)
      if stat.S_ISREG(found.st_mode):
        of_file.setdefault((found.st_dev, found.st_ino), []).append(name)
  chosen = sorted(_own_name(same, root) for same in of_file.values())
  return [(name, root / name) for name in chosen]


def _own_name(names: list[str], root: pathlib.Path) -> str:
  """Returns the first of a file's names that leads through no link, if any."""
  if len(names) > 1:
    real_root = os.path.realpath(root)
    for name in names:
      if os.path.realpath(root / name) == os.path.join(real_root, name):
        return name
  return names[0]


def _below(root: pathlib.Path, folder: str, part: str) -> Iterator[str]:
  """Yields what one part of a pattern matches in a folder."""
  if part == "**":
    yield from _folders(root, folder)
  elif glob.has_magic(part):
    for name in glob.glob(part, root_dir=root / folder):
      yield os.path.join(folder, name)
  elif os.path.lexists(root / folder / part):
    yield os.path.join(folder, part)


def _folders(root: pathlib.Path, top: str) -> Iterator[str]:
  """Yields a folder and all below it that are not hidden, each once.

  Links wait until all others are done: a folder that is also behind a link has
  its own name.
  """
  seen: set[Identity] = set()
  folders = [top]
  links = []
  while folders or links:
    name = folders.pop() if folders else links.pop(0)
    with contextlib.suppress(OSError):  # As `glob` passes over it.
      found = os.stat(root / name)
      identity = found.st_dev, found.st_ino
      if identity not in seen and stat.S_ISDIR(found.st_mode):
        seen.add(identity)
        yield name
        for entry in sorted(
          os.scandir(root / name), key=lambda each: each.name
        ):
          below = os.path.join(name, entry.name)
          if entry.name.startswith("."):
            continue
          if entry.is_dir(follow_symlinks=False):
            folders.append(below)
          elif entry.is_symlink():
            links.append(below)
