import contextlib
import json
import math
import os
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.metrics.lines import (
  JsonLines,
  RecordError,
  read_rows,
  write_atomically,
  write_json,
)

TORN = b'{"step": 4, "loss": 2.1'


def _file(tmp_path, num_rows=5):
  rows = JsonLines(tmp_path / "metrics.jsonl")
  for step in range(num_rows):
    rows.append({"step": step, "loss": 1 / (step + 3)})
  return rows


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_floats_read_back_bit_equal(tmp_path_factory, values):
  rows = JsonLines(tmp_path_factory.mktemp("run") / "rows.jsonl")
  rows.append({"step": 0, "values": values})
  (row,) = read_rows(rows.path)
  assert np.array(row["values"]).tobytes() == np.array(values).tobytes()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_numpy_float32_reads_back_bit_equal(tmp_path_factory, value):
  rows = JsonLines(tmp_path_factory.mktemp("run") / "rows.jsonl")
  rows.append({"step": np.int64(7), "value": np.float32(value)})
  (row,) = read_rows(rows.path)
  assert row["step"] == 7
  assert np.float32(row["value"]).tobytes() == np.float32(value).tobytes()


def test_keys_are_sorted_so_equal_rows_have_equal_bytes(tmp_path):
  rows = JsonLines(tmp_path / "rows.jsonl")
  rows.append({"step": 1, "loss": 2.0})
  rows.append({"loss": 2.0, "step": 1})
  first, second = rows.path.read_bytes().splitlines()
  assert first == second == b'{"loss": 2.0, "step": 1}'


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("-inf")])
def test_a_value_that_is_not_finite_is_null_and_the_file_stays_json(
  tmp_path, value
):
  rows = JsonLines(tmp_path / "rows.jsonl")
  rows.append({"step": 1, "loss": value, "each": np.array([1.0, value])})

  def refuse(name):
    raise AssertionError(f"{name} is not JSON")

  text = rows.path.read_text()
  assert json.loads(text, parse_constant=refuse) == {
    "step": 1,
    "loss": None,
    "each": [1.0, None],
  }


@pytest.mark.parametrize("step", [-1, 0, 2, 4, 9])
def test_opening_keeps_the_bytes_of_the_rows_up_to_the_step(tmp_path, step):
  rows = _file(tmp_path)
  lines = rows.path.read_bytes().splitlines(keepends=True)
  JsonLines(rows.path, step)
  assert rows.path.read_bytes() == b"".join(lines[: step + 1])


def test_opening_cuts_a_torn_last_line_even_of_an_early_step(tmp_path):
  rows = _file(tmp_path, num_rows=4)
  whole = rows.path.read_bytes()
  rows.path.write_bytes(whole + TORN)
  JsonLines(rows.path, 9)
  assert rows.path.read_bytes() == whole


def test_opening_cuts_the_final_row_whatever_its_step(tmp_path):
  rows = _file(tmp_path)
  whole = rows.path.read_bytes()
  rows.append({"kind": "final", "step": 4})
  JsonLines(rows.path, 4)
  assert rows.path.read_bytes() == whole


def test_opening_finds_late_rows_between_earlier_ones(tmp_path):
  rows = JsonLines(tmp_path / "timing.jsonl")
  for step in (1, 3, 2, 4):
    rows.append({"step": step})
  JsonLines(rows.path, 2)
  assert [row["step"] for row in read_rows(rows.path)] == [1, 2]


def test_reading_ignores_a_torn_last_line(tmp_path):
  rows = _file(tmp_path, num_rows=4)
  before = read_rows(rows.path)
  with rows.path.open("ab") as file:
    file.write(TORN)
  assert read_rows(rows.path) == before and len(before) == 4


def test_appending_after_a_torn_line_starts_a_line_of_its_own(tmp_path):
  rows = _file(tmp_path, num_rows=4)
  with rows.path.open("ab") as file:
    file.write(TORN)
  JsonLines(rows.path, 3).append({"step": 4})
  assert [row["step"] for row in read_rows(rows.path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
  "line", [b'{"step', b"{}", b"[" * 10**5, b"\xff", b"3"]
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
  with pytest.raises(RecordError, match="rows.jsonl line 2"):
    read_rows(path)


def test_a_missing_file_has_no_rows(tmp_path):
  assert read_rows(tmp_path / "rows.jsonl") == []


@pytest.mark.parametrize("room", [0, 5], ids="{} bytes left".format)
def test_a_full_disk_is_one_line_and_takes_no_part_of_a_row(tmp_path, room):
  rows = _file(tmp_path)
  whole = rows.path.read_bytes()
  with _file_size_limit(len(whole) + room), pytest.raises(RecordError) as error:
    rows.append({"step": 5})
  assert str(rows.path) in str(error.value)
  assert "\n" not in str(error.value)
  assert rows.path.read_bytes() == whole


@contextlib.contextmanager
def _file_size_limit(size_bytes):
  """Lets the kernel stop a write in the middle, as a full disk does."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "run.json"
  write_json(path, {"seed": 1})

  def full(descriptor):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(RecordError, match="run.json: No space left on device"):
    write_json(path, {"seed": 2})
  assert json.loads(path.read_text()) == {"seed": 1}


def test_an_atomic_write_leaves_no_other_file_behind(tmp_path):
  write_atomically(tmp_path / "a.csv", "x\n")
  assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_a_file_name_that_is_not_utf_8_can_be_written_about(tmp_path):
  write_atomically(tmp_path / "page", "caf\udce9, café")
  assert (tmp_path / "page").read_text("utf-8") == "caf\\udce9, café"
