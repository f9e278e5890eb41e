"""Reads documents from files: plain text, or JSON lines, also compressed.

A plain file is one document. In a file of JSON lines every line is an object,
and one field of it is the text of a document. A .json file is read like one, or
is an array of such objects. All may be compressed.

A document is text in UTF-8. Other bytes are damage: most tokenizers could not
give them back, and those that could would learn what is no text.

Documents have names, because a name decides whether a document is held out for
validation. The document of line 12 of a.jsonl is called "a.jsonl:12", so a
single file can be divided.
"""

import contextlib
import glob
import io
import itertools
import json
import lzma
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.data.compressed import open_unpacked, plain_suffix

TEXT_FIELD = "text"
OnDamage = Callable[[ValueError], None]
DAMAGED = ("error", "skip")  # What to do with a line or file that is damaged.
_LONGEST_PATH = 4096  # Characters; no system opens a longer one.
_HEAD = 64  # Bytes that may stand before an array of JSON.
_OBJECTS = (".jsonl", ".ndjson", ".json")


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
  folder can be moved, and names stay the same. A "[1]" in the name of a file or
  folder that exists is no wildcard.

  Args:
    pattern: Path, or glob pattern; `**` matches folders of any depth.

  Returns:
    Pairs of name and path.

  Raises:
    ValueError: If no file matches.
  """
  root, rest = _divided(os.path.expanduser(pattern))
  names = [rest]
  if not os.path.exists(root / rest):
    names = glob.glob(rest, root_dir=root, recursive=True)
  paths = {pathlib.Path(name).as_posix(): root / name for name in names}
  found = sorted((n, path) for n, path in paths.items() if os.path.isfile(path))
  if not found:
    folder = next(filter(os.path.isdir, paths.values()), "") if pattern else ""
    reason = f"the glob {pattern!r} matches folders, and no file"
    if not folder:
      reason = f"no file matches the glob {pattern!r}"
    raise ValueError(
      f"{reason}: give a pattern of existing files, for example "
      f"{str(folder or 'texts') + '/**/*'!r}"
    )
  return found


def split_globs(globs: str) -> list[str]:
  """Returns the paths and patterns that ";" joins, at least one.

  Blanks around a part are left out, and so are empty parts. A ";" in a path
  that exists divides nothing.
  """
  return _split(globs) or [""]


def named_globs(sets: str) -> dict[str, str]:
  """Returns the glob of each set of `evaluation.sets`, by the name of the set.

  Args:
    sets: Names and globs, e.g. "wiki=wiki/*.txt;code=src/**/*.py".

  Raises:
    ValueError: If that is not its form, or a name comes twice.
  """
  pairs = [part.partition("=") for part in _split(sets, is_named=True)]
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
    globs: Globs as in `split_globs`. One alone changes nothing.
    read: Function from a glob to its documents.
  """
  for part, glob_of_part in enumerate(split_globs(globs)):
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
  """Hands an error on, or raises it if nobody wants to hear of it.

  Args:
    error: What is wrong with a line or a file.
    on_damage: Called with the error; None raises it.
  """
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


def _split(globs: str, is_named: bool = False) -> list[str]:
  """Returns the parts of a text; each may have a name and "=" in front."""

  def exists(part: str) -> bool:
    path = part.partition("=")[2] if is_named else part
    return os.path.exists(os.path.expanduser(path.strip()))

  pieces, found = globs.split(";"), []
  while pieces:
    joined = itertools.accumulate(pieces, "{};{}".format)
    short = itertools.takewhile(lambda part: len(part) < _LONGEST_PATH, joined)
    part = next(filter(exists, reversed(list(short))), pieces[0])
    del pieces[: 1 + part.count(";")]
    found.append(part.strip())
  return list(filter(None, found))


def _documents(name, path, text_field, on_damage) -> Iterator[Document]:
  with _readable(path), open_unpacked(path) as file:
    if plain_suffix(path) not in _OBJECTS:
      yield Document(name, _utf8(file.read(), path))
      return
    for number, where, row in _rows(path, file):
      try:
        value = _parsed(row, where) if isinstance(row, bytes) else row
        content = document_text(value, text_field, where)
      except ValueError as error:
        tell(error, on_damage)
      else:
        yield Document(f"{name}:{number}", content)


def _rows(
  path: pathlib.Path, file: io.BufferedReader
) -> Iterator[tuple[int, str, Any]]:
  """Yields number, place and value of the rows, or the line that is to be."""
  begin = file.peek(_HEAD).lstrip(b"\xef\xbb\xbf \t\r\n")
  if plain_suffix(path) == ".json" and begin.startswith(b"["):
    for number, row in enumerate(_parsed(file.read(), str(path)), start=1):
      yield number, f"{path}, item {number}", row
    return
  for number, line in enumerate(file, start=1):
    if line.strip():
      yield number, f"{path}, line {number}", line


def _parsed(text: bytes, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError, MemoryError) as error:
    raise ValueError(
      f"{where} is no JSON ({_reason(error)}): mend or remove it"
    ) from None


def _utf8(content: bytes, path: pathlib.Path) -> bytes:
  try:
    content.decode()
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is no text in UTF-8 ({error}): convert it, e.g. with iconv, or "
      "narrow the glob"
    ) from None
  return content


def document_text(value: Any, text_field: str, where: str) -> bytes:
  """Returns the text of an object in UTF-8.

  Args:
    value: A row of a file, or a line of JSON that was read.
    text_field: Field that has the text.
    where: Place of the object, for the message.

  Raises:
    ValueError: If there is no text in the field, or half a surrogate pair.
  """
  if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
    raise ValueError(
      f"{where} has no text in the field {text_field!r}: name another one with "
      "data.text_field, or remove the line"
    )
  try:
    return value[text_field].encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f"{where} has half of a surrogate pair in the field {text_field!r} "
      f"({error}): mend or remove it"
    ) from None


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
  """Turns errors of a file into one line that names it."""
  try:
    yield
  except (OSError, EOFError, lzma.LZMAError, zlib.error, MemoryError) as error:
    raise ValueError(
      f"cannot read {path} ({_reason(error)}): make it readable or narrow the "
      "glob"
    ) from error


def _reason(error: Exception) -> str:
  text = str(getattr(error, "strerror", None) or error)
  return " ".join(text.split()) or type(error).__name__


def _divided(pattern: str) -> tuple[pathlib.Path, str]:
  """Returns the folders before the first wildcard of a pattern, and the rest.

  What exists as it is written is no wildcard.
  """
  root, rest = pathlib.Path(), list(pathlib.Path(pattern).parts)
  while len(rest) > 1:
    folder = root / rest[0]
    if glob.has_magic(rest[0]) and not os.path.exists(folder):
      break
    root, rest = folder, rest[1:]
  return root, os.path.join("", *rest)
