"""Checkpoints of processes that have no directory in common.

Every process saves the replica that it trains on its own disk, as a run of one
replica would: leaves of the replica [1, ...], and a copy of what all replicas
share. When a group of processes starts, they tell each other what they hold and
choose the save to go on from. A process without that save gets a copy of
another one's replica, over the network. Example, with 3 processes:

  process    held saves (step, name)     its part in the save "b" of step 20
  0          10 a, 20 b                  replica 0
  1          nothing: a new machine      a copy of process 0
  2          10 a, 20 b                  replica 2
"""

import pathlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from dilocox_jax.distributed import processes
from dilocox_jax.metrics.recorder import METRICS, TIMING
from dilocox_jax.metrics.run_record import RECORD
from dilocox_jax.pytypes import Tree
from dilocox_jax.training import checkpoint, digests
from dilocox_jax.training.checkpoint import Checkpoints, RefusedError
from dilocox_jax.training.local_arrays import (
  LocalArraysHandler,
  LocalRestore,
  LocalSave,
)

_COPIED = RECORD, METRICS, TIMING
ORIGINS = "origins"  # Key of a restored record: old replica of every process.


class Save(NamedTuple):
  """A save of which a process holds its part.

  Attributes:
    step: Inner steps finished.
    name: Name of the save. Two groups may have saved the same step.
    replica: Which replica the process has saved.
    num_replicas: How many processes saved.
  """

  step: int
  name: str
  replica: int
  num_replicas: int


def chosen_save(
  held: Sequence[Sequence[Save]],
) -> tuple[int, list[int | None]] | None:
  """Chooses the save from which a group goes on.

  It is the newest one whose parts are all there, because a run goes on from it
  to the same bits. If there is none, it is the newest one. Replicas whose parts
  are missing count as new.

  Args:
    held: Saves that every process holds.

  Returns:
    The step, and for every process the replica that it has saved, or None if it
    does not hold this save. The result is None if nobody holds any.
  """
  holders: dict[tuple[int, str], dict[int, Save]] = {}
  for process, saves in enumerate(held):
    for save in saves:
      holders.setdefault((save.step, save.name), {})[process] = save
  if not holders:
    return None

  def rank(key: tuple[int, str]) -> tuple[bool, int, int, str]:
    parts = holders[key]
    count = next(iter(parts.values())).num_replicas
    return len(parts) == count, key[0], len(parts), key[1]

  step, name = max(holders, key=rank)
  parts = holders[step, name]
  origins = [parts[n].replica if n in parts else None for n in range(len(held))]
  return step, origins


