"""Saves and restores the state of a run with Orbax, and finds damaged files.

A checkpoint holds arrays (parameters, optimizer states, exchanges in flight)
and a JSON record (e.g. progress, data streams, adaptive controller). Orbax
writes it in the background. The checkpoint of step 12 has three states on the
disk, in turn:

  12.orbax-checkpoint-tmp/              files are being written
  12.orbax-checkpoint-tmp/digests.json  all files are written; this one has the
                                        step, 12, and the SHA-256 of the files
                                        of the arrays and the record
  12/                                   complete: Orbax has renamed the folder

If a run was killed during a save, its next start removes the unfinished folder.
A complete checkpoint is damaged if its files do not have these digests. The run
then goes on from the newest undamaged checkpoint.

The checkpoint of a finished run has the number of its last step plus one. For
example, a run of 60 steps may save checkpoint 60 after its last step. It saves
checkpoint 61 after the flush (the exchanges that end a run).
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from dilocox_jax import files
from dilocox_jax.checks import json_file, of_type, shown
from dilocox_jax.distributed import processes
from dilocox_jax.metrics.work_directory import RefusedError
from dilocox_jax.trees import Tree

FOLDER = "checkpoints"  # Name of the folder in a run directory.
# Names of the two items of a checkpoint, which Orbax writes into two folders.
ARRAYS = "arrays"
RECORD = "record"
# A week. Orbax measures the time with the system's clock, which may jump by a
# day during a save. The time includes the digests, which process 0 computes.
_SAVE_TIMEOUT_S = 7 * 24 * 60 * 60
_PARTIAL = ".orbax-checkpoint-tmp"  # Part of the folder's name during a save.
_BROKEN = "broken_checkpoints"  # Where damaged checkpoints are moved to.
# Name of the file with the step of a checkpoint, and with the SHA-256 of every
# file by its path.
_DIGESTS = "digests.json"
_NUMBER = re.compile(r"0|[1-9][0-9]*")  # Name of a checkpoint's folder.
_LONGEST_REASON = 200  # Characters; Orbax lists whole trees.


class SaveError(OSError):
  """Raised if the disk refuses to store a checkpoint. The message says why."""


@dataclasses.dataclass(frozen=True)
class SavedArray:
  """An array of a checkpoint that is not in memory.

  Attributes:
    folder: Folder of the arrays of the checkpoint.
    name: Name of the array there, e.g. "0002['params']['scale']".
    shape: Shape that the array should have.
    dtype: Type of numpy to which the values are converted when they are read.
  """

  folder: pathlib.Path
  name: str
  shape: tuple[int, ...]
  dtype: Any

  def read(self) -> np.ndarray:
    """Reads the array into the memory of the host.

    Raises:
      RefusedError: If the checkpoint has no array of this name and shape.
    """
    if 0 in self.shape:  # Such an array is not saved.
      return np.zeros(self.shape, self.dtype)
    kind = ocp.RestoreArgs(restore_type=np.ndarray, dtype=self.dtype)
    like = jax.ShapeDtypeStruct(self.shape, self.dtype)
    restore_args = ocp.args.PyTreeRestore(
      item={self.name: like},
      restore_args={self.name: kind},
      partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      array = reader.restore(self.folder, args=restore_args)[self.name]
    # Orbax returns `like` for an array that the checkpoint lacks.
    if not isinstance(array, np.ndarray) or array.shape != self.shape:
      raise RefusedError(
        f"the checkpoint in {self.folder.parent} has no array {self.name} of "
        f"the shape {self.shape}: pass the same model and optimizers as before"
      )
    return array


class Checkpoints:
  """The checkpoints of one run directory."""

  def __init__(
    self, directory: pathlib.Path, keep: int = 2, *, read_only: bool = False
  ):
    """Opens the directory, and creates it unless it is read-only.

    Args:
      directory: Folder that holds one folder for each checkpoint, named by its
        step.
      keep: Number of newest checkpoints to keep.
      read_only: Whether nothing in the directory may change.

    Raises:
      RefusedError: If `read_only` is False, and the directory is a file or a
        symbolic link, or something in it is a symbolic link.
    """
    self._read_only = read_only
    if read_only:
      self._directory = directory.resolve()
    else:
      # The folders above belong to the user and may be links.
      directory.parent.mkdir(parents=True, exist_ok=True)
      self._directory = directory.parent.resolve() / directory.name
      self._check_links()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      enable_async_checkpointing=True,
      async_options=ocp.AsyncOptions(
        timeout_secs=_SAVE_TIMEOUT_S,
        post_finalization_callback=self._write_digests,
      ),
      create=not read_only,
      cleanup_tmp_directories=not read_only,  # A killed save left them.
    )
    self._manager = ocp.CheckpointManager(self._directory, options=options)
    # Orbax logs with absl. If one of its tasks fails and nobody reads the
    # error, asyncio logs the error, perhaps only when the process ends.
    for name in ("absl", "asyncio"):
      logging.getLogger(name).addFilter(_has_no_traceback)

  def save(self, step: int, state: Tree, record: dict[str, Any]) -> None:
    """Starts a save in the background and returns.

    If an earlier save is still being written, this call waits for it first. If
    there is a checkpoint with the number `step` already, nothing is saved.

    Args:
      step: Name of the checkpoint: the number of finished inner steps, or one
        more for the last state of a run, after its last exchanges.
      state: Tree of arrays. They may be donated as soon as this call returns.
      record: Values that JSON can hold, which are saved with the state. They
        must not change until the save is complete (`wait`).

    Raises:
      SaveError: If the disk refused the earlier save, or refuses the start of
        this one. The method `wait` raises later errors of this one.
      RefusedError: If somebody has put a link into the directory.
    """
    args = {
      ARRAYS: ocp.args.StandardSave(_leaves(state)),
      RECORD: ocp.args.JsonSave(record),
    }
    self._check_links()
    with self._wording_disk_errors():
      self._manager.wait_until_finished()
      # A replica that joined its mailbox again may reach a step a second time.
      if step in saved_steps(self._directory):
        return
      self._manager.save(step, args=ocp.args.Composite(**args), force=True)

  def _check_links(self) -> None:
    """Creates the directory if it is missing, and refuses links in it."""
    folder = self._directory
    with _refusing_links(folder):
      files.folder_below(folder.parent, folder.name)
      with os.scandir(folder) as entries:
        links = [entry.name for entry in entries if entry.is_symlink()]
    if links:
      raise RefusedError(
        f"{folder / min(links)} is a symbolic link, which a run does not follow"
        " where it writes: remove it, or take another --workdir"
      )

  @contextlib.contextmanager
  def _wording_disk_errors(self) -> Iterator[None]:
    """Turns an error of the disk in a `with` block into a `SaveError`."""
    try:
      yield
    except Exception as error:
      if not _is_of_disk(error):
        raise
      reason = str(error).strip().partition("\n")[0]
      if "No space left on device" in reason:
        # The library puts four paths before these words.
        reason = "No space left on device"
      raise SaveError(
        f"cannot save a checkpoint in {self._directory}: {reason}; "
        f"{self._describe_newest()}; when the disk accepts files again, the "
        "same command goes on"
      ) from error

  def _write_digests(self) -> None:
    """Writes the digests of a save whose other files are all written."""
    if not processes.is_main():
      return
    # At most one save runs at a time.
    for partial in self._directory.glob(f"*{_PARTIAL}*"):
      step = int(partial.name.partition(".")[0])
      manifest = {"step": step, "files": _digests(partial)}
      text = json.dumps(manifest, indent=2)
      with files.replaced(partial / _DIGESTS, root=self._directory) as file:
        file.write(text.encode())

  def wait(self) -> None:
    """Waits until the save in the background is complete.

    Raises:
      SaveError: If the disk refused the save.
    """
    with self._wording_disk_errors():
      self._manager.wait_until_finished()

  def what_is_kept(self) -> str:
    """Names the newest checkpoint, after a save in the background has ended.

    The result is "the checkpoint of step 12 is kept", or "no checkpoint was
    saved yet".
    """
    # If the save failed, older checkpoints are still there.
    with contextlib.suppress(SaveError):
      self.wait()
    return self._describe_newest()

  def _describe_newest(self) -> str:
    """Names the newest complete checkpoint, without waiting for a save."""
    steps = saved_steps(self._directory)
    if not steps:
      return "no checkpoint was saved yet"
    return f"the checkpoint of step {steps[-1]} is kept"

  def restore(
    self, template: Callable[[dict[str, Any]], Tree]
  ) -> tuple[Tree, dict[str, Any]] | None:
    """Reads the newest checkpoint whose files are not damaged.

    Damaged checkpoints that are newer than this one are moved to the folder
    "broken_checkpoints" beside the directory. In a read-only directory they
    stay. All processes must call this method.

    Args:
      template: Function from a checkpoint's record (the JSON values that were
        saved with the state) to a tree of the shapes, types and shardings of
        the state. It may raise `RefusedError`.

    Returns:
      The state and the record. The result is None if there is no checkpoint,
      or if the directory is read-only and all checkpoints are damaged.

    Raises:
      RefusedError: In one of these cases:

        - The checkpoint does not fit the template, or `template` raises it.
        - All checkpoints are damaged, and the directory is not read-only.
        - A damaged checkpoint has to be moved, and "broken_checkpoints" is a
          file or a symbolic link.
    """
    step = self._find_newest()
    if step is None:
      return None
    record = self._item(step, RECORD, ocp.args.JsonRestore())
    return self._state(step, template(record)), record

  def open_newest(
    self, template: Callable[[dict[str, Any]], Tree]
  ) -> tuple[Tree, dict[str, Any]] | None:
    """Opens the newest undamaged checkpoint without reading its arrays.

    It moves newer, damaged checkpoints away as `restore` does. All processes
    must call this method.

    Args:
      template: Function from a checkpoint's record (the JSON values that were
        saved with the state) to a tree of the shapes and types of the state. It
        may raise `RefusedError`.

    Returns:
      The state, with a `SavedArray` in place of each array, and the record. The
      result is None if there is no checkpoint, or if the directory is read-only
      and all checkpoints are damaged.

    Raises:
      RefusedError: In one of these cases:

        - `template` raises it.
        - All checkpoints are damaged, and the directory is not read-only.
        - A damaged checkpoint has to be moved, and "broken_checkpoints" is a
          file or a symbolic link.
    """
    step = self._find_newest()
    if step is None:
      return None
    record = self._item(step, RECORD, ocp.args.JsonRestore())
    like = template(record)
    folder = self._directory / str(step) / ARRAYS
    arrays = [
      SavedArray(folder, name, tuple(leaf.shape), leaf.dtype)
      for name, leaf in _named_leaves(like)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), arrays), record

  def _find_newest(self) -> int | None:
    """Returns the step of the newest undamaged checkpoint, or None.

    Damaged checkpoints that are newer than this one are moved away, except in a
    read-only directory. If all are damaged, the result is None in a read-only
    directory, and otherwise `RefusedError` is raised.
    """
    self._manager.wait_until_finished()
    # The main process chooses the checkpoint and moves damaged ones, so that
    # all processes read the same checkpoint.
    newest = self._newest_undamaged() if processes.is_main() else None
    step, damage = processes.from_main(newest)
    if damage and not self._read_only:
      raise RefusedError(
        f"all checkpoints in {self._directory} are damaged (newest: {damage}): "
        "restore one from a backup, or take another --workdir"
      )
    if not processes.is_main():
      self._manager.reload()  # The main process may have moved folders.
    return step

  def _newest_undamaged(self) -> tuple[int | None, str]:
    """Finds the newest undamaged checkpoint, and sets newer ones aside.

    Returns the step of the undamaged checkpoint, and "". If all are damaged,
    none is set aside, and the result is None and the damage of the newest.
    Without checkpoints the result is None and "".
    """
    damages: dict[int, str] = {}
    for step in reversed(saved_steps(self._directory)):
      damage = _damage(self._directory / str(step))
      if not damage:
        for damaged_step, reason in damages.items():
          self._set_aside(damaged_step, reason)
        return step, ""
      damages[step] = damage
    return None, next(iter(damages.values()), "")

  def _set_aside(self, step: int, reason: str) -> None:
    """Moves a damaged checkpoint to "broken_checkpoints", and logs a warning.

    In a read-only directory it stays. `reason` says what is damaged.
    """
    path = self._directory / str(step)
    if not self._read_only:
      root = self._directory.parent
      with _refusing_links(root / _BROKEN):
        broken_folder = files.folder_below(root, _BROKEN)
        files.remove_folder(root, _BROKEN, str(step))
      path = path.rename(broken_folder / str(step))
      self._manager.reload()
    logging.getLogger(__name__).warning(
      "skipping the broken checkpoint of step %d (%s): %s", step, path, reason
    )

  def _state(self, step: int, like: Tree) -> Tree:
    """Reads the arrays of a checkpoint into a tree like `like`.

    Values are converted to the types of `like`. Raises `RefusedError` if the
    names or shapes of the arrays are not those of `like`.
    """
    leaves_by_name = _leaves(like)
    try:
      restore_args = ocp.args.StandardRestore(leaves_by_name)
      arrays = self._item(step, ARRAYS, restore_args)
    except (ValueError, KeyError, TypeError) as error:
      # The files are not damaged, so another version may be able to read them.
      reason = " ".join(str(error).split())
      raise RefusedError(
        f"the checkpoint of step {step} in {self._directory} does not fit: "
        "pass the same model and optimizers as before, or take the version "
        f"of the program that saved it ({reason[:_LONGEST_REASON]})"
      ) from error
    # The leaves are read in the order of the template. If there are more than
    # 10,000 leaves, their names have another order.
    stored = (arrays[name] for name in leaves_by_name)
    leaves = []
    for leaf in jax.tree.leaves(like):
      if leaf.size:
        leaves.append(next(stored))
      else:  # A leaf of zero size is not saved.
        leaves.append(jnp.zeros_like(leaf, device=leaf.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

  def _item(self, step: int, name: str, args: Any) -> Any:
    """Reads an item of a checkpoint: `ARRAYS` (arrays by name) or `RECORD`."""
    composite = ocp.args.Composite(**{name: args})
    return self._manager.restore(step, args=composite)[name]

  def close(self) -> None:
    """Waits until the save in the background is complete, then stops Orbax.

    Raises:
      SaveError: If the disk refused the save.
    """
    self.wait()
    self._manager.close()


@contextlib.contextmanager
def _refusing_links(path: pathlib.Path) -> Iterator[None]:
  """Turns a `NotADirectoryError` in a `with` block into a `RefusedError`.

  Its message names the path.
  """
  try:
    yield
  except NotADirectoryError as error:
    raise RefusedError(
      f"{path} cannot be written: {error.strerror}, or take another --workdir"
    ) from None


def saved_steps(directory: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints in a folder, ascending.

  A checkpoint is a subfolder whose name is its step. Everything else in the
  folder is ignored.
  """
  names = [path.name for path in directory.glob("*") if path.is_dir()]
  numbers = [int(name) for name in names if _NUMBER.fullmatch(name)]
  return sorted(numbers)


