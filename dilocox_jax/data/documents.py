"""Reads documents from files: plain text, or JSON lines, also compressed.

A plain file is one document. In a file of JSON lines (.jsonl, .ndjson, .json)
every line is an object, and one field of it is the text of a document. The last
ending of a name says whether a file is compressed: .gz, .bz2, .xz or .zst.

A document is text in UTF-8 without zero bytes. Other bytes are no text, such as
those of an archive: most tokenizers could not give them back, and those that
could would learn what is no text.

Documents have names, because a name decides whether a document is held out for
validation. The document of line 12 of a.jsonl is called "a.jsonl:12", so a
single file can be divided.
"""

import bz2
import glob
import gzip
import itertools
import lzma
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from dilocox_jax.checks import extra_package, json_object, printable
from dilocox_jax.data.globs import each_file_once, names_of

TEXT_FIELD = "text"
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
  folder that exists is no wildcard. Links are followed, and each file is listed
  once, however many links lead to it.

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
    names = names_of(rest, root)
  found = each_file_once(names, root)
  if not found:
    paths = (root / name for name in names)
    folder = next(filter(os.path.isdir, paths), "") if pattern else ""
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
  pieces = globs.split(";")
  found = []
  while pieces:
    joined = list(itertools.accumulate(pieces, "{};{}".format))
    names = (part for part in reversed(joined) if os.path.exists(part.strip()))
    part = next(names, pieces[0])
    del pieces[: 1 + part.count(";")]
    found.append(part.strip())
  return list(filter(None, found)) or [""]


def read_globs(
  globs: str, text_field: str = TEXT_FIELD
) -> Iterator[tuple[pathlib.Path, Iterator[Document]]]:
  """Yields each file of several globs, and its documents.

  Args:
    globs: Globs as in `split_globs`, each of which is a part of the text. One
      alone changes no name.
    text_field: Field of a JSON line that has the text.

  Raises:
    ValueError: If no file matches or a file cannot be read, or a line of JSON
      has no such text. The message is one line and names file and line.
  """
  files = map(matching_files, split_globs(globs))
  for part, found in enumerate(list(files)):
    for name, path in found:
      # Two globs may give two documents one name.
      name = f"{part}/{name}" if part else name
      yield path, _documents(name, path, text_field, part)


def _documents(
  name: str, path: pathlib.Path, text_field: str, part: int
) -> Iterator[Document]:
  where = printable(str(path))
  is_packed = path.suffix.lower() in _OPENED_BY
  suffix = pathlib.Path(path.stem).suffix if is_packed else path.suffix
  open_file = _OPENED_BY[path.suffix.lower()] if is_packed else open
  try:
    if is_packed and not path.stat().st_size:
      raise EOFError("it is empty, as no compressed file is")
    with open_file(path, "rb") as file:
      if suffix.lower() not in _OBJECTS:
        yield Document(name, _checked(file.read(), where), part)
        return
      for number, line in enumerate(file, start=1):
        if line.strip():
          content = _text_of(line, text_field, f"{where}, line {number}")
          yield Document(f"{name}:{number}", content, part)
  except ValueError:
    raise
  # Each library has an error of its own for what it did not compress.
  except Exception as error:
    reason = printable(str(getattr(error, "strerror", None) or error))
    raise ValueError(
      f"cannot read {where} ({reason}): make it readable or narrow the glob"
    ) from error


def _open_zstd(path: pathlib.Path, mode: str) -> Any:
  return extra_package("backports.zstd", str(path)).open(path, mode)


# What opens compressed files. Of a file that is cut each raises an EOFError.
_OPENED_BY = {
  ".gz": gzip.open,
  ".bz2": bz2.open,
  ".xz": lzma.open,
  ".zst": _open_zstd,
}


def _checked(content: bytes, where: str) -> bytes:
  try:
    content.decode()
    if b"\0" in content:
      raise ValueError("it has zero bytes")
  except ValueError as error:
    raise ValueError(
      f"{where} is no text in UTF-8 ({error}): unpack or convert it, or narrow "
      "the glob"
    ) from None
  return content


def _text_of(line: bytes, text_field: str, where: str) -> bytes:
  """Returns the text of a line of JSON in UTF-8."""
  # Its other fields are not read, so they may be what only Python takes.
  text = json_object(line, where, is_ours=False).get(text_field)
  if not isinstance(text, str):
    raise ValueError(
      f"{where} has no text in the field {text_field!r}: name another one with "
      "data.text_field, or remove the line"
    )
  try:
    content = text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f"{where} has half of a surrogate pair in the field {text_field!r} "
      f"({error}): mend or remove it"
    ) from None
  return _checked(content, where)


def _divided(pattern: str) -> tuple[pathlib.Path, str]:
  """Returns the folders before the first wildcard of a pattern, and the rest.

  What exists as it is written is no wildcard.
  """
  root = pathlib.Path()
  rest = list(pathlib.Path(pattern).parts)
  while len(rest) > 1:
    folder = root / rest[0]
    if glob.has_magic(rest[0]) and not os.path.exists(folder):
      break
    root = folder
    rest = rest[1:]
  return root, os.path.join("", *rest)
