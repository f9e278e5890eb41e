"""Batches of an iterable that somebody passes, by their number."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dilocox_jax.checks import require
from dilocox_jax.data.iterator_state import decoded, encoded
from dilocox_jax.trees import Tree

# As in grain, and as in torchdata and Hugging Face.
_STATES = ("get_state", "set_state"), ("state_dict", "load_state_dict")


def _next(iterator: Iterator[Any]) -> Any:
  """Returns the next item of an iterator; None at its end."""
  return next(iterator, None)


def _is_of_hugging_face(source: Any) -> bool:
  """Whether a source is a streamed data set of the library `datasets`."""
  module = type(source).__module__.partition(".")[0]
  return module == "datasets" and hasattr(source, "load_state_dict")


def _has_shuffle_buffer(source: Any) -> bool:
  """Whether the state of a source lacks the examples of a shuffle buffer.

  A data set of Hugging Face that was shuffled goes on from its state without
  the examples in its buffer, as `IterableDataset.load_state_dict` says.
  """
  if not _is_of_hugging_face(source):
    return False
  return _is_shuffled(getattr(source, "_ex_iterable", None))


def _is_shuffled(step: Any) -> bool:
  """Whether a step of such a data set, or one inside it, has a buffer."""
  if "BufferShuffled" in type(step).__name__:
    return True
  inner = [getattr(step, "ex_iterable", None)]
  inner += getattr(step, "ex_iterables", [])
  return any(_is_shuffled(each) for each in inner if each is not None)


class Drawn:
  """Batches of an iterable by their number, which may only rise.

  An iterable begins again at its end. An iterator cannot, and ends there.

  Args:
    source: The iterable.
    draw: Function from its iterator to the next batch, or to None at the end.
  """

  def __init__(self, source: Any, draw: Callable[[Any], Any] = _next):
    self._source = source
    self._iterator = iter(source)
    self._draw = draw
    self._count = 0
    self._last = None
    self._passes = 0  # Times that the source has begun again.

  def batch(self, number: int) -> Tree:
    """Draws up to a batch; those before it are dropped."""
    while self._count <= number:
      batch = self._draw(self._iterator)
      if batch is None:
        batch = self._begin_again()
      self._last = batch
      self._count += 1
    return self._last

  def _begin_again(self) -> Tree:
    said = f"the data ended after {self._count} batches"
    if _is_of_hugging_face(self._source):
      # Else it would begin where the last state that was loaded says.
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

  def _stateful(self) -> tuple[Any, str, str] | None:
    """Returns what has the state, and the names of its two functions."""
    if _has_shuffle_buffer(self._source):
      return None
    for part in (self._iterator, self._source):
      for names in _STATES:
        if all(hasattr(part, name) for name in names):
          return part, *names  # pyright: ignore
    return None

  def check_state(self) -> None:
    """Checks before a run whether the position can be saved.

    An iterable without a state is drawn from its start again by a run that goes
    on, which is logged.

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
    """Returns the position for JSON; None if the iterable has no state.

    Raises:
      ValueError: One line, if the state would not come back as it is.
    """
    stateful = self._stateful()
    if stateful is None:
      return None
    part, get_name, _ = stateful
    state = encoded(getattr(part, get_name)(), type(part).__name__)
    return {"count": self._count, "passes": self._passes, "iterator": state}

  def set_state(self, saved: Mapping[str, Any]) -> None:
    """Goes on where `get_state` was; raises ValueError for other data."""
    stateful = self._stateful()
    if stateful is None:
      raise ValueError(
        "the saved position is of an iterator with a state, which "
        f"{type(self._source).__name__} has not: pass the same kind"
      )
    part, _, set_name = stateful
    if part is not self._source:
      # A source that shuffles anew for each pass may count its iterators.
      for _ in range(saved["passes"] - self._passes):
        part = self._iterator = iter(self._source)
    getattr(part, set_name)(decoded(saved["iterator"]))
    if part is self._source:
      self._iterator = iter(part)
    self._count = saved["count"]
    self._passes = saved["passes"]
    self._last = None
