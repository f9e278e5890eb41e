"""Saves and restores the state of a run with Orbax, and finds broken files.

A checkpoint holds arrays (parameters, optimizer states, everything in flight)
and a small JSON record (progress, streams, controller). Orbax writes it in the
background. A save of step 12 goes through these states on the disk:

  12.orbax-checkpoint-tmp/              files are being written
  12.orbax-checkpoint-tmp/digests.json  all are written; SHA-256 of each file
  12/                                   complete: Orbax renamed the folder

If the process is killed, the folder stays in one of these states. The next
start removes a folder in the first or second state. So a folder whose name is a
plain number is complete. If a file in it does not have its digest, the disk
damaged the file later, and an older checkpoint is used.
"""

import contextlib
import hashlib
import json
import logging
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from dilocox_jax.distributed import processes
from dilocox_jax.pytypes import Tree

FOLDER = "checkpoints"  # In a run directory.
_ARRAYS, _RECORD, _DIGESTS = "arrays", "record", "digests.json"
_SAVE_TIMEOUT_S = 60 * 60  # Includes the digests, which process 0 computes.
_PARTIAL = ".orbax-checkpoint-tmp"  # In the name of an unfinished save.
# Orbax also writes metadata, the record and whole disk blocks. For small states
# these are 60 to 100 kB (measured). Rows of metrics need room, too.
SPARE_BYTES, _SPARE_SHARE = 1_000_000, 0.02
_DISK_STATUS = "os_error_code="  # In messages of the storage library's errors.


class RefusedError(ValueError):
  """Says why a run directory must not be used as the user asked."""


class SaveError(OSError):
  """Says why a checkpoint could not be written to the disk."""


