"""Checkpoints of processes that have no directory in common.

Every process saves the replica that it trains on its own disk, as a run of one
replica would: leaves of the replica [1, ...], and a copy of what all replicas
share. When a group of processes starts, they tell each other what they hold and
choose the save to go on from (`save_choice`). A process without a part of that
save gets a copy of another one's over the network. Example, with 3 processes:

  replica    held saves (step, group)    its part in the save "b" of step 20
  0          10 a, 20 b                  as it was saved
  1          10 a, 20 b                  as it was saved
  2          nothing: a new machine      a copy of replica 0's

A process that trains alone cannot know whether those who join it later will see
its directory. So it saves in this way too, and all kinds of groups can read it.
"""

import contextlib
import pathlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dilocox_jax.checks import json_object
from dilocox_jax.distributed import processes
from dilocox_jax.metrics.lines import write_atomically
from dilocox_jax.metrics.recorder import METRICS, TIMING
from dilocox_jax.metrics.run_record import CONFIG, RECORD
from dilocox_jax.pytypes import Tree
from dilocox_jax.training import checkpoint, digests
from dilocox_jax.training.checkpoint import (
  PART,
  Checkpoints,
  RefusedError,
  saved_steps,
)
from dilocox_jax.training.local_arrays import LocalArrays, LocalArraysHandler
from dilocox_jax.training.save_choice import (
  Save,
  chosen_save,
  order_of_processes,
  read_save,
)

# The config comes first: a directory that has only the others is refused.
_COPIED = CONFIG, RECORD, METRICS, TIMING
ORIGINS = "origins"  # Key of a restored record: old replica of every replica.


def are_own(directory: pathlib.Path) -> bool:
  """Whether every process has a directory of its own; all wait for all.

  Args:
    directory: Run directory of this process.
  """
  if jax.process_count() > 1:
    return not processes.share_directory(directory)
  records = _records(directory)
  return not records or PART in records[0]


def devices(directory: pathlib.Path) -> list[Any]:
  """Returns the device of every replica, so that each keeps what it has saved.

  Processes are numbered in the order in which they come, and would otherwise
  train with the data of another replica.

  Args:
    directory: Run directory of this process.
  """
  parts = [record[PART] for record in _records(directory) if PART in record]
  held = processes.from_all(parts, _saves)
  _, origins = chosen_save(held) or (0, [None] * len(held))
  by_process = {device.process_index: device for device in jax.devices()}
  return [by_process[n] for n in order_of_processes(origins)]


def opened(
  directory: pathlib.Path, keep: int, replica: int | None
) -> Checkpoints:
  """Opens the checkpoints of a run directory, and makes it.

  Args:
    directory: Run directory.
    keep: Number of newest checkpoints to keep; in a process's own directory two
      at least.
    replica: Number of the replica that has this directory for itself; None if
      it is that of all replicas.
  """
  folder = directory / checkpoint.FOLDER
  if replica is None:
    return Checkpoints(folder, keep)
  # Of two replicas one may be killed while it saves. Then it holds the save
  # before, to which the other one must be able to go back.
  return OwnCheckpoints(folder, max(keep, 2), replica)


