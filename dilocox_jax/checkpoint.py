"""State that survives: Orbax, with checksums and a way past broken saves.

A checkpoint holds arrays (parameters, optimizer states, everything in flight)
and a small JSON record (position, streams, totals). Orbax writes in the
background and renames when done, so a killed save leaves nothing that looks
finished; a finished one that was damaged later fails its checksums and is
passed over.
"""

import logging
import pathlib
import shutil
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dilocox_jax.pytypes import Tree

_ARRAYS, _RECORD, _CHECKSUMS = "arrays", "record", "checksums"


class RefusedError(ValueError):
  """A whole checkpoint that must not be read; the message says why."""


class Checkpoints:
  """The checkpoints of one run directory."""

  def __init__(self, directory: pathlib.Path, keep: int = 2):
    """Opens, and creates, the directory.

    Args:
      directory: Where checkpoints lie, one folder a step.
      keep: How many to keep.
    """
    self._directory = directory.resolve()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=True
    )
    self._manager = ocp.CheckpointManager(self._directory, options=options)

  def save(self, step: int, state: Tree, record: dict[str, Any]) -> None:
    """Starts a save and returns; a later save waits for it.

    Args:
      step: Inner steps finished; names the checkpoint.
      state: Tree of arrays.
      record: Anything JSON can hold.
    """
    arrays = _leaves(state)
    self._manager.save(
      step,
      args=ocp.args.Composite(
        **{
          _ARRAYS: ocp.args.StandardSave(arrays),
          _RECORD: ocp.args.JsonSave(record),
          _CHECKSUMS: ocp.args.JsonSave(_checksums(arrays)),
        }
      ),
      force=True,
    )

  def restore(
    self, template: Callable[[dict[str, Any]], Tree]
  ) -> tuple[Tree, dict[str, Any]] | None:
    """Reads the newest checkpoint that is whole.

    Args:
      template: From a checkpoint's record to the shapes, types and placement
        that its state must have; may raise `RefusedError`.

    Returns:
      The state and the record; None if there is no whole checkpoint.
    """
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        return self._read(step, template)
      except RefusedError:
        raise
      except Exception as error:  # Whatever broke, an older one may be whole.
        self._set_aside(step, error)
    return None

  def _set_aside(self, step: int, error: Exception) -> None:
    """Moves a broken checkpoint out of the way, so its step can be saved."""
    aside = self._directory.with_name("broken_checkpoints") / str(step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    (self._directory / str(step)).rename(aside)
    self._manager.reload()
    lines = str(error).strip().splitlines() or [repr(error)]
    logging.getLogger(__name__).warning(
      "skipping the broken checkpoint of step %d (now %s): %s",
      step,
      aside,
      lines[0],
    )

  def _read(self, step: int, template: Callable) -> tuple[Tree, dict]:
    parts = {
      _RECORD: ocp.args.JsonRestore(),
      _CHECKSUMS: ocp.args.JsonRestore(),
    }
    read = self._manager.restore(step, args=ocp.args.Composite(**parts))
    like = template(read[_RECORD])
    arrays = self._manager.restore(
      step,
      args=ocp.args.Composite(
        **{_ARRAYS: ocp.args.StandardRestore(_leaves(like))}
      ),
    )[_ARRAYS]
    if _checksums(arrays) != read[_CHECKSUMS]:
      raise ValueError("its checksums do not match its arrays")
    leaves = [arrays[name] for name in sorted(arrays)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), read[_RECORD]

  def close(self) -> None:
    """Waits for the save that is under way."""
    self._manager.wait_until_finished()
    self._manager.close()


def _leaves(state: Tree) -> dict[str, Any]:
  """Leaves by number and path, in the order of flattening."""
  paths, _ = jax.tree.flatten_with_path(state)
  return {
    f"{number:04d}{jax.tree_util.keystr(path)}".replace("/", "|"): leaf
    for number, (path, leaf) in enumerate(paths)
  }


def _checksums(arrays: dict[str, Any]) -> dict[str, int]:
  """CRC-32 of every array's bytes."""
  return {
    name: zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data)
    for name, leaf in jax.device_get(arrays).items()
  }
