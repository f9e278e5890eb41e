"""Objects in a bucket of S3, Google Cloud or Azure, or in memory.

The library `obstore` does the work. It turns the status of an answer into a
class of errors, which does not always mean the same for each call. So the
status is looked at here; docs/notes/mailbox_protocol.md has the table.
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
)

# A run waits by itself, and says so; the library would retry for minutes in
# silence. The first value bounds the transfer of the largest message.
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
ERRORS = (BaseError, OSError)  # What the library raises.
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_CONFLICT, _NOT_IMPLEMENTED = 409, 501
# A request is wrong if its status is from 400 to 499. Of these another try may
# do after a timeout, a conflict with a request at the same time, a condition
# that did not hold, and too many requests.
_TRY_AGAIN = (408, _CONFLICT, 412, 429)
_TIMEOUT = "RequestTimeout"  # S3 says it with status 400.
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_NO_OBJECT, _DENIED = "NoSuchKey", "AccessDenied"
_ELSEWHERE = "Received redirect"  # The region is a wrong one.


class Bucket:
  """The objects of a bucket, below a prefix.

  Attributes:
    deleted_at_once: Objects that one call of `delete` may have.
  """

  deleted_at_once = 1000  # S3 takes so many.

  def __init__(self, where: str, options: dict[str, Any]):
    """Opens a bucket; nothing is asked of it yet.

    Args:
      where: URL such as `s3://bucket/run` or `memory:///`.
      options: Settings of `obstore.store.from_url`.

    Raises:
      BaseError: If it is no URL of a bucket.
      ValueError: For the same reason.
    """
    if where.startswith("memory://"):
      self._objects: Any = from_url(where)
    else:
      self._objects = from_url(where, **(_PATIENCE | options))

  def get(self, path: str, at_most: int) -> bytes | None:
    """Returns an object; None if it is missing or larger than `at_most`."""
    try:
      found = obstore.get(self._objects, path)
      if found.meta["size"] > at_most:
        return None
      return bytes(found.bytes())
    except FileNotFoundError as error:
      if _code(error) in _NO_BUCKET:
        raise _refusal(error) from None
      return None
    except ERRORS as error:
      raise _refusal(error) from None

  def create(self, path: str, data: bytes) -> bool:
    """Writes an object that must not exist; returns whether it was written."""
    try:
      obstore.put(self._objects, path, data, mode="create")
    except AlreadyExistsError as error:
      if _status(error) == _CONFLICT and not self._has(path):
        # Somebody else wrote or deleted it at that moment.
        raise _refusal(error) from None
      return False
    except ERRORS as error:
      raise _refusal(error) from None
    return True

  def put(self, path: str, data: bytes) -> None:
    """Writes an object, or replaces it as a whole."""
    try:
      obstore.put(self._objects, path, data, mode="overwrite")
    except ERRORS as error:
      raise _refusal(error) from None

  def delete(self, paths: Sequence[str]) -> None:
    """Deletes objects; those that are missing are passed over."""
    try:
      obstore.delete(self._objects, paths)
    except ERRORS as error:
      is_missing = isinstance(error, FileNotFoundError)
      is_missing = is_missing or _code(error) == _NO_OBJECT
      if not is_missing or _code(error) in _NO_BUCKET:
        raise _refusal(error) from None
      # Where one was missing, some servers were not asked for those after it.
      for path in paths if len(paths) > 1 else ():
        self.delete([path])

  def sizes(self, prefix: str) -> dict[str, int]:
    """Returns the bytes of the objects below a prefix, by path."""
    try:
      found = obstore.list(self._objects, prefix).collect()
    except ERRORS as error:
      raise _refusal(error) from None
    return {each["path"]: each["size"] for each in found}

  def _has(self, path: str) -> bool:
    try:
      obstore.head(self._objects, path)
    except FileNotFoundError:
      return False
    except ERRORS as error:
      raise _refusal(error) from None
    return True


def said(error: BaseException) -> str:
  """Returns what an error says first; the library's go on with their source."""
  return str(error).strip().split("\n")[0] or type(error).__name__


def _status(error: BaseException) -> int:
  """Returns the status of an answer; 0 if there was none."""
  found = _STATUS.search(str(error))
  return int(found.group(1)) if found else 0


def _code(error: BaseException) -> str:
  """Returns the word by which a server says what is wrong; "" if none."""
  found = _CODE.search(str(error))
  return found.group(1) or found.group(2) if found else ""


def _refusal(error: BaseException) -> StoreUnavailableError:
  """Returns what an answer means that is not the one that was asked for."""
  status, code = _status(error), _code(error)
  message = _MESSAGE.search(str(error))
  text = said(error)
  if message:
    text = " ".join(f"{status} {code}: {message.group(1)}".split())
  if code in _NO_BUCKET:
    advice = "make it, or correct its name"
    return ClosedError(f"there is no such bucket ({text}): {advice}")
  is_wrong = 400 <= status < 500 and status not in _TRY_AGAIN
  if is_wrong and code != _TIMEOUT:
    return ClosedError(text)
  is_unknown = status == _NOT_IMPLEMENTED or _ELSEWHERE in text
  if is_unknown or code == _DENIED:
    return ClosedError(text)
  return StoreUnavailableError(text)
