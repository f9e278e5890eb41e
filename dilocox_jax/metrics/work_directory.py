"""What says whose a work directory is, what was run in it, and who is at work.

Several programs write files with the same names, such as `report.md`. So the
first file of a directory is `made_by.json`, and a program writes only into a
directory that is empty or has its own stamp. Hidden files do not count: they
are locks, halves of files, or those of a file browser. Two runs at once would
mix their rows, so a run locks its directory.

A loss can only be compared with another one if its config, source revision and
corpus digest are known. So `config.json` and `run.json` are written before the
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
CONFIG, RECORD = "config.json", "run.json"
_PACKAGES = ("jax", "flax", "optax", "numpy")
PROGRAM = "train"  # The stamp of all runs, whatever program trains them.


class RefusedError(ValueError):
  """The directory must not be used in this way; the message says why."""


class BusyError(RuntimeError):
  """Another process is at work there; the same call works later."""


def claim(path: Directory, program: str) -> pathlib.Path:
  """Makes a directory, with the stamp of a program, or finds it so.

  Args:
    path: The directory; made if missing. Several processes of the program may
      claim it at once.
    program: Name of the program.

  Returns:
    The path.

  Raises:
    RefusedError: If another program or a user made it, or its path is
      not UTF-8. It is as it was then.
    OSError: If the system refuses.
  """
  path = pathlib.Path(path)
  _check_name(path)
  path.mkdir(parents=True, exist_ok=True)
  # Listed first: whoever else claims it writes the stamp before other files.
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
    _write(path, program)
  return path


def _check_name(path: pathlib.Path) -> None:
  """Refuses a path that Orbax and the pages cannot write."""
  whole = str(path.resolve())
  try:
    whole.encode()
  except UnicodeEncodeError as error:
    raise RefusedError(
      f"{whole} is not named in UTF-8: choose another directory, or set "
      "PYTHONUTF8=1 if its name is UTF-8 and the locale is not"
    ) from error


def _owner(stamp: pathlib.Path) -> str | None:
  try:
    program = json_file(stamp).get("program")
  except ValueError:
    return None
  return None if program is None else str(program)


def _write(path: pathlib.Path, program: str) -> None:
  """Writes the stamp, also if other processes do so at the same time."""
  partial = path / f".{STAMP}.{uuid.uuid4().hex}"
  with partial.open("x") as file:
    file.write(json.dumps({"program": program}) + "\n")
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path / STAMP)


def check_subfolder(workdir: pathlib.Path, *names: str) -> pathlib.Path:
  """Returns the path of a folder in a work directory, which may be missing.

  Libraries and other programs open it by its path.

  Args:
    workdir: The work directory; it may be missing.
    *names: Names of the folders, each in the one before.

  Raises:
    RefusedError: If a link or something else has one of the names.
  """
  path = workdir.joinpath(*names)
  with _refusing(path), contextlib.suppress(FileNotFoundError):
    files.check_folder(workdir, *names)
  return path


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a run directory for as long as the block lasts.

  Args:
    workdir: The run directory; made if missing.

  Raises:
    BusyError: If another run holds it.
    RefusedError: If the directory is not that of a run, or the lock's file
      cannot be made.
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
  """Holds a lock on a file, for what only one process at a time may do.

  The kernel releases a lock when the last process that has the file open ends,
  killed or not. A child process may inherit the open file and so keep the lock
  until it has ended, too: the processes of a launch do. Lock libraries open
  and close files by themselves and do not allow that. On a file system that has
  no locks, as some network file systems, there is a warning.

  Args:
    path: File of the lock; made if missing. Nothing is written to it.
    refusal: Message if another process holds the lock.

  Yields:
    Descriptor of the file.

  Raises:
    BusyError: If another process holds the lock. The message ends with its
      number where the system tells it (Linux).
    RefusedError: If the file cannot be made.
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
  """Returns " (process 12)" for the other processes that have a file open."""
  whole = str(path.resolve())
  numbers = set()
  for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
    with contextlib.suppress(OSError):  # It has ended, or is another user's.
      if os.readlink(link) == whole:
        numbers.add(int(link.parts[2]))
  numbers.discard(os.getpid())
  if not numbers:
    return ""
  word = "process" if len(numbers) == 1 else "processes"
  return f" ({word} {', '.join(map(str, sorted(numbers)))})"


@contextlib.contextmanager
def _refusing(path: pathlib.Path) -> Iterator[None]:
  """Turns errors of the system inside the block into `RefusedError`."""
  try:
    yield
  except OSError as error:
    raise RefusedError(f"{path} cannot be written: {error.strerror}") from error


def _git(*arguments: str) -> str:
  package = pathlib.Path(__file__).parent
  # In a hook of Git these variables name the repository of the hook.
  environment = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("GIT_")
  }
  done = subprocess.run(
    ["git", "-C", str(package), *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=10,
    check=True,
  )
  return done.stdout.strip()


def source_revision() -> str | None:
  """Returns the commit of this source, or None outside a checkout.

  It ends with "-dirty" if tracked files were edited.
  """
  try:
    # An installed copy may lie inside the checkout of another project, for
    # example in its virtual environment. That commit is not ours.
    if _git("rev-parse", "--show-prefix") != "dilocox_jax/metrics/":
      return None
    revision = _git("rev-parse", "--verify", "HEAD")
    edited = _git("status", "--porcelain", "--untracked-files=no")
  except (OSError, subprocess.SubprocessError):
    return None
  return f"{revision}-dirty" if edited else revision


def write_run_record(
  workdir: Directory,
  config: Mapping[str, Any],
  run: Mapping[str, Any],
  start: Mapping[str, Any],
  continues: bool = False,
) -> None:
  """Writes `config.json` and `run.json`.

  The record of a continued run lists its earlier starts if they differ: by
  another command, on other devices, or from other source.

  Args:
    workdir: Run directory; created if missing.
    config: Whole config as nested mappings.
    run: What is trained, on what. Runs can be compared only if corpus_digest
      and held_out_digest are equal: hashes of the training text and of the
      sequences of every evaluation.
    start: How this program trains it: command, platform, and the values that
      the config left to the devices (chosen_for_device).
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
  earlier = _earlier_starts(workdir, start) if continues else []
  lines.write_json(
    workdir / RECORD, {**run, **start, "earlier_starts": earlier}
  )


def _earlier_starts(
  workdir: pathlib.Path, start: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Lists the earlier starts that differ from this one, the oldest first."""
  try:
    before = json_file(workdir / RECORD)
    listed = of_type("earlier_starts", before.get("earlier_starts", []), list)
  except ValueError:
    return []  # A run without its old record can still continue.
  last = {name: before.get(name) for name in start}
  starts = []
  for earlier in (*listed, last):
    if earlier not in (*starts, start):
      starts.append(earlier)
  return starts
