"""Saves and restores the state of a run with Orbax, and finds damaged files.

A checkpoint holds arrays (parameters, optimizer states, exchanges in flight)
and a small JSON record (progress, data streams, adaptive controller). Orbax
writes it in the background. A save of step 12 has three states on the disk, in
turn:

  12.orbax-checkpoint-tmp/              files are being written
  12.orbax-checkpoint-tmp/digests.json  all files are written, and the SHA-256
                                        of each file
  12/                                   complete: Orbax has renamed the folder

If the process is killed, the folder stays in one of these states. The next
start removes a folder in the first or second state. So a folder whose name is
only a number is complete. If its files do not match their digests, the disk
damaged them later. Then the run goes on from an older checkpoint.

The state of a finished run counts as one step more: a run of 60 steps that was
stopped before its flush has saved step 60, and step 61 when it has ended. So no
save replaces another.
"""

import contextlib
import logging
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from dilocox_jax.distributed import processes
from dilocox_jax.report.units import human_bytes
from dilocox_jax.training import saved_files
from dilocox_jax.trees import Tree

FOLDER = "checkpoints"  # Name of the folder in a run directory.
ARRAYS, RECORD = "arrays", "record"
# A week: Orbax measures it by the system's clock, which may jump by a day in
# the midst of a save. Process 0 computes digests in this time, too.
_SAVE_TIMEOUT_S = 7 * 24 * 60 * 60
_PARTIAL = ".orbax-checkpoint-tmp"  # Part of the folder's name during a save.
# Orbax writes metadata, the record and whole disk blocks in addition to the
# arrays. These took 60 to 100 kB for small states. Metrics need room, too.
SPARE_BYTES, _SPARE_SHARE = 1_000_000, 0.02
_LONGEST_REASON = 200  # Characters; Orbax lists whole trees.


class RefusedError(ValueError):
  """The run directory must not be used in this way; the message says why."""


class SaveError(OSError):
  """The disk refused to store a checkpoint; the message says why."""


