"""A store whose requests take simulated time, for many replicas in one process.

Each replica is a thread. One thread runs at a time: the one that waits for the
earliest simulated time. A request takes effect after half of the latency, and
the answer comes after the other half. Example: with a latency of 0.1 s, a
replica that makes three requests in a row and then pauses for 0.2 s needs 0.5
s. Requests that are made together (`SimulatedStore.at_once`) take one latency.
"""

import collections
import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dilocox_jax.mailbox_protocol.buffers import Data, num_bytes_of, parts_of


class SimulatedTime:
  """The clock of a simulation, which lets one thread run at a time."""

  def __init__(self):
    """Starts the clock at 0 s, without any thread."""
    self._waiting: list[tuple[float, int, threading.Event]] = []
    self._lock = threading.Lock()
    self._num_running = 0
    self._count = 0

  def run(self, programs: Sequence[Callable[[], None]]) -> None:
    """Runs each program in a thread, until all have ended.

    Raises:
      BaseException: The first error that a program raised.
    """
    errors: list[BaseException] = []

    def body(program: Callable[[], None]) -> None:
      try:
        self.wait_until(0.0, is_new=True)
        program()
      except BaseException as error:
        errors.append(error)
      finally:
        self._let_next_run()

    self._num_running = len(programs)
    threads = [
      threading.Thread(target=body, args=[program], daemon=True)
      for program in programs
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    if errors:
      raise errors[0]

  def wait_until(self, time_s: float, is_new: bool = False) -> None:
    """Lets the calling thread wait until a simulated time (seconds).

    `is_new` says whether this is the first call of the thread. No thread runs
    before all threads have made their first call.
    """
    event = threading.Event()
    with self._lock:
      self._count += 1  # Orders threads that wait for the same time.
      heapq.heappush(self._waiting, (time_s, self._count, event))
      others_are_missing = is_new and len(self._waiting) < self._num_running
    if not others_are_missing:
      self._wake_first()  # It may be this thread itself.
    event.wait()

  def _let_next_run(self) -> None:
    """Removes the calling thread, which ends, and wakes the next one."""
    with self._lock:
      self._num_running -= 1
    self._wake_first()

  def _wake_first(self) -> None:
    """Wakes the waiting thread whose time comes first."""
    with self._lock:
      if self._waiting:
        _, _, event = heapq.heappop(self._waiting)
        event.set()


class SimulatedStore:
  """A store in simulated time, as one replica sees it.

  It has the methods of `mailbox_protocol.store.Store`. Each replica has such a
  store, and all of them have the same objects.

  Attributes:
    where: Name of the store, for error messages.
    now_s: Simulated time of this replica (seconds).
    requests: Number of this replica's requests by kind.
    bytes_up: Number of bytes that this replica wrote.
    bytes_down: Number of bytes that this replica read.
  """

  where = "the simulated store"

  def __init__(
    self, time: SimulatedTime, objects: dict[str, bytes], latency_s: float
  ):
    """Opens the store.

    Args:
      time: The clock that all replicas share.
      objects: The objects of all replicas by path.
      latency_s: Time from a request to its answer (seconds).
    """
    self._time = time
    self._objects = objects
    self._latency_s = latency_s
    self.now_s = 0.0
    self.requests: collections.Counter[str] = collections.Counter()
    self.bytes_up = 0
    self.bytes_down = 0

  def clock(self) -> float:
    """Returns the simulated time of this replica (seconds)."""
    return self.now_s

  def pause(self, seconds: float) -> None:
    """Lets this replica wait for some simulated seconds."""
    self.now_s += seconds
    self._time.wait_until(self.now_s)

  def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls functions whose requests begin together, and returns their results.

    Afterwards `now_s` is the simulated time at which the slowest call ended.
    """
    start_s = self.now_s
    end_s = start_s
    results = []
    for call in calls:
      self.now_s = start_s
      results.append(call())
      end_s = max(end_s, self.now_s)
    self.now_s = end_s
    return results

  def get(self, path: str, at_most: int) -> bytes | None:
    """Returns an object.

    The result is None if the object is missing or larger than `at_most` bytes.
    """
    self._request("get")
    data = self._objects.get(path)
    if data is None or len(data) > at_most:
      return None
    self.bytes_down += len(data)
    return data

  def get_range(self, path: str, start: int, stop: int) -> bytes | None:
    """Returns the bytes `start` to `stop` - 1 of an object.

    The result is None if the object is missing or ends before `stop`.
    """
    self._request("get")
    data = self._objects.get(path)
    if data is None or len(data) < stop:
      return None
    self.bytes_down += stop - start
    return data[start:stop]

  def create(self, path: str, data: Data) -> bool:
    """Writes an object, unless there is one already.

    Returns whether the object was written.
    """
    self._request("put")
    if path in self._objects:
      return False
    self._write(path, data)
    return True

  def put(self, path: str, data: Data) -> None:
    """Writes an object in place of any with the same path."""
    self._request("put")
    self._write(path, data)

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes those objects that exist, with a request for each 1,000 paths."""
    for start in range(0, len(paths), 1000):
      self._request("delete")
      for path in paths[start : start + 1000]:
        self._objects.pop(path, None)

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the sizes of the objects in a folder, by path (bytes)."""
    self._request("list")
    return {
      path: len(self._objects[path])
      for path in sorted(self._objects)
      if path.startswith(f"{prefix}/")
    }

  def _write(self, path: str, data: Data) -> None:
    """Stores an object, and counts its bytes."""
    self._objects[path] = b"".join(parts_of(data))
    self.bytes_up += num_bytes_of(data)

  def _request(self, kind: str) -> None:
    """Counts a request, and lets the replica wait until it takes effect.

    That is after half of the latency. Then `now_s` is set to the time of the
    answer, after the whole latency.
    """
    self.requests[kind] += 1
    self._time.wait_until(self.now_s + self._latency_s / 2)
    self.now_s += self._latency_s
