"""Reads batches of a user's iterable by number, and saves the position."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dilocox_jax.checks import require
from dilocox_jax.data.iterator_state import decoded, encoded
from dilocox_jax.trees import Tree

# Names of the methods that return and set the state of an iterator: in grain,
# and in torchdata and Hugging Face.
_STATE_METHODS = (
  ("get_state", "set_state"),
  ("state_dict", "load_state_dict"),
)


def _next(iterator: Iterator[Any]) -> Any:
  """Returns the next item of an iterator; None at the end of the iterator."""
  return next(iterator, None)


def _is_of_hugging_face(source: Any) -> bool:
  """Returns whether a source is a streamed data set of Hugging Face."""
  module = type(source).__module__.partition(".")[0]
  return module == "datasets" and hasattr(source, "load_state_dict")


def _has_shuffle_buffer(source: Any) -> bool:
  """Returns whether a streamed data set of Hugging Face has a shuffle buffer.

  The saved state of such a data set lacks the examples in the buffer.
  """
  if not _is_of_hugging_face(source):
    return False
  return _is_shuffled(getattr(source, "_ex_iterable", None))


def _is_shuffled(step: Any) -> bool:
  """Returns whether a step, or a step before it, has a shuffle buffer.

  A step is one of the operations that make up a data set, e.g. map or shuffle.
  """
  if "BufferShuffled" in type(step).__name__:
    return True
  steps_before = [getattr(step, "ex_iterable", None)]
  steps_before += getattr(step, "ex_iterables", [])
  return any(
    _is_shuffled(step_before)
    for step_before in steps_before
    if step_before is not None
  )


class Drawn:
  """Draws batches from an iterable, and counts them.

  At its end, the iterable is read again from its start. The end of an iterator,
  which has no new start, is an error.

  Args:
    source: The iterable.
    draw: Function that draws the next batch from an iterator of `source`, and
      returns None at the end.
  """

  def __init__(self, source: Any, draw: Callable[[Any], Any] = _next):
    self._source = source
    self._iterator = iter(source)
    self._draw = draw
    self._count = 0  # Batches that were drawn.
    self._last = None  # The last batch that was drawn.
    self._passes = 0  # How often the source has begun again.

  def batch(self, number: int) -> Tree:
    """Returns a batch by its number. Batches before it are drawn and dropped.

    Args:
      number: Index of the batch, from 0, not lower than in the call before. The
        index of the call before gives the same batch again.

    Raises:
      ValueError: If the source ends, and a new pass over it gives no batch; or
        if the number is lower than in the call before.
    """
    require(
      number >= self._count - 1,
      f"batch {number} is past: {self._count} batches were drawn, and only the "
      "last one is kept",
    )
    while self._count <= number:
      batch = self._draw(self._iterator)
      if batch is None:
        batch = self._begin_again()
      self._last = batch
      self._count += 1
    return self._last

  def _begin_again(self) -> Tree:
    """Begins another pass over the source, and returns its first batch.

    Raises ValueError if the source gives no batch any more.
    """
    said = f"the data ended after {self._count} batches"
    if _is_of_hugging_face(self._source):
      # Otherwise the new iterator would begin at the state that was loaded
      # last, and not at the first example.
      self._source.load_state_dict(None)
    self._iterator = iter(self._source)
    self._passes += 1
    batch = self._draw(self._iterator)
    require(
      batch is not None,
      f"{said}, and the run needs more: pass data that repeats, or take "
      "fewer steps",
    )
    logging.getLogger(__name__).info("%s and begins again", said)
    return batch

  def _find_state(self) -> tuple[Any, str, str] | None:
    """Finds the object that has a state: the iterator, or else the source.

    Returns the object, and the names of its methods that return and set the
    state. The result is None if neither object has a state, or if the state
    lacks the examples in a shuffle buffer.
    """
    if _has_shuffle_buffer(self._source):
      return None
    for owner in (self._iterator, self._source):
      for get_name, set_name in _STATE_METHODS:
        if hasattr(owner, get_name) and hasattr(owner, set_name):
          return owner, get_name, set_name
    return None

  def check_state(self) -> None:
    """Logs a warning if the position in the iterable cannot be saved.

    A resumed run then draws all batches from the start again.

    Raises:
      ValueError: If the iterable has a state that JSON cannot hold unchanged.
    """
    if self.get_state() is None:
      logging.getLogger(__name__).warning(
        "%s has no state to save (get_state or state_dict): a run that goes on "
        "draws the batches that it has used again, and drops them",
        type(self._source).__name__,
      )

  def get_state(self) -> dict[str, Any] | None:
    """Returns the position in the iterable, as values of JSON.

    The result is None if the iterable has no state, or if its state lacks the
    examples in a shuffle buffer.

    Raises:
      ValueError: If JSON cannot hold the state unchanged.
    """
    stateful = self._find_state()
    if stateful is None:
      return None
    owner, get_name, _ = stateful
    state = encoded(getattr(owner, get_name)(), type(owner).__name__)
    return {"count": self._count, "passes": self._passes, "iterator": state}

  def set_state(self, saved: Mapping[str, Any]) -> None:
    """Moves the iterable to a position that `get_state` returned.

    Args:
      saved: Position in data of the same type; not None.

    Raises:
      ValueError: If this iterable has no state, if its state lacks the examples
        in a shuffle buffer, or if this version of the package cannot read
        `saved`.
    """
    stateful = self._find_state()
    if stateful is None:
      raise ValueError(
        "the saved position is of an iterator with a state, which "
        f"{type(self._source).__name__} has not: pass the same kind"
      )
    owner, _, set_name = stateful
    if owner is not self._source:
      # Some sources count their iterators, to shuffle each pass in another way.
      # So this makes as many iterators as the saved run has made.
      for _ in range(saved["passes"] - self._passes):
        owner = self._iterator = iter(self._source)
    getattr(owner, set_name)(decoded(saved["iterator"]))
    if owner is self._source:
      # A new iterator begins at the state that its source has now.
      self._iterator = iter(owner)
    self._count = saved["count"]
    self._passes = saved["passes"]
    self._last = None
