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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.checks import extra_package, require

TEXT_FIELD = "text"
OnDamage = Callable[[ValueError], None]
DAMAGED = ("error", "skip")  # What to do with a line or file that is damaged.
_LINES = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".zst")


class Document(NamedTuple):
  """A text and its name.

  Attributes:
    name: Path relative to the root of the corpus, with forward slashes, and
      for JSON lines the number of the line, from 1: "b/a.jsonl:12".
    content: The text in UTF-8.
    part: Number of the glob that it is from.
  """

  name: str
  content: bytes
  part: int = 0


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


def in_parts(
  globs: str, read: Callable[[str], Iterable[Document]]
) -> Iterator[Document]:
  """Yields the documents of several globs, each of which is a part of a text.

  Args:
    globs: Globs joined by ";". One alone changes nothing.
    read: Function from a glob to its documents.
  """
  for part, glob_of_part in enumerate(globs.split(";")):
    for document in read(glob_of_part):
      # Two globs may give two documents one name.
      name = f"{part}/{document.name}" if part else document.name
      yield Document(name, document.content, part)


def read_documents(
  name: str,
  path: pathlib.Path,
  text_field: str = TEXT_FIELD,
  on_damage: OnDamage | None = None,
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
    tell(error, on_damage)


def tell(error: ValueError, on_damage: OnDamage | None) -> None:
  """Hands an error on, or raises it if nobody wants to hear of it."""
  if on_damage is None:
    raise error
  on_damage(error)


def sampled(
  documents: Iterable[Document],
  shuffle_buffer: int = 0,
  max_documents: int = 0,
  seed: int = 0,
) -> Iterator[Document]:
  """Yields documents in a random order, or only the first of them.

  Each document is drawn from a buffer, which the next document then fills. So
  the memory of the buffer is all that a stream of any length needs. The order
  is a function of the documents, the size of the buffer and the seed.

  Args:
    documents: Documents.
    shuffle_buffer: Documents in the buffer; 0 keeps the order.
    max_documents: Documents to yield at most; 0 yields all.
    seed: Any integer that is not negative.
  """
  draws, buffer = np.random.default_rng(seed), []

  def drawn() -> Iterator[Document]:
    for document in documents:
      buffer.append(document)
      if len(buffer) > shuffle_buffer:
        yield buffer.pop(int(draws.integers(len(buffer))))
    draws.shuffle(buffer)
    yield from buffer

  return itertools.islice(drawn(), max_documents or None)


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
        tell(error, on_damage)
      else:
        yield Document(f"{name}:{number}", content)


def _field(line: bytes, text_field: str, where: str) -> bytes:
  try:
    value = json.loads(line)
  except ValueError as error:
    raise ValueError(
      f"{where} is no JSON ({error}): mend or remove it"
    ) from None
  return document_text(value, text_field, where)


def document_text(value: Any, text_field: str, where: str) -> bytes:
  """Returns the text of an object in UTF-8.

  Args:
    value: A row of a file, or a line of JSON that was read.
    text_field: Field that has the text.
    where: Place of the object, for the message.

  Raises:
    ValueError: If there is no text in the field.
  """
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
  zstandard = extra_package("zstandard", str(path))
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
