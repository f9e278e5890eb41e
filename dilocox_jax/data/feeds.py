"""Data that somebody passes: examples, or what gives whole batches.

A text is cut into sequences (`streams`). Examples, trees of arrays or sets of
Hugging Face, have random access too: they are divided among the replicas in an
order drawn anew for every epoch, as sequences are. Whole batches come from a
function, a data set of grain or any iterable.

A run that goes on knows its step, and the state of an iterator that has one.
Where there is neither a number to ask by nor a state, batches are drawn again
from the start, and those that the run has used are dropped.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.iterables import Drawn
from dilocox_jax.data.streams import ReplicaStreams, Streams
from dilocox_jax.data.token_rows import (
  as_rows,
  check_not_masked,
  is_list_of_numbers,
  is_row,
  is_sequence,
  is_sequence_of_rows,
  is_table,
  next_batch,
  read_by_number,
  token_ids,
  token_table,
  unread_columns,
)
from dilocox_jax.trees import Tree, kinds_by_path, tree_digest

PASSED_IN = "passed in"
_DIGESTED = 1000  # Training examples that a digest reads.
_SPLITS = ("validation", "test")  # Which split is held out: the first there is.


def as_feed(
  data: Any, reads_tokens: bool = False, batch_size: int = 1
) -> "Corpus | Feed":
  """Returns data of any kind as what a run reads.

  Args:
    data: A `Corpus`; a pair (train, validation) of arrays of tokens, trees of
      arrays with an example a row, or data sets of Hugging Face; a function
      (replica, step) -> batch; or an iterable of batches, such as a data set of
      grain or a loader. The last two may be the first of a pair too. A mapping
      with the splits "train" and "validation", or "test", is such a pair.
    reads_tokens: Whether the model reads tokens alone. Of rows, examples and
      batches with names it then gets `input_ids` (`data.token_rows`).
    batch_size: Rows of a batch that is made of an iterable of single rows.

  Raises:
    TypeError: One line, if it is none of these.
    ValueError: If arrays do not fit together, or rows with names have no
      tokens that can be trained on.
  """
  if isinstance(data, Corpus):
    return data
  data = _pair_of_splits(data)
  for part in data if isinstance(data, tuple | list) else (data,):
    if is_table(part):
      raise TypeError(
        f"data of type {type(part).__name__} is a table: pass a mapping of its "
        "columns, e.g. {'input_ids': table['input_ids'].tolist()}"
      )
  size = batch_size if reads_tokens else None
  if _gives_batches(data):
    return Batches(data, rows_per_batch=size)
  try:
    if not isinstance(data, tuple | list) or len(data) != 2:
      raise TypeError(f"it is no pair{_split_hint(data)}")
    train, validation = data
    if _gives_batches(train, reads_tokens):
      return Batches(train, validation, size)
    rows = [ExampleRows(split, reads_tokens) for split in data]
  except TypeError as error:
    raise TypeError(
      f"data of type {type(data).__name__} must be a pair (train, validation) "
      "of arrays or data sets, a function (replica, step) -> batch, an iterable"
      f" of batches, or a dilocox_jax.Corpus: {error}"
    ) from error
  texts = [each.text for each in rows if each.text is not None]
  if len(texts) < 2:
    return Examples(*rows)
  size = 1 + max(int(text.max()) for text in texts)
  tokens, held = texts
  return Corpus(PASSED_IN, tokens, held, tree_digest(texts, "text"), size, 0)


def _pair_of_splits(data: Any) -> Any:
  """Returns a mapping of splits as a pair; other data stay as they are."""
  if not isinstance(data, Mapping) or "train" not in data:
    return data
  for name in _SPLITS:
    if name in data:
      return data["train"], data[name]
  return data


def _split_hint(data: Any) -> str:
  """Says how a data set without a second split gets one."""
  if isinstance(data, Mapping) and hasattr(data.get("train"), "column_names"):
    data = data["train"]
  if not hasattr(data, "train_test_split"):
    return ""
  return ", and dataset.train_test_split(test_size=0.05) makes one"


def _gives_batches(data: Any, reads_tokens: bool = False) -> bool:
  """Whether data are a function or give batches when they are iterated.

  Args:
    data: Data of any kind.
    reads_tokens: Whether a sequence may be of rows of tokens, or of batches
      with names.
  """
  if callable(data) or hasattr(data, "__next__"):
    return True
  if reads_tokens and is_sequence_of_rows(data):
    return False
  if reads_tokens and is_sequence(data) and len(data):
    first = data[0]
    if isinstance(first, Mapping):
      return not is_row(first)
  is_plain = isinstance(data, Mapping | tuple | list | str | bytes)
  has_rows = hasattr(data, "shape") or hasattr(data, "with_format")
  is_streamed = not hasattr(data, "__len__") or not has_rows
  return hasattr(data, "__iter__") and not is_plain and is_streamed


class ExampleRows:
  """Examples with random access: arrays, or a data set of Hugging Face.

  Args:
    examples: The examples.
    reads_tokens: Whether rows with names are reduced to their tokens.

  Raises:
    TypeError: If it is neither.
    ValueError: If arrays have different numbers of examples, or rows have no
      tokens that can be trained on.
  """

  def __init__(self, examples: Any, reads_tokens: bool = False):
    self._set = None
    self._table = None
    self._arrays = None
    self._unread: list[str] = []
    if reads_tokens:
      self._table = token_table(examples)
    if self._table is not None:
      self.count = self._table.count
      self._unread = self._table.unread
      return
    if reads_tokens and isinstance(examples, Mapping):
      self._unread = unread_columns(examples)
      examples = token_ids(examples, "data")
    if hasattr(examples, "column_names"):
      self._set = examples.with_format("numpy")
      self.count = len(examples)
      return
    if reads_tokens and is_sequence_of_rows(examples):
      examples = as_rows(read_by_number(examples), "rows of data")
    self._arrays = jax.tree.map(numbers, examples, is_leaf=is_list_of_numbers)
    leaves = jax.tree.leaves(self._arrays)
    counts = sorted({len(leaf) if leaf.ndim else 0 for leaf in leaves})
    if not leaves or not counts[0]:
      raise TypeError("there are no examples")
    require(
      len(counts) == 1,
      f"arrays of data have {' and '.join(map(str, counts))} rows: give each "
      "the same number of examples",
    )
    self.count = counts[0]

  @property
  def text(self) -> np.ndarray | None:
    """The token ids, if this is one array of them."""
    found = self._arrays
    if isinstance(found, np.ndarray) and found.ndim == 1:
      return found if found.dtype.kind in "iu" else None
    return None

  @property
  def words(self) -> str:
    """What an example is, e.g. "rows of 129 tokens"."""
    first = self.take(np.zeros(1, int))
    is_array = isinstance(first, np.ndarray) and first.ndim == 2
    if not is_array or first.dtype.kind not in "iu":
      return "examples"
    said = f"rows of {first.shape[1]} tokens"
    if self._unread:
      said += f" (columns not read: {', '.join(self._unread)})"
    return said

  @property
  def in_memory(self) -> Tree | None:
    """All examples, if they are arrays."""
    return self._arrays

  def take(self, ids: np.ndarray) -> Tree:
    """Returns examples, leaves [*ids.shape, ...].

    Args:
      ids: Numbers of examples, of any shape.
    """
    if self._table is not None:
      return narrow(numbers(self._table.take(ids)))
    if self._set is None:
      return jax.tree.map(lambda leaf: narrow(leaf[ids]), self._arrays)
    found = self._set[ids.reshape(-1).tolist()]
    found = {name: narrow(numbers(values)) for name, values in found.items()}
    return jax.tree.map(lambda x: x.reshape(*ids.shape, *x.shape[1:]), found)

  def spaced(self, number: int) -> np.ndarray:
    """Returns the ids of so many examples, evenly spaced, or of all."""
    number = min(number, self.count)
    return np.arange(number) * self.count // number

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns evenly spaced examples in batches; all of them for `most` = 0."""
    ids = self.spaced(most or self.count)
    whole = len(ids) // batch_size * batch_size
    parts = ids[:whole].reshape(-1, batch_size), ids[None, whole:]
    return [self.take(part) for part in parts if part.size]


