"""What can go wrong with a checkpoint's files: damage, and a full disk."""

import hashlib
import json
import logging
import pathlib
import traceback

from dilocox_jax.checks import json_object

_STATUS = "os_error_code="  # Part of TensorStore's error messages.
FILE = "digests.json"  # SHA-256 of every file of the checkpoint, by its path.


def seal(checkpoint: pathlib.Path) -> None:
  """Writes the digests of a checkpoint's files, which must all be written."""
  text = json.dumps(_digests(checkpoint), indent=2)
  (checkpoint / FILE).write_text(text)


def damage(checkpoint: pathlib.Path) -> str:
  """Returns what is wrong with a checkpoint's files, or "" if nothing is."""
  try:
    expected = json_object((checkpoint / FILE).read_bytes(), FILE)
    digests = _digests(checkpoint)
  except (OSError, ValueError) as error:
    return f"its files cannot be read ({error})"
  wrong = [path for path in expected if digests.get(path) != expected[path]]
  return f"{wrong[0]} is damaged or missing" if wrong else ""


def _digests(checkpoint: pathlib.Path) -> dict[str, str]:
  """Returns the SHA-256 of every file of a checkpoint, by relative path."""
  digests = {}
  for path in sorted(checkpoint.glob("*/**/*")):
    if path.is_file():
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      digests[path.relative_to(checkpoint).as_posix()] = digest
  return digests


def _is_worth_a_line(record: logging.LogRecord) -> bool:
  """Log filter that drops the tracebacks of Orbax's background threads.

  If a save fails, each thread prints a traceback, and Orbax raises the error in
  the next call. The run then ends with one line (`SaveError`). 200 lines of
  tracebacks would hide this line.
  """
  error = record.exc_info[1] if record.exc_info else None
  frames = traceback.walk_tb(error.__traceback__) if error else ()
  files = {frame.f_code.co_filename for frame, _ in frames}
  return not (error and any("orbax" in x for x in files | {record.pathname}))


def hide_tracebacks() -> None:
  """Drops what Orbax's background threads log about errors."""
  # Orbax logs by absl. Where nobody asks for the error of one of its tasks,
  # asyncio logs it, perhaps not before the process ends.
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_worth_a_line)


def is_of_disk(error: BaseException | None) -> bool:
  """Whether an error, or an error that caused it, is of the operating system.

  The library that writes the arrays (TensorStore) raises a ValueError. Its text
  contains the system's code, e.g. "[os_error_code='28']" for a full disk.
  """
  while error:
    if isinstance(error, OSError) or _STATUS in str(error):
      return True
    error = error.__cause__ or error.__context__
  return False
