"""The processes of one replica, of which only process 0 uses the mailbox.

All processes of a replica run the same program, so they all ask the same
questions in the same order. Process 0 asks its mailbox, and tells the others
the answer. This module says what the client of a mailbox needs for that, and
writes answers as messages that need no pickle. `rounds.cluster_processes`
carries the messages between the processes.
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

TakeArrays = Callable[[], Sequence[Any]]
# Answers of a mailbox that have fields.
_RECORDS: dict[str, type] = {"Exchanged": Exchanged, "Snapshot": Snapshot}
# Errors that mean the same in all processes. Any other error becomes a
# RuntimeError in the other processes.
_ERRORS: dict[str, type[Exception]] = {
  "ReplicaStaleError": ReplicaStaleError,
  "StoppedError": StoppedError,
  "ValueError": ValueError,
  "OSError": OSError,
}
# Keys of the mappings that stand for what JSON does not have.
_ARRAY = "array"
_RECORD = "record"
_FIELDS = "fields"
_MAPPING = "mapping"


class ReplicaProcesses(Protocol):
  """The processes of one replica."""

  @property
  def is_main(self) -> bool:
    """Whether this is process 0, which has the mailbox."""
    ...

  @property
  def is_stop_requested(self) -> bool:
    """Whether another process was asked to stop. Only process 0 may ask."""
    ...

  def from_main(
    self, ask: Callable[[], Any], shared: TakeArrays | None = None
  ) -> Any:
    """Returns process 0's answer in every process.

    All processes make the same calls in the same order.

    Args:
      ask: Function that asks the mailbox. Only process 0 calls it.
      shared: Returns the arrays of which process 0 may ask for the parts that
        this process has (`collected`). None: it asks for none.

    Returns:
      The answer.

    Raises:
      Exception: The error of `ask`, in every process.
    """

  def collected(self, arrays: Sequence[Any]) -> Sequence[Any]:
    """Returns arrays that fetch their parts from all processes when read.

    Args:
      arrays: Arrays that are divided among the devices of all processes.

    Returns:
      Objects with `nbytes`, which numpy reads as whole arrays. Only process 0
      may read them, and only inside `from_main`.
    """
    ...

  def request_stop(self) -> None:
    """Tells process 0 that this process was asked to stop.

    Any thread may call this method.
    """


class OneProcess:
  """A replica of one process, which has nobody to tell."""

  is_main = True
  is_stop_requested = False

  def from_main(
    self, ask: Callable[[], Any], shared: TakeArrays | None = None
  ) -> Any:
    """Returns the answer of the mailbox."""
    del shared
    return ask()

  def collected(self, arrays: Sequence[Any]) -> Sequence[Any]:
    """Returns the arrays, of which this process has all parts."""
    return arrays

  def request_stop(self) -> None:
    """Does nothing: this process knows that it was asked to stop."""


def encode_answer(answer: Any) -> tuple[Any, list[np.ndarray]]:
  """Divides an answer of a mailbox into values of JSON and arrays.

  Args:
    answer: Values of JSON, arrays, and the records `Exchanged` and `Snapshot`,
      nested in any way.

  Returns:
    Values of JSON, in which numbers stand for the arrays, and the arrays.
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
      return {_MAPPING: {key: encode(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
      return [encode(item) for item in value]
    return value

  return encode(answer), arrays


def decode_answer(value: Any, arrays: Sequence[np.ndarray]) -> Any:
  """Returns the answer that `encode_answer` has divided.

  Tuples have become lists.

  Args:
    value: Values of JSON.
    arrays: The arrays.
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
  """Returns the kind and the one line of an error, for `decode_error`."""
  for name, kind in _ERRORS.items():
    if isinstance(error, kind):
      return name, str(error)
  return type(error).__name__, str(error)


def decode_error(name: str, text: str) -> Exception:
  """Returns the error of process 0, for another process to raise.

  Args:
    name: Kind of the error.
    text: Its one line.
  """
  if name in _ERRORS:
    return _ERRORS[name](text)
  return RuntimeError(f"process 0 ended by {name}: {text}")
