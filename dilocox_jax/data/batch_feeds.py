"""Data that gives whole batches: a function, an iterator or a loader.

What has a state is saved with a run and goes on from it. What has none is read
again from the start, and what a run has used already is dropped.
"""

import base64
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.feeds import (
  ExampleRows,
  Feed,
  Streams,
  narrow,
  numbers,
  text_or_examples,
  tree_digest,
)
from dilocox_jax.trees import Tree

# As in grain, and as in torchdata and Hugging Face.
_STATES = ("get_state", "set_state"), ("state_dict", "load_state_dict")


def as_feed(data: Any) -> Corpus | Feed:
  """Returns data of any kind as what a run reads.

  Args:
    data: A `Corpus`; a pair (train, validation) of arrays of tokens, trees of
      arrays with an example a row, or data sets of Hugging Face; a function
      (replica, step) -> batch; or an iterable of batches, such as a data set of
      grain or a loader. The last two may be the first of a pair too. Alone,
      their first batches are held out for evaluations and not trained on.

  Raises:
    TypeError: One line, if it is none of these.
    ValueError: If arrays do not fit together.
  """
  if isinstance(data, Corpus):
    return data
  if isinstance(data, Mapping) and {"train", "validation"} <= data.keys():
    data = data["train"], data["validation"]
  if _gives_batches(data):
    return Batches(data)
  try:
    if not isinstance(data, tuple | list) or len(data) != 2:
      raise TypeError("it is no pair")
    train, validation = data
    if _gives_batches(train):
      return Batches(train, validation)
    rows = ExampleRows(train), ExampleRows(validation)
  except TypeError as error:
    raise TypeError(
      f"data of type {type(data).__name__} must be a pair (train, validation) "
      "of arrays or data sets, a function (replica, step) -> batch, an iterable"
      f" of batches, or a dilocox_jax.Corpus: {error}"
    ) from error
  return text_or_examples(*rows)


def _gives_batches(data: Any) -> bool:
  """Whether data are a function or give batches when they are iterated."""
  if callable(data) or hasattr(data, "__next__"):
    return True
  is_plain = isinstance(data, Mapping | tuple | list | str | bytes)
  has_rows = hasattr(data, "shape") or hasattr(data, "with_format")
  is_streamed = not hasattr(data, "__len__") or not has_rows
  return hasattr(data, "__iter__") and not is_plain and is_streamed


