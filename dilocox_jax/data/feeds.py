"""Converts the data that a user passes to a form that a run can read.

There are three kinds of data:

- A text is one long array of tokens. It is cut into sequences
  (`data.streams`).
- Examples are arrays, rows of tokens or data sets of Hugging Face, with random
  access (class `Examples`). They are divided among the replicas. Each epoch
  reads them in a new order.
- Whole batches come from a function, a data set of grain or any other iterable
  (class `Batches`).
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

PASSED_IN = "passed in"  # Name of the user's data in the records of a run.
# A digest of examples reads at most this many training examples, because
# reading all of a large data set takes long.
_DIGESTED = 1000
# Names of the split for evaluations. If a data set has both, the first counts.
_SPLITS = ("validation", "test")


def as_feed(
  data: Any, reads_tokens: bool = False, batch_size: int = 1
) -> "Corpus | Feed":
  """Converts data of any kind to a form that a run can read.

  Args:
    data: One of these kinds:

      - A `Corpus`, which is returned unchanged.
      - A pair (train, validation). Each is an array of tokens, a tree of arrays
        whose first axis counts the examples, or a data set of Hugging Face. If
        `reads_tokens` is set, each may also be a list of rows. A row is a list
        of tokens, or a mapping with `input_ids`.
      - A function (replica, step) -> batch.
      - An iterable of batches, such as a data set of grain or a loader.
      - A pair (train, validation) whose training data are a function or an
        iterable.
      - A mapping with the splits "train" and "validation", or "train" and
        "test". It is read as a pair.
    reads_tokens: Whether the model reads only tokens. Of named columns, it then
      gets only `input_ids`.
    batch_size: Number of rows that make a batch if an iterable gives single
      rows. It is only read if `reads_tokens` is set.

  Returns:
    A `Corpus` for a pair of token arrays with one axis, `Examples` for any
    other pair with random access, and `Batches` for a function or an iterable.

  Raises:
    TypeError: If the data are of another kind.
    ValueError: If arrays differ in their number of examples, if rows differ in
      length, if an array of numpy masks values (`np.ma`), or if named columns
      have no tokens to train on.
  """
  if isinstance(data, Corpus):
    return data
  data = _pair_of_splits(data)
  splits = data if isinstance(data, tuple | list) else (data,)
  for split in splits:
    if is_table(split):
      raise TypeError(
        f"data of type {type(split).__name__} is a table: pass a mapping of "
        "its columns, e.g. {'input_ids': table['input_ids'].tolist()}"
      )
  rows_per_batch = batch_size if reads_tokens else None
  # `reads_tokens` is left out: if the data are no pair, single rows of tokens
  # are not examples. `Batches` makes batches of them.
  if _gives_batches(data):
    return Batches(data, rows_per_batch=rows_per_batch)
  try:
    if not isinstance(data, tuple | list) or len(data) != 2:
      raise TypeError(f"it is no pair{_split_hint(data)}")
    train, validation = data
    if _gives_batches(train, reads_tokens):
      return Batches(train, validation, rows_per_batch=rows_per_batch)
    train_rows = ExampleRows(train, reads_tokens)
    validation_rows = ExampleRows(validation, reads_tokens)
  except TypeError as error:
    raise TypeError(
      f"data of type {type(data).__name__} must be a pair (train, validation) "
      "of arrays or data sets, a function (replica, step) -> batch, an iterable"
      f" of batches, or a dilocox_jax.Corpus: {error}"
    ) from error
  train_text = train_rows.text
  validation_text = validation_rows.text
  if train_text is None or validation_text is None:
    return Examples(train_rows, validation_rows)
  texts = [train_text, validation_text]
  return Corpus(
    name=PASSED_IN,
    train=train_text,
    validation=validation_text,
    digest=tree_digest(texts, "text"),
    vocab_size=1 + max(int(text.max()) for text in texts),
    num_files=0,
  )


def _pair_of_splits(data: Any) -> Any:
  """Returns the pair (train, validation) of a mapping of splits.

  Without a split "validation", the split "test" is taken. Other data are
  returned unchanged.
  """
  if not isinstance(data, Mapping) or "train" not in data:
    return data
  for name in _SPLITS:
    if name in data:
      return data["train"], data[name]
  return data


def _split_hint(data: Any) -> str:
  """Returns the end of an error message: how to make a pair of one data set.

  For data that are not of Hugging Face it is "".
  """
  if isinstance(data, Mapping) and hasattr(data.get("train"), "column_names"):
    data = data["train"]
  if not hasattr(data, "train_test_split"):
    return ""
  return ", and dataset.train_test_split(test_size=0.05) makes one"


def _gives_batches(data: Any, reads_tokens: bool = False) -> bool:
  """Returns whether data are read as batches and not as examples.

  Functions, iterators and loaders are read as batches. If `reads_tokens` is
  set, single rows of tokens in a sequence are examples.
  """
  if callable(data) or hasattr(data, "__next__"):
    return True
  if reads_tokens and is_sequence_of_rows(data):
    return False
  if reads_tokens and is_sequence(data) and len(data):
    first = data[0]
    # Each mapping of such a list is a batch or a single row.
    if isinstance(first, Mapping):
      return not is_row(first)
  # A mapping, a tuple or a list is read as a tree of arrays.
  is_plain = isinstance(data, Mapping | tuple | list | str | bytes)
  # Arrays have a shape, and data sets of Hugging Face can set a format.
  can_have_rows = hasattr(data, "shape") or hasattr(data, "with_format")
  has_rows = can_have_rows and hasattr(data, "__len__")
  return hasattr(data, "__iter__") and not is_plain and not has_rows


class ExampleRows:
  """Reads the examples of one split by their indices.

  Args:
    examples: An array, a tree of arrays, a sequence of rows, or a data set of
      Hugging Face.
    reads_tokens: Whether the model reads only tokens. Of named columns, only
      `input_ids` is then read.

  Attributes:
    count: Number of examples.

  Raises:
    TypeError: If the examples are of another kind, or if there are none.
    ValueError: If arrays differ in their number of examples, if rows differ in
      length, if an array of numpy masks values (`np.ma`), or if named columns
      have no tokens to train on.
  """

  def __init__(self, examples: Any, reads_tokens: bool = False):
    # Exactly one of the next three holds the examples: a data set of Hugging
    # Face, rows of tokens with named columns, or a tree of arrays.
    self._set = None
    self._table = None
    self._arrays = None
    self._unread: list[str] = []  # Columns that are not read.
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
    """The text, if the examples are one long array of token ids; else None."""
    tokens = self._arrays
    if isinstance(tokens, np.ndarray) and tokens.ndim == 1:
      return tokens if tokens.dtype.kind in "iu" else None
    return None

  @property
  def kind(self) -> str:
    """Words for the examples, e.g. "rows of 129 tokens".

    If the examples are not rows of tokens, the result is "examples".
    """
    first = self.take(np.zeros(1, int))
    is_array = isinstance(first, np.ndarray) and first.ndim == 2
    if not is_array or first.dtype.kind not in "iu":
      return "examples"
    description = f"rows of {first.shape[1]} tokens"
    if self._unread:
      description += f" (columns not read: {', '.join(self._unread)})"
    return description

  @property
  def in_memory(self) -> Tree | None:
    """All examples, leaves [count, ...], if they are arrays; else None."""
    return self._arrays

  def take(self, ids: np.ndarray) -> Tree:
    """Returns the examples with the given indices.

    Args:
      ids: Indices, an array with any number of axes.

    Returns:
      A tree of arrays. The axes of `ids` are the first axes of every leaf.

    Raises:
      TypeError: If values are not numbers, or differ in shape.
      ValueError: If an integer is too large for JAX, or if rows of tokens are
        refused, e.g. because they differ in length.
    """
    if self._table is not None:
      return narrow(numbers(self._table.take(ids)))
    if self._set is None:
      return jax.tree.map(lambda leaf: narrow(leaf[ids]), self._arrays)
    columns = self._set[ids.reshape(-1).tolist()]
    columns = {
      name: narrow(numbers(values)) for name, values in columns.items()
    }
    return jax.tree.map(lambda x: x.reshape(*ids.shape, *x.shape[1:]), columns)

  def evenly_spaced(self, number: int) -> np.ndarray:
    """Returns the indices of `number` evenly spaced examples.

    If there are fewer examples, the indices of all are returned.
    """
    number = min(number, self.count)
    return np.arange(number) * self.count // number

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns evenly spaced examples in batches.

    Args:
      batch_size: Number of examples in a batch, B.
      most: Largest number of examples; 0: all examples.

    Returns:
      One or two trees: all whole batches, leaves [batches, B, ...], and the
      remaining examples, leaves [1, remaining examples, ...]. An empty tree is
      left out.
    """
    ids = self.evenly_spaced(most or self.count)
    num_in_batches = len(ids) // batch_size * batch_size
    whole_batches = ids[:num_in_batches].reshape(-1, batch_size)
    last_batch = ids[None, num_in_batches:]
    return [
      self.take(batches)
      for batches in (whole_batches, last_batch)
      if batches.size
    ]


