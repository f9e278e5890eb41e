"""What the hosts of a run tell each other, past the devices.

A collective for a few bytes would stand in the devices' queue, where every
message between replicas costs a slow link its latency. The processes have
another wire: the store that JAX's coordinator keeps at process 0.
"""

import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

_FOLDER = "dilocox_jax"
# A process may compile or wait for a link as long as it likes; that one is
# gone is noticed by the heartbeats, not here.
_WAIT_MS = 24 * 60 * 60 * 1000
_LENGTH_BYTES = 8
_PARTING_MS = 5_000  # Enough for a round trip; one may not come at all.
_LAST_S = 0.5  # Process 0 stays until the others have ended.

_turns = itertools.count()


def allgather(own: bytes) -> list[bytes]:
  """Every process's message, by process, in every process.

  All processes must call it, in the same order; each waits for the slowest.
  Process 0 collects, so the others wait for one round trip to it.

  Args:
    own: This process's message; lengths may differ.
  """
  if jax.process_count() == 1:
    return [own]
  store, turn = _store(), next(_turns)
  folder = f"{_FOLDER}/{turn}"
  if jax.process_index():
    with ThreadPoolExecutor(1) as other:  # One after the other were two trips.
      own_key = f"{folder}/{jax.process_index()}"
      telling = other.submit(store.key_value_set_bytes, own_key, own)
      joined = store.blocking_key_value_get_bytes(f"{folder}/all", _WAIT_MS)
      telling.result()
    return _split(joined)
  others = [
    store.blocking_key_value_get_bytes(f"{folder}/{process}", _WAIT_MS)
    for process in range(1, jax.process_count())
  ]
  store.key_value_set_bytes(f"{folder}/all", _join([own, *others]))
  if turn:  # Who speaks now has heard all of the turn before.
    store.key_value_delete(f"{_FOLDER}/{turn - 1}")
  return [own, *others]


def wait_for_end() -> None:
  """Waits a little for the others, for an end that all come to.

  Process 0 knows first, and its end takes the store along, which the others
  would take for the loss of a peer.
  """
  store = _store()
  if store:
    with contextlib.suppress(RuntimeError):  # One may be gone, or not come.
      store.wait_at_barrier(f"{_FOLDER}/end", _PARTING_MS)
      time.sleep(0 if jax.process_index() else _LAST_S)


def _store() -> Any:
  """The client of the coordinator's store; no public name gives it."""
  from jax._src import distributed

  return distributed.global_state.client


def _join(messages: list[bytes]) -> bytes:
  return b"".join(len(each).to_bytes(_LENGTH_BYTES) + each for each in messages)


def _split(joined: bytes) -> list[bytes]:
  messages, start = [], 0
  while start < len(joined):
    first = start + _LENGTH_BYTES
    start = first + int.from_bytes(joined[start:first])
    messages.append(joined[first:start])
  return messages
