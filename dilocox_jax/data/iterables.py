"""Batches of an iterable that somebody passes, by their number."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dilocox_jax.checks import require
from dilocox_jax.data.iterator_state import decoded, encoded
from dilocox_jax.trees import Tree

# Names of the two methods for the state of an iterator: those of grain, and
# those of torchdata and Hugging Face.
_STATE_METHODS = (
  ("get_state", "set_state"),
  ("state_dict", "load_state_dict"),
)


def _next(iterator: Iterator[Any]) -> Any:
  """Returns the next item of an iterator; None at the end of the iterator."""
  return next(iterator, None)


def _is_of_hugging_face(source: Any) -> bool:
  """Returns whether a source is a streamed data set of Hugging Face.

  The name of their library is `datasets`. It may not be installed.
  """
  module = type(source).__module__.partition(".")[0]
  return module == "datasets" and hasattr(source, "load_state_dict")


def _has_shuffle_buffer(source: Any) -> bool:
  """Returns whether a source shuffles in a buffer that its state leaves out.

  After `load_state_dict`, a streamed data set of Hugging Face goes on without
  the examples that were in its shuffle buffer. The docstring of
  `IterableDataset.load_state_dict` says so.
  """
  if not _is_of_hugging_face(source):
    return False
  return _is_shuffled(getattr(source, "_ex_iterable", None))


def _is_shuffled(step: Any) -> bool:
  """Returns whether a processing step, or a step before it, has a buffer.

  Args:
    step: A step of a streamed data set of Hugging Face, such as map or shuffle.
      Its attributes `ex_iterable` and `ex_iterables` are the steps before it.
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
  """Draws batches from an iterable, and remembers how many.

  A caller asks for a batch by its number. The number must not be lower than in
  the call before. At the end of an iterable its batches are repeated. An
  iterator has no second pass, so the run fails at its end.

  Args:
    source: The iterable.
    draw: Function from an iterator of `source` to the next batch, or to None at
      the end of the iterator.
  """

  def __init__(self, source: Any, draw: Callable[[Any], Any] = _next):
    self._source = source
    self._iterator = iter(source)
    self._draw = draw
    self._count = 0  # Batches that were drawn.
    self._last = None  # The last batch that was drawn.
    self._passes = 0  # Times that the source has begun again.

  def batch(self, number: int) -> Tree:
    """Returns a batch. Batches before it are drawn, and not returned.

    Args:
      number: Index of the batch, from 0. With the number of the call before,
        the same batch is returned again.

    Raises:
      ValueError: If the source ends and cannot begin again.
    """
    while self._count <= number:
      batch = self._draw(self._iterator)
      if batch is None:
        batch = self._begin_again()
      self._last = batch
      self._count += 1
    return self._last

  def _begin_again(self) -> Tree:
    """Returns the first batch of another pass over the source.

    Raises:
      ValueError: If the source gives no batch again.
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

    Returns:
      The object, and the names of its methods that return and set the state.
      None if neither object has a state, or if the state leaves out a shuffle
      buffer (`_has_shuffle_buffer`).
    """
    if _has_shuffle_buffer(self._source):
      return None
    for owner in (self._iterator, self._source):
      for get_name, set_name in _STATE_METHODS:
        if hasattr(owner, get_name) and hasattr(owner, set_name):
          return owner, get_name, set_name
    return None

  def check_state(self) -> None:
    """Checks before a run whether the position can be saved.

    Logs a warning if `get_state` returns None. A run that goes on from a
    checkpoint then draws all batches from the start again.

    Raises:
      ValueError: One line, if the iterable has a state that cannot be saved.
    """
    if self.get_state() is None:
      logging.getLogger(__name__).warning(
        "%s has no state to save (get_state or state_dict): a run that goes on "
        "draws the batches that it has used again, and drops them",
        type(self._source).__name__,
      )

  def get_state(self) -> dict[str, Any] | None:
    """Returns the position, as values that JSON can hold.

    Returns:
      The position for `set_state`. None if the iterable has no state, or if its
      state leaves out a shuffle buffer.

    Raises:
      ValueError: One line, if JSON cannot hold the state without a change.
    """
    stateful = self._find_state()
    if stateful is None:
      return None
    owner, get_name, _ = stateful
    state = encoded(getattr(owner, get_name)(), type(owner).__name__)
    return {"count": self._count, "passes": self._passes, "iterator": state}

  def set_state(self, saved: Mapping[str, Any]) -> None:
    """Goes on at a position.

    Args:
      saved: Position that `get_state` returned for data of the same kind.

    Raises:
      ValueError: If `get_state` returns None for this iterable.
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
      self._iterator = iter(owner)
    self._count = saved["count"]
    self._passes = saved["passes"]
    self._last = None