@dataclasses.dataclass(frozen=True)
class Examples:
  """Training and validation examples with random access.

  Attributes:
    train: Training examples.
    validation: Examples for evaluations.
  """

  train: ExampleRows
  validation: ExampleRows

  @property
  def description(self) -> str:
    """The training examples in words: "1,000 rows of 129 tokens"."""
    return f"{self.train.count:,} {self.train.kind}"

  def example(self, batch_size: int = 1) -> Tree:
    """Returns the first training examples as a batch, leaves [B, ...].

    Args:
      batch_size: Number of examples in the batch, B. If there are fewer, they
        are repeated.
    """
    return self.train.take(np.arange(batch_size) % self.train.count)

  def seen_at_once(self) -> Tree:
    """Returns the training examples that are checked before the run.

    If the examples are arrays, they are all returned. Of other data, at most
    1,000 evenly spaced examples are returned.
    """
    if self.train.in_memory is not None:
      return self.train.in_memory
    return self.train.take(self.train.evenly_spaced(_DIGESTED))

  def streams(self, num_replicas: int, batch_size: int, seed: int) -> Streams:
    """Divides the training examples among replicas.

    Args:
      num_replicas: Number of replicas, M.
      batch_size: Number of examples in a batch of one replica.
      seed: Seed of the order of the examples, which changes in every epoch.

    Returns:
      Streams that give batches with leaves [replicas, steps, batch_size, ...].

    Raises:
      ValueError: If there are too few examples for a batch of every replica.
    """
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
      # The index of an example takes the place of a sequence of one token.
      sequence_length=0,
      seed=seed,
    )
    return _ExampleStreams(order, self.train)

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns evenly spaced validation examples in batches.

    Args:
      batch_size: Number of examples in a batch, B.
      most: Largest number of examples; 0: all examples.

    Returns:
      One or two trees with leaves [batches, B, ...]. If examples remain that
      make no whole batch, the last tree has them as a smaller batch.
    """
    return self.validation.held_out(batch_size, most)

  def digest(self, held_out: Iterable[Tree]) -> str:
    """Returns 16 hexadecimal digits that identify the data.

    They depend on the number of training examples, on at most 1,000 of these
    examples, and on the result of the method `held_out`.
    """
    sample = self.train.take(self.train.evenly_spaced(_DIGESTED))
    return tree_digest([sample, *held_out], str(self.train.count))


class _ExampleStreams:
  """Implements `Streams` for examples, in the order that `order` gives."""

  def __init__(self, order: ReplicaStreams, rows: ExampleRows):
    self._order = order
    self._rows = rows
    self.get_state = order.get_state
    self.set_state = order.set_state

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """Reads the next batches, leaves [replicas, num_steps, batch size, ...].

    `replicas` are the replicas to read (None: all). All streams move on.
    """
    return self._rows.take(self._order.take(num_steps, replicas)[..., 0])


class Batches:
  """Training and validation batches from a function or an iterable.

  A function is called for each replica's batches. Of any other source, replica
  m of M replicas reads the training batches m, m + M, m + 2 M, ... Without
  validation data, the first batches of the source (of a function: those of
  replica 0) are used for evaluations, and training begins after them.

  Args:
    source: A function (replica, step) -> batch, a `MapDataset` of grain, or an
      iterable of batches. If `rows_per_batch` is given, an iterable may also
      give single rows.
    validation: Batches or rows for evaluations; None: the first batches of the
      source.
    rows_per_batch: Number of single rows that make a batch of tokens. If it is
      given, only `input_ids` is read of named columns. None: the source gives
      whole batches of any data.

  Attributes:
    description: Description of the data, e.g. "batches of a function".
    drawn: Draws the batches of an iterable in order; None if the source gives
      any batch by its number.
  """

  def __init__(
    self,
    source: Any,
    validation: Any = None,
    rows_per_batch: int | None = None,
  ):
    self._validation = validation
    self._num_held_out = 0  # Batches at the start of the source.
    self._first: Tree | None = None
    self._rows_per_batch = rows_per_batch
    # Function (replica, number) -> batch; replaced below for other sources.
    self._source: Callable[[int, int], Any] = source
    self._is_function = callable(source)
    what = "a function" if self._is_function else type(source).__name__
    self.description = f"batches of {what}"
    # A `MapDataset` of grain is indexed, and can become an iterator.
    has_numbers = self._is_function or hasattr(source, "to_iter_dataset")
    self.drawn = None
    if not has_numbers:
      self.drawn = self._draw_from(source, rows_per_batch)
    if not self._is_function:
      by_number = self.drawn.batch if self.drawn else source.__getitem__
      self._source = lambda replica, number: by_number(number)

  @staticmethod
  def _draw_from(source: Any, rows_per_batch: int | None) -> Drawn:
    """Returns a `Drawn` for an iterable of batches, or of single rows.

    Each `rows_per_batch` rows make a batch; None: the items are batches.
    """
    if rows_per_batch is None:
      return Drawn(source)
    draw = functools.partial(next_batch, batch_size=rows_per_batch)
    return Drawn(source, draw)

  @property
  def _reads_tokens(self) -> bool:
    """Whether the model reads only tokens."""
    return self._rows_per_batch is not None

  def example(self, batch_size: int = 0) -> Tree:
    """Returns the first batch. All batches must have its shapes and dtypes.

    The argument is ignored, because the source decides the size of a batch. The
    errors are those of `batch`.
    """
    del batch_size
    return self._batch(0, 0)

  def seen_at_once(self) -> Tree:
    """Returns the first batch of the source, a sample for checks before a run.

    The run itself may skip this batch, or use it for evaluations.
    """
    return self.example()

  def batch(self, replica: int, step: int, num_replicas: int) -> Tree:
    """Returns a training batch.

    Batches of an iterable must be read in the order in which they come.

    Args:
      replica: Index of the replica, m.
      step: Number of training batches of the replica before this one.
      num_replicas: Number of replicas, M.

    Raises:
      TypeError: If the batch has values that are not numbers.
      ValueError: If the batch has no rows, if it has other shapes or dtypes
        than the first batch, if `token_rows.token_ids` refuses its columns, or
        if an iterator has ended.
    """
    if not self._is_function:
      step = step * num_replicas + replica
    return self._batch(replica, self._num_held_out + step)

  def _batch(self, replica: int, number: int) -> Tree:
    """Reads and checks the source's batch with the index `number`.

    The argument `replica` is read only if the source is a function.
    """
    is_first = replica == 0 and number == 0
    if is_first and self._first is not None:
      return self._first
    name = f"batch {number} of replica {replica}"
    batch = self._source(replica, number)
    if self._reads_tokens and isinstance(batch, Mapping):
      batch = token_ids(batch, name)
    batch = _checked_batch(batch, self._first, name)
    if is_first:
      self._first = batch
    return batch

  def streams(self, num_replicas: int, batch_size: int, seed: int) -> Streams:
    """Returns streams of the training batches, in the order of the source.

    `batch_size` and `seed` are ignored.

    Raises:
      ValueError: If the source has a state that cannot be saved as JSON.
    """
    del batch_size, seed
    self.example()
    if self.drawn:
      self.drawn.check_state()
    return _BatchStreams(self, num_replicas)

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns the batches for evaluations.

    They come from the validation data or, if there are none, from the start of
    the source. This method must be called before training batches are read.

    Args:
      batch_size: Number of rows in a batch, B. It is only read if the
        validation data are rows and not batches.
      most: Number of examples. For rows: the largest number; 0 means all. For
        batches: above 0; it is rounded up to whole batches.

    Returns:
      Trees with leaves [batches, B, ...]: one tree for batches; one or two
      trees for rows (`ExampleRows.held_out`).

    Raises:
      ValueError: If `most` is 0 and the method would read batches, not rows.
    """
    validation = self._validation
    has_rows = validation is not None and not _gives_batches(
      validation, self._reads_tokens
    )
    if has_rows:
      rows = ExampleRows(validation, self._reads_tokens)
      return rows.held_out(batch_size, most)
    require(
      most > 0,
      "evaluation.num_sequences=0 reads all, and batches may have no end: give"
      " a number",
    )
    feed = self
    if validation is not None:
      feed = Batches(validation, rows_per_batch=self._rows_per_batch)
    rows_per_batch = len(jax.tree.leaves(feed.example())[0])
    num_batches = -(-most // rows_per_batch)
    # Without validation data, `feed` is `self`, whose training batches follow.
    feed._num_held_out = num_batches
    return [_stacked([feed._batch(0, number) for number in range(num_batches)])]

  def digest(self, held_out: Iterable[Tree]) -> str:
    """Returns 16 hexadecimal digits that identify the data.

    They depend on the description, and on the result of the method `held_out`.
    """
    return tree_digest(held_out, self.description)


class _BatchStreams:
  """Implements `Streams` for a `Batches`."""

  def __init__(self, feed: Batches, num_replicas: int):
    self._feed = feed
    self._num_replicas = num_replicas
    self._step = 0
    # Inner step s reads batch s + `_batch_offset`. The offset is above 0 after
    # the run has gone back to an earlier step (`set_state`).
    self._batch_offset = 0

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """Reads the next batches, leaves [replicas, num_steps, ...].

    `replicas` are the replicas to read (None: all). All streams move on.
    """
    chosen = range(self._num_replicas) if replicas is None else replicas
    batches_of_replica = {replica: [] for replica in sorted(chosen)}
    first = self._step + self._batch_offset
    # Batches of an iterable must be read in this order.
    for number in range(first, first + num_steps):
      for replica, batches in batches_of_replica.items():
        batches.append(self._feed.batch(replica, number, self._num_replicas))
    self._step += num_steps
    return _stacked(
      [_stacked(batches_of_replica[replica]) for replica in chosen]
    )

  def get_state(self) -> dict[str, Any]:
    """Returns the position of the streams as values of JSON."""
    drawn = self._feed.drawn
    position = drawn.get_state() if drawn else None
    return {
      "step": self._step,
      "ahead": self._batch_offset,
      "drawn": position,
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Moves the streams to a saved position, which may be an earlier one.

    Steps that are repeated get the same batches again from a function or a
    `MapDataset` of grain. From any other iterable, which cannot go back, they
    get the next batches.

    Args:
      state: State that `get_state` returned for the same data.

    Raises:
      ValueError: If the position of an iterator cannot be set.
    """
    self._batch_offset = state["ahead"]
    if self._feed.drawn:
      # A run may go back to an earlier step, but an iterable cannot. So later
      # batches take the place of the batches that were drawn already.
      self._batch_offset += max(0, self._step - state["step"])
      if state["drawn"]:
        self._feed.drawn.set_state(state["drawn"])
    self._step = state["step"]


Feed = Examples | Batches  # The data of a run, if they are not a text.


def num_predictions(batches: Tree) -> int:
  """Returns the number of predictions over which the loss of batches is a mean.

  Args:
    batches: N batches of B rows. A single array of integers [N, B, L + 1]
      counts as token ids. It has N B L predictions, because the first token of
      a row is not predicted. Any other tree of arrays [N, B, ...] has N B
      predictions, one for each example.
  """
  first, *others = jax.tree.leaves(batches)
  if not others and first.ndim == 3 and first.dtype.kind in "iu":
    return first[..., 1:].size
  return first.shape[0] * first.shape[1]


def numbers(leaf: Any) -> np.ndarray:
  """Converts a leaf of a user's data to a numpy array of numbers.

  Args:
    leaf: An array of any library, a number, a (nested) list of numbers, or a
      sequence of arrays.

  Raises:
    TypeError: If the leaf has values that are not real numbers or booleans, or
      items of different shapes.
    ValueError: If values are masked, or if rows of numbers differ in length.
  """
  array = _array(leaf)
  if array.dtype.kind not in "iufb" and array.dtype.name != "bfloat16":
    raise TypeError(f"it has {array.dtype}, but only numbers can be trained on")
  return array


def _array(leaf: Any) -> np.ndarray:
  """Converts a leaf of a user's data to a numpy array of any dtype."""
  check_not_masked(leaf)
  if is_list_of_numbers(leaf):
    return as_rows(leaf, "rows of data")
  if is_sequence(leaf) and not hasattr(leaf, "__array__"):
    # NumPy reads items until one raises IndexError. Not every data set raises
    # IndexError at its end.
    leaf = read_by_number(leaf)
  try:
    return np.asarray(leaf)
  except ValueError:  # The items differ in shape or kind.
    raise TypeError(
      "it has items of different shapes or kinds, which make no array: pass a "
      "mapping of arrays"
    ) from None


def narrow(leaf: np.ndarray) -> np.ndarray:
  """Converts an array to the dtype that JAX would give it.

  For example, JAX converts int64 to int32 unless 64-bit types are enabled.

  Raises:
    ValueError: If an integer does not fit into this dtype.
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


def _checked_batch(batch: Any, first: Tree | None, name: str) -> Tree:
  """Checks a batch of a user's data, and returns a copy as arrays of numbers.

  Its shapes and dtypes must be those of `first`, the first batch. If `first` is
  None, the batch itself is the first one.
  """
  batch = jax.tree.map(lambda leaf: narrow(np.array(numbers(leaf))), batch)
  leaves = jax.tree.leaves(batch)
  require(
    bool(leaves) and all(leaf.ndim for leaf in leaves),
    f"{name} has no arrays, or one without an axis of examples",
  )
  require(len(leaves[0]) > 0, f"{name} has no rows: give it one or more")
  kinds = kinds_by_path(batch)
  first_kinds = kinds if first is None else kinds_by_path(first)
  for path in first_kinds | kinds:
    require(
      first_kinds.get(path) == kinds.get(path),
      f"{name} has {kinds.get(path, 'nothing')} at {path or 'its root'}, but "
      f"the first one has {first_kinds.get(path, 'nothing')}: all need one "
      "shape",
    )
  return batch


def _stacked(trees: Sequence[Tree]) -> Tree:
  """Stacks the leaves of several trees along a new first axis."""
  return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
