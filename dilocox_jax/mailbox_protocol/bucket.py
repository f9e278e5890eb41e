"""Stores objects in a bucket of S3, Google Cloud or Azure, or in memory.

The library `obstore` makes the requests. Its exceptions hold the HTTP status
only in their messages, so this module reads the status from there.
docs/how_it_works/mailbox_stores.md says what a replica concludes from it.
"""

import datetime
import re
from collections.abc import Sequence
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from dilocox_jax.mailbox_protocol.answers import (
  ClosedError,
  StoreUnavailableError,
  first_line,
)
from dilocox_jax.mailbox_protocol.buffers import Buffer, Data, parts_of

# By default the library repeats a request for minutes without a line in the
# log, so it gets short limits. `RetryingStore` repeats requests after that, and
# logs that it waits. The timeout must be long enough to transfer the largest
# message.
_SETTINGS: dict[str, Any] = {
  "client_options": {
    "timeout": "10m",
    "connect_timeout": "5s",
    "allow_http": True,  # For endpoints of the user that begin with http://.
  },
  "retry_config": {
    "max_retries": 2,
    "retry_timeout": datetime.timedelta(seconds=30),
  },
}
ERRORS = (BaseError, OSError)  # Exceptions that the library raises.
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_CONFLICT = 409
_NO_RANGE = 416  # The object ends before the range begins.
_NO_RANGE_IN_MEMORY = "Invalid range"  # The same for `memory:///`.
_NOT_IMPLEMENTED = 501
# A status from 400 to 499 means that the request is wrong. With these
# exceptions another try may succeed: a timeout, a conflict with a simultaneous
# request, a condition that did not hold, and too many requests.
_TRY_AGAIN = (408, _CONFLICT, 412, 429)
_TIMEOUT = "RequestTimeout"  # S3 sends this code with status 400.
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_NO_OBJECT = "NoSuchKey"
_DENIED = "AccessDenied"
_ELSEWHERE = "Received redirect"  # The region is wrong.