def _leaves(state: Tree) -> dict[str, Any]:
  """Returns the leaves of a state by name, without leaves of zero size."""
  return {name: leaf for name, leaf in _named_leaves(state) if leaf.size}


def _named_leaves(state: Tree) -> list[tuple[str, Any]]:
  """Returns all leaves with their names, such as "0002['params']['scale']".

  A name is the number of the leaf in the flattened tree, and its key path.
  """
  paths_and_leaves, _ = jax.tree.flatten_with_path(state)
  named_leaves = []
  for number, (path, leaf) in enumerate(paths_and_leaves):
    name = f"{number:04d}{jax.tree_util.keystr(path)}".replace("/", "|")
    named_leaves.append((name, leaf))
  return named_leaves


def _damage(checkpoint: pathlib.Path) -> str:
  """Describes the first damage of a checkpoint's files; "" if there is none.

  A checkpoint with an added file in a subfolder (unless the file is hidden),
  and a copy of another step's checkpoint, count as damaged, too.
  """
  try:
    manifest = json_file(checkpoint / _DIGESTS)
    expected = of_type("files", manifest.get("files"), dict)
    digests = _digests(checkpoint)
  except (OSError, ValueError) as error:
    return f"its files cannot be read ({error})"
  if manifest.get("step") != int(checkpoint.name):
    return f"it is a copy of that of step {shown(manifest.get('step'))}"
  for path in expected:
    if digests.get(path) != expected[path]:
      return f"{path} is damaged or missing"
  for path in digests:
    # File browsers and network file systems write hidden files.
    is_hidden = path.rpartition("/")[2].startswith(".")
    if path not in expected and not is_hidden:
      return f"{path} was not saved with it"
  return ""


def _digests(checkpoint: pathlib.Path) -> dict[str, str]:
  """Returns the SHA-256 of every file in the subfolders of a checkpoint.

  Keys are paths relative to `checkpoint`. Values have hexadecimal digits.
  """
  digests = {}
  for path in sorted(checkpoint.glob("*/**/*")):
    if path.is_file():
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      digests[path.relative_to(checkpoint).as_posix()] = digest
  return digests


def _has_no_traceback(record: logging.LogRecord) -> bool:
  """Returns whether a log record has no traceback, for a filter of logs."""
  return not record.exc_info


def _is_of_disk(error: BaseException | None) -> bool:
  """Whether an error, or one of its causes, comes from the operating system."""
  # TensorStore, which writes the arrays, raises a ValueError whose text has the
  # system's code, e.g. "[os_error_code='28']" for a full disk.
  while error:
    if isinstance(error, OSError) or "os_error_code=" in str(error):
      return True
    error = error.__cause__ or error.__context__
  return False
