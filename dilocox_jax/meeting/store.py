"""An object store: a folder, or a bucket of S3, Google Cloud or Azure.

The library `obstore` does the work. What a replica needs of a store is little,
and a store of one's own has the methods of `Store`. While it cannot be reached,
it is waited for (`Patient`).
"""

import collections
import contextlib
import datetime
import functools
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

_LOG = logging.getLogger(__name__)
# `Patient` waits and says so; the library would retry for minutes in silence.
# The first value bounds the transfer of the largest message.
_PATIENCE: dict[str, Any] = {
  "client_options": {
    "timeout": "10m",
    "connect_timeout": "5s",
    "allow_http": True,  # Where the endpoint that was given says http://.
  },
  "retry_config": {
    "max_retries": 2,
    "retry_timeout": datetime.timedelta(seconds=30),
  },
}
_DELETED_AT_ONCE = 1000  # S3 takes so many; of files one may be missing.


class AwayError(Exception):
  """Means that the store cannot be reached, or refuses; try again later."""


class Store:
  """Objects by path. Every call is one request, which is counted.

  Attributes:
    where: The folder or URL, for messages.
    requests: Number of requests by kind: get, put, list, delete.
    bytes_up: Bytes that were written.
    bytes_down: Bytes that were read.
  """

  def __init__(self, where: str | os.PathLike[str], **options: Any):
    """Opens a store; nothing is asked of it yet.

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
    try:
      self._objects = _opened(self.where, options)
    except (BaseError, OSError, ValueError) as error:
      raise ValueError(f"cannot open {self.where}: {_said(error)}") from None

  def get(self, path: str, at_most: int) -> bytes | None:
    """Returns an object, or None if it is missing or too large.

    Args:
      path: Name of the object.
      at_most: Bytes that it may have. What is larger is not downloaded.
    """
    with self._request("get"):
      found = obstore.get(self._objects, path)
      if found.meta["size"] <= at_most:
        data = bytes(found.bytes())
        self.bytes_down += len(data)
        return data
    return None

  def create(self, path: str, data: bytes) -> bool:
    """Writes an object that must not exist; of several writers one wins.

    An answer may be lost on its way. So a writer that is told that the object
    exists may have written it itself: it has to read it.

    Returns:
      Whether it was written by this call.
    """
    try:
      self._write(path, data, "create")
    except AlreadyExistsError:
      return False
    return True

  def put(self, path: str, data: bytes) -> None:
    """Writes an object, or replaces it as a whole."""
    self._write(path, data, "overwrite")

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes objects; those that are missing are passed over."""
    size = 1 if isinstance(self._objects, LocalStore) else _DELETED_AT_ONCE
    for start in range(0, len(paths), size):
      with self._request("delete"):
        obstore.delete(self._objects, paths[start : start + size])

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the bytes of all objects in a folder, by path, sorted."""
    found = []
    with self._request("list"):
      found = obstore.list(self._objects, prefix).collect()
    return dict(sorted((each["path"], each["size"]) for each in found))

  def _write(self, path: str, data: bytes, mode: Any) -> None:
    with self._request("put"):
      obstore.put(self._objects, path, data, mode=mode)
      self.bytes_up += len(data)

  @contextlib.contextmanager
  def _request(self, kind: str) -> Iterator[None]:
    """Counts a request; a store that does not answer it is away."""
    self.requests[kind] += 1
    try:
      yield
    except FileNotFoundError:
      return  # The caller goes on without it.
    except AlreadyExistsError:
      raise
    except (BaseError, OSError) as error:
      raise AwayError(_said(error)) from None


def _said(error: BaseException) -> str:
  """Returns what an error says first; obstore's go on with their source."""
  return str(error).strip().split("\n")[0] or type(error).__name__


def _opened(where: str, options: dict[str, Any]) -> Any:
  if where.startswith("memory://"):
    return from_url(where)
  if "://" in where and not where.startswith("file://"):
    return from_url(where, **(_PATIENCE | options))
  folder = pathlib.Path(where.removeprefix("file://")).expanduser().resolve()
  return LocalStore(folder, mkdir=True, automatic_cleanup=True)


FIRST_PAUSE_S, LONGEST_PAUSE_S, LINE_EVERY_S = 0.1, 5.0, 60.0


class Patient:
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
  ):
    """Wraps a store.

    Args:
      store: A `Store`, or an object with its methods.
      clock: Seconds that never go back.
      pause: Waits for a number of seconds.
    """
    self.store, self.clock, self.pause = store, clock, pause

  def __getattr__(self, call: str) -> Any:
    return functools.partial(self._patiently, getattr(self.store, call))

  def _patiently(self, call: Callable, *given: Any) -> Any:
    began, said, wait = self.clock(), None, FIRST_PAUSE_S
    while True:
      try:
        answer = call(*given)
      except AwayError as error:
        now = self.clock()
        if said is None or now - said >= LINE_EVERY_S:
          _LOG.warning("waiting for %s: %s", self.store.where, error)
          said = now
      else:
        if said is not None:
          away = self.clock() - began
          _LOG.warning("%s is back after %.0f s", self.store.where, away)
        return answer
      self.pause(wait)
      wait = min(2 * wait, LONGEST_PAUSE_S)
