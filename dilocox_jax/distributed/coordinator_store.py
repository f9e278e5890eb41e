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
"""

import contextlib
import itertools
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dilocox_jax.pytypes import Tree

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
    own: Value of this process. It is pickled, as the processes of one run
      trust each other.
  """
  if jax.process_count() == 1:
    return [own]
  store, turn = _store(), next(_turns)
  folder = f"{_FOLDER}/{turn}"
  if jax.process_index():
    # Both requests at once: one after the other would be two round trips.
    with ThreadPoolExecutor(1) as thread:
      own_key = f"{folder}/{jax.process_index()}"
      message = pickle.dumps(own)
      setting = thread.submit(store.key_value_set_bytes, own_key, message)
      joined = store.blocking_key_value_get_bytes(f"{folder}/all", _WAIT_MS)
      setting.result()
    return pickle.loads(joined)
  values = [own]
  for process in range(1, jax.process_count()):
    key = f"{folder}/{process}"
    message = store.blocking_key_value_get_bytes(key, _WAIT_MS)
    values.append(pickle.loads(message))
  store.key_value_set_bytes(f"{folder}/all", pickle.dumps(values))
  if turn:  # All have read the turn before (see above).
    store.key_value_delete(f"{_FOLDER}/{turn - 1}")
  return values


def arrays_to_host(tree: Tree) -> Tree:
  """Returns the values of arrays as numpy arrays, in every process.

  All processes must call it, in the same order, with trees of one structure.
  Arrays of which every process holds the same parts are not sent.

  Args:
    tree: Arrays, each on devices of this process alone or of all processes.
  """
  leaves, structure = jax.tree.flatten(tree)
  shared = {n: leaf for n, leaf in enumerate(leaves) if _is_shared(leaf)}
  values = {n: np.empty(leaf.shape, leaf.dtype) for n, leaf in shared.items()}
  shards = [
    (n, x) for n, leaf in shared.items() for x in leaf.addressable_shards
  ]
  parts = jax.device_get([(n, shard.index, shard.data) for n, shard in shards])
  divided = {n for n, leaf in shared.items() if not _is_alike_in_all(leaf)}
  if divided:
    # Of all devices that hold a part, the one with the number 0 sends it.
    sent = [
      part
      for part, (n, shard) in zip(parts, shards, strict=True)
      if n in divided and shard.replica_id == 0
    ]
    parts += itertools.chain(*allgather(sent))
  for n, span, part in parts:
    values[n][span] = part
  return jax.device_get(
    structure.unflatten(values.get(n, leaf) for n, leaf in enumerate(leaves))
  )


def _is_shared(leaf: Any) -> bool:
  """Whether devices of other processes hold a part of an array too."""
  return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _is_alike_in_all(leaf: jax.Array) -> bool:
  """Whether every process holds the same parts of an array, so all of it.

  For example losses [2, 6] of two replicas on two processes: each process holds
  one row and sends it. If both replicas span both processes, each process holds
  both rows.
  """
  parts: dict[int, set[str]] = {}
  for device, span in leaf.sharding.devices_indices_map(leaf.shape).items():
    # Slices cannot be in a set before Python 3.12.
    parts.setdefault(device.process_index, set()).add(str(span))
  return len({frozenset(spans) for spans in parts.values()}) == 1


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
