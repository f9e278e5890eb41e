"""An object store: a folder, or a bucket of S3, Google Cloud or Azure.

A replica needs only a few methods of a store. A user's own store has the
methods of `Store`. While a store cannot be reached, replicas wait for it
(`RetryingStore`).
"""

import collections
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from dilocox_jax.mailbox_protocol.answers import (
  ClosedError,
  StoreUnavailableError,
  UnfitStoreError,
)
from dilocox_jax.mailbox_protocol.bucket import ERRORS, Bucket, first_line
from dilocox_jax.mailbox_protocol.folder import Folder

_LOG = logging.getLogger(__name__)
_FILE = "file://"


class Store:
  """Objects by path. Every call makes one request and counts it.

  Each call raises `StoreUnavailableError` if the store cannot be reached, or
  refuses.

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
    self._objects: Bucket | Folder
    try:
      if "://" in self.where and not self.where.startswith(_FILE):
        self._objects = Bucket(self.where, options)
      else:
        self._objects = Folder(self.where.removeprefix(_FILE))
    except (*ERRORS, ValueError) as error:
      raise ValueError(
        f"cannot open {self.where}: {first_line(error)}"
      ) from None

  def get(self, path: str, at_most: int) -> bytes | None:
    """Returns an object, or None if it is missing or too large.

    Args:
      path: Name of the object.
      at_most: Number of bytes that it may have. A larger object is not
        downloaded.
    """
    self.requests["get"] += 1
    data = self._objects.get(path, at_most)
    if data is not None:
      self.bytes_down += len(data)
    return data

  def create(self, path: str, data: bytes) -> bool:
    """Writes an object that must not exist. Of several writers one succeeds.

    The answer to a request may be lost. So a caller that gets False may have
    written the object itself: it has to read the object to know.

    Args:
      path: Name of the object.
      data: Content of the object.

    Returns:
      Whether this call has written the object.
    """
    self.requests["put"] += 1
    is_written = self._objects.create(path, data)
    if is_written:
      self.bytes_up += len(data)
    return is_written

  def put(self, path: str, data: bytes) -> None:
    """Writes an object, or replaces it as a whole."""
    self.requests["put"] += 1
    self._objects.put(path, data)
    self.bytes_up += len(data)

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes objects. Missing objects are no error."""
    size = self._objects.deleted_at_once
    for start in range(0, len(paths), size):
      self.requests["delete"] += 1
      self._objects.delete(paths[start : start + size])

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the sizes in bytes of all objects in a folder, by sorted path."""
    self.requests["list"] += 1
    return dict(sorted(self._objects.sizes(prefix).items()))


FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LINE_EVERY_S = 60.0


class RetryingStore:
  """A store that repeats every call until it succeeds.

  A folder without space, a bucket without permission and a link that is down
  are treated in the same way: somebody repairs them, and the run goes on.
  Meanwhile the log has one line a minute that says what the replica waits for.
  `create` also returns False if it wrote the object and the answer was lost.
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

  def __getattr__(self, call: str) -> Any:
    """Returns a method of the store that is repeated until it succeeds."""
    return functools.partial(self.retry, getattr(self.store, call))

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
    start_s = self.clock()
    last_line_s = None
    wait = FIRST_PAUSE_S
    while True:
      try:
        answer = call(*args)
      except StoreUnavailableError as error:
        if self._is_entering and isinstance(error, ClosedError):
          raise UnfitStoreError(f"{self.store.where}: {error}") from None
        now_s = self.clock()
        if last_line_s is None or now_s - last_line_s >= LINE_EVERY_S:
          _LOG.warning("waiting for %s: %s", self.store.where, error)
          last_line_s = now_s
      else:
        if last_line_s is not None:
          away_s = self.clock() - start_s
          _LOG.warning("%s is back after %.0f s", self.store.where, away_s)
        return answer
      self.pause(wait)
      wait = min(2 * wait, LONGEST_PAUSE_S)
