"""Rows with names: their tokens, and what is refused in one line."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

from dilocox_jax.data.feeds import as_feed
from tests.data.data_sets import DataSet, Streamed

ROWS = 40
LENGTH = 9
IDS = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 23
ONES = np.ones_like(IDS)
PACKED = DataSet({"input_ids": IDS.tolist()})
TOKENIZED = DataSet(
  {
    "input_ids": IDS.tolist(),
    "attention_mask": ONES.tolist(),
    "labels": IDS.tolist(),
    "text": ["words"] * ROWS,
  }
)


class Sequence:
  """A data set of PyTorch's kind: a length, and an example by its number."""

  def __len__(self):
    return ROWS

  def __getitem__(self, number):
    return {"input_ids": IDS[number]}


class Endless:
  """Rows by their numbers, which never end when they are iterated."""

  def __len__(self):
    return ROWS

  def __getitem__(self, number):
    return IDS[number % ROWS]


WITH_RANDOM_ACCESS = {
  "packed": PACKED,
  "formatted": PACKED.with_format("numpy"),
  "tokenized": TOKENIZED,
  "columns of arrays": {"input_ids": IDS, "labels": IDS},
  "columns of lists": {"input_ids": IDS.tolist()},
  "list of examples": [{"input_ids": row} for row in IDS.tolist()],
  "sequence of examples": Sequence(),
  "list of rows": IDS.tolist(),
  "list of arrays": list(IDS),
  "sequence of arrays": Endless(),
  "an array without a mask": np.ma.masked_array(IDS),
}


def batches(feed):
  """The first batches of two replicas, and what is held out."""
  (held,) = feed.held_out(4, 8)[:1]
  return feed.streams(2, 4, 0).take(3), held


@pytest.mark.parametrize("kind", WITH_RANDOM_ACCESS)
def test_rows_with_names_are_read_as_their_tokens(kind):
  data = WITH_RANDOM_ACCESS[kind]
  feed: Any = as_feed((data, data), reads_tokens=True)
  expected = batches(as_feed((IDS, IDS), reads_tokens=True))
  for found, wanted in zip(batches(feed), expected, strict=True):
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.int32
  assert feed.description.startswith("40 rows of 9 tokens")
  assert ("not read: text" in feed.description) == (data is TOKENIZED)


