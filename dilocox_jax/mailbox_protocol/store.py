"""An object store: a folder, or a bucket of S3, Google Cloud or Azure.

`Store` has the methods that a replica needs, and counts requests and bytes.
`RetryingStore` wraps a store, and repeats calls while it cannot be reached.
"""

import collections
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dilocox_jax.checks import extra_package
from dilocox_jax.mailbox_protocol.answers import (
  ClosedError,
  StoreUnavailableError,
  UnfitStoreError,
  first_line,
)
from dilocox_jax.mailbox_protocol.buffers import Buffer, Data, num_bytes_of
from dilocox_jax.mailbox_protocol.folder import Folder
from dilocox_jax.threads import in_thread

if TYPE_CHECKING:
  from dilocox_jax.mailbox_protocol.bucket import Bucket

_LOG = logging.getLogger(__name__)
_FILE = "file://"


# Largest number of requests that one replica makes at the same time.
_MOST_AT_ONCE = 128


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
  """Calls functions at the same time, in threads, up to 128 at once.

  Returns the results in the order of `calls`, or raises an error of one of the
  functions.
  """
  results = []
  for start in range(0, len(calls), _MOST_AT_ONCE):
    first, *others = calls[start : start + _MOST_AT_ONCE]
    futures = [in_thread(call) for call in others]
    results += [first(), *(future.result() for future in futures)]
  return results


def get_all(store: Any, at_most: dict[str, int]) -> list[Buffer | None]:
  """Reads several objects at the same time.

  Args:
    store: A `Store`, or an object with its methods.
    at_most: For each path, how many bytes the object may have.

  Returns:
    The bytes of each object, in the order of `at_most`; None for an object that
    is missing or larger.
  """
  return store.at_once(
    [functools.partial(store.get, *item) for item in at_most.items()]
  )


