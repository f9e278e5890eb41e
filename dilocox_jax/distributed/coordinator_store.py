"""Messages between the hosts of a run that the devices take no part in.

A collective for a few bytes would wait in the devices' queue, and every message
between replicas costs a slow link its latency. The processes use another way:
the key-value store that JAX's coordinator keeps at process 0.

Every call of `allgather` is one turn, numbered alike in all processes because
all make the same calls in the same order. Turn 7 of three processes:

  process 1, 2  set 7/1, 7/2 and wait for 7/all
  process 0     waits for 7/1 and 7/2, sets 7/all, deletes all of turn 6

Process 0 may delete turn 6 then: who has set its key of turn 7 has read 6/all.

Values that are small and read often, such as losses and drifts, take this way
too (`arrays_to_host`). With one process nothing is sent.

Whoever reaches the coordinator's port can write into the store. So a message is
JSON, and arrays in it are files of numpy's format without Python objects: what
a stranger writes may be wrong, but it is never executed.
"""

import base64
import contextlib
import io
import itertools
import json
import time
from typing import Any

import jax
import numpy as np

from dilocox_jax.threads import in_thread
from dilocox_jax.trees import Tree

_FOLDER = "dilocox_jax"
# A process may compile or wait for a link for hours. That it is gone is noticed
# by the coordinator's heartbeats, not by this limit.
_WAIT_MS = 24 * 60 * 60 * 1000
_END_MS = 5_000  # Enough for a round trip; a process may not come at all.
_LAST_S = 0.5  # Process 0 stays this long, until the others have ended.

_turns = itertools.count()


def allgather(own: Any) -> list[Any]:
  """Returns every process's value, by process, in every process.

  All processes must call it, in the same order; each waits for the slowest.
  Process 0 collects, so the others wait for one round trip to it.

  Args:
    own: Value of this process, which JSON must have. Tuples become lists, also
      in this process, if there are several.
  """
  if jax.process_count() == 1:
    return [own]
  store, turn = _store(), next(_turns)
  folder, message = f"{_FOLDER}/{turn}", json.dumps(own).encode()
  if jax.process_index():
    # Both requests at once: one after the other would be two round trips.
    own_key = f"{folder}/{jax.process_index()}"
    setting = in_thread(store.key_value_set_bytes, own_key, message)
    joined = store.blocking_key_value_get_bytes(f"{folder}/all", _WAIT_MS)
    setting.result()
    return json.loads(joined)
  others = [
    store.blocking_key_value_get_bytes(f"{folder}/{process}", _WAIT_MS)
    for process in range(1, jax.process_count())
  ]
  joined = b"[" + b",".join([message, *others]) + b"]"
  values = json.loads(joined)
  store.key_value_set_bytes(f"{folder}/all", joined)
  if turn:  # All have read the turn before (see above).
    store.key_value_delete(f"{_FOLDER}/{turn - 1}")
  return values


def arrays_to_host(tree: Tree) -> Tree:
  """Returns the values of arrays as numpy arrays, in every process.

  All processes must call it, in the same order, with trees of one structure.
  Arrays that every device holds whole are not sent.

  Args:
    tree: Arrays, each on devices of this process alone or of all processes.
  """
  leaves, structure = jax.tree.flatten(tree)
  divided = {n: leaf for n, leaf in enumerate(leaves) if _is_divided(leaf)}
  if not divided:
    return jax.device_get(tree)
  values = {n: np.empty(leaf.shape, leaf.dtype) for n, leaf in divided.items()}
  # Of all devices that hold a part, the one with the number 0 sends it.
  sent = [
    _to_message(n, shard.index, np.asarray(shard.data))
    for n, leaf in divided.items()
    for shard in leaf.addressable_shards
    if shard.replica_id == 0
  ]
  for message in itertools.chain.from_iterable(allgather(sent)):
    n, span, part = _from_message(*message)
    values[n][span] = part.view(values[n].dtype)
  return jax.device_get(
    structure.unflatten(values.get(n, leaf) for n, leaf in enumerate(leaves))
  )


def _is_divided(leaf: Any) -> bool:
  """Whether devices of other processes hold parts that this one lacks."""
  is_array = isinstance(leaf, jax.Array)
  return is_array and not (
    leaf.is_fully_addressable or leaf.is_fully_replicated
  )


def _to_message(n: int, span: tuple[slice, ...], part: np.ndarray) -> Any:
  """Returns a part of array number n as JSON has it."""
  file = io.BytesIO()
  np.lib.format.write_array(file, np.asanyarray(part), allow_pickle=False)
  bounds = [(each.start, each.stop) for each in span]
  return n, bounds, base64.b64encode(file.getvalue()).decode()


def _from_message(
  n: int, bounds: list[list[int | None]], text: str
) -> tuple[int, tuple[slice, ...], np.ndarray]:
  """Undoes `_to_message`; types that numpy lacks come as their bytes."""
  file = io.BytesIO(base64.b64decode(text, validate=True))
  part = np.lib.format.read_array(file, allow_pickle=False)
  return n, tuple(slice(*each) for each in bounds), part


def wait_for_end() -> None:
  """Waits a little for the others to reach an end that all come to.

  The store ends with process 0. If it ended first, the others would take that
  for the loss of a process.
  """
  store = _store()
  if store:
    with contextlib.suppress(RuntimeError):  # A process may not come.
      store.wait_at_barrier(f"{_FOLDER}/end", _END_MS)
      time.sleep(0 if jax.process_index() else _LAST_S)


def _store() -> Any:
  """Returns the client of the store, for which JAX has no public name."""
  from jax._src import distributed

  return distributed.global_state.client
