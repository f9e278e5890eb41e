"""An object store: a folder, or a bucket of S3, Google Cloud or Azure.

What a replica needs of a store is little, and a store of one's own has the
methods of `Store`. While it cannot be reached, it is waited for
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
from dilocox_jax.mailbox_protocol.bucket import ERRORS, Bucket, said
from dilocox_jax.mailbox_protocol.folder import Folder

_LOG = logging.getLogger(__name__)
_FILE = "file://"


class Store:
  """Objects by path. Every call is one request, which is counted.

  Each call raises `StoreUnavailableError` if the store cannot be reached, or
  refuses.

  Attributes:
    where: The folder or URL, for messages.
    requests: Number of requests by kind: get, put, list, delete.
    bytes_up: Bytes that were written.
    bytes_down: Bytes that were read.
  """

  def __init__(self, where: str | os.PathLike[str], **options: Any):
    """Opens a store; nothing is asked of a bucket yet.

    Args:
      where: A folder, which is made if missing, or a URL such as
        `file:///mnt/share/run`, `s3://bucket/run` or `memory:///`.
      **options: Settings of `obstore.store.from_url`, e.g. `endpoint`. Those
        of a bucket also come from the environment (`AWS_ACCESS_KEY_ID`, ...).

    Raises:
      ValueError: If it is no place that can be opened. The message is one line.
    """
    self.where = str(where)
    self.requests: collections.Counter[str] = collections.Counter()
    self.bytes_up = self.bytes_down = 0
    self._objects: Bucket | Folder
    try:
      if "://" in self.where and not self.where.startswith(_FILE):
        self._objects = Bucket(self.where, options)
      else:
        self._objects = Folder(self.where.removeprefix(_FILE))
    except (*ERRORS, ValueError) as error:
      raise ValueError(f"cannot open {self.where}: {said(error)}") from None

  def get(self, path: str, at_most: int) -> bytes | None:
    """Returns an object, or None if it is missing or too large.

    Args:
      path: Name of the object.
      at_most: Bytes that it may have. What is larger is not downloaded.
    """
    self.requests["get"] += 1
    data = self._objects.get(path, at_most)
    if data is not None:
      self.bytes_down += len(data)
    return data

  def create(self, path: str, data: bytes) -> bool:
    """Writes an object that must not exist; of several writers one wins.

    An answer may be lost on its way. So a writer that is told that the object
    exists may have written it itself: it has to read it.

    Returns:
      Whether it was written by this call.
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
    """Deletes objects; those that are missing are passed over."""
    size = self._objects.deleted_at_once
    for start in range(0, len(paths), size):
      self.requests["delete"] += 1
      self._objects.delete(paths[start : start + size])

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the bytes of all objects in a folder, by path, sorted."""
    self.requests["list"] += 1
    return dict(sorted(self._objects.sizes(prefix).items()))


FIRST_PAUSE_S, LONGEST_PAUSE_S, LINE_EVERY_S = 0.1, 5.0, 60.0


class RetryingStore:
  """A store of which every call is repeated until it answers.

  A folder without space, a bucket without permission and a link that is down
  look alike: somebody repairs them, and the run goes on. Meanwhile one line a
  minute says what is waited for. After a lost answer `create` is False, too.
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
      is_entering: Whether a place that is missing or closed is an error of who
        asks (`UnfitStoreError`), and is not waited for.
    """
    self.store, self.clock, self.pause = store, clock, pause
    self._is_entering = is_entering

  def __getattr__(self, call: str) -> Any:
    return functools.partial(self.retry, getattr(self.store, call))

  def retry(self, call: Callable, *given: Any) -> Any:
    """Returns what a function of the store returns as soon as it answers.

    Raises:
      UnfitStoreError: See `is_entering`.
    """
    began, said_at, wait = self.clock(), None, FIRST_PAUSE_S
    while True:
      try:
        answer = call(*given)
      except StoreUnavailableError as error:
        if self._is_entering and isinstance(error, ClosedError):
          raise UnfitStoreError(f"{self.store.where}: {error}") from None
        now = self.clock()
        if said_at is None or now - said_at >= LINE_EVERY_S:
          _LOG.warning("waiting for %s: %s", self.store.where, error)
          said_at = now
      else:
        if said_at is not None:
          away = self.clock() - began
          _LOG.warning("%s is back after %.0f s", self.store.where, away)
        return answer
      self.pause(wait)
      wait = min(2 * wait, LONGEST_PAUSE_S)
