"""Lines that survive a kill, and files that are whole or not there."""

import contextlib
import json
import math
import os
import resource
from typing import Any

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
FINITE: Any = {"allow_nan": False, "allow_infinity": False}


@pytest.fixture(name="rows")
def rows_fixture(tmp_path):
  """Rows of the steps 0 to 4."""
  rows = JsonLines(tmp_path / "metrics.jsonl")
  for step in range(5):
    rows.append({"step": step, "loss": 1 / (step + 3)})
  return rows


@given(st.lists(st.floats(**FINITE)), st.floats(width=32, **FINITE))
def test_floats_read_back_bit_equal(tmp_path_factory, values, single):
  rows = JsonLines(tmp_path_factory.mktemp("run") / "rows.jsonl")
  single = np.float32(single)
  rows.append({"step": np.int64(7), "values": values, "single": single})
  (row,) = read_rows(rows.path)
  assert row["step"] == 7
  assert np.array(row["values"]).tobytes() == np.array(values).tobytes()
  assert np.float32(row["single"]).tobytes() == single.tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("-inf")])
def test_lines_are_json_with_sorted_keys_and_null_for_no_number(
  tmp_path, value
):
  rows = JsonLines(tmp_path / "rows.jsonl")
  rows.append({"step": 1, "loss": value, "each": np.array([1.0, value])})
  expected = b'{"each": [1.0, null], "loss": null, "step": 1}\n'
  assert rows.path.read_bytes() == expected


def test_rows_that_are_a_pipe_or_a_link_are_one_line(tmp_path):
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "thesis").write_text("precious\n")
  (tmp_path / "link").symlink_to("thesis")
  assert read_rows(tmp_path / "pipe") == []
  for name in ("pipe", "link"):
    rows = JsonLines.__new__(JsonLines)
    rows.path = tmp_path / name
    with pytest.raises(RecordError, match=f"cannot write .*{name}: it is a "):
      rows.append({"step": 1})
  JsonLines(tmp_path / "pipe")
  assert (tmp_path / "thesis").read_text() == "precious\n"


@pytest.mark.parametrize("step", [-1, 0, 2, 4, 9])
@pytest.mark.parametrize("tail", [b"", TORN, b'{"kind": "final", "step": 4}\n'])
def test_opening_keeps_the_rows_up_to_the_step(rows, step, tail):
  lines = rows.path.read_bytes().splitlines(keepends=True)
  with rows.path.open("ab") as file:
    file.write(tail)
  # A torn line is none, and the closing row is always written again.
  JsonLines(rows.path, step)
  assert rows.path.read_bytes() == b"".join(lines[: step + 1])


def test_opening_finds_late_rows_between_earlier_ones(tmp_path):
  rows = JsonLines(tmp_path / "timing.jsonl")
  for step in (1, 3, 2, 4):
    rows.append({"step": step})
  JsonLines(rows.path, 2)
  assert [row["step"] for row in read_rows(rows.path)] == [1, 2]


def test_a_torn_last_line_is_neither_read_nor_gone_on_with(rows):
  before = read_rows(rows.path)
  with rows.path.open("ab") as file:
    file.write(TORN)
  assert read_rows(rows.path) == before
  JsonLines(rows.path, 4).append({"step": 5})
  assert [row["step"] for row in read_rows(rows.path)] == [*range(6)]
  assert read_rows(rows.path.with_name("missing.jsonl")) == []


@pytest.mark.parametrize(
  "line", [b'{"step', b"{}", b"[" * 10**5, b"\xff", b"3"]
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
  with pytest.raises(RecordError, match="rows.jsonl line 2"):
    read_rows(path)


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_is_one_line_and_takes_no_part_of_a_row(rows, room):
  whole = rows.path.read_bytes()
  with _file_size_limit(len(whole) + room), pytest.raises(RecordError) as error:
    rows.append({"step": 5})
  text = str(error.value)
  assert str(rows.path) in text and "\n" not in text
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


def test_an_atomic_write_leaves_the_old_file_or_the_new_one(
  tmp_path, monkeypatch
):
  path = tmp_path / "run.json"
  write_json(path, {"seed": 1})
  # A file name that is not UTF-8 can be written about.
  write_atomically(tmp_path / "page", "caf\udce9, café")
  assert (tmp_path / "page").read_text("utf-8") == "caf\\udce9, café"

  def full(descriptor):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(RecordError, match="run.json: No space left on device"):
    write_json(path, {"seed": 2})
  assert json.loads(path.read_text()) == {"seed": 1}
  assert {each.name for each in tmp_path.iterdir()} == {"page", "run.json"}
