"""Reads documents from files: plain text, or JSON lines, also compressed.

A plain file is one document. In a file of JSON lines (.jsonl, .ndjson, .json)
every line is an object or blank, and one field of the object is the text of a
document. A file is compressed if its name ends in .gz, .bz2, .xz or .zst. A
document must be text in UTF-8 without zero bytes.
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

TEXT_FIELD = "text"  # Default name of the field that has the text.
_OBJECTS = (".jsonl", ".ndjson", ".json")  # Endings of files of JSON lines.


class Document(NamedTuple):
  """A text and its name.

  Attributes:
    name: Path of the file, relative to the folders before the first wildcard of
      the glob; without a wildcard, only the name of the file. For JSON lines,
      the number of the line follows, from 1. A `part` above 0 comes first.
      Examples: "b/a.jsonl:12", "1/b/a.jsonl:12".
    content: The text in UTF-8.
    part: Index of the glob that matches the file, from 0.
  """

  name: str
  content: bytes
  part: int = 0


def matching_files(pattern: str) -> list[tuple[str, pathlib.Path]]:
  """Lists the files that a pattern matches, in the order of their names.

  Names are relative to the folders before the first wildcard of the pattern.
  With "/data/texts/**/*.txt" the name of /data/texts/a/b.txt is "a/b.txt". If
  the pattern has no wildcard, the last part of the path is the name. Each file
  is listed once, however many links lead to it.

  Args:
    pattern: Path, or glob pattern; `**` matches folders of any depth, and "~"
      at the start is the user's home directory. Brackets in the name of an
      existing file or folder are no wildcard.

  Returns:
    Pairs (name, path).

  Raises:
    ValueError: If no file matches.
  """
  root, relative_pattern = _split_pattern(os.path.expanduser(pattern))
  names = [relative_pattern]
  if not os.path.exists(root / relative_pattern):
    names = names_of(relative_pattern, root)
  matches = each_file_once(names, root)
  if not matches:
    # If the pattern matches a folder, the message suggests the files in it.
    folder = ""
    if pattern:
      folder = next(
        (root / name for name in names if os.path.isdir(root / name)), ""
      )
    reason = f"no file matches the glob {pattern!r}"
    if folder:
      reason = f"the glob {pattern!r} matches folders, and no file"
    raise ValueError(
      f"{reason}: give a pattern of existing files, for example "
      f"{str(folder or 'texts') + '/**/*'!r}"
    )
  return matches


def split_globs(globs: str) -> list[str]:
  """Splits paths and glob patterns that are joined by ";".

  Example: "a/*.txt; b/*.txt" gives ["a/*.txt", "b/*.txt"].

  Blanks around a glob are removed, and empty globs are left out. If all are
  empty, the result is [""]. A ";" in the path of an existing file or folder
  does not split the path.
  """
  pieces = globs.split(";")
  split = []
  while pieces:
    # The first piece, the first two pieces, and so on, joined again.
    prefixes = list(itertools.accumulate(pieces, "{};{}".format))
    existing = (
      prefix for prefix in reversed(prefixes) if os.path.exists(prefix.strip())
    )
    longest = next(existing, pieces[0])
    # A path with n times ";" is made of n + 1 pieces.
    del pieces[: 1 + longest.count(";")]
    split.append(longest.strip())
  return list(filter(None, split)) or [""]


def read_globs(
  globs: str, text_field: str = TEXT_FIELD
) -> Iterator[tuple[pathlib.Path, Iterator[Document]]]:
  """Yields each file of several globs, and its documents.

  Args:
    globs: Globs joined by ";". Names of documents begin with the index of their
      glob if it is above 0: "a.txt", "1/a.txt", "2/a.txt".
    text_field: Field of a JSON line that has the text.

  Yields:
    Path of a file, and an iterator that reads its documents.

  Raises:
    ValueError: If a glob matches no file, if a file cannot be read, or if a
      file or a line has no valid text.
  """
  # All globs are checked before the first file is read.
  files_of_parts = [matching_files(pattern) for pattern in split_globs(globs)]
  for part, files in enumerate(files_of_parts):
    for name, path in files:
      # Without the prefix, documents of two globs could have the same name.
      name = f"{part}/{name}" if part else name
      yield path, _documents(name, path, text_field, part)


def _documents(
  name: str, path: pathlib.Path, text_field: str, part: int
) -> Iterator[Document]:
  """Yields the documents of a file.

  Raises ValueError if the file cannot be read, or if a document is no text.
  """
  where = printable(str(path))
  is_compressed = path.suffix.lower() in _OPENED_BY
  # Of "a.jsonl.gz", this is ".jsonl".
  suffix = pathlib.Path(path.stem).suffix if is_compressed else path.suffix
  open_file = _OPENED_BY[path.suffix.lower()] if is_compressed else open
  try:
    # `gzip` would read an empty file as an empty text.
    if is_compressed and not path.stat().st_size:
      raise EOFError("it is empty, as no compressed file is")
    with open_file(path, "rb") as file:
      if suffix.lower() not in _OBJECTS:
        yield Document(name, _checked(file.read(), where), part)
        return
      for number, line in enumerate(file, start=1):
        if line.strip():
          content = _text_of(line, text_field, f"{where}, line {number}")
          yield Document(f"{name}:{number}", content, part)
  except ValueError:  # `_checked` and `_text_of` say what is wrong.
    raise
  # Each library has its own error for a file that is not in its format.
  except Exception as error:
    reason = printable(str(getattr(error, "strerror", None) or error))
    raise ValueError(
      f"cannot read {where} ({reason}): make it readable or narrow the glob"
    ) from error


def _open_zstd(path: pathlib.Path, mode: str) -> Any:
  """Opens a .zst file as `gzip.open` opens a .gz file."""
  return extra_package("backports.zstd", str(path)).open(path, mode)


# Functions that open compressed files, by the last ending of the name. With all
# of them, reading a file that is cut short raises an EOFError.
_OPENED_BY = {
  ".gz": gzip.open,
  ".bz2": bz2.open,
  ".xz": lzma.open,
  ".zst": _open_zstd,
}


def _checked(content: bytes, where: str) -> bytes:
  """Returns the content of a document; raises ValueError unless it is text."""
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
  """Returns the text in a line of JSON, in UTF-8.

  Raises ValueError if the line has no valid text in the field `text_field`.
  """
  # Other fields of the object may have values such as NaN, which are not JSON
  # but which Python reads. They do not matter here.
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


def _split_pattern(pattern: str) -> tuple[pathlib.Path, str]:
  """Splits a pattern before its first wildcard part, else before its last part.

  "/data/texts/**/*.txt" becomes "/data/texts" and "**/*.txt". A part such as
  "[a]" has no wildcard if the disk has a file or folder of this very name.
  """
  root = pathlib.Path()
  remaining_parts = list(pathlib.Path(pattern).parts)
  while len(remaining_parts) > 1:
    folder = root / remaining_parts[0]
    if glob.has_magic(remaining_parts[0]) and not os.path.exists(folder):
      break
    root = folder
    remaining_parts = remaining_parts[1:]
  return root, os.path.join("", *remaining_parts)