def _records(directory: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the records of a run's checkpoints, newest first."""
  folder = directory / checkpoint.FOLDER
  records = {}
  for step in saved_steps(folder):
    file = folder / str(step) / checkpoint.RECORD / "metadata"
    # `restore` says what is damaged.
    with contextlib.suppress(OSError, ValueError):
      records[step] = json_object(file.read_bytes(), file)
  return [records[step] for step in sorted(records, reverse=True)]


def _saves(message: Sequence[dict[str, Any]]) -> list[Save]:
  """Reads the saves that a process says it holds."""
  return [read_save(part) for part in message]


def _holdings(message: Any) -> tuple[int, str, list[Save], str, str]:
  """Reads what a process says of itself (`OwnCheckpoints._meet`)."""
  replica, name, parts, damage, refusal = message
  return int(replica), str(name), _saves(parts), str(damage), str(refusal)


def _room_for(sizes: dict[str, int]) -> dict[str, np.ndarray]:
  """Returns room for the files that a process gives away, by name."""
  return {name: np.zeros(size, np.uint8) for name, size in sizes.items()}


class OwnCheckpoints(Checkpoints):
  """The checkpoints of one process's own run directory.

  Every process must have one device and train one replica.
  """

  # Orbax says to all processes alike that the folders are there, so a process
  # would take another one's word for it.
  _makes_folders_later = False
  _on_one_disk = staticmethod(max)  # Of replica 0, who counts what is shared.

  def __init__(self, directory: pathlib.Path, keep: int, replica: int):
    """Opens the directory, and creates it.

    Args:
      directory: Folder that holds one folder for each checkpoint.
      keep: Number of newest checkpoints to keep.
      replica: Number of the replica that this process trains.
    """
    super().__init__(directory, keep)
    self._replica = replica
    self._group, self._members = "", ()

  @property
  def _writes(self) -> bool:
    return True

  def _sharing(self) -> dict[str, Any]:
    # Orbax makes no folders for a part of the processes.
    self._directory.mkdir(parents=True, exist_ok=True)
    return {"create": False, "multiprocessing_options": _alone()}

  def _handlers(self) -> dict[str, Any]:
    json_handler = ocp.JsonCheckpointHandler(multiprocessing_options=_alone())
    return {
      checkpoint.ARRAYS: LocalArraysHandler(),
      checkpoint.RECORD: json_handler,
    }

  def save(self, step: int, state: Tree, record: dict[str, Any]) -> None:
    """Starts a save of this process's replica (`Checkpoints.save`).

    Must come after `restore`, in which the group has met.
    """
    part = Save(step, self._group, self._replica, self._members)
    super().save(step, state, record | {PART: part._asdict()})

  def _save_args(self, leaves: dict[str, Any]) -> LocalArrays:
    # The arrays may be donated before they are written, so they are copied.
    return LocalArrays(
      {
        name: np.array(leaf.addressable_shards[0].data)
        for name, leaf in leaves.items()
      }
    )

  def wait(self) -> None:
    """Waits until all processes have saved: who ends first ends the others."""
    super().wait()
    processes.meet()

  def restore(
    self, template: Callable[[dict[str, Any]], Tree]
  ) -> tuple[Tree, dict[str, Any]] | None:
    """Reads or receives the state from which the group goes on.

    Args:
      template: Function from a checkpoint's record to the shapes, types and
        placement of the state of all replicas of this group.

    Returns:
      The state, and the record of the first replica that holds the save, with
      the list of `chosen_save` under `ORIGINS`. The result is None if nobody
      has a checkpoint.

    Raises:
      RefusedError: In all processes, if what one of them holds does not fit, or
        if all checkpoints of all processes are damaged.
    """
    self._manager.wait_until_finished()
    damages, records, refusal = self._found(template)
    chosen = self._meet(list(records.values()), damages, refusal)
    if chosen is None:
      return None
    step, origins = chosen
    for damaged_step, damage in damages.items():
      self._set_aside(damaged_step, damage)
    is_held = origins[self._replica] is not None
    self._leave_only(step, is_held)
    source = next(m for m, origin in enumerate(origins) if origin is not None)
    is_source = self._replica == source
    own = records[step] if is_source else {}
    record = next(filter(None, processes.from_all(own, dict)))
    like = template(record)
    parts = jax.tree.map(_room, like)
    if is_held:
      parts = self._state(step, self._part, parts)
    if None in origins:
      # Gloo gives a group 30 s to form, and reading may take longer.
      processes.meet()
      parts = copy_of(is_source, parts)
      # Who is new goes on with the rows of the others.
      _copy_records(self._directory.parent, is_source, not is_held)
    return jax.tree.map(_placed, like, parts), record | {ORIGINS: origins}

  def _found(
    self, template: Callable
  ) -> tuple[dict[int, str], dict[int, dict[str, Any]], str]:
    """Looks at what this process holds.

    Returns:
      What is wrong with damaged checkpoints, records of the others, both by
      step, and why to refuse them ("" if nothing).
    """
    damages, records = {}, {}
    for step in sorted(self._manager.all_steps(), reverse=True):
      if damage := digests.damage(self._directory / str(step)):
        damages[step] = damage
        continue
      record = self._record(step)
      if PART not in record:
        if records:  # A group that shared this directory was before this one.
          continue
        return (
          damages,
          records,
          (
            f"the checkpoints in {self._directory} are those of processes that "
            "share a directory: give all processes that directory again"
          ),
        )
      try:
        template(record)
      except RefusedError as error:
        return damages, records, str(error)
      records[step] = record
    return damages, records, ""

  def _meet(
    self,
    records: Sequence[dict[str, Any]],
    damages: dict[int, str],
    refusal: str,
  ) -> tuple[int, list[int | None]] | None:
    """Tells the others what this process holds, and chooses as all others do.

    Returns:
      What `chosen_save` returns, by replica.
    """
    parts = [record[PART] for record in records]
    saves = _saves(parts)
    name = saves[0].directory if saves else uuid.uuid4().hex
    damage = next(iter(damages.values()), "")
    own = (self._replica, name, parts, damage, refusal)
    told = sorted(processes.from_all(own, _holdings))
    _, names, held, all_damages, refusals = zip(*told, strict=True)
    self._members = names
    self._group = processes.from_main(uuid.uuid4().hex, str)
    if any(refusals):
      raise RefusedError(next(filter(None, refusals)))
    chosen = chosen_save(held)
    if chosen is None and any(all_damages):
      raise RefusedError(
        "all checkpoints of all processes are damaged "
        f"({next(filter(None, all_damages))}): restore one from a backup, or "
        "take another --workdir"
      )
    return chosen

  def _leave_only(self, step: int, is_held: bool) -> None:
    """Moves away what the group does not go on from and saves anew."""
    for other in self._manager.all_steps():
      if other > step or (other == step and not is_held):
        reason = f"the others go on from step {step}"
        self._set_aside(other, reason, "unfinished")


def _alone() -> ocp.options.MultiprocessingOptions:
  """Returns the options with which Orbax waits for no other process."""
  own = jax.process_index()
  return ocp.options.MultiprocessingOptions(
    primary_host=own,
    active_processes={own},
    barrier_sync_key_prefix=f"process_{own}",
  )


def copy_of(is_source: bool, parts: Tree) -> Tree:
  """Returns the arrays of one process in every process, equal in every bit.

  Args:
    is_source: Whether they are those of this process.
    parts: Tree of numpy arrays; in other processes only shapes and types count.
  """
  from jax.experimental import multihost_utils

  def copied(own: np.ndarray) -> np.ndarray:
    # Sums of floating-point numbers would turn -0.0 into 0.0.
    sent = np.frombuffer(own.tobytes(), np.uint8)
    received = multihost_utils.broadcast_one_to_all(sent, is_source)
    return np.asarray(received).view(own.dtype).reshape(own.shape)

  return jax.tree.map(copied, parts)


def _room(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
  """Returns room for this process's part of an array of all replicas."""
  assert leaf.sharding is not None
  return np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _placed(leaf: jax.ShapeDtypeStruct, part: np.ndarray) -> jax.Array:
  """Returns the array of all replicas of which this process has a part."""
  return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: part)


def _copy_records(
  directory: pathlib.Path, is_source: bool, is_new: bool
) -> None:
  """Gives new processes the records of the run that another one has.

  Args:
    directory: Run directory of this process.
    is_source: Whether this is the process that has them.
    is_new: Whether this process needs them.
  """
  own = {}
  if is_source:
    files = [directory / name for name in _COPIED]
    own = {f.name: np.fromfile(f, np.uint8) for f in files if f.exists()}
  sizes = {name: len(content) for name, content in own.items()}
  room = next(filter(None, processes.from_all(sizes, _room_for)), {})
  copies = copy_of(is_source, own or room)
  if is_new:
    for name in filter(copies.__contains__, _COPIED):
      write_atomically(directory / name, copies[name].tobytes())