class OwnCheckpoints(Checkpoints):
  """The checkpoints of one process's own run directory.

  Every process must have one device.
  """

  # Orbax says to all processes alike that the folders are there, so a process
  # would take another one's word for it.
  _makes_folders_later = False

  @property
  def _writes(self) -> bool:
    return True

  def _sharing(self) -> dict[str, Any]:
    # Orbax makes no folders for a part of the processes.
    self._directory.mkdir(parents=True, exist_ok=True)
    return {"create": False, "multiprocessing_options": _alone()}

  def _handlers(self) -> dict[str, Any]:
    return {
      checkpoint.ARRAYS: LocalArraysHandler(),
      checkpoint.RECORD: ocp.JsonCheckpointHandler(
        multiprocessing_options=_alone()
      ),
    }

  def save(self, step: int, state: Tree, record: dict[str, Any]) -> None:
    """Starts a save of this process's replica (`Checkpoints.save`)."""
    name = processes.from_main(uuid.uuid4().hex)
    part = Save(step, name, jax.process_index(), jax.process_count())
    super().save(step, state, record | {"save": part._asdict()})

  def _save_args(self, leaves: dict[str, Any]) -> LocalSave:
    # The arrays may be donated before they are written, so they are copied.
    return LocalSave(
      {
        name: np.array(leaf.addressable_shards[0].data)
        for name, leaf in leaves.items()
      }
    )

  def _restore_args(self, leaves: dict[str, Any]) -> LocalRestore:
    return LocalRestore(leaves)

  def _make_way(self, step: int) -> None:
    self._move_aside(step)
    self._manager.reload()

  def _written_bytes(self, state: Tree) -> int:
    own = sum(
      leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
    )
    return max(processes.from_all(own))

  def restore(
    self, template: Callable[[dict[str, Any]], Tree]
  ) -> tuple[Tree, dict[str, Any]] | None:
    """Reads or receives the state from which the group goes on.

    Args:
      template: Function from a checkpoint's record to the shapes, types and
        placement of the state of all replicas of this group.

    Returns:
      The state, and the record of the first process that holds the save, with
      the list of `chosen_save` under `ORIGINS`. The result is None if nobody
      holds a whole checkpoint.

    Raises:
      RefusedError: In all processes, if what one of them holds does not fit, or
        if all checkpoints of all processes are damaged.
    """
    self._manager.wait_until_finished()
    records, reason = self._whole_records(template)
    refusals = processes.from_all(reason)
    if any(refusals):
      raise RefusedError(next(filter(None, refusals)))
    held = [Save(**record["save"]) for record in records.values()]
    chosen = chosen_save(processes.from_all(held))
    if chosen is None:
      return None
    step, origins = chosen
    own = jax.process_index()
    source = next(n for n, origin in enumerate(origins) if origin is not None)
    record = processes.from_all(records[step] if own == source else None)[
      source
    ]
    like = template(record)
    parts = jax.tree.map(_part, like)
    if origins[own] is not None:
      parts = self._state(step, parts)
    self._leave_only(step, origins[own] is not None)
    if None in origins:
      parts = copy_from(source, parts)
      # Who is new goes on with the rows of the others.
      _copy_records(self._directory.parent, origins, source)
    return jax.tree.map(_placed, like, parts), record | {ORIGINS: origins}

  def _whole_records(
    self, template: Callable
  ) -> tuple[dict[int, dict[str, Any]], str]:
    """Returns the records of undamaged checkpoints, and why to refuse them."""
    records, damage = {}, ""
    for step in sorted(self._manager.all_steps(), reverse=True):
      if damage := digests.damage(self._directory / str(step)):
        self._set_aside(step, damage)
        continue
      records[step] = self._record(step)
      try:
        if "save" not in records[step]:
          raise RefusedError(
            f"the checkpoints in {self._directory} are those of processes that "
            "share a directory: give all processes that directory again"
          )
        template(records[step])
      except RefusedError as error:
        return records, str(error)
    return records, ""

  def _leave_only(self, step: int, is_held: bool) -> None:
    """Moves away what the group does not go on from and saves anew."""
    for other in self._manager.all_steps():
      if other > step or (other == step and not is_held):
        self._set_aside(other, f"the others go on from step {step}")


def _alone() -> ocp.options.MultiprocessingOptions:
  """Returns the options with which Orbax waits for no other process."""
  own = jax.process_index()
  return ocp.options.MultiprocessingOptions(
    primary_host=own,
    active_processes={own},
    barrier_sync_key_prefix=f"process_{own}",
  )


def copy_from(source: int, parts: Tree) -> Tree:
  """Returns the arrays of one process in every process, equal in every bit.

  Args:
    source: Number of the process.
    parts: Tree of numpy arrays; in other processes only shapes and types count.
  """
  from jax.experimental import multihost_utils

  is_source = jax.process_index() == source

  def copied(own: np.ndarray) -> np.ndarray:
    # Sums of floating-point numbers would turn -0.0 into 0.0.
    sent = np.frombuffer(own.tobytes(), np.uint8)
    received = multihost_utils.broadcast_one_to_all(sent, is_source)
    return np.asarray(received).view(own.dtype).reshape(own.shape)

  return jax.tree.map(copied, parts)


def _part(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
  """Returns room for this process's part of an array of all replicas."""
  assert leaf.sharding is not None
  return np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _placed(leaf: jax.ShapeDtypeStruct, part: np.ndarray) -> jax.Array:
  """Returns the array of all replicas of which this process has a part."""
  return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: part)


def _copy_records(
  directory: pathlib.Path, origins: Sequence[int | None], source: int
) -> None:
  """Gives new processes the records of the run that another one has.

  Args:
    directory: Run directory of this process.
    origins: As `chosen_save` returns them.
    source: Number of the process that has the records.
  """
  own = {}
  if jax.process_index() == source:
    files = [directory / name for name in _COPIED]
    own = {file.name: np.fromfile(file, np.uint8) for file in files}
  sizes = processes.from_all({name: len(x) for name, x in own.items()})[source]
  room = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
  copies = copy_from(source, own or room)
  if origins[jax.process_index()] is None:
    for name, content in copies.items():
      content.tofile(directory / name)