class Checkpoints:
  """The checkpoints of one run directory."""

  def __init__(
    self, directory: pathlib.Path, keep: int = 2, *, read_only: bool = False
  ):
    """Opens the directory, and creates it unless it is read-only.

    Args:
      directory: Folder of the checkpoints; each is a folder named by its step.
      keep: Number of newest checkpoints to keep.
      read_only: Whether the directory belongs to another run, so that nothing
        in it may change.
    """
    self._directory, self._read_only = directory.resolve(), read_only
    self._replaced = self.aside(self._directory)
    if processes.is_main() and not read_only:
      self._clean_up()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=not read_only,
      enable_async_checkpointing=True,
      async_options=ocp.AsyncOptions(
        timeout_secs=_SAVE_TIMEOUT_S, post_finalization_callback=self._seal
      ),
    )
    self._manager = ocp.CheckpointManager(self._directory, options=options)
    self._log_filter = _NoSaveTracebacks()
    logging.getLogger("absl").addFilter(self._log_filter)

  @staticmethod
  def aside(directory: pathlib.Path) -> pathlib.Path:
    """Returns where a checkpoint waits until its replacement is complete."""
    return directory.with_name("replaced_checkpoints")

  def _clean_up(self) -> None:
    """Removes unfinished saves and restores the checkpoints they replaced."""
    for partial in self._partial():
      shutil.rmtree(partial)
    for replaced in self._replaced.glob("*"):
      if not (self._directory / replaced.name).exists():
        replaced.rename(self._directory / replaced.name)
    shutil.rmtree(self._replaced, ignore_errors=True)

  def _partial(self) -> list[pathlib.Path]:
    return list(self._directory.glob(f"*{_PARTIAL}*"))

  def save(self, step: int, state: Tree, record: dict[str, Any]) -> None:
    """Starts a save in the background. The next save waits for its end.

    Args:
      step: Inner steps finished, which is the name of the checkpoint. An old
        checkpoint of the same step is deleted when the new one is complete.
      state: Tree of arrays. They may be donated as soon as this returns.
      record: Values that JSON can hold, by name.

    Raises:
      SaveError: If there is no room, or if the save before this one failed.
    """
    args = {
      _ARRAYS: ocp.args.StandardSave(_leaves(state)),
      _RECORD: ocp.args.JsonSave(record),
    }
    with self._wording_disk_errors():
      self._manager.wait_until_finished()
      self._check_room(state)
      if step in self._manager.all_steps():
        self._make_way(step)
      self._manager.save(step, args=ocp.args.Composite(**args), force=True)

  def _make_way(self, step: int) -> None:
    """Moves a checkpoint aside until a new one of the same step is complete."""
    if processes.is_main():
      self._replaced.mkdir(exist_ok=True)
      (self._directory / str(step)).rename(self._replaced / str(step))
    processes.from_main(None)  # Other processes wait here until it has moved.
    self._manager.reload()

  def _check_room(self, state: Tree) -> None:
    """Raises OSError if a save would fill the disk.

    All processes write to one directory. So all of them compute the same sum,
    and either all save or all raise.
    """
    free_bytes = shutil.disk_usage(self._directory).free
    all_needed, all_free = zip(
      *processes.from_all([_own_bytes(state), free_bytes]), strict=True
    )
    needed_bytes = round((1 + _SPARE_SHARE) * sum(all_needed)) + SPARE_BYTES
    if needed_bytes > min(all_free):
      raise OSError(
        f"{needed_bytes / 1e6:,.1f} MB are needed and "
        f"{min(all_free) / 1e6:,.1f} MB free"
      )

  @contextlib.contextmanager
  def _wording_disk_errors(self) -> Iterator[None]:
    """Turns errors of the disk into a `SaveError` with one line.

    Orbax saves in the background, so an error of one save is raised by the next
    call.
    """
    try:
      yield
    except Exception as error:
      if not _is_of_disk(error):
        raise
      reason = str(error).strip().partition("\n")[0]
      if "No space left on device" in reason:  # After four file names.
        reason = "No space left on device"
      raise SaveError(
        f"cannot save a checkpoint in {self._directory}: {reason}; "
        f"{self._kept()}, and once the disk takes it, the same command goes on"
      ) from error

  def _seal(self) -> None:
    """Writes the digests when all files of a save have been written."""
    if not processes.is_main():
      return
    for partial in self._partial():  # There is only one: saves do not overlap.
      text = json.dumps(_digests(partial), indent=2)
      (partial / _DIGESTS).write_text(text)

  def wait(self) -> None:
    """Waits for the save that is under way.

    Raises:
      SaveError: If the disk refused it.
    """
    with self._wording_disk_errors():
      self._manager.wait_until_finished()

  def what_is_kept(self) -> str:
    """Returns part of a sentence: which checkpoint a run can continue from."""
    with contextlib.suppress(SaveError):  # Older checkpoints still exist.
      self.wait()
    return self._kept()

  def _kept(self) -> str:
    steps = saved_steps(self._directory)
    if not steps:
      return "no checkpoint was saved yet"
    return f"the checkpoint of step {steps[-1]} is kept"

  def restore(
    self, template: Callable[[dict[str, Any]], Tree]
  ) -> tuple[Tree, dict[str, Any]] | None:
    """Reads the newest checkpoint that is whole.

    Args:
      template: Function from a checkpoint's record to the shapes, types and
        shardings that its state must have; may raise `RefusedError`.

    Returns:
      The state and the record. None if there is no checkpoint, or if the
      directory is read-only and no checkpoint is whole.

    Raises:
      RefusedError: If the newest whole checkpoint does not fit the template, or
        if there are checkpoints but none is whole. In that case a run that
        starts at step 0 would delete the rows of metrics.
    """
    self._manager.wait_until_finished()
    # Only the main process checks and moves checkpoints, so that all processes
    # read the same one.
    newest = self._newest_whole() if processes.is_main() else None
    step, damage = processes.from_main(newest)
    if damage and not self._read_only:
      raise RefusedError(
        f"no checkpoint in {self._directory} is whole, the newest: {damage}; "
        "if the disk cannot bring one back, take another --workdir"
      )
    if not processes.is_main():
      self._manager.reload()  # The main process may have moved some.
    return None if step is None else self._read(step, template)

  def _newest_whole(self) -> tuple[int | None, str]:
    """Finds the newest checkpoint whose files have their digests.

    Returns:
      Its step and "". If no checkpoint is whole: None and what is wrong with
      the newest one. If there is no checkpoint: None and "".
    """
    damages: dict[int, str] = {}
    for step in sorted(self._manager.all_steps(), reverse=True):
      damage = _damage(self._directory / str(step))
      if not damage:
        for broken, reason in damages.items():
          self._set_aside(broken, reason)
        return step, ""
      damages[step] = damage
    return None, next(iter(damages.values()), "")

  def _set_aside(self, step: int, damage: str) -> None:
    """Moves a broken checkpoint out of the way, so its step can be saved."""
    path = self._directory / str(step)
    if not self._read_only:
      aside = self._directory.with_name("broken_checkpoints") / str(step)
      shutil.rmtree(aside, ignore_errors=True)
      aside.parent.mkdir(exist_ok=True)
      path = path.rename(aside)
      self._manager.reload()
    logging.getLogger(__name__).warning(
      "skipping the broken checkpoint of step %d (%s): %s", step, path, damage
    )

  def _read(self, step: int, template: Callable) -> tuple[Tree, dict]:
    record = self._item(step, _RECORD, ocp.args.JsonRestore())
    like = template(record)
    try:
      wanted = ocp.args.StandardRestore(_leaves(like))
      arrays = self._item(step, _ARRAYS, wanted)
    except (ValueError, KeyError, TypeError) as error:
      # Its files are whole, so another version may be able to read it.
      raise RefusedError(
        f"the checkpoint of step {step} in {self._directory} does not fit "
        f"this version of the program: {str(error).strip().splitlines()[0]}"
      ) from error
    leaves = [arrays[name] for name in sorted(arrays)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), record

  def _item(self, step: int, name: str, args: Any) -> Any:
    composite = ocp.args.Composite(**{name: args})
    return self._manager.restore(step, args=composite)[name]

  def close(self) -> None:
    """Waits for the save that is under way.

    Raises:
      SaveError: If the disk refused it.
    """
    try:
      self.wait()
      self._manager.close()
      if processes.is_main() and not self._read_only:
        shutil.rmtree(self._replaced, ignore_errors=True)
    finally:
      logging.getLogger("absl").removeFilter(self._log_filter)


