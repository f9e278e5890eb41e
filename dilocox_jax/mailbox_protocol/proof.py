"""Tests, when a replica enters a run, that a store creates objects only once.

The replicas can agree only if the store keeps one promise: if several replicas
create the same object, exactly one of them succeeds. In a bucket, the HTTP
header If-None-Match demands this, but some servers ignore it and overwrite the
object. Then two replicas could each follow their own list of messages.
"""

import contextlib
import secrets
from typing import Any

from dilocox_jax.mailbox_protocol.answers import (
  StoreUnavailableError,
  UnfitStoreError,
)
from dilocox_jax.mailbox_protocol.messages import probe_path

# Somebody else may damage the object of one try, but hardly the objects of all
# tries.
_TRIES = 3
# Requests also fail if the link is down. But if the second creation fails this
# many times in a row (11 s), and the object can be read each time, then the
# store is at fault.
_MOST_ERRORS = 8
# The two creations write contents of the same length, because some servers
# overwrite an object but remember the length of its first content.
_FIRST = b"first"
_SECOND = b"other"
_OVERWRITES = (
  "overwrites an object that was to be created only if it is missing"
)


def prove(store: Any, name: str) -> None:
  """Tests that a store creates an object only if it is missing.

  A test creates an object, creates it a second time, and reads it. It succeeds
  if the store refuses the second creation, and then returns the content of the
  first one. A test that fails is repeated up to two times. Several processes
  may test at the same time.

  Args:
    store: The folder or bucket, as a `RetryingStore` with `is_entering`.
    name: Name of the replica that enters.

  Raises:
    UnfitStoreError: If all three tests fail, or if the store does not exist or
      denies access.
  """
  fault = ""
  for _ in range(_TRIES):
    path = probe_path(name, secrets.token_hex(8))
    # If all tests fail, the error names the fault of the last one.
    fault = _fault_of(store, path)
    if not fault:
      store.delete([path])
      return
    # Delete the object by one request that is not repeated if it fails: this
    # store will probably be refused, so there is no use in waiting for it.
    with contextlib.suppress(StoreUnavailableError):
      store.store.delete([path])
  raise UnfitStoreError(
    f"{store.store.where} {fault}: replicas cannot agree there; take a server"
    " that knows If-None-Match, or a folder"
  )


def _fault_of(store: Any, path: str) -> str:
  """Creates, creates again and reads an object, and returns the store's fault.

  The result is the end of a sentence that begins with the store's name; "" if
  nothing is wrong. `path` has no object yet; the test leaves one there.
  """
  # Some buckets answer that a missing object is forbidden. Then `get` raises
  # UnfitStoreError here, when the replica enters, and not later in the run.
  store.get(path, len(_FIRST))
  store.create(path, _FIRST)
  fault = _fault_of_second_creation(store, path)
  if fault:
    return fault
  content = store.get(path, len(_FIRST))
  if content == _FIRST:
    return ""
  if content == _SECOND:
    return _OVERWRITES
  return "does not give back an object that was just written"


def _fault_of_second_creation(store: Any, path: str) -> str:
  """Tries to create an object that exists, and returns the store's fault.

  The result is the end of a sentence that begins with the store's name; "" if
  the store refused to create the object, as it should.
  """
  errors: list[StoreUnavailableError] = []

  def create() -> str:
    try:
      is_created = store.store.create(path, _SECOND)
    except StoreUnavailableError as error:
      # A server may overwrite the object and then answer with an error.
      if store.store.get(path, len(_SECOND)) == _SECOND:
        return _OVERWRITES
      errors.append(error)
      if len(errors) < _MOST_ERRORS:
        raise  # `retry` waits, and calls this function again.
      return f"cannot say that an object exists ({error})"
    return _OVERWRITES if is_created else ""

  return store.retry(create)
