"""Proves a store when a replica enters: it has to keep what it promises.

The agreement of the replicas rests on one promise: of several who create an
object exactly one wins. Some servers do not know the condition with which S3
asks for that, and overwrite the object without a word. Then one replica would
train alone, and another would wait for ever.
"""

import contextlib
import secrets
from typing import Any

from dilocox_jax.mailbox_protocol.answers import (
  StoreUnavailableError,
  UnfitStoreError,
)
from dilocox_jax.mailbox_protocol.messages import probe_path

_TRIES = 3  # A stranger may harm one object, and hardly that of each try.
_MOST_ERRORS = 8  # In 13 s: a store that answers all else is not away.
# As long as each other: some servers note the length of what was there first.
_FIRST, _SECOND = b"first", b"other"
_OVERWRITES = (
  "overwrites an object that was to be created only if it is missing"
)


def prove(store: Any, name: str) -> None:
  """Creates an object twice, reads it and deletes it, with five requests.

  Its name is used once. So any number of replicas may prove a store at once,
  also two processes of one name.

  Args:
    store: A `RetryingStore` store.
    name: Name of the replica that enters.

  Raises:
    UnfitStoreError: If the second creation changes the object or ends in an
      error,
      or if the object is not read as it was written.
  """
  fault = ""
  for _ in range(_TRIES):
    path = probe_path(name, secrets.token_hex(8))
    fault = _fault_of(store, path)
    if not fault:
      store.delete([path])
      return
    with contextlib.suppress(
      StoreUnavailableError
    ):  # Without patience: it is refused.
      store.store.delete([path])
  raise UnfitStoreError(
    f"{store.store.where} {fault}: replicas cannot agree there; take a server"
    " that knows If-None-Match, or a folder"
  )


def _fault_of(store: Any, path: str) -> str:
  """Returns what is wrong with a store; "" if nothing is."""
  # Some buckets answer that what is missing is forbidden.
  store.get(path, len(_FIRST))
  store.create(path, _FIRST)
  fault = _fault_of_second(store, path)
  if fault:
    return fault
  found = store.get(path, len(_FIRST))
  if found == _FIRST:
    return ""
  if found == _SECOND:
    return _OVERWRITES
  return "does not give back an object that was just written"


def _fault_of_second(store: Any, path: str) -> str:
  """Creates an object that exists; returns what is wrong with the answer."""
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
