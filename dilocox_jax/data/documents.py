"""Reads documents from files: plain text, or JSON lines, also compressed.

A plain file is one document. In a file of JSON lines every line is an object,
and one field of it is the text of a document. Both may be compressed: the last
ending is then .gz or .zst.

Documents have names, because a name decides whether a document is held out for
validation. The document of line 12 of a.jsonl is called "a.jsonl:12", so a
single file can be divided.
"""

import contextlib
import glob
import gzip
import io
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dilocox_jax.checks import require
from dilocox_jax.data.text_extra import text_package

TEXT_FIELD = "text"
_LINES = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".zst")


class Document(NamedTuple):
  """A text and its name.

  Attributes:
    name: Path relative to the root of the corpus, with forward slashes, and
      for JSON lines the number of the line, from 1: "b/a.jsonl:12".
    content: The text in UTF-8.
  """

  name: str
  content: bytes


def matching_files(pattern: str) -> list[tuple[str, pathlib.Path]]:
  """Lists the files that a pattern matches, in the order of their names.

  Names are relative to the part of the pattern before its first wildcard. With
  "/data/texts/**/*.txt" the name of /data/texts/a/b.txt is "a/b.txt". So the
  folder can be moved, and names stay the same.

  Args:
    pattern: Glob pattern; `**` matches folders of any depth.

  Returns:
    Pairs of name and path.

  Raises:
    ValueError: If no file matches.
  """
  pattern = os.path.expanduser(pattern)
  root = _fixed_part(pattern)
  paths = map(pathlib.Path, glob.glob(pattern, recursive=True))
  found = sorted(
    (p.relative_to(root).as_posix(), p) for p in paths if p.is_file()
  )
  if not found:
    raise ValueError(
      f"no file matches the glob {pattern!r}: give a pattern of existing"
      " files, for example 'texts/**/*.txt'"
    )
  return found


def named_globs(sets: str) -> dict[str, str]:
  """Returns the glob of each set of `evaluation.sets`, by the name of the set.

  Args:
    sets: Names and globs, e.g. "wiki=wiki/*.txt;code=src/**/*.py".

  Raises:
    ValueError: If that is not its form, or a name comes twice.
  """
  pairs = [part.partition("=") for part in sets.split(";") if part.strip()]
  found = {name.strip(): glob.strip() for name, _, glob in pairs}
  require(
    all(found) and all(found.values()) and len(found) == len(pairs),
    f"evaluation.sets={sets!r} must be different names with a glob each, like "
    "'wiki=wiki/*.txt;code=src/**/*.py'",
  )
  return found


def read_documents(
  name: str,
  path: pathlib.Path,
  text_field: str = TEXT_FIELD,
  on_damage: Callable[[ValueError], None] | None = None,
) -> Iterator[Document]:
  """Yields the documents of one file.

  Args:
    name: Name of the file.
    path: The file.
    text_field: Field of a JSON line that has the text.
    on_damage: Called with the error of a line or a file that cannot be read,
      which is then left out. None raises the error.

  Raises:
    ValueError: If the file cannot be read, or a line of JSON has no such text.
      The message is one line and names file and line.
  """
  try:
    yield from _documents(name, path, text_field, on_damage)
  except ValueError as error:
    _tell(error, on_damage)


def _tell(
  error: ValueError, on_damage: Callable[[ValueError], None] | None
) -> None:
  """Hands an error on, or raises it if nobody wants to hear of it."""
  if on_damage is None:
    raise error
  on_damage(error)


def _documents(name, path, text_field, on_damage) -> Iterator[Document]:
  with _readable(path), _opened(path) as file:
    if _plain_suffix(path) not in _LINES:
      yield Document(name, file.read())
      return
    for number, line in enumerate(file, start=1):
      if not line.strip():
        continue
      try:
        content = _field(line, text_field, f"{path}, line {number}")
      except ValueError as error:
        _tell(error, on_damage)
      else:
        yield Document(f"{name}:{number}", content)


def _field(line: bytes, text_field: str, where: str) -> bytes:
  try:
    value = json.loads(line)
  except ValueError as error:
    raise ValueError(
      f"{where} is no JSON ({error}): mend or remove it"
    ) from None
  if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
    raise ValueError(
      f"{where} has no text in the field {text_field!r}: name another one with "
      "data.text_field, or remove the line"
    )
  return value[text_field].encode(errors="surrogatepass")


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
  """Turns errors of a file into one line that names it."""
  try:
    yield
  except (OSError, EOFError) as error:
    reason = getattr(error, "strerror", None) or error
    raise ValueError(
      f"cannot read {path} ({reason}): make it readable or narrow the glob"
    ) from error


def _opened(path: pathlib.Path) -> io.BufferedIOBase:
  if path.suffix == ".gz":
    return gzip.open(path)
  if path.suffix != ".zst":
    return path.open("rb")
  zstandard = text_package("zstandard", str(path))
  return io.BufferedReader(zstandard.open(path, "rb"))


def _plain_suffix(path: pathlib.Path) -> str:
  """Returns the ending of a file without that of its compression."""
  name = pathlib.Path(path.stem) if path.suffix in _COMPRESSED else path
  return name.suffix


def _fixed_part(pattern: str) -> pathlib.Path:
  """Returns the folders of a pattern before the first wildcard."""
  if not glob.has_magic(pattern):
    return pathlib.Path(pattern).parent
  parts = pathlib.Path(pattern).parts
  return pathlib.Path(
    *itertools.takewhile(lambda part: not glob.has_magic(part), parts)
  )