def saved_steps(directory: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints in a folder, ascending."""
  names = [path.name for path in directory.glob("*")]
  return sorted(int(name) for name in names if name.isdigit())


class _NoSaveTracebacks(logging.Filter):
  """Log filter that drops the tracebacks of Orbax's background threads.

  When a save fails, each background thread logs a traceback, about 200 lines in
  all. The next call to Orbax raises the error, too, and `Checkpoints` turns it
  into a `SaveError` with one line. The tracebacks would hide this line.
  """

  def filter(self, record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _is_of_disk(error: BaseException | None) -> bool:
  """Returns whether an error, or an error that caused it, is one of the disk.

  The library that writes the arrays (TensorStore) raises a ValueError whose
  text has the system's error code, e.g. "[os_error_code='28']" for a full disk.
  """
  while error:
    if isinstance(error, OSError) or _DISK_STATUS in str(error):
      return True
    error = error.__cause__ or error.__context__
  return False


def _leaves(state: Tree) -> dict[str, Any]:
  """Returns the leaves by their number and path, in the order of the tree."""
  paths, _ = jax.tree.flatten_with_path(state)
  return {
    f"{number:04d}{jax.tree_util.keystr(path)}".replace("/", "|"): leaf
    for number, (path, leaf) in enumerate(paths)
  }


def _own_bytes(state: Tree) -> int:
  """Returns the bytes that this process writes, without copies of shards."""
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(state)
    for shard in leaf.addressable_shards
    if shard.replica_id == 0
  )


def _digests(checkpoint: pathlib.Path) -> dict[str, str]:
  """Returns the SHA-256 of every file in the subfolders, by relative path."""
  digests = {}
  for path in sorted(checkpoint.glob("*/**/*")):
    if path.is_file():
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      digests[path.relative_to(checkpoint).as_posix()] = digest
  return digests


def _damage(checkpoint: pathlib.Path) -> str:
  """Returns what is wrong with a checkpoint's files; empty if nothing is."""
  try:
    expected = json.loads((checkpoint / _DIGESTS).read_text())
    digests = _digests(checkpoint)
  except (OSError, ValueError) as error:
    return f"its files cannot be read ({error})"
  wrong = [path for path in expected if digests.get(path) != expected[path]]
  return f"{wrong[0]} is damaged or missing" if wrong else ""
