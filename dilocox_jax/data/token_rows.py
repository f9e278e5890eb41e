"""Token ids in named columns, as data sets of Hugging Face have them.

A row has its tokens in `input_ids`. Libraries put `attention_mask` and `labels`
beside them. In packed text these say nothing new: no token is padding, and a
label is the token itself. Rows in which they do say more are refused, because
the loss of tokens would train on padding. Other columns are not read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dilocox_jax.checks import require

IDS = "input_ids"
_MASK = "attention_mask"
_LABELS = "labels"
_READ = (IDS, _MASK, _LABELS)
_OWN_LOSS = "pass loss=, a function of model and batch"
_JOIN = (
  f"join the rows by np.concatenate(dataset[{IDS!r}]), which is cut into "
  "sequences, or pack them to one length"
)

Columns = Mapping[str, Any]


def token_ids(batch: Columns, what: str = "a batch") -> np.ndarray:
  """Returns the tokens of rows with names.

  Args:
    batch: Columns by name, each with one entry a row; `input_ids` may be an
      array [rows, tokens] or lists of numbers.
    what: What the rows are, for messages.

  Returns:
    Token ids [rows, tokens], or [tokens] if it is a single row.

  Raises:
    ValueError: One line, if there are no tokens, rows differ in length, a row
      has padding, or labels are not the tokens.
  """
  require(IDS in batch, f"{what} {_without_ids(batch)}")
  ids = as_rows(batch[IDS], f"rows of {IDS}")
  if _MASK in batch:
    mask = as_rows(batch[_MASK], f"rows of {_MASK}")
    require(
      mask.shape == ids.shape and bool(np.all(mask == 1)),
      f"{what} has padding ({_MASK} is not 1 everywhere): {_JOIN}, or "
      f"{_OWN_LOSS}, that leaves it out",
    )
  if _LABELS in batch:
    labels = as_rows(batch[_LABELS], f"rows of {_LABELS}")
    require(
      np.array_equal(labels, ids),
      f"{what} has {_LABELS} that are not its {IDS}: {_OWN_LOSS}, that reads "
      f"them, or drop them by remove_columns({_LABELS!r})",
    )
  return ids


def _without_ids(columns: Columns) -> str:
  """Says what columns have in place of tokens, and what to do."""
  names = ", ".join(map(str, columns)) or "no columns"
  texts = [str(k) for k, value in columns.items() if _is_text(value)]
  if texts:
    return (
      f"has text ({texts[0]}) and no {IDS}: make tokens of it, e.g. "
      f"dataset.map(lambda rows: tokenizer(rows[{texts[0]!r}]), batched=True), "
      "and pack them to rows of one length"
    )
  return f"has {names} and no {IDS}: {_OWN_LOSS}, that reads them"


def _is_text(values: Any) -> bool:
  if isinstance(values, str):
    return True
  if isinstance(values, np.ndarray):
    return values.dtype.kind in "US" or (
      values.dtype.kind == "O" and values.size > 0 and _is_text(values.flat[0])
    )
  return is_sequence(values) and len(values) > 0 and _is_text(values[0])


def check_not_masked(values: Any) -> None:
  """Raises ValueError if an array of numpy has values under a mask.

  They would be trained on, as a model gets no mask.
  """
  is_masked = isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values)
  require(
    not is_masked,
    "data are a masked array, and a model would read what is under its mask: "
    "fill it, or leave these rows out",
  )


def as_rows(values: Any, what: str) -> np.ndarray:
  """Returns numbers in rows as one array.

  Args:
    values: An array, or lists of numbers.
    what: What the rows are, for the message.

  Raises:
    ValueError: One line, if the rows differ in length, or values are masked.
  """
  check_not_masked(values)
  try:
    found = np.asarray(values)
  except ValueError:  # Rows of different lengths.
    found = None
  if found is not None and found.dtype.kind != "O":
    return found
  lengths = {len(row) if hasattr(row, "__len__") else 0 for row in values}
  if len(lengths) > 1:
    raise ValueError(
      f"{what} have {min(lengths)} to {max(lengths)} tokens, and all must have "
      f"one length: {_JOIN}"
    )
  return np.stack([np.asarray(row) for row in values])


def is_sequence(data: Any) -> bool:
  """Whether data have a length and are read by number, as lists are."""
  has_both = hasattr(data, "__len__") and hasattr(data, "__getitem__")
  is_other = isinstance(data, Mapping | str | bytes) or hasattr(data, "dtype")
  # A data set of grain has a length, and batches that are asked for by number.
  return has_both and not is_other and not hasattr(data, "to_iter_dataset")


def is_list_of_numbers(data: Any) -> bool:
  """Whether data are a list of numbers, or of lists of numbers."""
  if not isinstance(data, list | tuple) or not data:
    return False
  first = data[0]
  return isinstance(first, int | float | np.number) or is_list_of_numbers(first)


def is_sequence_of_rows(data: Any) -> bool:
  """Whether data are a sequence of lists of numbers, or of arrays of them."""
  if not is_sequence(data) or not len(data):
    return False
  return is_list_of_numbers(data[0]) or getattr(data[0], "ndim", 0) == 1


def read_by_number(data: Any) -> list[Any]:
  """Returns the items of a sequence, which need not end when it is iterated."""
  return [data[number] for number in range(len(data))]


def is_table(data: Any) -> bool:
  """Whether data are a table of pandas, Polars or PyArrow.

  Their items are columns or rows, as each library has it.
  """
  has_columns = hasattr(data, "columns") or hasattr(data, "column_names")
  return has_columns and not hasattr(data, "with_format")


class TokenTable:
  """Rows of tokens that are read by their numbers.

  Attributes:
    count: Number of rows.
    unread: Names of the columns that are not read.
  """

  def __init__(
    self, read: Callable[[Sequence[int]], Columns], count: int, what: str
  ):
    """Reads the first row and the last one, which is often a shorter rest.

    Args:
      read: Function from numbers of rows to their columns.
      count: Number of rows.
      what: What the rows are, for messages.

    Raises:
      ValueError: As `token_ids`.
      TypeError: If there are no rows.
    """
    if not count:
      raise TypeError("there are no examples")
    self._read = read
    self._what = what
    self.count = count
    ends = read([0, count - 1])
    self.unread = unread_columns(ends)
    token_ids(ends, what)

  def take(self, ids: np.ndarray) -> np.ndarray:
    """Returns rows of tokens [*ids.shape, tokens].

    Args:
      ids: Numbers of rows, of any shape.
    """
    tokens = token_ids(self._read(ids.reshape(-1).tolist()), self._what)
    return tokens.reshape(*ids.shape, *tokens.shape[1:])


def token_table(data: Any) -> TokenTable | None:
  """Returns rows with names that can be read by number; None for other data.

  Args:
    data: A data set of Hugging Face, or any sequence of mappings.

  Raises:
    ValueError: One line, if it has such rows, and they have no tokens.
  """
  if hasattr(data, "column_names") and hasattr(data, "__len__"):
    rows = data.with_format("numpy")
    return TokenTable(lambda ids: rows[ids], len(data), "the data set")
  if is_sequence(data) and len(data) and is_row(data[0]):

    def read(ids: Sequence[int]) -> Columns:
      return _joined([data[number] for number in ids])

    return TokenTable(read, len(data), "data")
  return None


def unread_columns(columns: Iterable[str]) -> list[str]:
  """Returns the names of those columns that are not read."""
  return [str(name) for name in columns if name not in _READ]


def is_row(item: Any) -> bool:
  """Whether an item with names is one row, and not a batch of rows."""
  if not isinstance(item, Mapping):
    return False
  rows = item.get(IDS, ())
  return not len(rows) or np.ndim(rows[0]) == 0


def _joined(rows: Sequence[Columns]) -> Columns:
  """Returns rows as columns; they must have the same names."""
  return {name: [row[name] for row in rows] for name in rows[0]}


def next_batch(iterator: Iterator[Any], batch_size: int) -> Any:
  """Draws the next batch of tokens from an iterator of batches or of rows.

  Args:
    iterator: Iterator of token ids [B, S], or of rows [S], of which a batch is
      made: arrays, lists, or mappings with `input_ids`.
    batch_size: Number of rows in a batch.

  Returns:
    The batch; None at the end, where rows that make no whole batch are dropped.
    An item of another form is returned as it is.
  """
  item = _item(next(iterator, None))
  if not isinstance(item, np.ndarray) or item.ndim != 1:
    return item
  rows = [item.copy()]  # A loader may fill its own arrays again.
  while len(rows) < batch_size:
    item = _item(next(iterator, None))
    if item is None:
      return None
    rows.append(item.copy())
  return as_rows(rows, f"rows of {IDS}")


def _item(item: Any) -> Any:
  """Returns the tokens of an item; what has none stays as it is."""
  if isinstance(item, Mapping):
    return token_ids(item)
  if is_list_of_numbers(item):
    return as_rows(item, "rows of a batch")
  return item
