import json
import pathlib
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.pipeline.orders import PIPELINES
from dilocox_jax.plan.pipeline.timeline import Pipeline, TickTimes, timeline
from dilocox_jax.plan.pipeline.timetable import timetable
from experiments.benchmarks import pipeline as bench
from experiments.runtime.command_line import UsageError

ROOT = pathlib.Path(__file__).resolve().parents[3]


def made(name, stages=3, batches=6, chunks=2):
  return bench.pipelines([name], stages, batches, chunks)[0]


def cells_of_stages(lines, num_stages):
  """What the drawn lines say, put together from all pieces."""
  rows = [[] for _ in range(num_stages)]
  for line in lines:
    if match := re.match(r"stage (\d+) +(.*)", line.plain):
      rows[int(match[1])] += match[2].split()
  return rows


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("columns", [20, 80, 400])
def test_a_chart_shows_every_tick_and_fits_the_terminal(name, columns):
  pipeline = made(name)
  table = timetable(pipeline)
  lines = bench.chart(table, columns)
  drawn = [line for line in lines if line.plain.startswith("stage")]
  assert max(len(line.plain) for line in drawn) <= columns
  rows = cells_of_stages(lines, pipeline.num_stages)
  assert rows == bench.cells(table)
  assert {len(row) for row in rows} == {table.num_ticks}


@pytest.mark.parametrize("name", PIPELINES)
def test_cells_are_the_lists_with_dots_between(name):
  pipeline = made(name)
  for row, order in zip(
    bench.cells(timetable(pipeline)), pipeline.orders, strict=True
  ):
    assert [cell for cell in row if cell != "."] == [
      tick.direction[0].upper() + str(tick.micro_batch) + "'" * tick.chunk
      for tick in order
    ]


@given(st.integers(10, 120), st.sampled_from(PIPELINES))
def test_a_chart_in_pieces_says_when_it_would_be_in_one(columns, name):
  table = timetable(made(name))
  lines = bench.chart(table, columns)
  in_pieces = len(lines) > table.num_stages
  hint = re.search(r"in one piece: (\d+) columns", lines[-1].plain)
  assert bool(hint) == in_pieces
  if hint:
    needed = int(hint[1])
    assert len(bench.chart(table, needed)) == table.num_stages
    assert len(bench.chart(table, needed - 1)) > table.num_stages


def test_counts_are_those_of_the_plan(tmp_path, capsys):
  record = bench.run_schedules(tmp_path, PIPELINES, 3, 6, 2)
  assert json.loads((tmp_path / "bench_pipeline.json").read_text()) == record
  times = TickTimes(1, 2)
  for name, row in record["schedules"].items():
    pipeline = made(name)
    table, run = timetable(pipeline), timeline(pipeline, times)
    assert row["ticks"] == table.num_ticks
    assert row["idle_ticks"] == table.idle_ticks
    assert row["idle_fraction"] == run.bubble_fraction
    assert row["step_forwards"] == run.step_s
    assert row["lockstep_step_forwards"] == table.lockstep_step_s(times)
    assert row["saved_slots"] == table.num_saved_slots
  peaks = {
    name: row["peak_activations"] for name, row in record["schedules"].items()
  }
  assert peaks["1f1b"] == [3, 2, 1] and peaks["interleaved"][-1] == 2
  shown = capsys.readouterr().out
  assert all(name in shown for name in PIPELINES) and "F5'" in shown
  assert (tmp_path / "bench_pipeline.png").stat().st_size


def test_schedules_are_drawn_once_each_and_chunked_only_if_interleaved():
  found = bench.pipelines(["1f1b", "interleaved", "1f1b"], 2, 4, 3)
  assert found == [Pipeline("1f1b", 2, 4), Pipeline("interleaved", 2, 4, 3)]


def test_a_schedule_that_cannot_be_names_those_that_can():
  message = "multiple of num_stages=4 for interleaved; or take --schedule=1f1b$"
  with pytest.raises(UsageError, match=message):
    bench.pipelines(["1f1b", "interleaved"], 4, 6, 2)
  with pytest.raises(UsageError, match="for interleaved$"):
    bench.pipelines(["interleaved"], 4, 6, 2)


def test_the_bench_runs_from_the_command_line_without_jax(tmp_path):
  script = (
    "import sys; from experiments import bench;"
    "from experiments.runtime import command_line;"
    "sys.argv = ['bench', '--bench=pipeline', '--stages=2', '--chunks=3',"
    f" '--micro_batches=2', '--schedule=interleaved', '--workdir={tmp_path}'];"
    "command_line.main(bench.main, bench.define_flags);"
    "assert 'jax' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
  record = json.loads((tmp_path / "bench_pipeline.json").read_text())
  assert list(record["schedules"]) == ["interleaved"]
  assert record["num_stages"] == record["num_micro_batches"] == 2
  table = timetable(Pipeline("interleaved", 2, 2, 3))
  assert record["schedules"]["interleaved"]["ticks"] == table.num_ticks
