"""Lines of finished runs: what is kept, read again and refused."""

import csv
import dataclasses
import math

import pytest

from dilocox_jax.metrics import RecordError
from experiments.sweeps import page, runs
from experiments.sweeps.rows import CurveRow, Rows, RunRow

(RUN,) = runs.runs_of({"base": {"total_steps": 60}, "runs": [{"name": "a"}]})
ROW = RunRow(
  *("a", 0, RUN.digest, "text", "{}", 60, 600, 100, 1.5, 1.5, 1.4, math.nan),
  *(9.0, "cpu", "3.11", "0.10", "", 1, ""),
)
POINTS = [CurveRow(RUN.digest, "text", n, n, n, 1.5, n == 60) for n in (30, 60)]


def test_what_is_added_is_read_again_by_anybody(tmp_path):
  path = tmp_path / "rows.csv"
  Rows(path).add(ROW, POINTS)
  again = Rows(path)
  (row,) = again.runs.values()
  assert math.isnan(row.judge_loss)
  assert dataclasses.replace(row, judge_loss=0) == dataclasses.replace(
    ROW, judge_loss=0
  )
  assert again.curve(row) == POINTS
  with path.open(newline="") as file:
    (line,) = csv.DictReader(file)
  assert float(line["loss"]) == 1.5 and int(line["sent_bytes"]) == 100


@pytest.mark.parametrize(
  ("sweep", "loss"), [({}, 1.5), ({"judged": True}, 1.6)]
)
def test_only_a_sweep_of_results_shows_losses_of_the_text_that_judges(
  sweep, loss, tmp_path
):
  found = [dataclasses.replace(ROW, judge_loss=1.6)]
  rows = Rows(tmp_path / "rows.csv")
  frame = page.frame(sweep, [RUN], found, rows, {}, {"a": {}})
  assert [trace.loss for trace in frame.settings[0].traces] == [loss]


def test_a_run_whose_points_were_written_before_its_line_has_each_once(
  tmp_path,
):
  path = tmp_path / "rows.csv"
  Rows(path).add(ROW, POINTS)
  path.unlink()  # Killed between the two writes.
  Rows(path).add(ROW, POINTS)
  assert Rows(path).curve(ROW) == POINTS


def test_a_sweep_begins_with_committed_rows_and_changes_none(tmp_path):
  start, path = tmp_path / "start.csv", tmp_path / "new" / "rows.csv"
  Rows(start).add(ROW, POINTS)
  before = start.read_bytes()
  rows = Rows(path, start)
  assert rows.source == start and rows.row(RUN) == rows.row(RUN, "text")
  rows.add(dataclasses.replace(ROW, corpus="other"), [])
  assert start.read_bytes() == before and len(Rows(path, start).runs) == 2


def test_a_line_on_another_text_counts_only_where_any_text_will_do(tmp_path):
  rows = Rows(tmp_path / "rows.csv")
  for corpus, digest in (("rare", RUN.digest), ("text", "x"), ("text", "y")):
    rows.add(dataclasses.replace(ROW, corpus=corpus, digest=digest), [])
  found = rows.row(RUN)
  assert found and found.corpus == "rare"
  assert rows.row(RUN, "text") is None
  rows.add(ROW, [])
  found = rows.row(RUN)
  assert found and found.corpus == "text"


@pytest.mark.parametrize(
  "text", ["name,seed\na,0\n", "nonsense\n1\n", "\xff\xfe\n", "a" * 200_000]
)
def test_a_damaged_file_is_one_line(tmp_path, text):
  path = tmp_path / "rows.csv"
  path.write_bytes(text.encode("latin1") + b"\n")
  with pytest.raises(RecordError, match="rows.csv is no table") as error:
    Rows(path)
  assert "\n" not in str(error.value)
