"""What the hosts of a run tell each other, past the devices.

A collective for a few bytes would stand in the devices' queue, where every
message between replicas costs a slow link its latency. The processes have
another wire: the store that JAX's coordinator keeps at process 0.
"""

import itertools

import jax
from jax._src import distributed  # No public name gives the store's client.

_FOLDER = "dilocox_jax"
# A process may compile or wait for a link as long as it likes; that one is
# gone is noticed by the heartbeats, not here.
_WAIT_MS = 24 * 60 * 60 * 1000
_LENGTH_BYTES = 8

_turns = itertools.count()


def allgather(own: bytes) -> list[bytes]:
  """Every process's message, by process, in every process.

  All processes must call it, in the same order; each waits for the slowest.
  Process 0 collects, so each of the others waits for one round trip only.

  Args:
    own: This process's message; lengths may differ.
  """
  if jax.process_count() == 1:
    return [own]
  store, turn = distributed.global_state.client, next(_turns)
  assert store, "several processes have met through it"
  folder = f"{_FOLDER}/{turn}"
  if jax.process_index():
    store.key_value_set_bytes(f"{folder}/{jax.process_index()}", own)
    return _split(store.blocking_key_value_get_bytes(f"{folder}/all", _WAIT_MS))
  others = [
    store.blocking_key_value_get_bytes(f"{folder}/{process}", _WAIT_MS)
    for process in range(1, jax.process_count())
  ]
  store.key_value_set_bytes(f"{folder}/all", _join([own, *others]))
  if turn:  # Who speaks now has heard all of the turn before.
    store.key_value_delete(f"{_FOLDER}/{turn - 1}")
  return [own, *others]


def _join(messages: list[bytes]) -> bytes:
  return b"".join(len(each).to_bytes(_LENGTH_BYTES) + each for each in messages)


def _split(joined: bytes) -> list[bytes]:
  messages, start = [], 0
  while start < len(joined):
    first = start + _LENGTH_BYTES
    start = first + int.from_bytes(joined[start:first])
    messages.append(joined[first:start])
  return messages
