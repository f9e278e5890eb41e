"""Lets the processes of one replica share a mailbox: a folder or a bucket.

Replicas exchange messages through the mailbox. If a replica consists of several
processes, only its process 0 uses the mailbox, and passes the results on to the
other processes. These results travel between the hosts
(`distributed.channel`), and never between the devices.

Before process 0 has a result, it may ask the other processes for their parts of
an array, e.g. to write a snapshot of the shared state:

  process 0        uses the mailbox ... wants array 3 ... sends the result
  other processes  wait ............... send their parts . return the result
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from dilocox_jax.distributed import coordinator_store, processes
from dilocox_jax.distributed.channel import MAIN, Channel
from dilocox_jax.mailbox_protocol.replica_processes import (
  TakeArrays,
  decode_answer,
  decode_error,
  encode_answer,
  encode_error,
)
from dilocox_jax.threads import in_thread

# A wait is divided into waits of so many seconds, because Ctrl-C cannot
# interrupt a single long one.
_LOOK_EVERY_S = 0.5
_STOP = "stop"  # Mark of a process that was asked to stop.
# Kinds of the messages of process 0.
_ANSWER = "answer"
_ERROR = "error"
_WANTED = "wanted"
# Start and stop of the slice of each axis.
_Bounds = list[tuple[int, int]]


class ClusterProcesses:
  """Connects the processes of one replica, which share a mailbox.

  The class implements `mailbox_protocol.replica_processes.ReplicaProcesses` for
  a replica that consists of several processes.
  """

  def __init__(self):
    """Makes the lock for sending. The channel is opened at its first use."""
    self._sending = threading.Lock()

  # A channel does not use the devices: an exchange runs in a thread beside the
  # inner steps. If two threads dispatched programs that communicate, the order
  # of these programs would differ from process to process.
  @functools.cached_property
  def _channel(self) -> Channel:
    """The channel between the processes, which opens at the first use."""
    return Channel()

  @property
  def is_main(self) -> bool:
    """Whether this is process 0, which has the mailbox."""
    return processes.is_main()

  @property
  def is_stop_requested(self) -> bool:
    """Whether a process other than process 0 has called `request_stop`."""
    return self._channel.is_marked(_STOP)

  def request_stop(self) -> None:
    """Tells process 0 that this process was asked to stop.

    In process 0 the method does nothing.
    """
    if not self.is_main:
      self._channel.mark(_STOP)

  def from_main(
    self, ask: Callable[[], Any], shared: TakeArrays | None = None
  ) -> Any:
    """Calls a function in process 0, and returns its result in every process.

    All processes must make the same calls in the same order.

    Args:
      ask: Function that uses the mailbox. Only process 0 calls it. Its result
        may have JSON values, numpy arrays and the results of a mailbox's
        methods, nested in lists, tuples and dicts.
      shared: Function that returns arrays. While `ask` runs, process 0 may read
        this process's parts of these arrays (`collected`). Process 0 itself
        does not call the function. None: no arrays.

    Returns:
      The result of `ask`. In the processes other than 0, its tuples without
      names have become lists.

    Raises:
      Exception: The error of `ask`, in every process. Outside process 0, it is
        raised as a `ReplicaStaleError`, `StoppedError`, ValueError or OSError
        if it is one, and otherwise as a RuntimeError.
    """
    if self.is_main:
      return self._ask_and_tell(ask)
    # Ctrl-C cannot interrupt a wait of the channel, so a thread waits there.
    return _result(in_thread(self._heard, shared))

  def _ask_and_tell(self, ask: Callable[[], Any]) -> Any:
    """Calls `ask` in process 0, and sends its result or error to the others."""
    try:
      answer = ask()
    except Exception as error:
      # The other processes may be gone, so nobody waits for them.
      self._tell(_ERROR, encode_error(error), waits=False)
      raise
    value, arrays = encode_answer(answer)
    types_and_shapes = [(array.dtype.name, array.shape) for array in arrays]
    with self._sending:
      self._tell_locked(_ANSWER, [value, types_and_shapes])
      for array in arrays:
        self._channel.send_array(array, self._channel.others)
    return answer

  def _tell(self, kind: str, value: Any, *, waits: bool = True) -> None:
    """Sends a message of a kind, e.g. `_ANSWER`, to all other processes.

    If `waits` is True, it waits until the others have read the message.
    """
    with self._sending:
      self._tell_locked(kind, value, waits=waits)

  def _tell_locked(self, kind: str, value: Any, *, waits: bool = True) -> None:
    """Does the work of `_tell`. The caller holds the lock."""
    content = json.dumps([kind, value]).encode()
    self._channel.send(content, self._channel.others, waits=waits)

  def _heard(self, shared: TakeArrays | None) -> Any:
    """Waits for process 0's result, and returns it or raises its error.

    Meanwhile this process sends its parts of every array that process 0 wants.
    """
    arrays: Sequence[Any] | None = None
    while True:
      kind, value = json.loads(self._channel.receive(MAIN))
      if kind == _ERROR:
        raise decode_error(*value)
      if kind == _ANSWER:
        break
      # Process 0 wants the array with the number `value`.
      if arrays is None:
        assert shared is not None, "process 0 wants what is not there"
        arrays = shared()
      self._send_parts(arrays[value])
    # The arrays of the answer follow it, one message each.
    answer, types_and_shapes = value
    received = [
      self._channel.receive_array(MAIN, shape, np.dtype(name))
      for name, shape in types_and_shapes
    ]
    return decode_answer(answer, received)

  def _send_parts(self, array: jax.Array) -> None:
    """Sends this process's parts of an array to process 0."""
    parts = coordinator_store.parts_to_send(array)
    bounds = [_bounds(shard.index, array.shape) for shard in parts]
    self._channel.send(json.dumps(bounds).encode(), [MAIN])
    for shard in parts:
      self._channel.send_array(np.asarray(shard.data), [MAIN])

  def collected(self, arrays: Sequence[jax.Array]) -> Sequence[Any]:
    """Wraps arrays so that process 0 can read them as a whole.

    Args:
      arrays: Arrays on the devices of all processes. They must be those that
        the argument `shared` of `from_main` returns, in the same order.

    Returns:
      A `CollectedArray` for each array. Only process 0 may read it, and only in
      the function `ask` that it passes to `from_main`.
    """
    return [
      CollectedArray(array, functools.partial(self._collect, number, array))
      for number, array in enumerate(arrays)
    ]

  def _collect(self, number: int, array: jax.Array) -> np.ndarray:
    """Returns the whole array, in process 0.

    `number` is the array's position in the arrays of `collected`.
    """
    if not coordinator_store.is_divided(array):
      return np.asarray(jax.device_get(array))
    values = np.empty(array.shape, array.dtype)
    # First come the parts of this process, then those of the others.
    for shard in coordinator_store.parts_to_send(array):
      values[shard.index] = np.asarray(shard.data)
    self._tell(_WANTED, number)
    for process in self._channel.others:
      all_bounds = json.loads(self._channel.receive(process))
      for bounds in all_bounds:
        shape = [stop - start for start, stop in bounds]
        index = tuple(slice(start, stop) for start, stop in bounds)
        values[index] = self._channel.receive_array(
          process, shape, values.dtype
        )
    return values


class CollectedArray:
  """An array whose parts other processes send when numpy reads it.

  Attributes:
    nbytes: Bytes of the whole array.
  """

  def __init__(self, array: jax.Array, collect: Callable[[], np.ndarray]):
    """Stores the array's size and the function that fetches the whole array."""
    self.nbytes = array.nbytes
    self._collect = collect

  def __array__(
    self, dtype: np.dtype | None = None, copy: bool | None = None
  ) -> np.ndarray:
    """Copies the parts from all processes, and returns the whole array."""
    del copy
    return np.asarray(self._collect(), dtype)


def _bounds(index: tuple[slice, ...], shape: Sequence[int]) -> _Bounds:
  """Returns the start and the stop of an index on each axis, as numbers."""
  return [
    axis_slice.indices(length)[:2]
    for axis_slice, length in zip(index, shape, strict=True)
  ]


def _result(future: Future) -> Any:
  """Returns a future's result or raises its error; Ctrl-C can interrupt it."""
  while wait([future], _LOOK_EVERY_S).not_done:
    pass
  return future.result()
