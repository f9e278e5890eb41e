"""Carries the mailbox's answers from process 0 to the others of a replica.

A replica may consist of several processes. Only process 0 reads and writes the
mailbox. The answers travel through the hosts (`distributed.channel`) and never
through the devices: an exchange runs in a thread beside the inner steps, and if
two threads dispatched programs that communicate, their order would differ from
process to process.

While process 0 has not answered, it may ask the other processes for their parts
of an array, e.g. for a snapshot of the shared state:

  process 0        asks the mailbox ... wants array 3 ... has the answer
  other processes  wait ............... send their parts . return the answer
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

_LOOK_EVERY_S = 0.5
_STOP = "stop"  # Mark of a process that was asked to stop.
# Kinds of the messages of process 0.
_ANSWER = "answer"
_ERROR = "error"
_WANTED = "wanted"
# Start and stop of the slice of each axis.
_Bounds = list[tuple[int, int]]


class ClusterProcesses:
  """The processes of a replica that consists of several processes.

  It implements `mailbox_protocol.replica_processes.ReplicaProcesses`.
  """

  def __init__(self):
    """Makes the lock. The channel is opened at the first use."""
    self._sending = threading.Lock()

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
    """Whether another process than process 0 was asked to stop."""
    return self._channel.is_marked(_STOP)

  def request_stop(self) -> None:
    """Tells process 0 that this process was asked to stop."""
    if not self.is_main:
      self._channel.mark(_STOP)

  def from_main(
    self, ask: Callable[[], Any], shared: TakeArrays | None = None
  ) -> Any:
    """Asks the mailbox in process 0, and returns the answer in every process.

    All processes must make the same calls in the same order.

    Args:
      ask: Function that asks the mailbox. Only process 0 calls it.
      shared: Function that returns the arrays of which process 0 may want this
        process's parts. None: process 0 wants none.

    Raises:
      Exception: The error of `ask`, in every process.
    """
    if self.is_main:
      return self._ask_and_tell(ask)
    return _result(in_thread(self._heard, shared))

  def _ask_and_tell(self, ask: Callable[[], Any]) -> Any:
    """Asks the mailbox, and sends the answer to the other processes.

    Args:
      ask: Function that asks the mailbox. If it raises, the other processes get
        the error too, and this function raises it.

    Returns:
      The answer.
    """
    try:
      answer = ask()
    except Exception as error:
      # The other processes may be gone, so nobody waits for them.
      self._tell(_ERROR, encode_error(error), waits=False)
      raise
    value, arrays = encode_answer(answer)
    kinds = [(array.dtype.name, array.shape) for array in arrays]
    with self._sending:
      self._tell_locked(_ANSWER, [value, kinds])
      for array in arrays:
        self._channel.send_array(array, self._channel.others)
    return answer

  def _tell(self, kind: str, value: Any, *, waits: bool = True) -> None:
    """Sends a message to all other processes, and holds the lock meanwhile.

    Args:
      kind: Kind of the message, e.g. `_WANTED`.
      value: Value of JSON.
      waits: Whether to wait until the others have read the message.
    """
    with self._sending:
      self._tell_locked(kind, value, waits=waits)

  def _tell_locked(self, kind: str, value: Any, *, waits: bool = True) -> None:
    """Sends a message to all other processes. The caller holds the lock.

    Args:
      kind: Kind of the message, e.g. `_ANSWER`.
      value: Value of JSON.
      waits: Whether to wait until the others have read the message.
    """
    content = json.dumps([kind, value]).encode()
    self._channel.send(content, self._channel.others, waits=waits)

  def _heard(self, shared: TakeArrays | None) -> Any:
    """Waits for the answer of process 0, and returns it.

    Meanwhile this process sends its parts of every array that process 0 wants.

    Args:
      shared: Function that returns the arrays of which process 0 may want
        parts. None: process 0 wants none.

    Raises:
      Exception: The error of process 0, if it could not get an answer.
    """
    arrays: Sequence[Any] | None = None
    while True:
      kind, value = json.loads(self._channel.receive(MAIN))
      if kind == _ERROR:
        raise decode_error(*value)
      if kind == _ANSWER:
        break
      if arrays is None:
        assert shared is not None, "process 0 wants what is not there"
        arrays = shared()
      self._send_parts(arrays[value])
    answer, kinds = value
    received = [
      self._channel.receive_array(MAIN, shape, np.dtype(name))
      for name, shape in kinds
    ]
    return decode_answer(answer, received)

  def _send_parts(self, array: jax.Array) -> None:
    """Sends this process's parts of an array to process 0.

    Args:
      array: An array that is divided among the devices of all processes.
    """
    parts = coordinator_store.parts_to_send(array)
    bounds = [_bounds(shard.index, array.shape) for shard in parts]
    self._channel.send(json.dumps(bounds).encode(), [MAIN])
    for shard in parts:
      self._channel.send_array(np.asarray(shard.data), [MAIN])

  def collected(self, arrays: Sequence[jax.Array]) -> Sequence[Any]:
    """Returns objects that numpy reads as whole arrays (`CollectedArray`).

    Only process 0 may read them, and only inside `from_main`.

    Args:
      arrays: Arrays that are divided among the devices of all processes, in the
        order of `shared` of `from_main`.
    """
    return [
      CollectedArray(array, functools.partial(self._collect, number, array))
      for number, array in enumerate(arrays)
    ]

  def _collect(self, number: int, array: jax.Array) -> np.ndarray:
    """Returns the whole array.

    If the array is divided, the other processes are asked for their parts.

    Args:
      number: Position of the array in the arrays of `collected`. The other
        processes get the same arrays in the same order (`shared`).
      array: The array, of which process 0 has only its own parts.
    """
    if not coordinator_store.is_divided(array):
      return np.asarray(jax.device_get(array))
    values = np.empty(array.shape, array.dtype)
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
    """Stores the array. Nothing is fetched before numpy reads it.

    Args:
      array: The array, whose parts several processes have.
      collect: Function that fetches the parts and returns the whole array.
    """
    self.nbytes = array.nbytes
    self._collect = collect

  def __array__(
    self, dtype: np.dtype | None = None, copy: bool | None = None
  ) -> np.ndarray:
    """Copies the parts from all processes, and returns the whole array.

    Args:
      dtype: Type of the result; None: the type of the parts.
      copy: Not used.
    """
    del copy
    return np.asarray(self._collect(), dtype)


def _bounds(index: tuple[slice, ...], shape: Sequence[int]) -> _Bounds:
  """Returns the start and the stop of an index on each axis.

  Args:
    index: A slice for each axis. Its start and stop may be None.
    shape: Shape of the array that the index is for.
  """
  return [
    axis_slice.indices(length)[:2]
    for axis_slice, length in zip(index, shape, strict=True)
  ]


def _result(future: Future) -> Any:
  """Waits for a future, and returns its result.

  It waits in short intervals, so that Ctrl-C can interrupt the wait.

  Args:
    future: The future.

  Raises:
    Exception: The error of the future, if it has one.
  """
  while wait([future], _LOOK_EVERY_S).not_done:
    pass
  return future.result()
