"""Reads token ids from named columns, as data sets of Hugging Face have them.

The tokens are in the column `input_ids`. The columns `attention_mask` and
`labels` are only checked, because the loss of a language model here reads
neither. Rows with padding, or with labels that are not the tokens themselves,
are refused. Other columns are not read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dilocox_jax.checks import require

IDS = "input_ids"
_MASK = "attention_mask"
_LABELS = "labels"
_READ = (IDS, _MASK, _LABELS)  # Columns that are read.
# Two things that a user can do, for error messages.
_OWN_LOSS = "pass loss=, a function of model and batch"
_JOIN = (
  f"join the rows by np.concatenate(dataset[{IDS!r}]), which is cut into "
  "sequences, or pack them to one length"
)

Columns = Mapping[str, Any]  # Columns by name, each with one entry per row.


def token_ids(batch: Columns, what: str = "a batch") -> np.ndarray:
  """Returns the tokens of rows with named columns, and checks the rows.

  Args:
    batch: Columns by name. `input_ids` may be an array [rows, tokens], lists of
      numbers, or the tokens of a single row.
    what: Words for the rows in messages, e.g. "a batch".

  Returns:
    Token ids [rows, tokens]; [tokens] for a single row.

  Raises:
    ValueError: If there is no column `input_ids`, rows differ in length, values
      are masked, a row has padding, or labels are not the tokens.
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
  """Returns the end of an error message about columns without `input_ids`.

  It names the first column that holds text, or else all columns, and says what
  the user can do.
  """
  names = ", ".join(map(str, columns)) or "no columns"
  text_columns = [
    str(name) for name, values in columns.items() if _is_text(values)
  ]
  if text_columns:
    text_column = text_columns[0]
    return (
      f"has text ({text_column}) and no {IDS}: make tokens of it, e.g. "
      f"dataset.map(lambda rows: tokenizer(rows[{text_column!r}]),"
      " batched=True), and pack them to rows of one length"
    )
  return f"has {names} and no {IDS}: {_OWN_LOSS}, that reads them"


def _is_text(values: Any) -> bool:
  """Returns whether values are a text, or a column that begins with a text."""
  if isinstance(values, str):
    return True
  if isinstance(values, np.ndarray):
    if values.dtype.kind in "US":  # Texts or bytes.
      return True
    is_of_objects = values.dtype.kind == "O" and values.size > 0
    return is_of_objects and _is_text(values.flat[0])
  return is_sequence(values) and len(values) > 0 and _is_text(values[0])


def check_not_masked(values: Any) -> None:
  """Raises ValueError if data are a numpy array with masked values.

  A model gets no mask, so it would be trained on the masked values.
  """
  is_masked = isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values)
  require(
    not is_masked,
    "data are a masked array, and a model would read what is under its mask: "
    "fill it, or leave these rows out",
  )


def as_rows(values: Any, what: str) -> np.ndarray:
  """Converts rows of numbers to one array.

  Args:
    values: An array, or lists of numbers or of arrays.
    what: Words for the rows in messages, e.g. "rows of a batch".

  Raises:
    ValueError: If the rows differ in length, or values are masked.
  """
  check_not_masked(values)
  try:
    array = np.asarray(values)
  except ValueError:  # Rows of different lengths.
    array = None
  if array is not None and array.dtype.kind != "O":
    return array
  lengths = {len(row) if hasattr(row, "__len__") else 0 for row in values}
  if len(lengths) > 1:
    raise ValueError(
      f"{what} have {min(lengths)} to {max(lengths)} tokens, and all must have "
      f"one length: {_JOIN}"
    )
  return np.stack([np.asarray(row) for row in values])


def is_sequence(data: Any) -> bool:
  """Returns whether data are like a list: with a length, and items by number.

  The result is False for mappings, texts, arrays and data sets of grain.
  """
  if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
    return False
  if isinstance(data, Mapping | str | bytes):
    return False
  is_array = hasattr(data, "dtype")
  is_of_grain = hasattr(data, "to_iter_dataset")
  return not is_array and not is_of_grain


def is_list_of_numbers(data: Any) -> bool:
  """Returns whether data are a list of numbers, or nested lists of numbers.

  Only the first item of each list is looked at. An empty list gives False.
  """
  if not isinstance(data, list | tuple) or not data:
    return False
  first = data[0]
  return isinstance(first, int | float | np.number) or is_list_of_numbers(first)


def is_sequence_of_rows(data: Any) -> bool:
  """Returns whether data are a sequence whose first item is a row.

  A row is a (nested) list of numbers, or an array with one axis.
  """
  if not is_sequence(data) or not len(data):
    return False
  return is_list_of_numbers(data[0]) or getattr(data[0], "ndim", 0) == 1


