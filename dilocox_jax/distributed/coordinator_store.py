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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from dilocox_jax.trees import Tree

_FOLDER = "dilocox_jax"
# A process may compile or wait for a link for hours. That it is gone is noticed
# by the coordinator's heartbeats, not by this limit.
_WAIT_MS = 24 * 60 * 60 * 1000
_END_MS = 5_000  # Enough for a round trip; a process may not come at all.
_LAST_S = 0.5  # Process 0 stays this long, until the others have ended.

# What reading a message of another form raises.
_MALFORMED = (
  *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
  *(RecursionError, MemoryError),
)

_turns = itertools.count()

Read = TypeVar("Read")


class LostProcessError(RuntimeError):
  """Another process of the run is gone; the message is one line."""


class MessageError(LostProcessError):
  """What another process is said to have sent is no message of this run."""


def allgather(own: Any) -> list[Any]:
  """Returns every process's value, by process, in every process.

  All processes must call it, in the same order; each waits for the slowest.
  Process 0 collects, so the others wait for one round trip to it.

  Args:
    own: Value of this process, which JSON must have. Tuples become lists, also
      in this process, if there are several.

  Raises:
    MessageError: If a stranger writes into the store.
  """
  if jax.process_count() == 1:
    return [own]
  store, turn = _store(), next(_turns)
  folder = f"{_FOLDER}/{turn}"
  if jax.process_index():
    # Both requests at once: one after the other would be two round trips.
    with ThreadPoolExecutor(1) as thread:
      own_key = f"{folder}/{jax.process_index()}"
      setting = thread.submit(_set, own_key, json.dumps(own).encode())
      joined = store.blocking_key_value_get_bytes(f"{folder}/all", _WAIT_MS)
      setting.result()
    return understood(_list_of_all, _parsed(joined, 0), 0)
  messages = [json.dumps(own).encode()]
  for process in range(1, jax.process_count()):
    key = f"{folder}/{process}"
    messages.append(store.blocking_key_value_get_bytes(key, _WAIT_MS))
  values = [_parsed(each, process) for process, each in enumerate(messages)]
  _set(f"{folder}/all", b"[" + b",".join(messages) + b"]")
  if turn:  # All have read the turn before (see above).
    store.key_value_delete(f"{_FOLDER}/{turn - 1}")
  return values


def understood(read: Callable[[Any], Read], message: Any, process: int) -> Read:
  """Returns what a function makes of a message of `allgather`.

  Args:
    read: Function that raises any error of Python if the message has not the
      form of which it makes the value.
    message: What the process has sent.
    process: Number of the process.

  Raises:
    MessageError: If the function raises an error, and there are other
      processes.
  """
  if jax.process_count() == 1:
    return read(message)
  try:
    return read(message)
  except _MALFORMED as error:
    _refuse(process, error)


def _parsed(message: bytes, process: int) -> Any:
  return understood(json.loads, message, process)


def _list_of_all(message: Any) -> list[Any]:
  if not isinstance(message, list) or len(message) != jax.process_count():
    raise ValueError("it is not one value for each process")
  return message


def _set(key: str, message: bytes) -> None:
  """Writes a message of this process, which nobody else may have written."""
  try:
    _store().key_value_set_bytes(key, message)
  except jax.errors.JaxRuntimeError as error:
    if "ALREADY_EXISTS" in str(error):
      _refuse(jax.process_index(), "somebody else has written it")
    raise


def _refuse(process: int, reason: object) -> NoReturn:
  reason = " ".join(str(reason).split())[:200]
  raise MessageError(
    f"the message of process {process} is none of this run ({reason}): a "
    "stranger may have reached the port of --coordinator, or a process has "
    "other code"
  ) from None


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
      _to_message(*part)
      for part, (n, shard) in zip(parts, shards, strict=True)
      if n in divided and shard.replica_id == 0
    ]

    def placed(messages: list[Any]) -> None:
      for message in messages:
        n, span, part = _from_message(*message)
        values[n][span] = part.view(values[n].dtype)

    for process, messages in enumerate(allgather(sent)):
      understood(placed, messages, process)
  for n, span, part in parts:
    values[n][span] = part
  return jax.device_get(
    structure.unflatten(values.get(n, leaf) for n, leaf in enumerate(leaves))
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
