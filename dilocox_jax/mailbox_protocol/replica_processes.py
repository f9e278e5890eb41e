"""Lets the processes of one replica share one mailbox.

All processes of a replica make the same calls of the mailbox in the same order.
Only process 0 has a mailbox: it makes the call, and tells the others the
result. This module has the interface for that (`ReplicaProcesses`), and
functions that write results as JSON and arrays, and errors as texts.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from dilocox_jax.mailbox_protocol.agreement import (
  ReplicaStaleError,
  StoppedError,
)
from dilocox_jax.mailbox_protocol.mailbox import Exchanged
from dilocox_jax.mailbox_protocol.snapshots import Snapshot

# Returns arrays of JAX that are divided among the devices of all processes.
TakeArrays = Callable[[], Sequence[Any]]
# Named tuples that methods of a mailbox return.
_RECORDS: dict[str, type] = {"Exchanged": Exchanged, "Snapshot": Snapshot}
# Errors that keep their type in the other processes. Any other error of process
# 0 becomes a RuntimeError there.
_ERRORS: dict[str, type[Exception]] = {
  "ReplicaStaleError": ReplicaStaleError,
  "StoppedError": StoppedError,
  "ValueError": ValueError,
  "OSError": OSError,
}
# JSON has no arrays and no named tuples. A mapping with one of these keys
# stands for such a value. A mapping of the answer itself becomes the value of
# the key `_MAPPING`, so that its own keys cannot be mistaken for these.
_ARRAY = "array"
_RECORD = "record"
_FIELDS = "fields"
_MAPPING = "mapping"


class ReplicaProcesses(Protocol):
  """The processes of one replica, as one of them sees the others.

  `OneProcess` is the form for a replica of a single process.
  """

  @property
  def is_main(self) -> bool:
    """Whether this process is process 0, which has the mailbox."""
    ...

  @property
  def is_stop_requested(self) -> bool:
    """Whether another process of the replica was asked to stop the run.

    Only process 0 may read this property.
    """
    ...

  def from_main(
    self, ask: Callable[[], Any], shared: TakeArrays | None = None
  ) -> Any:
    """Calls a function in process 0, and returns its result in every process.

    All processes must make their calls of this method in the same order.

    Args:
      ask: Function without arguments, which calls the mailbox. Its result must
        be one that `encode_answer` accepts. Outside process 0, tuples without
        names have become lists.
      shared: Function that returns arrays, which are divided among the devices
        of all processes. While `ask` runs, process 0 may read the parts that
        the other processes hold (`collected`). None: it reads none.

    Raises:
      Exception: Any error of `ask`, in every process. Outside process 0 its
        type is `ReplicaStaleError`, `StoppedError`, `ValueError` or `OSError`;
        an error of any other type is a RuntimeError there.
    """

  def collected(self, arrays: Sequence[Any]) -> Sequence[Any]:
    """Wraps arrays so that process 0 can read them as a whole.

    Args:
      arrays: Arrays that are divided among the devices of all processes, as the
        argument `shared` of `from_main` returns them.

    Returns:
      For each array an object with `nbytes`, which fetches all parts when numpy
      reads it. Only process 0 may read it, and only inside `from_main`.
    """
    ...

  def request_stop(self) -> None:
    """Tells process 0 that this process was asked to stop the run.

    Any thread may call this method.
    """


class OneProcess:
  """The form of `ReplicaProcesses` for a replica of a single process."""

  is_main = True
  is_stop_requested = False

  def from_main(
    self, ask: Callable[[], Any], shared: TakeArrays | None = None
  ) -> Any:
    """Returns the result of `ask()`. `shared` is not used."""
    del shared
    return ask()

  def collected(self, arrays: Sequence[Any]) -> Sequence[Any]:
    """Returns the arrays unchanged: this process has all their parts."""
    return arrays

  def request_stop(self) -> None:
    """Does nothing: this process knows that it was asked to stop."""


def encode_answer(answer: Any) -> tuple[Any, list[np.ndarray]]:
  """Writes the result of a mailbox's method as values of JSON, and arrays.

  Args:
    answer: Values of JSON, numpy arrays, `Exchanged` and `Snapshot`, nested in
      any way.

  Returns:
    A tuple (value, arrays). `value` has only values of JSON. In place of an
    array it has the array's index in `arrays`.
  """
  arrays: list[np.ndarray] = []

  def encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
      arrays.append(value)
      return {_ARRAY: len(arrays) - 1}
    name = type(value).__name__
    if name in _RECORDS:
      fields = [encode(field) for field in value]
      return {_RECORD: name, _FIELDS: fields}
    if isinstance(value, dict):
      # Under a key of its own, so that no key in it is mistaken for `_ARRAY`.
      return {_MAPPING: {key: encode(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
      return [encode(item) for item in value]
    return value

  return encode(answer), arrays


def decode_answer(value: Any, arrays: Sequence[np.ndarray]) -> Any:
  """Returns the result from which `encode_answer` made `value` and `arrays`.

  Tuples without names have become lists.
  """
  if isinstance(value, list):
    return [decode_answer(item, arrays) for item in value]
  if not isinstance(value, dict):
    return value
  if _ARRAY in value:
    return arrays[value[_ARRAY]]
  if _RECORD in value:
    fields = decode_answer(value[_FIELDS], arrays)
    return _RECORDS[value[_RECORD]](*fields)
  return {
    key: decode_answer(item, arrays) for key, item in value[_MAPPING].items()
  }


def encode_error(error: Exception) -> tuple[str, str]:
  """Returns the name of an error's type and its message, for `decode_error`.

  For a subclass of `ReplicaStaleError`, `StoppedError`, `ValueError` or
  `OSError`, the name is that of this type.
  """
  for name, kind in _ERRORS.items():
    if isinstance(error, kind):
      return name, str(error)
  return type(error).__name__, str(error)


def decode_error(name: str, text: str) -> Exception:
  """Returns an error of process 0, for another process to raise.

  It is a RuntimeError if `name` is not "ReplicaStaleError", "StoppedError",
  "ValueError" or "OSError".
  """
  if name in _ERRORS:
    return _ERRORS[name](text)
  return RuntimeError(f"process 0 ended by {name}: {text}")
