"""Claims and locks work directories, and writes the record of a run.

Several programs write files with the same names, such as `report.md`. So a
program first writes the stamp `made_by.json` into its directory. A program
writes only into a directory that is empty or has the program's own stamp.
Hidden files do not count: they are locks, partly written files, or files of a
file browser. Two runs in one directory would mix their rows, so a run locks its
directory.

Two losses can only be compared if config, source revision and corpus digest of
both runs are known. So `config.json` and `run.json` are written before the
first step, and every report reads them. Versions come from the metadata of
installed packages, so no package is imported for its version.
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

  The stamp is a file that names the program (`made_by.json`). A directory that
  already has the program's stamp is left as it is.

  Args:
    path: The directory; created if missing. Several processes of the program
      may claim it at once.
    program: Name of the program, for the stamp.

  Returns:
    The path of the directory.

  Raises:
    RefusedError: If the directory has files but no stamp, if it has the stamp
      of another program, or if its path is not UTF-8. Nothing in it is changed
      then.
    OSError: If the system refuses.
  """
  path = pathlib.Path(path)
  _check_name(path)
  path.mkdir(parents=True, exist_ok=True)
  # The files are listed before the stamp is read, because a process that claims
  # the directory at the same time writes the stamp before other files.
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
  """Raises RefusedError if a path is not UTF-8.

  Orbax and reports cannot write such a path.

  Args:
    path: The path.
  """
  full_path = str(path.resolve())
  try:
    full_path.encode()
  except UnicodeEncodeError as error:
    raise RefusedError(
      f"{full_path} is not named in UTF-8: choose another directory, or set "
      "PYTHONUTF8=1 if its name is UTF-8 and the locale is not"
    ) from error


def _owner(stamp: pathlib.Path) -> str | None:
  """Returns the program that a stamp names.

  Args:
    stamp: Path of the stamp.

  Returns:
    Name of the program; None if there is no stamp, or if it cannot be read.
  """
  try:
    program = json_file(stamp).get("program")
  except ValueError:
    return None
  if program is None:
    return None
  return str(program)


def _write_stamp(path: pathlib.Path, program: str) -> None:
  """Writes the stamp of a directory.

  Other processes may write the same stamp at the same time. So each process
  writes a file with a name of its own, and then renames it to the stamp.

  Args:
    path: The directory.
    program: Name of the program, for the stamp.
  """
  partial = path / f".{STAMP}.{uuid.uuid4().hex}"
  with partial.open("x") as file:
    file.write(json.dumps({"program": program}) + "\n")
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path / STAMP)


def check_subfolder(workdir: pathlib.Path, *names: str) -> pathlib.Path:
  """Refuses a folder of a work directory if it is a link.

  Libraries and other programs open the folder by its path, and would follow a
  link to files outside of the work directory. A missing folder is accepted.

  Args:
    workdir: The work directory; it may be missing.
    *names: Names of the folders. Each lies in the folder before it.

  Returns:
    The path of the last folder.

  Raises:
    RefusedError: If something with one of the names is not a folder, for
      example a link.
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
    RefusedError: If the directory does not belong to a run, or if the directory
      or the file of the lock cannot be written.
  """
  with _refusing(workdir / LOCK):
    claim(workdir, PROGRAM)
  refusal = f"another run is at work in workdir={workdir}: wait for its end"
  with locked(workdir / LOCK, refusal):
    with _refusing(workdir):
      files.remove_partial(workdir)
    yield


@contextlib.contextmanager
def locked(path: pathlib.Path, refusal: str) -> Iterator[int]:
  """Holds a lock on a file while the block runs.

  The kernel releases the lock when the last process that has the file open
  ends, even if it was killed. So a child process that inherits the open file,
  such as a process of the launcher, keeps the lock until it has ended. (Lock
  libraries open and close the file themselves, so no child process could
  inherit it.)

  Some network file systems have no locks. On these, the function logs a warning
  and goes on without a lock.

  Args:
    path: File of the lock; created if missing. Nothing is written to it.
    refusal: Message if another process holds the lock.

  Yields:
    Descriptor of the file.

  Raises:
    BusyError: If another process holds the lock. On Linux the message ends with
      the number of the process.
    RefusedError: If the file cannot be created.
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
  """Names the other processes that have a file open, for messages.

  Args:
    path: The file.

  Returns:
    For example " (process 12)" or " (processes 12, 13)". Empty if there are
    none, or if they cannot be found (only Linux has /proc).
  """
  full_path = str(path.resolve())
  numbers = set()
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
  """Turns an OSError inside the block into a `RefusedError`.

  Args:
    path: File or directory that the block writes, for the message.
  """
  try:
    yield
  except OSError as error:
    raise RefusedError(f"{path} cannot be written: {error.strerror}") from error


def _git(*arguments: str) -> str:
  """Runs Git in the folder of this file and returns its output.

  Args:
    *arguments: Command of Git, and arguments of the command.

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

  Returns:
    The commit, with "-dirty" at the end if tracked files were edited. None if
    the source is no checkout, or if git is missing, fails or takes more than 10
    seconds.
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
    run: Facts about the run: its model, its method and its data. Two runs can
      be compared only if corpus_digest and held_out_digest are equal. These are
      hashes of the training text and of the sequences of every evaluation.
    start: Facts about this start of the run: its command, its platform, and the
      values that were chosen for the devices where the config says "auto"
      (chosen_for_device).
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
  """Returns the earlier starts that differ from this start, the oldest first.

  Args:
    workdir: Run directory, whose `run.json` is of the start before this start.
    start: Facts about this start, as `run.json` will have them.

  Returns:
    Facts about each earlier start. Empty if `run.json` is missing or damaged.
  """
  try:
    record = json_file(workdir / RECORD)
    listed_starts = of_type(
      "earlier_starts", record.get("earlier_starts", []), list
    )
  except ValueError:
    return []  # A run without its old record can still continue.
  last_start = {name: record.get(name) for name in start}
  earlier_starts = []
  for earlier_start in [*listed_starts, last_start]:
    if earlier_start != start and earlier_start not in earlier_starts:
      earlier_starts.append(earlier_start)
  return earlier_starts
