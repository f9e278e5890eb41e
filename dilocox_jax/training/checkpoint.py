"""State that survives: Orbax, with digests and a way past broken saves.

A checkpoint holds arrays (parameters, optimizer states, everything in flight)
and a small JSON record (position, streams, totals). Orbax writes in the
background and renames when done, so a killed save leaves nothing that looks
finished. Just before the rename every file's digest is put down; a checkpoint
that was damaged later is recognised by them, and passed over.
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

_ARRAYS, _RECORD, _DIGESTS = "arrays", "record", "digests.json"
_SAVE_TIMEOUT_S = 60 * 60  # Digests are in it, which process 0 works out alone.
_PARTIAL = ".orbax-checkpoint-tmp"  # In the name of a save until it is done.


class RefusedError(ValueError):
  """A whole checkpoint that must not be read; the message says why."""


class SaveError(OSError):
  """The disk did not take a checkpoint; the message says why."""


class Checkpoints:
  """The checkpoints of one run directory."""

  def __init__(
    self, directory: pathlib.Path, keep: int = 2, *, read_only: bool = False
  ):
    """Opens, and creates, the directory.

    Args:
      directory: Where checkpoints lie, one folder a step.
      keep: How many to keep.
      read_only: Whether the directory is another run's, to be left alone.
    """
    self._directory, self._read_only = directory.resolve(), read_only
    # What a kill left of a save would stay for ever.
    if processes.is_main() and not read_only:
      for partial in self._partial():
        shutil.rmtree(partial)
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=not read_only,
      enable_async_checkpointing=True,
      async_options=ocp.AsyncOptions(
        timeout_secs=_SAVE_TIMEOUT_S, post_finalization_callback=self._seal
      ),
    )
    self._manager = ocp.CheckpointManager(self._directory, options=options)

  def _partial(self) -> list[pathlib.Path]:
    return list(self._directory.glob(f"*{_PARTIAL}*"))

  def save(self, step: int, state: Tree, record: dict[str, Any]) -> None:
    """Starts a save and returns; a later save waits for it.

    Args:
      step: Inner steps finished; names the checkpoint.
      state: Tree of arrays. They may be donated as soon as this returns.
      record: Anything JSON can hold.

    Raises:
      SaveError: If there is no room, or the disk refused the save before.
    """
    args = {
      _ARRAYS: ocp.args.StandardSave(_leaves(state)),
      _RECORD: ocp.args.JsonSave(record),
    }
    with self._taking():
      self._manager.wait_until_finished()
      self._check_room(state)
      self._manager.save(step, args=ocp.args.Composite(**args), force=True)

  def _check_room(self, state: Tree) -> None:
    """A disk that fills up in the middle makes Orbax's threads die loudly.

    Processes write to one directory, and refuse a save together.
    """
    free_bytes = shutil.disk_usage(self._directory).free
    all_needed, all_free = zip(
      *processes.from_all([_own_bytes(state), free_bytes]), strict=True
    )
    needed_bytes, free_bytes = sum(all_needed), min(all_free)
    if needed_bytes > free_bytes:
      raise OSError(
        f"{needed_bytes / 1e6:,.1f} MB are needed and {free_bytes / 1e6:,.1f}"
        " MB free"
      )

  @contextlib.contextmanager
  def _taking(self) -> Iterator[None]:
    """Words what a disk refuses; Orbax passes it on with the next call."""
    try:
      yield
    except (OSError, ValueError) as error:
      reason = str(error).strip().partition("\n")[0]
      raise SaveError(
        f"cannot save a checkpoint in {self._directory}: {reason}; once the"
        " disk takes it, the same command goes on from the checkpoint before it"
      ) from error

  def _seal(self) -> None:
    """Puts down the digests of a save whose files are written, by all."""
    if not processes.is_main():
      return
    for partial in self._partial():  # There is one, as saves wait for saves.
      text = json.dumps(_digests(partial), indent=2)
      (partial / _DIGESTS).write_text(text)

  def restore(
    self, template: Callable[[dict[str, Any]], Tree]
  ) -> tuple[Tree, dict[str, Any]] | None:
    """Reads the newest checkpoint that is whole.

    Args:
      template: From a checkpoint's record to the shapes, types and placement
        that its state must have; may raise `RefusedError`.

    Returns:
      The state and the record; None if there is no checkpoint, or none of
      another run's is whole.

    Raises:
      RefusedError: If a whole checkpoint does not fit the template, or none of
        several is whole: a run that began anew would cut all its rows.
    """
    self._manager.wait_until_finished()
    # One process judges and moves, so that all read the same checkpoint.
    found = self._newest_whole() if processes.is_main() else None
    step, damage = processes.from_main(found)
    if damage and not self._read_only:
      raise RefusedError(
        f"no checkpoint in {self._directory} is whole, the newest: {damage}; "
        "if the disk cannot bring one back, take another --workdir"
      )
    if not processes.is_main():
      self._manager.reload()  # The main one may have moved some.
    return None if step is None else self._read(step, template)

  def _newest_whole(self) -> tuple[int | None, str]:
    """Its step, or None and what is wrong with the newest, if there is one."""
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
      # Whole, so it must not be lost: perhaps another version can read it.
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
    with self._taking():
      self._manager.wait_until_finished()
    self._manager.close()


def _leaves(state: Tree) -> dict[str, Any]:
  """Leaves by number and path, in the order of flattening."""
  paths, _ = jax.tree.flatten_with_path(state)
  return {
    f"{number:04d}{jax.tree_util.keystr(path)}".replace("/", "|"): leaf
    for number, (path, leaf) in enumerate(paths)
  }


def _own_bytes(state: Tree) -> int:
  """What this process writes of a state: of equal shards, one."""
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(state)
    for shard in leaf.addressable_shards
    if shard.replica_id == 0
  )


def _digests(checkpoint: pathlib.Path) -> dict[str, str]:
  """SHA-256 of every file of the items, by relative path."""
  digests = {}
  for path in sorted(checkpoint.glob("*/**/*")):
    if path.is_file():
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      digests[path.relative_to(checkpoint).as_posix()] = digest
  return digests


def _damage(checkpoint: pathlib.Path) -> str:
  """What is wrong with the files of a checkpoint; empty if nothing is."""
  try:
    expected = json.loads((checkpoint / _DIGESTS).read_text())
    found = _digests(checkpoint)
  except (OSError, ValueError) as error:
    return f"its files cannot be read ({error})"
  wrong = [path for path in expected if found.get(path) != expected[path]]
  return f"{wrong[0]} is damaged or missing" if wrong else ""
