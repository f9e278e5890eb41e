"""JSON lines that survive a kill, and files replaced as a whole.

A row is one line, written by one system call, and a line counts only once its
newline is on disk; so a kill at any moment leaves at most one torn tail, which
reading ignores and the next writer cuts. JSON has no NaN or infinity: a float
that is not finite is written as null, and the row types read null back as NaN.
"""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

Directory = str | os.PathLike[str]


class RecordError(RuntimeError):
  """A file of the run directory could not be written or read; one line."""


@contextlib.contextmanager
def one_line(path: Directory, verb: str = "write") -> Iterator[None]:
  """Turns an OSError inside the block into one line that names the path."""
  try:
    yield
  except OSError as error:
    reason = error.strerror or str(error)
    raise RecordError(f"cannot {verb} {os.fspath(path)}: {reason}") from error


def make_directory(path: Directory) -> pathlib.Path:
  """Makes a directory, those above it included, unless it is there.

  Raises:
    RecordError: The disk refused, or a file has its name.
  """
  path = pathlib.Path(path)
  with one_line(path):
    path.mkdir(parents=True, exist_ok=True)
  return path


def plain(value: Any) -> Any:
  """Turns numpy values, tuples and paths into what JSON can hold.

  Args:
    value: Nested mappings and sequences of numbers, strings and None.

  Returns:
    The same with Python numbers; floats that are not finite become None.
  """
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  if isinstance(value, np.ndarray | np.generic):
    return plain(value.tolist())
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return os.fspath(value) if isinstance(value, os.PathLike) else value


def write_atomically(path: Directory, text: str | bytes) -> None:
  """Replaces a file as a whole, so that no reader sees half of it.

  Args:
    path: The file; its directory must exist.
    text: The new content; a string is written as UTF-8.

  Raises:
    RecordError: The disk refused.
  """
  path = pathlib.Path(path)
  partial = path.with_name(f".{path.name}.partial")
  with one_line(path):
    with partial.open("wb") as file:
      file.write(text.encode() if isinstance(text, str) else text)
      file.flush()
      os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Directory, value: Any) -> None:
  """Writes indented JSON with sorted keys, atomically (see `plain`)."""
  text = json.dumps(plain(value), indent=2, sort_keys=True, allow_nan=False)
  write_atomically(path, text + "\n")


def _whole_lines(path: pathlib.Path) -> list[bytes]:
  if not path.exists():
    return []
  with one_line(path, "read"):
    lines = path.read_bytes().splitlines(keepends=True)
  return [line for line in lines if line.endswith(b"\n")]


def _parse(path: pathlib.Path, lines: Iterable[bytes]) -> list[dict[str, Any]]:
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      rows.append(dict(json.loads(line)))
    except (ValueError, TypeError) as error:
      raise RecordError(f"{path} line {number} is not a JSON object") from error
  return rows


def read_rows(path: Directory) -> list[dict[str, Any]]:
  """Reads a JSON-lines file; a missing file has no rows.

  Args:
    path: The file. A last line without its newline is ignored.

  Returns:
    One dictionary a line, in order.

  Raises:
    RecordError: A whole line is not a JSON object.
  """
  path = pathlib.Path(path)
  return _parse(path, _whole_lines(path))


class JsonLines:
  """An append-only file of rows, one JSON object a line."""

  def __init__(self, path: Directory):
    """Opens the file for appending, and cuts a torn last line.

    Args:
      path: The file, created with the first row; its directory must exist.
    """
    self.path = pathlib.Path(path)
    size = sum(map(len, _whole_lines(self.path)))
    if self.path.exists() and self.path.stat().st_size != size:
      with one_line(self.path):
        os.truncate(self.path, size)

  def append(self, row: Mapping[str, Any]) -> None:
    """Writes one row so that a killed process leaves all of it or a torn tail.

    Args:
      row: Anything `plain` accepts. Floats read back bit-equal.

    Raises:
      RecordError: The disk refused; the earlier rows are untouched.
    """
    text = json.dumps(plain(row), sort_keys=True, allow_nan=False)
    line = text.encode() + b"\n"
    with one_line(self.path), self.path.open("ab", buffering=0) as file:
      size = os.fstat(file.fileno()).st_size
      if file.write(line) != len(line):
        file.truncate(size)
        raise OSError("the disk took only part of a row")

  def truncate_after(self, step: int) -> None:
    """Cuts the rows of steps that a restored run will do again.

    The closing row is cut whatever its step: it comes after the flush, which
    no checkpoint holds, so a run that ends again writes it again.

    Args:
      step: The restored inner step; -1 cuts every row.
    """
    lines = _whole_lines(self.path)
    rows = _parse(self.path, lines)
    kept = [
      line
      for line, row in zip(lines, rows, strict=True)
      if row["step"] <= step and row.get("kind") != "final"
    ]
    if len(kept) != len(lines):
      write_atomically(self.path, b"".join(kept))
