"""An object store: a folder, or a bucket of S3, Google Cloud or Azure.

A replica needs only a few methods of a store. A user's own store has the
methods of `Store`. While a store cannot be reached, replicas wait for it
(`RetryingStore`).
"""

import collections
import functools
import logging
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


# Most requests of one replica that are under way at the same time.
_MOST_AT_ONCE = 128


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
  """Calls functions at the same time, each in a thread.

  Args:
    calls: The functions. Each of them makes one request to a store, or several
      that follow each other.

  Returns:
    Their results, in the order of the functions.
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
    at_most: Number of bytes that each object may have, by path.

  Returns:
    For each object what `Store.get` returns.
  """
  return store.at_once(
    [functools.partial(store.get, *item) for item in at_most.items()]
  )


class Store:
  """Objects by path. Every call makes one request and counts it.

  Threads may call it at the same time. Each call raises
  `StoreUnavailableError` if the store cannot be reached, or refuses.

  Attributes:
    where: The folder or URL, for messages.
    requests: Number of requests by kind: get, put, list, delete.
    bytes_up: Number of bytes that were written.
    bytes_down: Number of bytes that were read.
  """

  def __init__(self, where: str | os.PathLike[str], **options: Any):
    """Opens a store. It makes no request to a bucket yet.

    Args:
      where: A folder, which is made if missing, or a URL such as
        `file:///mnt/share/run`, `s3://bucket/run` or `memory:///`.
      **options: Settings of `obstore.store.from_url`, e.g. `endpoint`. The
        library also reads settings of a bucket from the environment
        (`AWS_ACCESS_KEY_ID`, ...).

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
    """Returns an object, or None if it is missing or too large.

    Args:
      path: Name of the object.
      at_most: Number of bytes that it may have. A larger object is not
        downloaded.
    """
    self._count("get")
    data = self._objects.get(path, at_most)
    self._count_bytes(down=data)
    return data

  def get_range(self, path: str, start: int, stop: int) -> Buffer | None:
    """Returns bytes of an object, or None if it is missing or too short.

    Args:
      path: Name of the object.
      start: First byte.
      stop: End of the range, larger than `start`.
    """
    self._count("get")
    data = self._objects.get_range(path, start, stop)
    self._count_bytes(down=data)
    return data

  def create(self, path: str, data: Data) -> bool:
    """Writes an object that must not exist. Of several writers one succeeds.

    The answer to a request may be lost. So a caller that gets False may have
    written the object itself: it has to read the object to know.

    Args:
      path: Name of the object.
      data: Content of the object, as one buffer or as several that follow each
        other.

    Returns:
      Whether this call has written the object.
    """
    self._count("put")
    is_written = self._objects.create(path, data)
    if is_written:
      self._count_bytes(up=data)
    return is_written

  def put(self, path: str, data: Data) -> None:
    """Writes an object, or replaces it as a whole.

    Args:
      path: Name of the object.
      data: As for `create`.
    """
    self._count("put")
    self._objects.put(path, data)
    self._count_bytes(up=data)

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes objects. Missing objects are no error."""
    size = self._objects.deleted_at_once
    for start in range(0, len(paths), size):
      self._count("delete")
      self._objects.delete(paths[start : start + size])

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the sizes in bytes of all objects in a folder, by sorted path."""
    self._count("list")
    return dict(sorted(self._objects.sizes(prefix).items()))

  def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls functions at the same time. Returns their results, in order.

    Args:
      calls: Functions that call methods of this store.
    """
    return at_once(calls)

  def _count(self, kind: str) -> None:
    """Counts a request of a kind."""
    with self._lock:
      self.requests[kind] += 1

  def _count_bytes(
    self, up: Data | None = None, down: Data | None = None
  ) -> None:
    """Counts the bytes of objects that were written or read."""
    with self._lock:
      self.bytes_up += num_bytes_of(up or b"")
      self.bytes_down += num_bytes_of(down or b"")


FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LINE_EVERY_S = 60.0


def _open_bucket(url: str, options: dict[str, Any]) -> "Bucket":
  """Opens a bucket.

  The client of buckets is imported here, because a mailbox in a folder works
  without the package.

  Args:
    url: URL such as `s3://bucket/run`.
    options: Settings of `obstore.store.from_url`.

  Raises:
    ValueError: If `url` is not the URL of a bucket, or if the package `obstore`
      is not installed. The message is one line.
  """
  extra_package("obstore", needed_by="a bucket", extra="mailbox")
  from dilocox_jax.mailbox_protocol.bucket import Bucket

  return Bucket(url, options)


class RetryingStore:
  """A store that repeats every call until it succeeds.

  A folder without space, a bucket without permission and a link that is down
  are treated in the same way: somebody repairs them, and the run goes on.
  Meanwhile the log has one line a minute that says what the replica waits for,
  however many calls wait. `create` also returns False if it wrote the object
  and the answer was lost.
  """

  def __init__(
    self,
    store: Any,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    is_entering: bool = False,
  ):
    """Wraps a store.

    Args:
      store: A `Store`, or an object with its methods.
      clock: Seconds that never go back.
      pause: Waits for a number of seconds.
      is_entering: Whether this replica is entering a run. Then a store that is
        missing or closed is a mistake of the user, and raises
        `UnfitStoreError` instead of being waited for.
    """
    self.store = store
    self.clock = clock
    self.pause = pause
    self._is_entering = is_entering
    self._lock = threading.Lock()  # Held while these three change.
    self._num_failing = 0
    self._failing_since_s = 0.0
    self._last_line_s: float | None = None

  def __getattr__(self, call: str) -> Any:
    """Returns a method of the store that is repeated until it succeeds."""
    return functools.partial(self.retry, getattr(self.store, call))

  def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls functions at the same time. Returns their results, in order."""
    return self.store.at_once(calls)

  def retry(self, call: Callable, *args: Any) -> Any:
    """Calls a function of the store until it succeeds.

    Args:
      call: The function.
      *args: Its arguments.

    Returns:
      The result of the function.

    Raises:
      UnfitStoreError: If the store is missing or closed, and this replica is
        entering a run.
    """
    has_failed = False
    wait = FIRST_PAUSE_S
    while True:
      try:
        answer = call(*args)
      except StoreUnavailableError as error:
        if self._is_entering and isinstance(error, ClosedError):
          raise UnfitStoreError(f"{self.store.where}: {error}") from None
        self._note_failure(error, is_first=not has_failed)
        has_failed = True
      else:
        if has_failed:
          self._note_success()
        return answer
      self.pause(wait)
      wait = min(2 * wait, LONGEST_PAUSE_S)

  def _note_failure(self, error: StoreUnavailableError, is_first: bool) -> None:
    """Says what this replica waits for, if nothing said so in this minute.

    Args:
      error: The error of a call.
      is_first: Whether the call fails for the first time.
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
    """Says that the store is back, if no other call still fails."""
    with self._lock:
      self._num_failing -= 1
      if not self._num_failing:
        away_s = self.clock() - self._failing_since_s
        _LOG.warning("%s is back after %.0f s", self.store.where, away_s)