@dataclasses.dataclass(frozen=True)
class Examples:
  """Examples to train and to evaluate on, a `Feed`."""

  train: ExampleRows
  validation: ExampleRows

  @property
  def says(self) -> str:
    """What it is, in a few words."""
    return f"{self.train.count:,} {self.train.words}"

  def example(self, batch_size: int = 1) -> Tree:
    """Returns a batch of examples."""
    return self.train.take(np.arange(batch_size) % self.train.count)

  def seen_at_once(self) -> Tree:
    """Returns all training examples in memory, or some of a data set."""
    if self.train.in_memory is not None:
      return self.train.in_memory
    return self.train.take(self.train.spaced(_DIGESTED))

  def streams(self, num_replicas: int, batch_size: int, seed: int) -> Streams:
    """Divides the examples among replicas, in an order drawn each epoch."""
    count = self.train.count
    require(
      count >= num_replicas * batch_size,
      f"{count} examples are less than a batch of {batch_size} for each of "
      f"{num_replicas} replicas: lower data.batch_size",
    )
    order = ReplicaStreams(
      np.arange(count),
      num_replicas=num_replicas,
      batch_size=batch_size,
      sequence_length=0,  # The number of an example is a sequence of one.
      seed=seed,
    )
    return _Ordered(order, self.train)

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns evenly spaced examples; all of them for `most` = 0."""
    return self.validation.held_out(batch_size, most)

  def digest(self, held_out: Iterable[Tree]) -> str:
    """Names some training examples, their number, and what is held out."""
    seen = self.train.take(self.train.spaced(_DIGESTED))
    return tree_digest([seen, *held_out], str(self.train.count))


class _Ordered:
  """Streams of examples, in the order of a stream of their numbers."""

  def __init__(self, order: ReplicaStreams, rows: ExampleRows):
    self._order = order
    self._rows = rows
    self.get_state = order.get_state
    self.set_state = order.set_state

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """As in `Streams`."""
    return self._rows.take(self._order.take(num_steps, replicas)[..., 0])


class Batches:
  """Batches that a function or an iterable gives, a `Feed`.

  Of M replicas, replica m reads every M-th batch of an iterable, the first of
  them number m. Without validation the first batches are held out.

  Args:
    source: A function (replica, step) -> batch, a `MapDataset` of grain, or an
      iterable of batches.
    validation: Batches or rows for evaluations; None takes the first ones of
      the source.
    rows_per_batch: If batches with names are reduced to their tokens: how many
      rows make a batch where an iterable gives single rows. None: batches stay
      as they are.
  """

  def __init__(
    self,
    source: Any,
    validation: Any = None,
    rows_per_batch: int | None = None,
  ):
    self._validation = validation
    self._held = 0
    self._first: Tree | None = None
    self._rows_per_batch = rows_per_batch
    self._source: Callable[[int, int], Any] = source
    self._is_function = callable(source)
    what = "a function" if self._is_function else type(source).__name__
    self.says = f"batches of {what}"
    has_numbers = self._is_function or hasattr(source, "to_iter_dataset")
    self.drawn = None
    if not has_numbers:
      self.drawn = self._drawn(source, rows_per_batch)
    if not self._is_function:
      by_number = self.drawn.batch if self.drawn else source.__getitem__
      self._source = lambda replica, number: by_number(number)

  @staticmethod
  def _drawn(source: Any, rows_per_batch: int | None) -> Drawn:
    if rows_per_batch is None:
      return Drawn(source)
    draw = functools.partial(next_batch, batch_size=rows_per_batch)
    return Drawn(source, draw)

  @property
  def _reads_tokens(self) -> bool:
    return self._rows_per_batch is not None

  def example(self, batch_size: int = 0) -> Tree:
    """Returns the first batch, of whatever size it is."""
    del batch_size
    return self._batch(0, 0)

  def seen_at_once(self) -> Tree:
    """Returns the first batch, as nobody can see all that is to come."""
    return self.example()

  def batch(self, replica: int, step: int, num_replicas: int) -> Tree:
    """Returns a training batch; those of an iterable must be asked in order.

    Args:
      replica: Number of the replica, m.
      step: Steps before it.
      num_replicas: Number of replicas, M.
    """
    if not self._is_function:
      step = step * num_replicas + replica
    return self._batch(replica, self._held + step)

  def _batch(self, replica: int, number: int) -> Tree:
    """Returns a batch; the source is asked for the first one only once."""
    is_first = replica == 0 and number == 0
    if is_first and self._first is not None:
      return self._first
    name = f"batch {number} of replica {replica}"
    batch = self._source(replica, number)
    if self._reads_tokens and isinstance(batch, Mapping):
      batch = token_ids(batch, name)
    batch = _checked(batch, self._first, name)
    if is_first:
      self._first = batch
    return batch

  def streams(self, num_replicas: int, batch_size: int, seed: int) -> Streams:
    """Returns the batches of every replica, as the source gives them."""
    del batch_size, seed
    self.example()
    if self.drawn:
      self.drawn.check_state()
    return _BatchStreams(self, num_replicas)

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns validation's rows, or as many batches as make `most` examples."""
    given = self._validation
    if given is not None and not _gives_batches(given, self._reads_tokens):
      rows = ExampleRows(given, self._reads_tokens)
      return rows.held_out(batch_size, most)
    require(
      most > 0,
      "evaluation.num_sequences=0 reads all, and batches may have no end: give"
      " a number",
    )
    feed = self
    if given is not None:
      feed = Batches(given, rows_per_batch=self._rows_per_batch)
    size = len(jax.tree.leaves(feed.example())[0])
    feed._held = -(-most // size)
    return [_stacked([feed._batch(0, n) for n in range(feed._held)])]

  def digest(self, held_out: Iterable[Tree]) -> str:
    """Names what is held out, as nobody can see all that is to come."""
    return tree_digest(held_out, self.says)


class _BatchStreams:
  """Streams of whole batches, in the order of their numbers."""

  def __init__(self, feed: Batches, num_replicas: int):
    self._feed = feed
    self._num_replicas = num_replicas
    self._step = self._ahead = 0

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """As in `Streams`."""
    everyone = range(self._num_replicas)
    chosen = everyone if replicas is None else replicas
    found = {m: [] for m in sorted(chosen)}
    first = self._step + self._ahead
    for step in range(first, first + num_steps):
      for m, own in found.items():
        own.append(self._feed.batch(m, step, self._num_replicas))
    self._step += num_steps
    return _stacked([_stacked(found[m]) for m in chosen])

  def get_state(self) -> dict[str, Any]:
    """As in `Streams`."""
    drawn = self._feed.drawn
    position = drawn.get_state() if drawn else None
    return {"step": self._step, "ahead": self._ahead, "drawn": position}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """As in `Streams`."""
    self._ahead = state["ahead"]
    if self._feed.drawn:  # Who goes back to a step cannot draw its batch again.
      self._ahead += max(0, self._step - state["step"])
      if state["drawn"]:
        self._feed.drawn.set_state(state["drawn"])
    self._step = state["step"]


Feed = Examples | Batches  # Data of a run that is no text.


def num_predictions(batches: Tree) -> int:
  """Returns how many predictions a loss of batches is the mean of.

  Args:
    batches: Token ids [N, B, L + 1], of which the last L are predicted, or any
      other tree of arrays [N, B, ...], of N * B examples.
  """
  first, *others = jax.tree.leaves(batches)
  if not others and first.ndim == 3 and first.dtype.kind in "iu":
    return first[..., 1:].size
  return first.shape[0] * first.shape[1]


def numbers(leaf: Any) -> np.ndarray:
  """Returns an array.

  Raises:
    TypeError: One line, unless it has numbers or booleans.
    ValueError: One line, if some of its values are masked, or its rows differ
      in length.
  """
  found = _array(leaf)
  if found.dtype.kind not in "iufb" and found.dtype.name != "bfloat16":
    raise TypeError(f"it has {found.dtype}, but only numbers can be trained on")
  return found


def _array(leaf: Any) -> np.ndarray:
  check_not_masked(leaf)
  if is_list_of_numbers(leaf):
    return as_rows(leaf, "rows of data")
  if is_sequence(leaf) and not hasattr(leaf, "__array__"):
    # NumPy asks for items until one raises IndexError, which the data sets of
    # others need not do.
    leaf = read_by_number(leaf)
  try:
    return np.asarray(leaf)
  except ValueError:  # Its items differ in shape or kind.
    raise TypeError(
      "it has items of different shapes or kinds, which make no array: pass a "
      "mapping of arrays"
    ) from None


def narrow(leaf: np.ndarray) -> np.ndarray:
  """Returns an array in the type that JAX would give it.

  Raises:
    ValueError: If that type cannot hold an integer of the array, which NumPy
      would change to another one.
  """
  dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
  if leaf.dtype.kind in "iu" and leaf.dtype != dtype and leaf.size:
    limits = np.iinfo(dtype)
    lowest = int(leaf.min())
    highest = int(leaf.max())
    require(
      limits.min <= lowest and highest <= limits.max,
      f"data have integers from {lowest} to {highest}, but JAX computes with "
      f"{dtype}, which ends at {limits.max}: pass smaller ones, or leave these "
      "out",
    )
  return leaf.astype(dtype, copy=False)


def _checked(batch: Any, like: Tree | None, name: str) -> Tree:
  """Returns a batch as arrays of numbers, if it is like the first one.

  They are copies, since the source may fill its own arrays again.
  """
  batch = jax.tree.map(lambda leaf: narrow(np.array(numbers(leaf))), batch)
  found = kinds_by_path(batch)
  leaves = jax.tree.leaves(batch)
  require(
    bool(found) and all(leaf.ndim for leaf in leaves),
    f"{name} has no arrays, or one without an axis of examples",
  )
  require(len(leaves[0]) > 0, f"{name} has no rows: give it one or more")
  wanted = found if like is None else kinds_by_path(like)
  for path in wanted | found:
    require(
      wanted.get(path) == found.get(path),
      f"{name} has {found.get(path, 'nothing')} at {path or 'its root'}, but "
      f"the first one has {wanted.get(path, 'nothing')}: all need one shape",
    )
  return batch


def _stacked(trees: Sequence[Tree]) -> Tree:
  return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