def test_splits_of_a_dictionary_are_a_pair():
  expected = batches(as_feed((PACKED, TOKENIZED), reads_tokens=True))
  for name in ("validation", "test"):
    splits = {"train": PACKED, name: TOKENIZED, "other": PACKED}
    found = batches(as_feed(splits, reads_tokens=True))
    np.testing.assert_array_equal(found[1], expected[1])
  without: Any = {"train": PACKED}
  for data in (PACKED, without):
    with pytest.raises(TypeError, match="train_test_split") as raised:
      as_feed(data, reads_tokens=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("form", ["batches", "rows", "loader", "lists"])
def test_an_iterable_of_batches_or_of_rows_is_read_as_its_tokens(form):
  forms = {
    "batches": Streamed(TOKENIZED, batch_size=4),
    "rows": Streamed(TOKENIZED),
    "loader": [{"input_ids": rows} for rows in IDS.reshape(-1, 4, LENGTH)],
    "lists": iter(IDS.tolist()),
  }
  feed: Any = as_feed((forms[form], PACKED), reads_tokens=True, batch_size=4)
  found = feed.streams(2, 4, 0).take(3)
  expected = IDS[:24].reshape(3, 2, 4, LENGTH).swapaxes(0, 1)
  np.testing.assert_array_equal(found, expected)
  (held,) = feed.held_out(4, 4)
  assert held.shape == (1, 4, LENGTH)


def test_rows_of_an_iterable_go_on_from_its_state():
  def streams():
    feed: Any = as_feed((Streamed(PACKED), PACKED), True, 4)
    return feed.streams(2, 4, 0)

  first = streams()
  first.take(2)
  saved = json.loads(json.dumps(first.get_state()))
  again = streams()
  again.set_state(saved)
  np.testing.assert_array_equal(again.take(2), first.take(2))


def test_a_function_may_return_columns():
  def batch(replica, step):
    return {"input_ids": IDS[4 * step :][:4] + replica}

  feed: Any = as_feed(batch, reads_tokens=True)
  feed.held_out(4, 4)
  found = feed.streams(2, 4, 0).take(2)
  np.testing.assert_array_equal(found[1, 0], IDS[4:8] + 1)


RAGGED = [row[: 3 + n % 5] for n, row in enumerate(IDS.tolist())]
PADDED = ONES.copy()
PADDED[:, -2:] = 0
MISTAKES = {
  "ragged": ({"input_ids": RAGGED}, "3 to 7 tokens, and all must have one"),
  "a shorter last row": (
    {"input_ids": [*IDS.tolist()[:-1], [1, 2]]},
    "2 to 9 tokens, .* np.concatenate",
  ),
  "text": ({"text": ["words"] * ROWS}, r"has text .* tokenizer\(rows\['text'"),
  "others": ({"score": [1.0] * ROWS}, "has score and no input_ids: pass loss="),
  "padding": (
    {"input_ids": IDS.tolist(), "attention_mask": PADDED.tolist()},
    "has padding .* join the rows by .* or pass loss=",
  ),
  "labels": (
    {"input_ids": IDS.tolist(), "labels": (IDS + 1).tolist()},
    "labels that are not its input_ids: pass loss=",
  ),
  "nothing": ({"input_ids": []}, "there are no examples"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_rows_that_cannot_be_trained_on_are_refused_in_one_line(kind):
  columns, message = MISTAKES[kind]
  data_set = DataSet(columns)
  for data in (
    (data_set, data_set),
    (data_set.with_format("numpy"), PACKED),
    (PACKED, data_set),
  ):
    with pytest.raises((TypeError, ValueError), match=message) as raised:
      as_feed(data, reads_tokens=True)
    assert "\n" not in str(raised.value)


class Table:
  """Answers as a table of pandas: it has columns, and no rows by number."""

  columns = ("input_ids",)

  def __len__(self):
    return ROWS

  def __getitem__(self, name):
    return {"input_ids": IDS}[name]


def test_a_table_is_refused_in_one_line():
  for data in (Table(), (Table(), IDS), (IDS, Table())):
    for reads_tokens in (True, False):
      with pytest.raises(TypeError, match="is a table: pass a mapp") as raised:
        as_feed(data, reads_tokens)
      assert "\n" not in str(raised.value)


def test_what_is_under_a_mask_is_not_trained_on():
  masked = np.ma.masked_array(IDS, IDS == 3)

  def batch(replica, step):
    return masked

  for data in ((masked, IDS), (IDS, {"input_ids": masked}), batch):
    for reads_tokens in (True, False):
      with pytest.raises(ValueError, match="data are a masked array, and"):
        feed: Any = as_feed(data, reads_tokens)
        feed.example()


def test_sequences_are_read_by_number_for_a_loss_of_ones_own():
  """NumPy would ask an endless one for items for ever."""
  feed: Any = as_feed((Endless(), {"x": Endless()}))
  np.testing.assert_array_equal(feed.train.in_memory, IDS)
  np.testing.assert_array_equal(feed.validation.in_memory["x"], IDS)
  with pytest.raises(TypeError, match="items of different shapes or kinds"):
    as_feed((Unlike(), Unlike()))


class Unlike(Endless):
  """Pairs of a row and a number."""

  def __getitem__(self, number):
    return IDS[number % ROWS], 1.5


def test_a_row_that_differs_is_found_when_it_is_drawn():
  rows = IDS.tolist()
  rows[17] = rows[17][:4]
  feed: Any = as_feed((DataSet({"input_ids": rows}), PACKED), True)
  with pytest.raises(ValueError, match="rows of input_ids have 4 to 9 tokens"):
    feed.streams(1, 4, 0).take(10)


def test_with_a_loss_of_ones_own_columns_stay_as_they_are():
  counted = ({"input_ids": np.full((2, 3), n)} for n in itertools.count())
  for data in ((PACKED, {"input_ids": IDS}), counted):
    feed: Any = as_feed(data)
    assert feed.example().keys() == {"input_ids"}