class Bucket:
  """Reads, writes, lists and deletes objects of a bucket.

  Paths are relative to the prefix in the URL: in `s3://bucket/run` the path
  `seat/0002` is the object `run/seat/0002`.

  A method that makes a request raises `StoreUnavailableError` if the store
  cannot be reached or refuses. It raises the subclass `ClosedError` if no retry
  can succeed before somebody changes the bucket, its permissions or the URL.

  Attributes:
    deleted_at_once: Largest number of objects in one call of `delete`.
  """

  deleted_at_once = 1000  # The limit of S3.

  def __init__(self, where: str, options: dict[str, Any]):
    """Opens a bucket, without a request.

    Args:
      where: `memory:///`, or a URL of bucket and prefix: `s3://bucket/run`.
      options: Settings of `obstore.store.from_url`; not used for `memory:///`.

    Raises:
      ValueError: If `where` is not the URL of a bucket, or if `options` has an
        unknown setting or a value of a wrong type. The message is one line.
    """
    settings = _SETTINGS | options
    if where.startswith("memory://"):
      settings = {}
    try:
      self._objects: Any = from_url(where, **settings)
    except (*ERRORS, TypeError) as error:
      raise ValueError(first_line(error)) from None

  def get(self, path: str, at_most: int) -> Buffer | None:
    """Returns an object; None if it is missing or has over `at_most` bytes."""
    try:
      response = obstore.get(self._objects, path)
      if response.meta["size"] > at_most:
        return None
      return memoryview(response.bytes())
    except FileNotFoundError as error:
      if _code(error) in _NO_BUCKET:
        raise _refusal(error) from None
      return None
    except ERRORS as error:
      raise _refusal(error) from None

  def get_range(self, path: str, start: int, stop: int) -> Buffer | None:
    """Returns the bytes `start` to `stop` - 1 of an object.

    The result is None if the object is missing or ends before `stop`.
    """
    try:
      found = obstore.get_range(self._objects, path, start=start, end=stop)
    except FileNotFoundError as error:
      if _code(error) in _NO_BUCKET:
        raise _refusal(error) from None
      return None
    except ERRORS as error:
      if _status(error) == _NO_RANGE or _NO_RANGE_IN_MEMORY in str(error):
        return None
      raise _refusal(error) from None
    if len(found) != stop - start:
      return None  # The object ends within the range.
    return memoryview(found)

  def create(self, path: str, data: Data) -> bool:
    """Writes an object unless it exists.

    Returns:
      True: this call has written the object. False: it exists; this call may
      still have written it if the answer to its request was lost.
    """
    try:
      obstore.put(self._objects, path, parts_of(data), mode="create")
    except AlreadyExistsError as error:
      if _status(error) == _CONFLICT and not self._has(path):
        # Somebody else wrote or deleted the object at that moment.
        raise _refusal(error) from None
      return False
    except ERRORS as error:
      raise _refusal(error) from None
    return True

  def put(self, path: str, data: Data) -> None:
    """Writes an object, or replaces it as a whole."""
    try:
      obstore.put(self._objects, path, parts_of(data), mode="overwrite")
    except ERRORS as error:
      raise _refusal(error) from None

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes objects. A missing object is no error.

    Args:
      paths: Paths of the objects, at most `deleted_at_once`.
    """
    try:
      obstore.delete(self._objects, paths)
    except ERRORS as error:
      is_missing = (
        isinstance(error, FileNotFoundError) or _code(error) == _NO_OBJECT
      )
      if not is_missing or _code(error) in _NO_BUCKET:
        raise _refusal(error) from None
      if len(paths) == 1:
        return
      # With some servers, the objects after a missing one are not deleted yet.
      for path in paths:
        self.delete([path])

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the sizes in bytes of the objects below a folder, by path.

    Args:
      prefix: Path of the folder, such as "manifest".
    """
    try:
      objects = obstore.list(self._objects, prefix).collect()
    except ERRORS as error:
      raise _refusal(error) from None
    return {meta["path"]: meta["size"] for meta in objects}

  def _has(self, path: str) -> bool:
    """Returns whether an object exists."""
    try:
      obstore.head(self._objects, path)
    except FileNotFoundError:
      return False
    except ERRORS as error:
      raise _refusal(error) from None
    return True


def _status(error: BaseException) -> int:
  """Returns the HTTP status in an error's message; 0 if there is none."""
  match = _STATUS.search(str(error))
  if match is None:
    return 0
  return int(match.group(1))


def _code(error: BaseException) -> str:
  """Returns the server's error code, e.g. "NoSuchKey"; "" if there is none."""
  match = _CODE.search(str(error))
  if match is None:
    return ""
  return match.group(1) or match.group(2)


def _refusal(error: BaseException) -> StoreUnavailableError:
  """Translates an exception of `obstore` into an error of this package.

  The result is a `ClosedError` if no retry can succeed before somebody changes
  the bucket, its permissions or the URL; else a `StoreUnavailableError`.
  """
  status = _status(error)
  code = _code(error)
  message = _MESSAGE.search(str(error))
  text = first_line(error)
  if message:
    text = " ".join(f"{status} {code}: {message.group(1)}".split())
  if code in _NO_BUCKET:
    return ClosedError(
      f"there is no such bucket ({text}): make it, or correct its name"
    )
  # A status from 400 to 499 says that the request is wrong, and would be wrong
  # again. There are a few exceptions.
  is_wrong = 400 <= status < 500 and status not in _TRY_AGAIN
  if is_wrong and code != _TIMEOUT:
    return ClosedError(text)
  cannot_succeed = status == _NOT_IMPLEMENTED or _ELSEWHERE in text
  if cannot_succeed or code == _DENIED:
    return ClosedError(text)
  return StoreUnavailableError(text)
