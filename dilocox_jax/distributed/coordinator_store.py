"""Sends small messages between the processes of a run, without the devices.

A collective for a few bytes would wait in the queue of the devices, and would
cost the latency of a slow link. So small messages go through the key-value
store of JAX's coordinator, which is a part of process 0. Every call of
`allgather` is one turn. For example, this is turn 7 of three processes:

  process 1, 2  set the keys 7/1 and 7/2, and wait for the key 7/all
  process 0     waits for 7/1 and 7/2, sets 7/all, deletes all keys of turn 6

Process 0 may then delete the keys of turn 6, because a process that has set its
key of turn 7 has read 6/all.

Anybody who can reach the coordinator's port can write into the store. So these
messages are JSON and arrays without Python objects: a forged message may have
wrong values, but no code in it is executed.
"""

import base64
import contextlib
import io
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dilocox_jax.threads import in_thread
from dilocox_jax.trees import Tree

FOLDER = "dilocox_jax"  # All keys of this module begin with it.
# How long to wait for another process, which may compile or wait for a link for
# hours. If a process has died, JAX notices it sooner by missing heartbeats.
WAIT_MS = 24 * 60 * 60 * 1000
# How long to wait at the end of a run, where a process may be missing.
_END_MS = 5_000
# Process 0 ends this much later than the other processes. If the store, a part
# of process 0, ended first, they would report that they have lost a process.
_LAST_S = 0.5

_turns = itertools.count()  # Numbers of the turns, from 0.
_at_end: list[Callable[[], None]] = []  # See `at_end`.


def allgather(value: Any) -> list[Any]:
  """Returns the values of all processes, in order, in every process.

  All processes must make the same calls in the same order. Each call waits for
  the slowest process.

  Args:
    value: Value of this process, of types that JSON has. With several
      processes, tuples become lists in the result.
  """
  if jax.process_count() == 1:
    return [value]
  store = key_value_store()
  turn = next(_turns)
  folder = f"{FOLDER}/{turn}"
  message = json.dumps(value).encode()
  if jax.process_index() != 0:
    # Both requests are sent at the same time: one after the other would take
    # two round trips.
    key = f"{folder}/{jax.process_index()}"
    set_request = in_thread(store.key_value_set_bytes, key, message)
    gathered = store.blocking_key_value_get_bytes(f"{folder}/all", WAIT_MS)
    set_request.result()
    return json.loads(gathered)
  other_messages = [
    store.blocking_key_value_get_bytes(f"{folder}/{process}", WAIT_MS)
    for process in range(1, jax.process_count())
  ]
  gathered = b"[" + b",".join([message, *other_messages]) + b"]"
  values = json.loads(gathered)
  store.key_value_set_bytes(f"{folder}/all", gathered)
  if turn > 0:
    # All processes have read the turn before, as the module's docstring says.
    store.key_value_delete(f"{FOLDER}/{turn - 1}")
  return values


def arrays_to_host(tree: Tree) -> Tree:
  """Returns the values of arrays as numpy arrays, in every process.

  All processes must make the same calls in the same order, with trees of the
  same structure.

  Args:
    tree: Tree of arrays, each on devices of this process only, or of all
      processes. Only arrays that are divided among processes are exchanged.
  """
  leaves, structure = jax.tree.flatten(tree)
  divided = {i: leaf for i, leaf in enumerate(leaves) if is_divided(leaf)}
  if not divided:
    return jax.device_get(tree)
  values = {i: np.empty(leaf.shape, leaf.dtype) for i, leaf in divided.items()}
  sent_parts = [
    _to_message(i, shard.index, np.asarray(shard.data))
    for i, leaf in divided.items()
    for shard in parts_to_send(leaf)
  ]
  for message in itertools.chain.from_iterable(allgather(sent_parts)):
    i, index, part = _from_message(*message)
    # Values of a dtype such as bfloat16 have come as raw bytes.
    values[i][index] = part.view(values[i].dtype)
  all_leaves = [values.get(i, leaf) for i, leaf in enumerate(leaves)]
  return jax.device_get(structure.unflatten(all_leaves))


def is_divided(leaf: Any) -> bool:
  """Returns whether an array is divided and has devices in other processes.

  An array is divided unless each of its devices has all of its values. The
  result is False for anything that is not a JAX array.
  """
  if not isinstance(leaf, jax.Array):
    return False
  return not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def parts_to_send(array: jax.Array) -> list[jax.Shard]:
  """Returns the parts of an array that this process must send to the others.

  Of several copies of a part, one device's copy is sent.
  """
  return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _to_message(
  number: int, index: tuple[slice, ...], part: np.ndarray
) -> tuple[int, list[tuple[int | None, int | None]], str]:
  """Converts a part of an array to values that JSON can store.

  They are the number of the array, start and stop of each slice of `index`, and
  the values of the part as base64 text.
  """
  file = io.BytesIO()
  np.lib.format.write_array(file, np.asanyarray(part), allow_pickle=False)
  bounds = [(axis_slice.start, axis_slice.stop) for axis_slice in index]
  return number, bounds, base64.b64encode(file.getvalue()).decode()


def _from_message(
  number: int, bounds: list[list[int | None]], text: str
) -> tuple[int, tuple[slice, ...], np.ndarray]:
  """Converts the result of `_to_message` back to number, slices and values.

  Values of dtypes that numpy's file format does not know, such as bfloat16, are
  raw bytes of the same width, which the caller must view as the dtype.

  Raises:
    ValueError: If the text is damaged, or contains Python objects.
  """
  file = io.BytesIO(base64.b64decode(text, validate=True))
  part = np.lib.format.read_array(file, allow_pickle=False)
  index = tuple(slice(start, stop) for start, stop in bounds)
  return number, index, part


def at_end(function: Callable[[], None]) -> None:
  """Registers a function that `wait_for_end` calls at the end of the run.

  It is called only if `jax.distributed` was initialized, and all processes
  reach the end in time.
  """
  _at_end.append(function)


def wait_for_end() -> None:
  """Waits up to 5 s for all processes, then calls what `at_end` registered.

  If a process does not call `wait_for_end` in time, the functions are not
  called. If `jax.distributed` was not initialized, e.g. in a run of one
  process, nothing happens.
  """
  store = key_value_store()
  if store is None:
    return
  # If a process does not come in time, the store raises RuntimeError.
  with contextlib.suppress(RuntimeError):
    store.wait_at_barrier(f"{FOLDER}/end", _END_MS)
    for function in _at_end:
      function()
    if jax.process_index() == 0:
      time.sleep(_LAST_S)


def key_value_store() -> Any:
  """Returns this process's client of JAX's key-value store.

  The result is None if `jax.distributed` was not initialized.
  """
  # JAX has no public function for it.
  from jax._src import distributed

  return distributed.global_state.client