def read_by_number(data: Any) -> list[Any]:
  """Returns the items 0 to len(data) - 1 of a sequence as a list.

  `list(data)` may read until `__getitem__` raises IndexError, and a user's
  sequence may never raise it.
  """
  return [data[number] for number in range(len(data))]


def is_table(data: Any) -> bool:
  """Returns whether data are a table of pandas, Polars or PyArrow."""
  has_columns = hasattr(data, "columns") or hasattr(data, "column_names")
  return has_columns and not hasattr(data, "with_format")


class TokenTable:
  """Reads rows of tokens by their indices.

  Attributes:
    count: Number of rows.
    unread: Names of the columns that are not read.
  """

  def __init__(
    self, read: Callable[[Sequence[int]], Columns], count: int, what: str
  ):
    """Reads and checks the first row and the last row.

    Args:
      read: Function from the indices of rows to the columns of these rows.
      count: Number of rows.
      what: Words for the rows in messages, e.g. "the data set".

    Raises:
      ValueError: If `token_ids` refuses the two rows, e.g. for two lengths.
      TypeError: If there are no rows.
    """
    if not count:
      raise TypeError("there are no examples")
    self._read = read
    self._what = what
    self.count = count
    first_and_last = read([0, count - 1])
    self.unread = unread_columns(first_and_last)
    token_ids(first_and_last, what)

  def take(self, ids: np.ndarray) -> np.ndarray:
    """Returns the token ids of the rows with the given indices.

    Args:
      ids: Indices of rows, an array with any number of axes.

    Returns:
      Token ids. The axes of `ids` come first, and the last axis has the tokens.

    Raises:
      ValueError: If `token_ids` refuses the rows, e.g. for different lengths.
    """
    columns = self._read(ids.reshape(-1).tolist())
    tokens = token_ids(columns, self._what)
    return tokens.reshape(*ids.shape, *tokens.shape[1:])


def token_table(data: Any) -> TokenTable | None:
  """Returns a reader of rows of tokens, for data whose rows have named columns.

  Such data are a data set of Hugging Face with a length, or a sequence of
  mappings that are single rows. For other data the result is None.

  Raises:
    ValueError: If `token_ids` refuses the first or the last row.
    TypeError: If a data set has no rows.
  """
  if hasattr(data, "column_names") and hasattr(data, "__len__"):
    rows = data.with_format("numpy")
    return TokenTable(lambda ids: rows[ids], len(data), "the data set")
  if is_sequence(data) and len(data) and is_row(data[0]):

    def read(ids: Sequence[int]) -> Columns:
      return _columns_of([data[number] for number in ids])

    return TokenTable(read, len(data), "data")
  return None


def unread_columns(columns: Iterable[str]) -> list[str]:
  """Returns the names of the columns that this module does not read."""
  return [str(name) for name in columns if name not in _READ]


def is_row(item: Any) -> bool:
  """Returns whether an item is a mapping that holds a single row, not a batch.

  A mapping without `input_ids`, or with an empty one, counts as a row.
  """
  if not isinstance(item, Mapping):
    return False
  rows = item.get(IDS, ())
  return not len(rows) or np.ndim(rows[0]) == 0


def _columns_of(rows: Sequence[Columns]) -> Columns:
  """Converts a list of rows, which are mappings, to columns by name."""
  return {name: [row[name] for row in rows] for name in rows[0]}


def next_batch(iterator: Iterator[Any], batch_size: int) -> Any:
  """Draws the next batch of tokens from an iterator of batches or of rows.

  Args:
    iterator: Iterator of batches of token ids [B, S], or of rows [S] that are
      collected to batches. Each item is an array, a list, or a mapping with
      `input_ids`.
    batch_size: Number of rows that are collected to a batch, B.

  Returns:
    The batch [B, S]; None at the end of the iterator. Rows at the end that make
    no whole batch are dropped. An item of another kind is returned unchanged.

  Raises:
    ValueError: If `token_ids` refuses an item, or rows of a batch differ in
      length.
  """
  item = _tokens_of_item(next(iterator, None))
  if not isinstance(item, np.ndarray) or item.ndim != 1:
    return item  # A whole batch, or None at the end.
  rows = [item.copy()]  # A loader may write its next row into the same array.
  while len(rows) < batch_size:
    item = _tokens_of_item(next(iterator, None))
    if item is None:
      return None
    rows.append(item.copy())
  return as_rows(rows, f"rows of {IDS}")


def _tokens_of_item(item: Any) -> Any:
  """Returns the tokens of a mapping or of a list of numbers as an array.

  Any other item is returned unchanged.
  """
  if isinstance(item, Mapping):
    return token_ids(item)
  if is_list_of_numbers(item):
    return as_rows(item, "rows of a batch")
  return item
