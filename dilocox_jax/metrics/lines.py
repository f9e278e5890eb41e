"""Reads and writes JSON lines that survive a kill; replaces files as a whole.

A row is a line of JSON, written by one system call. If the program is killed
meanwhile, the last line may be torn: it does not end with a newline. Readers
ignore such a line, and the next writer cuts it:

    {"loss": 2.5, "step": 30}   newline: this is a row
    {"loss": 2.4, "step": 60}   newline: this is a row
    {"loss": 2.3, "st           torn: no newline, so this is not a row

JSON has no NaN or infinity: a float that is not finite is written as null.
"""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import json_object, of_type

Directory = str | os.PathLike[str]


class RecordError(RuntimeError):
  """Raised if a file of a run cannot be written or read."""


@contextlib.contextmanager
def one_line(path: Directory, verb: str = "write") -> Iterator[None]:
  """Turns an OSError in the block into a RecordError of one line.

  The message begins with "cannot VERB PATH".
  """
  try:
    yield
  except OSError as error:
    reason = error.strerror or str(error)
    raise RecordError(f"cannot {verb} {os.fspath(path)}: {reason}") from error


def make_directory(path: Directory) -> pathlib.Path:
  """Creates a directory and its parents unless they exist, and returns it.

  Raises:
    RecordError: If the system refuses, or a file has the name.
  """
  path = pathlib.Path(path)
  with one_line(path):
    path.mkdir(parents=True, exist_ok=True)
  return path


def plain(value: Any) -> Any:
  """Converts numpy values, tuples and paths to types that JSON has.

  Args:
    value: Nested mappings, lists, tuples and arrays of numbers, strings, paths
      and None.

  Returns:
    Nested dicts and lists of Python values. Keys become strings. Floats that
    are not finite become None. A value of any other type stays as it is.
  """
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  if isinstance(value, np.ndarray | np.generic):
    return plain(value.tolist())
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  return value


def write_atomically(path: Directory, text: str | bytes) -> None:
  """Replaces a file as a whole, so that no reader sees half of the file.

  Args:
    path: File to replace; its directory must exist.
    text: New content. A string is written as UTF-8. A character that UTF-8
      cannot encode is written as an escape.

  Raises:
    RecordError: If the system refuses.
  """
  with one_line(path), files.replaced(path) as file:
    if isinstance(text, str):
      text = text.encode(errors="backslashreplace")
    file.write(text)


def write_json(path: Directory, value: Any) -> None:
  """Replaces a file by indented JSON, as a whole (`write_atomically`).

  `value` may be any that `plain` accepts. The directory must exist.

  Raises:
    RecordError: If the system refuses.
  """
  text = json.dumps(plain(value), indent=2, sort_keys=True, allow_nan=False)
  write_atomically(path, text + "\n")


def whole_lines(path: pathlib.Path) -> list[bytes]:
  """Returns the lines of a file that end with a newline, newline included.

  A missing file has no lines, and a FIFO counts as missing.

  Raises:
    RecordError: If the path is a folder, or if the file cannot be read.
  """
  if path.is_dir():
    raise RecordError(f"{path} is a folder, and has to be a file")
  if not path.is_file():
    return []  # A read of a FIFO would wait for a writer.
  with one_line(path, "read"):
    content = path.read_bytes()
  # Not `splitlines`, which would also divide a line at a carriage return.
  *lines, _ = content.split(b"\n")
  return [line + b"\n" for line in lines]


def _parse(path: pathlib.Path, lines: Iterable[bytes]) -> list[dict[str, Any]]:
  """Parses lines of JSON into rows.

  Raises:
    RecordError: If a line is not a JSON object with an integer "step".
  """
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json_object(line, f"{path} line {number}")
      of_type(f"{path} line {number}: step", row.get("step"), int)
    except ValueError as error:
      raise RecordError(str(error)) from None
    rows.append(row)
  return rows


def read_rows(path: Directory) -> list[dict[str, Any]]:
  """Reads a JSON-lines file; a missing file has no rows.

  A last line without a newline is ignored.

  Raises:
    RecordError: If the file cannot be read, or a line is not a JSON object with
      an integer "step".
  """
  path = pathlib.Path(path)
  return _parse(path, whole_lines(path))


class JsonLines:
  """A file with one JSON object per line, to which rows are appended."""

  def __init__(self, path: Directory, last_step: int = -1):
    """Opens a file, and cuts what a restored run will write again.

    A last line without a newline is cut, and so are all rows after `last_step`.
    Example: there are rows of the steps 30, 60 and 90, and `last_step` is 60.
    Then the row of step 90 is cut. The row of kind "final" is always cut,
    because a run that continues writes it again.

    Args:
      path: The file, in an existing directory. `append` creates it if missing.
      last_step: Inner step of the restored checkpoint; -1 cuts every row.

    Raises:
      RecordError: If the file cannot be read or written, or a line is not a
        row.
    """
    self.path = pathlib.Path(path)
    lines = whole_lines(self.path)
    remaining_lines = []
    for line, row in zip(lines, _parse(self.path, lines), strict=True):
      is_final = row.get("kind") == "final"
      if row["step"] <= last_step and not is_final:
        remaining_lines.append(line)
    remaining = b"".join(remaining_lines)
    # Write the file only if something is cut from it.
    if self.path.is_file() and self.path.stat().st_size != len(remaining):
      write_atomically(self.path, remaining)

  def append(self, row: Mapping[str, Any]) -> None:
    """Appends one row with one system call.

    Args:
      row: Any mapping that `plain` accepts, with an integer "step": `read_rows`
        refuses a file that has a row without it. `read_rows` returns finite
        floats with the same bits.

    Raises:
      RecordError: If the system refuses. The file is then as before the call.
    """
    text = json.dumps(plain(row), sort_keys=True, allow_nan=False)
    line = text.encode() + b"\n"
    # Without a buffer (0), `write` is one system call.
    with one_line(self.path), files.opened_to_append(self.path, 0) as file:
      size = os.fstat(file.fileno()).st_size
      # A disk that is almost full may take only the first bytes of the row.
      if file.write(line) != len(line):
        file.truncate(size)
        raise OSError("the disk took only part of a row")