class Batches:
  """Batches that a function or an iterable gives, a `Feed`.

  Of M replicas, replica m reads every M-th batch of an iterable, the first of
  them number m.

  Args:
    source: A function (replica, step) -> batch, or an iterable of batches.
    validation: Batches or rows for evaluations; None takes the first ones of
      the source.
  """

  def __init__(self, source: Any, validation: Any = None):
    self._source, self._validation = source, validation
    self._held = 0  # Steps of a function that are held out.
    self._drawn = None if callable(source) else _Draws(source)
    what = "a function" if callable(source) else type(source).__name__
    self.says = f"batches of {what}"

  def example(self, batch_size: int = 0) -> Tree:
    """Returns the first batch, of whatever size it is."""
    del batch_size
    return self._drawn.peek() if self._drawn else self._called(0, 0)

  def _called(self, replica: int, step: int, like: Tree = None) -> Tree:
    name = f"the batch of replica {replica} at step {step}"
    return _checked(self._source(replica, step), like, name)

  def streams(self, num_replicas: int, batch_size: int, seed: int) -> Streams:
    """Returns the batches of every replica, as the source gives them."""
    del batch_size, seed
    if self._drawn:
      self._drawn.warn_without_state()
      return _InTurn(self._drawn, num_replicas)
    return _ByStep(self._called, self.example(), num_replicas, self._held)

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns validation's rows, or as many batches as make `most` examples."""
    given = self._validation
    if given is not None and not _gives_batches(given):
      return ExampleRows(given).held_out(batch_size, most)
    feed = self if given is None else Batches(given)
    size = len(jax.tree.leaves(feed.example())[0])
    feed._held = -(-max(most, 1) // size)
    own = feed._drawn or (feed._called(0, s) for s in range(feed._held))
    return [_stacked([list(itertools.islice(own, feed._held))], 1)]

  def digest(self, held_out: Iterable[Tree]) -> str:
    """Names what is held out, as nobody can see all that is to come."""
    return tree_digest(held_out, self.says)


class _ByStep:
  """Streams of a function, of which each process calls what it needs."""

  def __init__(self, call: Callable, like: Tree, num_replicas: int, first: int):
    self._call, self._like = call, like
    self._everyone, self._step = range(num_replicas), first

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """As in `Streams`."""
    chosen = self._everyone if replicas is None else replicas
    steps = range(self._step, self._step + num_steps)
    self._step += num_steps
    return _stacked(
      [[self._call(m, step, self._like) for step in steps] for m in chosen]
    )

  def get_state(self) -> dict[str, Any]:
    """As in `Streams`."""
    return {"step": self._step}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """As in `Streams`."""
    self._step = state["step"]


class _InTurn:
  """Streams of one iterator, whose batches the replicas take in turn."""

  def __init__(self, drawn: "_Draws", num_replicas: int):
    self._drawn, self._everyone = drawn, range(num_replicas)

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """As in `Streams`; every process draws the batches of all replicas."""
    chosen = self._everyone if replicas is None else replicas
    rows = [
      [next(self._drawn) for _ in self._everyone] for _ in range(num_steps)
    ]
    return _stacked([[row[m] for row in rows] for m in chosen])

  def get_state(self) -> dict[str, Any]:
    """As in `Streams`."""
    return self._drawn.get_state()

  def set_state(self, state: Mapping[str, Any]) -> None:
    """As in `Streams`."""
    self._drawn.set_state(state)


class _Draws(Iterator):
  """Draws batches of one shape from an iterable, and begins again at its end.

  An iterator ends where it ends, as it cannot begin again.
  """

  def __init__(self, source: Any):
    if hasattr(source, "to_iter_dataset"):  # Only these have a state in grain.
      source = source.to_iter_dataset()
    self._source, self._iterator = source, iter(source)
    self._first = self._ahead = None
    self._count = 0

  def peek(self) -> Tree:
    """Returns the first batch, which stays the next one."""
    if self._first is None:
      self._ahead = self._draw()
    return self._first

  def __next__(self) -> Tree:
    """Returns the next batch."""
    batch, self._ahead = self._ahead, None
    return self._draw() if batch is None else batch

  def _draw(self) -> Tree:
    batch = next(self._iterator, None)
    if batch is None:
      batch = self._begin_again()
    self._count += 1
    batch = _checked(batch, self._first, f"batch {self._count}")
    batch = jax.tree.map(np.array, batch)  # A loader may fill its own again.
    self._first = batch if self._first is None else self._first
    return batch

  def _begin_again(self) -> Tree:
    said = f"the data ended after {self._count} batches"
    self._iterator = iter(self._source)
    batch = next(self._iterator, None)
    require(
      batch is not None,
      f"{said}, and the run needs more: hand in data that repeats, or take "
      "fewer steps",
    )
    logging.getLogger(__name__).info("%s and begins again", said)
    return batch

  @property
  def _state(self) -> tuple[Any, str, str] | None:
    """What has the state, and the names of its functions."""
    for part in (self._iterator, self._source):
      for names in _STATES:
        if all(hasattr(part, name) for name in names):
          return part, *names
    return None

  def warn_without_state(self) -> None:
    """Says that a resumed run has to draw its batches again, if it has to."""
    if not self._state:
      logging.getLogger(__name__).warning(
        "%s has no state to save (get_state or state_dict): a run that goes on "
        "draws the batches that it has used again, and drops them",
        type(self._source).__name__,
      )

  def get_state(self) -> dict[str, Any]:
    """Returns the number of batches drawn, and the state of the iterator."""
    state = None
    if self._state:
      part, name, _ = self._state
      state = getattr(part, name)()
    if isinstance(state, bytes):
      state = {"base64": base64.b64encode(state).decode()}
    try:
      json.dumps(state)
    except TypeError as error:
      raise ValueError(
        f"the state of {type(self._source).__name__} cannot be saved as JSON "
        f"({error}): hand in an iterator without one"
      ) from error
    return {"count": self._count, "iterator": state}

  def set_state(self, saved: Mapping[str, Any]) -> None:
    """Goes on where `get_state` was; raises ValueError for another kind."""
    state = saved["iterator"]
    require(
      (state is None) == (self._state is None),
      "the saved position is of data with a state, or these have one: hand in "
      "data of the same kind",
    )
    self._ahead = None  # It is counted.
    if not self._state:
      for _ in range(saved["count"] - self._count):
        self._draw()
      return
    part, _, name = self._state
    if isinstance(state, Mapping) and state.keys() == {"base64"}:
      state = base64.b64decode(state["base64"])
    getattr(part, name)(state)
    if part is self._source:
      self._iterator = iter(part)
    self._count = saved["count"]


def _checked(batch: Any, like: Tree | None, name: str) -> Tree:
  """Returns a batch as arrays of numbers, if it is like the first one."""
  batch = jax.tree.map(lambda leaf: narrow(numbers(leaf)), batch)
  found = _kinds(batch)
  require(
    bool(found) and all(leaf.ndim for leaf in jax.tree.leaves(batch)),
    f"{name} has no arrays, or one without an axis of examples",
  )
  wanted = found if like is None else _kinds(like)
  for path in wanted | found:
    require(
      wanted.get(path) == found.get(path),
      f"{name} has {found.get(path, 'nothing')} at {path or 'its root'}, but "
      f"the first one has {wanted.get(path, 'nothing')}: all need one shape",
    )
  return batch


def _kinds(tree: Tree) -> dict[str, str]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in leaves
  }


def _stacked(rows: Sequence[Sequence[Tree]], num_axes: int = 2) -> Tree:
  """Stacks batches [replicas][steps]: leaves [replicas, steps, ...] or less."""
  sizes = (len(rows), len(rows[0]))[2 - num_axes :]

  def stack(*leaves: np.ndarray) -> np.ndarray:
    return np.stack(leaves).reshape(*sizes, *leaves[0].shape)

  return jax.tree.map(stack, *itertools.chain.from_iterable(rows))
