"""Claims and locks work directories, and writes the record of a run.

A program claims a directory that is empty (hidden files do not count) or has
the program's stamp, `made_by.json`. Any other directory is refused, because its
files might be overwritten. A run also locks its directory, so that no other run
mixes its rows in. The record of a run is `config.json` and `run.json`.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import pathlib
import platform as host
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from dilocox_jax import files
from dilocox_jax.checks import json_file, of_type
from dilocox_jax.files import STAMP
from dilocox_jax.metrics import lines
from dilocox_jax.metrics.lines import Directory

LOCK = ".train.lock"
CONFIG = "config.json"
RECORD = "run.json"
_PACKAGES = ("jax", "flax", "optax", "numpy")
PROGRAM = "train"  # The program in the stamp of every run's directory.


class RefusedError(ValueError):
  """Raised if a program cannot or must not write into a directory.

  The message is one line that says why.
  """


class BusyError(RuntimeError):
  """Raised if another process uses a directory. A later call may succeed."""


def claim(path: Directory, program: str) -> pathlib.Path:
  """Claims a directory for a program: creates it and writes its stamp.

  A directory that already has the program's stamp is left as it is.

  Args:
    path: The directory. Several processes of the program may claim it at once.
    program: Name of the program, which the stamp (`made_by.json`) holds.

  Returns:
    The path of the directory.

  Raises:
    RefusedError: If the directory has no readable stamp but has files that are
      not hidden, if it has the stamp of another program, or if its path is not
      UTF-8. Nothing in it is changed then.
    OSError: If the system refuses.
  """
  path = pathlib.Path(path)
  _check_name(path)
  path.mkdir(parents=True, exist_ok=True)
  # The files are listed before the stamp is read, because a process that claims
  # the directory at the same time writes the stamp before other files. So if a
  # file of that process is in the list, its stamp is found below.
  names = [name for name in os.listdir(path) if not name.startswith(".")]
  owner = _owner(path / STAMP)
  if owner is None and names:
    raise RefusedError(
      f"{path} has files that {program} did not make: choose another --workdir"
    )
  if owner not in (None, program):
    raise RefusedError(
      f"{path} was made by {owner}, and {program} would write over its files: "
      "choose another --workdir"
    )
  if owner is None:
    _write_stamp(path, program)
  return path


def _check_name(path: pathlib.Path) -> None:
  """Raises RefusedError for a path that is not UTF-8."""
  full_path = str(path.resolve())
  try:
    full_path.encode()
  except UnicodeEncodeError as error:
    raise RefusedError(
      f"{full_path} is not named in UTF-8: choose another directory, or set "
      "PYTHONUTF8=1 if its name is UTF-8 and the locale is not"
    ) from error


def _owner(stamp: pathlib.Path) -> str | None:
  """Returns the program that a stamp file names; None if it cannot be read."""
  try:
    program = json_file(stamp).get("program")
  except ValueError:
    return None
  if program is None:
    return None
  return str(program)


def _write_stamp(path: pathlib.Path, program: str) -> None:
  """Writes the stamp, a file that names the program, into a directory."""
  # Other processes may write the stamp at the same time, so each one renames
  # a file of its own.
  partial = path / f".{STAMP}.{uuid.uuid4().hex}"
  with partial.open("x") as file:
    file.write(json.dumps({"program": program}) + "\n")
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path / STAMP)


def check_subfolder(workdir: pathlib.Path, *names: str) -> pathlib.Path:
  """Refuses a folder of a work directory if it is a link or no folder.

  A missing folder is accepted. Libraries would follow a link out of the
  directory.

  Args:
    workdir: The work directory; it may be missing.
    *names: Names of the folders. Each lies in the folder before it.

  Returns:
    The path of the last folder.

  Raises:
    RefusedError: If one of the names belongs to a link or a file, or if the
      system refuses.
  """
  path = workdir.joinpath(*names)
  with _refusing(path), contextlib.suppress(FileNotFoundError):
    files.check_folder(workdir, *names)
  return path


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
  """Claims a run directory, and holds its lock while the block runs.

  Files that a killed run has written only in part are removed.

  Args:
    workdir: The run directory; created if missing.

  Raises:
    BusyError: If another run holds the lock.
    RefusedError: If the directory has files that no run has made, cannot be
      written, or has a path that is not UTF-8.
  """
  with _refusing(workdir):
    claim(workdir, PROGRAM)
  refusal = f"another run is at work in workdir={workdir}: wait for its end"
  with locked(workdir / LOCK, refusal):
    with _refusing(workdir):
      files.remove_partial(workdir)
    yield


@contextlib.contextmanager
def locked(path: pathlib.Path, refusal: str) -> Iterator[int]:
  """Holds a lock on a file while the block runs.

  The lock ends when no process has the file open any more. So a child process
  that inherits the descriptor keeps the lock. On network file systems without
  locks, a warning is logged and the block runs without a lock.

  Args:
    path: File of the lock; created if missing. Nothing is written to it.
    refusal: Message if another process holds the lock.

  Yields:
    Descriptor of the file.

  Raises:
    BusyError: If another process holds the lock.
    RefusedError: If the file cannot be created or opened.
  """
  with _refusing(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    file = files.opened_to_append(path)
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise BusyError(refusal + _holders(path)) from None
    except OSError as error:
      logging.warning("%s cannot be locked (%s)", path, error.strerror)
    yield file.fileno()


def _holders(path: pathlib.Path) -> str:
  """Returns a text that lists the other processes that have a file open.

  For example, the text is " (process 12)" or " (processes 12, 15)". It is "" if
  none is found, and always on systems other than Linux.
  """
  full_path = str(path.resolve())
  numbers = set()
  # Linux lists the open files of each process as links in /proc/NUMBER/fd.
  for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
    # Reading fails if the process has ended, or belongs to another user.
    with contextlib.suppress(OSError):
      if os.readlink(link) == full_path:
        numbers.add(int(link.parts[2]))
  numbers.discard(os.getpid())
  if not numbers:
    return ""
  word = "process" if len(numbers) == 1 else "processes"
  return f" ({word} {', '.join(map(str, sorted(numbers)))})"


@contextlib.contextmanager
def _refusing(path: pathlib.Path) -> Iterator[None]:
  """Turns an OSError inside the block into a `RefusedError`."""
  try:
    yield
  except OSError as error:
    raise RefusedError(f"{path} cannot be written: {error.strerror}") from error


def _git(*arguments: str) -> str:
  """Runs Git in the folder of this file and returns its output.

  Raises:
    OSError: If Git cannot be run.
    subprocess.SubprocessError: If Git fails or takes longer than 10 seconds.
  """
  package = pathlib.Path(__file__).parent
  # In a hook of Git these variables name the repository of the hook.
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("GIT_")
  }
  finished = subprocess.run(
    ["git", "-C", str(package), *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=10,
    check=True,
  )
  return finished.stdout.strip()


def source_revision() -> str | None:
  """Returns the commit of this source.

  The result ends with "-dirty" if tracked files were edited. It is None if the
  source is no Git checkout, or if Git is missing, fails or takes too long.
  """
  try:
    # An installed copy may lie inside the checkout of another project, for
    # example in its virtual environment. The commit of that project is not the
    # revision of this source.
    if _git("rev-parse", "--show-prefix") != "dilocox_jax/metrics/":
      return None
    revision = _git("rev-parse", "--verify", "HEAD")
    edited = _git("status", "--porcelain", "--untracked-files=no")
  except (OSError, subprocess.SubprocessError):
    return None
  if edited:
    return f"{revision}-dirty"
  return revision


def write_run_record(
  workdir: Directory,
  config: Mapping[str, Any],
  run: Mapping[str, Any],
  start: Mapping[str, Any],
  continues: bool = False,
) -> None:
  """Writes `config.json` and `run.json`, the record of a run.

  The record of a continued run lists the earlier starts that differ from this
  start, for example in the command, the devices or the source revision.

  Args:
    workdir: Run directory; created if missing.
    config: Whole config as nested mappings.
    run: Facts about the run: its model, its method and its data, with hashes of
      the training text and of the held-out sequences.
    start: Facts about this start of the run: its command, its platform, and the
      values that were chosen for the devices.
    continues: Whether the run continues from a checkpoint.

  Raises:
    RecordError: If the directory cannot be written.
  """
  workdir = lines.make_directory(workdir)
  lines.write_json(workdir / CONFIG, config)
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  start = {
    **start,
    "source_revision": source_revision(),
    "versions": {"python": host.python_version(), **versions},
  }
  earlier_starts = []
  if continues:
    earlier_starts = _earlier_starts(workdir, start)
  lines.write_json(
    workdir / RECORD, {**run, **start, "earlier_starts": earlier_starts}
  )


def _earlier_starts(
  workdir: pathlib.Path, start: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns the earlier starts that differ from `start`, the oldest first.

  They come from `run.json`; [] if it is missing or damaged.
  """
  try:
    record = json_file(workdir / RECORD)
    listed_starts = of_type(
      "earlier_starts", record.get("earlier_starts", []), list
    )
  except ValueError:
    return []  # A run without its old record can still continue.
  # The record has the facts about the last start beside those about the run.
  last_start = {name: record.get(name) for name in start}
  earlier_starts = []
  for earlier_start in [*listed_starts, last_start]:
    if earlier_start != start and earlier_start not in earlier_starts:
      earlier_starts.append(earlier_start)
  return earlier_starts
