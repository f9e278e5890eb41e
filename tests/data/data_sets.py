"""A data set that answers as those of Hugging Face do, without their library.

What is copied was seen in `datasets` 5.2: an example by its number, columns by
a slice or a list of numbers, a column by its name, arrays after
`with_format("numpy")`, where rows of different lengths are an array of objects.
"""

import numpy as np


class DataSet:
  """Columns by name, each with a value a row."""

  def __init__(self, columns, is_numpy=False):
    self._columns = {name: list(values) for name, values in columns.items()}
    self._is_numpy = is_numpy

  @property
  def column_names(self):
    return list(self._columns)

  @property
  def features(self):
    return dict.fromkeys(self._columns)

  def __len__(self):
    return len(next(iter(self._columns.values())))

  def __iter__(self):
    return (self[number] for number in range(len(self)))

  def __getitem__(self, key):
    if isinstance(key, str):
      return self._columns[key]
    if isinstance(key, int):
      return {name: self._as(rows[key]) for name, rows in self._columns.items()}
    if isinstance(key, slice):
      key = range(*key.indices(len(self)))
    return {
      name: self._as([rows[number] for number in key])
      for name, rows in self._columns.items()
    }

  def _as(self, value):
    if not self._is_numpy:
      return value
    try:
      return np.asarray(value)
    except ValueError:  # Rows of different lengths.
      found = np.empty(len(value), object)
      found[:] = [np.asarray(row) for row in value]
      return found

  def with_format(self, kind):
    return DataSet(self._columns, is_numpy=kind == "numpy")

  def train_test_split(self, test_size):
    raise NotImplementedError(test_size)


class Streamed:
  """An iterable data set: examples, or batches, with a position to save."""

  def __init__(self, data_set, batch_size=None):
    self._data_set = data_set
    self._batch_size = batch_size
    self._next = 0
    self.column_names = data_set.column_names

  def with_format(self, kind):
    return Streamed(self._data_set.with_format(kind), self._batch_size)

  def __iter__(self):
    size = self._batch_size or 1
    while self._next + size <= len(self._data_set):
      start = self._next
      self._next = self._next + size
      is_batch = self._batch_size is not None
      key = slice(start, start + size) if is_batch else start
      yield self._data_set[key]
    self._next = 0

  def state_dict(self):
    return {"next": self._next}

  def load_state_dict(self, state):
    self._next = state["next"]
