"""Tests a store when a replica enters a run.

The replicas can agree only if the store keeps one promise: if several replicas
create the same object, exactly one succeeds. S3 asks for that with a condition
(If-None-Match). Some servers do not know the condition, and overwrite the
object without an error. Then one replica would train alone, and another would
wait for ever.
"""

import contextlib
import secrets
from typing import Any

from dilocox_jax.mailbox_protocol.answers import (
  StoreUnavailableError,
  UnfitStoreError,
)
from dilocox_jax.mailbox_protocol.messages import probe_path

# Somebody else may damage the object of one try, but hardly those of all tries.
_TRIES = 3
# The store answers other requests. So after this many errors, which take 13 s,
# it is not a store that cannot be reached.
_MOST_ERRORS = 8
# Both contents are equally long, because some servers overwrite an object but
# remember the length of the first content.
_FIRST = b"first"
_SECOND = b"other"
_OVERWRITES = (
  "overwrites an object that was to be created only if it is missing"
)


def prove(store: Any, name: str) -> None:
  """Tests that a store creates an object only if it is missing.

  It reads a missing object, creates it, creates it again, reads it and deletes
  it: five requests. The name of the object is drawn at random, so any number of
  replicas may test a store at the same time, also two processes with one name.

  Args:
    store: A `RetryingStore` store.
    name: Name of the replica that enters.

  Raises:
    UnfitStoreError: If the second creation changes the object or ends in an
      error, or if the store does not give back the object as it was written.
  """
  fault = ""
  for _ in range(_TRIES):
    path = probe_path(name, secrets.token_hex(8))
    fault = _fault_of(store, path)
    if not fault:
      store.delete([path])
      return
    # The store is refused anyway, so nobody waits until it deletes the object.
    with contextlib.suppress(StoreUnavailableError):
      store.store.delete([path])
  raise UnfitStoreError(
    f"{store.store.where} {fault}: replicas cannot agree there; take a server"
    " that knows If-None-Match, or a folder"
  )


def _fault_of(store: Any, path: str) -> str:
  """Returns what is wrong with a store; "" if nothing is."""
  # Some buckets answer that a missing object is forbidden. `get` then raises
  # an error.
  store.get(path, len(_FIRST))
  store.create(path, _FIRST)
  fault = _fault_of_second(store, path)
  if fault:
    return fault
  content = store.get(path, len(_FIRST))
  if content == _FIRST:
    return ""
  if content == _SECOND:
    return _OVERWRITES
  return "does not give back an object that was just written"


def _fault_of_second(store: Any, path: str) -> str:
  """Creates an object that exists. Returns what is wrong with the answer."""
  errors: list[StoreUnavailableError] = []

  def create() -> str:
    try:
      is_created = store.store.create(path, _SECOND)
    except StoreUnavailableError as error:
      if store.store.get(path, len(_SECOND)) == _SECOND:
        return _OVERWRITES
      errors.append(error)
      if len(errors) < _MOST_ERRORS:
        raise
      return f"cannot say that an object exists ({error})"
    return _OVERWRITES if is_created else ""

  return store.retry(create)