class Store:
  """Reads and writes objects in a folder or a bucket, and counts requests.

  An object is a sequence of bytes with a path such as "seat/0002". Threads may
  call the methods at the same time. A method that makes a request raises
  `StoreUnavailableError` if the store cannot be reached, or refuses.

  Attributes:
    where: The folder or URL of the store, for messages.
    requests: Number of requests by kind: "get", "put", "list", "delete".
    bytes_up: Number of bytes that were written.
    bytes_down: Number of bytes that were read.
  """

  def __init__(self, where: str | os.PathLike[str], **options: Any):
    """Opens a store, without a request to a bucket. Makes a missing folder.

    Args:
      where: A folder, or a URL such as `file:///mnt/share/run`,
        `s3://bucket/run` or `memory:///`.
      **options: Settings of `obstore.store.from_url` for a bucket, e.g.
        `endpoint`. The library also reads the environment
        (`AWS_ACCESS_KEY_ID`, ...). A folder ignores the options.

    Raises:
      ValueError: If the store cannot be opened. The message is one line.
    """
    self.where = str(where)
    self.requests: collections.Counter[str] = collections.Counter()
    self.bytes_up = 0
    self.bytes_down = 0
    self._lock = threading.Lock()  # Held while counters change.
    self._objects: Bucket | Folder
    try:
      if "://" in self.where and not self.where.startswith(_FILE):
        self._objects = _open_bucket(self.where, options)
      else:
        self._objects = Folder(self.where.removeprefix(_FILE))
    except (OSError, ValueError) as error:
      raise ValueError(
        f"cannot open {self.where}: {first_line(error)}"
      ) from None

  def get(self, path: str, at_most: int) -> Buffer | None:
    """Returns an object; None if it is missing or has over `at_most` bytes.

    A larger object is not downloaded.
    """
    self._count("get")
    data = self._objects.get(path, at_most)
    self._count_bytes(down=data)
    return data

  def get_range(self, path: str, start: int, stop: int) -> Buffer | None:
    """Returns the bytes `start` to `stop` - 1 of an object.

    The result is None if the object is missing or ends before `stop`.
    """
    self._count("get")
    data = self._objects.get_range(path, start, stop)
    self._count_bytes(down=data)
    return data

  def create(self, path: str, data: Data) -> bool:
    """Writes an object unless it exists. Of several writers, one succeeds.

    Returns:
      True: this call has written the object. False: it exists; this call may
      still have written it if the answer to its request was lost.
    """
    self._count("put")
    is_written = self._objects.create(path, data)
    if is_written:
      self._count_bytes(up=data)
    return is_written

  def put(self, path: str, data: Data) -> None:
    """Writes an object, or replaces it as a whole."""
    self._count("put")
    self._objects.put(path, data)
    self._count_bytes(up=data)

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes the objects at some paths. Missing objects are no error."""
    size = self._objects.deleted_at_once
    for start in range(0, len(paths), size):
      self._count("delete")
      self._objects.delete(paths[start : start + size])

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the sizes in bytes of all objects below a folder, sorted by path.

    Args:
      prefix: Path of the folder, such as "event/0000000012/0".
    """
    self._count("list")
    return dict(sorted(self._objects.sizes(prefix).items()))

  def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls functions at the same time. Returns their results, in order."""
    return at_once(calls)

  def _count(self, kind: str) -> None:
    """Counts one request of a kind: "get", "put", "list" or "delete"."""
    with self._lock:
      self.requests[kind] += 1

  def _count_bytes(
    self, up: Data | None = None, down: Data | None = None
  ) -> None:
    """Counts the bytes of objects that were written (`up`) or read (`down`)."""
    with self._lock:
      self.bytes_up += num_bytes_of(up or b"")
      self.bytes_down += num_bytes_of(down or b"")


# Pauses (seconds) between the tries of a call: they double from the first to
# the longest. While a store is away, the log gets one line in LINE_EVERY_S.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LINE_EVERY_S = 60.0


def _open_bucket(url: str, options: dict[str, Any]) -> "Bucket":
  """Opens a bucket, without a request.

  Raises:
    ValueError: If `url` is not the URL of a bucket, or if the package `obstore`
      is not installed. The message is one line.
  """
  # A mailbox in a folder works without the package `obstore`.
  extra_package("obstore", needed_by="a bucket", extra="mailbox")
  from dilocox_jax.mailbox_protocol.bucket import Bucket

  return Bucket(url, options)


class RetryingStore:
  """Wraps a store, and repeats a call while the store cannot be reached.

  It has the methods of `Store`. A call is repeated after each
  `StoreUnavailableError`. Exception: while a replica enters a run, a
  `ClosedError` is raised as an `UnfitStoreError`. While calls wait, the log
  gets one line a minute with the store's name and error.

  Attributes:
    store: The store that is wrapped: a `Store`, or an object with its methods
      and counters.
    clock: Returns a time in seconds that never goes back.
    pause: Waits for a number of seconds.
  """

  def __init__(
    self,
    store: Any,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    is_entering: bool = False,
  ):
    """Makes no request to the store yet.

    If `is_entering`, this replica is still entering a run: a store that does
    not exist or denies access then raises `UnfitStoreError`.
    """
    self.store = store
    self.clock = clock
    self.pause = pause
    self._is_entering = is_entering
    self._lock = threading.Lock()  # Held while the next four fields change.
    self._num_failing = 0  # Calls that have failed and are being repeated.
    self._failing_since_s = 0.0
    self._back_s = -math.inf  # When the store was back for the last time.
    self._last_line_s: float | None = None

  def __getattr__(self, call: str) -> Any:
    """Returns the store's method `call`, wrapped by `retry`."""
    return functools.partial(self.retry, getattr(self.store, call))

  def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls functions at the same time. Returns their results, in order.

    A function that raises an error is not called again. But if it calls methods
    of this object, these calls are repeated until they succeed.
    """
    return self.store.at_once(calls)

  def retry(self, call: Callable, *args: Any) -> Any:
    """Calls a function until it raises no `StoreUnavailableError`.

    Returns the result of the function.

    Raises:
      UnfitStoreError: If this replica is entering a run, and the function
        raises `ClosedError`.
    """
    has_failed = False
    wait = FIRST_PAUSE_S
    while True:
      began_s = self.clock()
      try:
        answer = call(*args)
      except StoreUnavailableError as error:
        if self._is_entering and isinstance(error, ClosedError):
          raise UnfitStoreError(f"{self.store.where}: {error}") from None
        # A failure is no news if the store came back after the call began.
        if has_failed or not self._is_back_since(began_s):
          self._note_failure(error, is_first=not has_failed)
          has_failed = True
      else:
        if has_failed:
          self._note_success()
        return answer
      self.pause(wait)
      wait = min(2 * wait, LONGEST_PAUSE_S)

  def _is_back_since(self, began_s: float) -> bool:
    """Returns whether the store is there, and came back after a call began."""
    # The failure of this call is then no news. Example: of two calls at once,
    # one fails and is repeated ("the store is back") before the thread of the
    # other one goes on with an error of the same time.
    with self._lock:
      return not self._num_failing and began_s <= self._back_s

  def _note_failure(self, error: StoreUnavailableError, is_first: bool) -> None:
    """Notes a call that failed, and logs its error at most once a minute.

    `is_first` says whether this call has failed for the first time.
    """
    with self._lock:
      now_s = self.clock()
      if not self._num_failing:
        self._failing_since_s = now_s
        self._last_line_s = None
      self._num_failing += is_first
      last_line_s = self._last_line_s
      if last_line_s is None or now_s - last_line_s >= LINE_EVERY_S:
        _LOG.warning("waiting for %s: %s", self.store.where, error)
        self._last_line_s = now_s

  def _note_success(self) -> None:
    """Logs that the store is back, unless another call still fails."""
    with self._lock:
      self._num_failing -= 1
      if not self._num_failing:
        self._back_s = self.clock()
        away_s = self._back_s - self._failing_since_s
        _LOG.warning("%s is back after %.0f s", self.store.where, away_s)