class Checkpoints:
  """The checkpoints of one run directory."""

  def __init__(
    self, directory: pathlib.Path, keep: int = 2, *, read_only: bool = False
  ):
    """Opens the directory, and creates it unless it is read-only.

    Args:
      directory: Folder that holds one folder for each checkpoint. The name of a
        checkpoint's folder is its step.
      keep: Number of newest checkpoints to keep.
      read_only: Whether the directory belongs to another run, so that nothing
        in it may change.
    """
    self._directory, self._read_only = directory.resolve(), read_only
    if processes.is_main() and not read_only:
      for partial in self._partial():  # A killed save left it.
        shutil.rmtree(partial)
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      enable_async_checkpointing=True,
      async_options=ocp.AsyncOptions(
        timeout_secs=_SAVE_TIMEOUT_S, post_finalization_callback=self._seal
      ),
      create=not read_only,
    )
    self._manager = ocp.CheckpointManager(self._directory, options=options)
    saved_files.hide_tracebacks()

  def _partial(self) -> list[pathlib.Path]:
    return list(self._directory.glob(f"*{_PARTIAL}*"))

  def save(self, step: int, state: Tree, record: dict[str, Any]) -> None:
    """Starts a save in the background and returns.

    If an earlier save is still being written, this call waits for it first.

    Args:
      step: Number of finished inner steps, which names the checkpoint; one
        more for a run's last state, after the flush. No checkpoint may have it.
      state: Tree of arrays. They may be donated as soon as this call returns.
      record: Values that JSON can hold.

    Raises:
      SaveError: If the disk has no room, or if it refused the earlier save.
    """
    args = {
      ARRAYS: ocp.args.StandardSave(_leaves(state)),
      RECORD: ocp.args.JsonSave(record),
    }
    with self._wording_disk_errors():
      self._manager.wait_until_finished()
      self._check_room(state)
      self._manager.save(step, args=ocp.args.Composite(**args), force=True)

  def _check_room(self, state: Tree) -> None:
    """Raises OSError if a save would fill the disk.

    All processes compare with the smallest free space, and refuse the save or
    none of them does.
    """
    own_free_bytes = shutil.disk_usage(self._directory).free
    all_state_bytes, all_free_bytes = zip(
      *processes.from_all([_own_bytes(state), own_free_bytes], _two_sizes),
      strict=True,
    )
    # The bytes that all processes write to one directory add up.
    state_bytes = sum(all_state_bytes)
    free_bytes = min(all_free_bytes)
    needed_bytes = round((1 + _SPARE_SHARE) * state_bytes) + SPARE_BYTES
    if needed_bytes > free_bytes:
      raise OSError(
        f"{human_bytes(needed_bytes)} are needed and "
        f"{human_bytes(free_bytes)} free"
      )

  @contextlib.contextmanager
  def _wording_disk_errors(self) -> Iterator[None]:
    """Turns an error of the disk into a `SaveError` of one line.

    Orbax writes in the background, so it raises the error in the next call.
    """
    try:
      yield
    except Exception as error:
      if not saved_files.is_of_disk(error):
        raise
      reason = str(error).strip().partition("\n")[0]
      if "No space left on device" in reason:  # Four paths come before it.
        reason = "No space left on device"
      raise SaveError(
        f"cannot save a checkpoint in {self._directory}: {reason}; "
        f"{self._kept()}; when the disk accepts files again, the same command "
        "goes on"
      ) from error

  def _seal(self) -> None:
    """Writes the digests of a save. All its files must be written before."""
    if not processes.is_main():
      return
    for partial in self._partial():  # At most one save runs at a time.
      saved_files.seal(partial)

  def wait(self) -> None:
    """Waits until the save in the background is complete.

    Raises:
      SaveError: If the disk refused the save.
    """
    with self._wording_disk_errors():
      self._manager.wait_until_finished()

  def what_is_kept(self) -> str:
    """Returns a part of a sentence that names the newest kept checkpoint."""
    with contextlib.suppress(SaveError):  # Older checkpoints are still there.
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
    """Reads the newest checkpoint whose files are not damaged.

    Args:
      template: Function from a checkpoint's record to the shapes, types and
        placement that the state must have. It may raise `RefusedError`.

    Returns:
      The state and the record. The result is None if there is no checkpoint,
      or if the directory is read-only and all checkpoints are damaged.

    Raises:
      RefusedError: If an undamaged checkpoint does not fit the template, or if
        all checkpoints are damaged. In the second case a run would begin anew
        and delete all rows of metrics.
    """
    self._manager.wait_until_finished()
    # The main process chooses the checkpoint and moves damaged ones, so that
    # all processes read the same checkpoint.
    newest = self._newest_whole() if processes.is_main() else None
    step, damage = processes.from_main(newest, _step_and_damage)
    if damage and not self._read_only:
      raise RefusedError(
        f"all checkpoints in {self._directory} are damaged (newest: {damage}): "
        "restore one from a backup, or take another --workdir"
      )
    if not processes.is_main():
      self._manager.reload()  # The main process may have moved folders.
    return None if step is None else self._read(step, template)

  def _newest_whole(self) -> tuple[int | None, str]:
    """Finds the newest checkpoint that is not damaged.

    Returns:
      Its step and "". If all checkpoints are damaged, None and what is wrong
      with the newest checkpoint. If there is no checkpoint, None and "".
    """
    damages: dict[int, str] = {}
    for step in sorted(self._manager.all_steps(), reverse=True):
      damage = saved_files.damage(self._directory / str(step))
      if not damage:
        for damaged_step, reason in damages.items():
          self._set_aside(damaged_step, reason)
        return step, ""
      damages[step] = damage
    return None, next(iter(damages.values()), "")

  def _set_aside(self, step: int, reason: str) -> None:
    """Moves a checkpoint away, so that its step can be saved again."""
    path = self._directory / str(step)
    if not self._read_only:
      aside = self._directory.with_name("broken_checkpoints") / str(step)
      shutil.rmtree(aside, ignore_errors=True)
      aside.parent.mkdir(exist_ok=True)
      path = path.rename(aside)
      self._manager.reload()
    logging.getLogger(__name__).warning(
      "skipping the broken checkpoint of step %d (%s): %s", step, path, reason
    )

  def _read(self, step: int, template: Callable) -> tuple[Tree, dict]:
    record = self._item(step, RECORD, ocp.args.JsonRestore())
    return self._state(step, template(record)), record

  def _state(self, step: int, like: Tree) -> Tree:
    """Reads a state whose leaves have the shapes and places of `like`."""
    named = _leaves(like)
    try:
      arrays = self._item(step, ARRAYS, ocp.args.StandardRestore(named))
    except (ValueError, KeyError, TypeError) as error:
      # The files are not damaged, so another version may be able to read them.
      reason = " ".join(str(error).split())
      raise RefusedError(
        f"the checkpoint of step {step} in {self._directory} does not fit: "
        "hand in the same model and optimizers as before, or take the version "
        f"of the program that saved it ({reason[:_LONGEST_REASON]})"
      ) from error
    # Names sort like leaves only as long as their numbers have four digits.
    stored = (arrays[name] for name in named)
    leaves = [
      next(stored) if x.size else jnp.zeros_like(x, device=x.sharding)
      for x in jax.tree.leaves(like)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

  def _item(self, step: int, name: str, args: Any) -> Any:
    composite = ocp.args.Composite(**{name: args})
    return self._manager.restore(step, args=composite)[name]

  def close(self) -> None:
    """Waits until the save in the background is complete, then closes.

    Raises:
      SaveError: If the disk refused the save.
    """
    self.wait()
    self._manager.close()


def saved_steps(directory: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints in a folder, ascending."""
  names = [path.name for path in directory.glob("*")]
  return sorted(int(name) for name in names if name.isdigit())


def _leaves(state: Tree) -> dict[str, Any]:
  """Returns the leaves by name, such as "0002['params']['scale']".

  A name is the number of the leaf in the flattened tree and its key path.
  Leaves of zero size are left out, as Orbax refuses them.
  """
  paths, _ = jax.tree.flatten_with_path(state)
  return {
    f"{number:04d}{jax.tree_util.keystr(path)}".replace("/", "|"): leaf
    for number, (path, leaf) in enumerate(paths)
    if leaf.size
  }


def _two_sizes(message: list[int]) -> tuple[int, int]:
  state_bytes, free_bytes = message
  return int(state_bytes), int(free_bytes)


def _step_and_damage(message: list[Any]) -> tuple[int | None, str]:
  step, damage = message
  return None if step is None else int(step), str(damage)


def _own_bytes(state: Tree) -> int:
  """Returns the bytes that this process writes.

  If several devices hold a copy of the same shard, only one copy is written.
  """
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(state)
    for shard in leaf.addressable_shards
    if shard.replica_id == 0
  )
