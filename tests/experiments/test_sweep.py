"""Sweeps: the program, the lines of finished runs, and the processes."""

import dataclasses
import math
import os
import sys
import textwrap
import time

import pandas
import pytest

from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.metrics.work_directory import RefusedError
from experiments.runtime import process_group
from experiments.runtime.command_line import UsageError
from experiments.sweeps import columns, page, runs, training
from experiments.sweeps import pool as pool_module
from experiments.sweeps.finished import Rows
from experiments.sweeps.pool import Job, Pool
from experiments.sweeps.rows import EvaluationRow, RunRow, run_id
from experiments.sweeps.tables import (
  COMMITTED,
  read_evaluations,
  read_runs,
  write_tables,
)
from tests import damage
from tests.experiments.programs import run

CONFIG = """
from ml_collections import config_dict
from experiments.configs import default

def get_config():
  base = default.get_config()
  base.total_steps = 6
  base.data.source, base.data.batch_size = "synthetic", 1
  base.data.sequence_length, base.model.preset = 8, "nano"
  base.model.scan_unroll, base.evaluation.num_sequences = 1, 2
  base.evaluation.interval_steps = 3
  return config_dict.ConfigDict({
    "base": base,
    "grid": config_dict.ConfigDict(),
    "seeds": (0,),
    "runs": [
      {"name": "allreduce", "sync.method": "allreduce"},
      {"name": "diloco", "sync.method": "diloco", "sync.sync_interval": 3},
      RUN
    ],
    "baseline": "allreduce",
    "clocks": [{"name": "1gbit", "cluster": "1gbit", "step_s": 0.03}],
  })
"""


def config(tmp_path, more=""):
  path = tmp_path / "mine.py"
  path.write_text(textwrap.dedent(CONFIG).replace("RUN", more))
  return f"--config={path}"


@pytest.mark.slow
def test_a_sweep_keeps_what_is_done_and_trains_the_rest(tmp_path):
  out = tmp_path / "out"
  some = (config(tmp_path), f"--workdir={out}")
  parts = tmp_path / "parts.py"
  parts.write_text(f"import os\nos.mkdir(f'{tmp_path}/by {{os.getpid()}}')")
  done = run("sweep", *some, "--only=diloco", f"--parts={parts}")
  assert done.returncode == 0, done.stderr
  assert len([*tmp_path.glob("by *")]) == 2  # This process and the run's.
  assert "run 1 of 1, diloco, seed 0: loss" in done.stdout
  assert "allreduce (0 of 1 seeds)" in done.stdout
  # A run that diverges is a result, one that fails is tried again.
  more = '{"name": "wild", "inner.learning_rate": 1e38, "inner.clip_norm": 0.0}'
  done = run("sweep", config(tmp_path, more), f"--workdir={out}")
  assert done.returncode == 0, done.stderr
  assert "3 runs, 2 to do" in done.stdout and "wild, seed 0: div" in done.stdout
  rows = pandas.read_csv(out / "runs.csv").set_index("setting")
  assert set(rows.index) == {"allreduce", "diloco", "wild"}
  assert rows["failure"]["wild"] and math.isnan(rows["loss"]["wild"])
  expected = rows["loss"]["diloco"] / rows["loss"]["allreduce"] - 1
  assert rows["gap"]["diloco"] == pytest.approx(expected)
  assert rows["gap"].notna().sum() == 1
  page = (out / "report.md").read_text()
  assert "| diloco |" in page and "Time on the clock '1gbit'" in page
  assert not list(out.glob("runs/*/checkpoints"))
  again = run("sweep", config(tmp_path, more), f"--workdir={out}")
  assert "3 runs, 0 to do" in again.stdout


@pytest.mark.parametrize(
  ("more", "code", "words"),
  [
    ("", 75, "--max_minutes=0 are over"),
    (
      '{"name": "x", "checkpoint.init_from": "nowhere"}',
      1,
      "runs failed, first x",
    ),
  ],
)
def test_what_did_not_end_is_said_and_the_page_is_written(
  tmp_path, more, code, words
):
  out = tmp_path / "out"
  limit = ["--max_minutes=0"] if code == 75 else ["--only=x"]
  done = run("sweep", config(tmp_path, more), f"--workdir={out}", *limit)
  assert done.returncode == code and words in done.stderr
  assert (out / "report.md").exists()


# Lines of finished runs.

(RUN,) = runs.runs_of({"base": {"total_steps": 60}, "runs": [{"name": "a"}]})


def line_of(run, corpus="text00", **changes):
  """A line of a run, on a text."""
  line = RunRow(
    study="mine",
    run=run_id("mine", run.digest, corpus),
    setting=run.name,
    config=columns.cells_of(run),
    parameters=857_088,
    tokens=600,
    sent_bytes=100,
    loss=1.5,
    judge_loss=2.0,
    loss_newest=1.6,
    judge_loss_newest=2.1,
    replica_mean_loss=1.5,
    best_loss=1.4,
    baseline="",
    seconds=9.0,
    failure="",
    corpus=corpus,
    platform="cpu",
    python="3.11",
    jax="0.10",
    revision="",
    cores=1,
  )
  return dataclasses.replace(line, **changes)


LINE = line_of(RUN)  # Without NaN, which does not equal itself.
POINTS = [
  EvaluationRow(LINE.run, step, step, step, 1.5, step == 60)
  for step in (30, 60)
]


def other(name, **changes):
  """Another run, and its line."""
  (run,) = runs.runs_of(
    {"base": {"total_steps": 60}, "runs": [{"name": name} | changes]}
  )
  return run, line_of(run)


def test_what_is_added_is_read_again_by_anybody_and_has_each_point_once(
  tmp_path,
):
  path = tmp_path / "runs.csv"
  Rows(path, "mine").add(LINE, POINTS)
  path.unlink()  # Killed between the two writes.
  Rows(path, "mine").add(LINE, POINTS)
  again = Rows(path, "mine")
  assert [*again.runs.values()] == [LINE]
  assert again.evaluations(LINE) == POINTS
  table = pandas.read_csv(path)
  (line,) = table.to_dict("records")
  assert line["loss"] == 1.5 and line["sent_bytes"] == 100
  assert (line["method"], line["sync_interval"]) == ("diloco", 30)
  assert (line["num_fragments"], line["overlap_steps"]) == (1, 0)
  joined = pandas.read_csv(tmp_path / "evaluations.csv").merge(table, on="run")
  assert list(joined["step"]) == [30, 60]


def test_the_committed_files_are_what_a_sweep_would_write(tmp_path):
  """No digit is lost, and the gaps follow from the losses."""
  runs_table = read_runs(COMMITTED)
  evaluations = read_evaluations(COMMITTED)
  write_tables(tmp_path / "runs.csv", runs_table, evaluations)
  for name in ("runs.csv", "evaluations.csv"):
    committed = COMMITTED.with_name(name).read_text()
    assert (tmp_path / name).read_text() == committed, name


def test_a_file_of_several_sweeps_keeps_the_lines_of_the_others(tmp_path):
  path = tmp_path / "runs.csv"
  Rows(path, "mine").add(LINE, POINTS)
  theirs = dataclasses.replace(
    LINE, study="theirs", run=LINE.run.replace("mine", "theirs")
  )
  point = dataclasses.replace(POINTS[0], run=theirs.run)
  Rows(path, "theirs").add(theirs, [point])
  Rows(path, "mine").add(LINE, POINTS)
  assert [*Rows(path, "mine").runs.values()] == [LINE]
  again = Rows(path, "theirs")
  assert [*again.runs.values()] == [theirs]
  assert again.evaluations(theirs) == [point]


def test_a_run_has_its_gap_to_the_baseline_of_its_seed(tmp_path):
  path = tmp_path / "runs.csv"
  rows = Rows(path, "mine")
  for seed, judge_loss in ((0, 2.0), (1, 2.5), (2, 2.0)):
    run, line = other("base", seed=seed)
    rows.add(dataclasses.replace(line, judge_loss=judge_loss), [])
    run, line = other("own", seed=seed, **{"sync.sync_interval": 6})
    changes = {"baseline": "base", "tokens": 600 if seed < 2 else 900}
    rows.add(dataclasses.replace(line, judge_loss=3.0, **changes), [])
  gaps = pandas.read_csv(path).set_index(["setting", "seed"])["gap"]
  assert gaps["own", 0] == pytest.approx(0.5)
  assert gaps["own", 1] == pytest.approx(0.2)
  # After other numbers of tokens losses do not compare.
  assert math.isnan(gaps["own", 2]) and gaps["base"].isna().all()


@pytest.mark.parametrize(
  ("sweep", "loss"), [({}, 1.5), ({"judged": True}, 1.6)]
)
def test_only_a_sweep_of_results_shows_losses_of_the_text_that_judges(
  sweep, loss, tmp_path
):
  found = [dataclasses.replace(LINE, judge_loss=1.6)]
  rows = Rows(tmp_path / "runs.csv", "mine")
  frame = page.frame(sweep, [RUN], found, rows, {}, {"a": {}})
  assert [seed_run.loss for seed_run in frame.settings[0].seed_runs] == [loss]


@pytest.mark.parametrize(
  "field, message",
  [
    ("rows=3", "rows=3 must be of type str"),
    ("rows='docs/results/run.csv'", "docs/results/run.csv is not a file"),
    ("target_loss='low'", "target_loss='low' must be of type float"),
  ],
)
def test_a_wrong_field_is_one_line_before_anything_runs(
  field, message, tmp_path
):
  path = tmp_path / "mine.py"
  path.write_text(
    "from ml_collections import config_dict\n"
    "def get_config():\n"
    f"  return config_dict.ConfigDict(dict(runs=[dict(name='a')], {field}))\n"
  )
  out = tmp_path / "out"
  done = run("sweep", f"--config={path}", f"--workdir={out}", "--report_only")
  assert done.returncode == 2 and message in done.one_line
  assert not out.exists()


def test_a_fifo_in_place_of_a_table_is_refused(tmp_path):
  os.mkfifo(tmp_path / "runs.csv")
  with pytest.raises(RecordError, match="runs.csv has to be a file"):
    read_runs(tmp_path / "runs.csv")


def test_a_sweep_begins_with_committed_rows_and_changes_none(tmp_path):
  start = tmp_path / "start.csv"
  path = tmp_path / "new" / "runs.csv"
  Rows(start, "mine").add(LINE, POINTS)
  before = start.read_bytes()
  rows = Rows(path, "mine", start)
  assert rows.source == start
  (found,) = rows.on_one_text([RUN])
  assert found and found is rows.row(RUN, "text00") and found.loss == LINE.loss
  rows.add(line_of(RUN, corpus="other"), [])
  assert start.read_bytes() == before
  assert len(Rows(path, "mine", start).runs) == 2
  assert Rows(path, "mine").evaluations(LINE) == POINTS


def test_a_page_shows_lines_on_one_text_alone(tmp_path):
  """Losses on two texts do not compare."""
  rows = Rows(tmp_path / "runs.csv", "mine")
  second, of_second = other("b", **{"inner.learning_rate": 0.5})
  third, _ = other("c", **{"inner.learning_rate": 0.25})
  rows.add(line_of(RUN, corpus="old", loss=9.0), [])
  rows.add(line_of(third, corpus="old"), [])
  rows.add(LINE, [])
  rows.add(of_second, [])
  listed = [RUN, second, third]
  found = rows.on_one_text(listed)
  assert found == [LINE, of_second, None]
  assert rows.num_others(listed, found) == 2
  text = page.intro(listed, found, rows)
  assert "2 of 3 runs" in text and "`text00`. 2 lines are on another" in text
  assert rows.row(third, "text00") is None and rows.row(third, "old")


def test_a_text_that_is_drawn_is_another_one_for_each_seed(tmp_path):
  rows = Rows(tmp_path / "runs.csv", "mine")
  drawn_runs = [
    other("a", **{"data.source": "synthetic", "seed": seed})[0]
    for seed in range(3)
  ]
  lines = [
    line_of(run, corpus=f"{run.seed} drawn", loss=run.seed)
    for run in drawn_runs
  ]
  for line in lines:
    rows.add(line, [])
  assert rows.on_one_text(drawn_runs) == lines


def test_a_run_that_is_trained_again_has_the_points_of_the_last_time(tmp_path):
  path = tmp_path / "runs.csv"
  Rows(path, "mine").add(LINE, POINTS)
  path.unlink()  # Its evaluations are left, and belong to no line.
  assert not Rows(path, "mine").evaluations(LINE)
  again = [dataclasses.replace(point, loss=2.5) for point in POINTS]
  Rows(path, "mine").add(LINE, again)
  assert Rows(path, "mine").evaluations(LINE) == again


@pytest.mark.parametrize("name", ['a"b,c', " a", "nan", "数据", "1.0"])
def test_any_name_comes_back_from_a_table(tmp_path, name):
  line = dataclasses.replace(LINE, setting=name)
  Rows(tmp_path / "runs.csv", "mine").add(line, POINTS)
  (found,) = Rows(tmp_path / "runs.csv", "mine").runs.values()
  assert found == line


@pytest.mark.parametrize("name", ["a\rb", "a\nb", "\u2028"])
def test_a_name_of_several_lines_is_refused(name):
  with pytest.raises(ValueError, match="must be one line of plain text"):
    other(name)


@pytest.mark.parametrize(
  "changes",
  [
    {"sync.method": "streaming_diloco"},
    {"sync.method": "overlap_loco", "inner.momentum": 0.9},
    {"sync.method": "delayed", "sync.rule": "reset"},
    {"model.num_layers": 3, "model.qk_norm": True},
  ],
)
def test_the_columns_of_a_line_make_its_config_again(tmp_path, changes):
  run, line = other("a", **changes)
  path = tmp_path / "runs.csv"
  Rows(path, "mine").add(LINE, POINTS)  # It has other columns.
  Rows(path, "mine").add(line, POINTS)
  _, again = runs.runs_of({}, Rows(path, "mine").settings)
  assert again.config == run.config and again.digest == run.digest


def test_a_damaged_table_is_one_line_or_has_whole_rows(tmp_path):
  path = tmp_path / "runs.csv"
  rows = Rows(path, "mine")
  rows.add(LINE, POINTS)
  rows.add(other("b", **{"model.num_layers": 3})[1], POINTS)

  def read():
    try:
      found = Rows(path, "mine")
      return found.settings and [*found.runs.values()]
    except RecordError as error:
      raise ValueError(error) from error

  content = path.read_bytes()
  for what, damaged in damage.in_bytes(content, flips=150):
    path.write_bytes(damaged)
    for row in damage.outcome(what, read) or []:
      assert not math.isinf(row.loss) and row.tokens >= 0, what
  for cell in ("", "nan", "1e999", "-5", "text", "9" * 5000):
    path.write_bytes(content.replace(b",600,", f",{cell},".encode()))
    damage.outcome(cell, read)
  path.write_bytes(content + content.split(b"\n")[1] + b"\n")
  with pytest.raises(RecordError, match="two lines of 'a', seed 0"):
    Rows(path, "mine")
  path.write_bytes(content[:-1])
  with pytest.raises(RecordError, match="its last line is cut"):
    Rows(path, "mine")


def test_a_table_has_each_column_once_and_no_line_has_other_lengths(tmp_path):
  path = tmp_path / "runs.csv"
  Rows(path, "mine").add(LINE, POINTS)
  header, line, _ = path.read_text().split("\n")
  for wrong, said in (
    ([header, line.rpartition(",")[0]], "its cores is empty"),
    ([header, f"{line},1"], "is no table of runs"),
    ([line], "it lacks the column"),
    ([f"{header},more", f"{line},1"], "it has a column .'more'"),
    ([f"{header},setting", f"{line},b"], "it has a column twice"),
    ([f"{header},sync.more", f"{line},b"], "more"),
  ):
    path.write_text("\n".join([*wrong, ""]))
    with pytest.raises(RecordError, match=said):
      Rows(path, "mine")


@pytest.mark.parametrize(
  "text", ["name,seed\na,0\n", "nonsense\n1\n", "\xff\xfe\n", "a" * 200_000]
)
def test_a_damaged_file_is_one_line(tmp_path, text):
  path = tmp_path / "runs.csv"
  path.write_bytes(text.encode("latin1") + b"\n")
  with pytest.raises(RecordError, match="runs.csv is no table") as error:
    Rows(path, "mine")
  assert "\n" not in str(error.value)


# Processes.


def job(folder, name, code):
  return Job(name, folder / f"{name}.log", [sys.executable, "-c", code])


@pytest.mark.parametrize(
  ("code", "output", "expected"),
  [
    (0, b"error: once, then mended\n", ""),
    (2, b"one\nerror: no text\n\n", "no text"),
    (1, b"boom\n   \n", "boom"),
    (1, b"error: \n", "error:"),
    (-9, b"", "killed by SIGKILL"),
    (-40, b"", "killed by signal 40"),
    (3, b"", "exit code 3"),
  ],
)
def test_a_process_that_failed_always_has_a_reason(code, output, expected):
  assert pool_module._reason(code, output) == expected


def ended(pool, jobs):
  reasons = {}
  pool.run(jobs, reasons.__setitem__)
  return {jobs[number].name: reason for number, reason in reasons.items()}


FAILS = "import sys; print('error: no text', file=sys.stderr); sys.exit(2)"
CODES = {
  "works": "print('fine')",
  "fails": FAILS,
  "crashes": "1 / 0",
  "dies": "import os; os.kill(os.getpid(), 9)",
}


def test_every_job_ends_and_says_in_one_line_why_it_failed(tmp_path):
  jobs = [job(tmp_path, name, code) for name, code in CODES.items()]
  assert ended(Pool(2), jobs) == {
    "works": "",
    "fails": "no text",
    "crashes": "ZeroDivisionError: division by zero",
    "dies": "killed by SIGKILL",
  }
  assert "fine" in jobs[0].log.read_text()


@pytest.mark.parametrize("name", ["logs", "runs", "run"])
def test_what_a_sweep_writes_is_not_behind_a_link(tmp_path, name, monkeypatch):
  monkeypatch.setattr(training, "corpus_digest", lambda config: "text")
  workdir = tmp_path / "sweep"
  victim = tmp_path / "victim"
  made = training.Training(workdir, Rows(workdir / "runs.csv", "mine"))
  first = made._job(RUN)
  assert first.log.parent == workdir / "logs" and first.root == workdir
  link = {"run": workdir / "runs" / first.log.stem}.get(name, workdir / name)
  link.parent.mkdir(parents=True)
  victim.mkdir()
  link.symlink_to(victim)
  with pytest.raises(RefusedError, match=f"{link.name} is a symbolic link"):
    made._job(RUN)
  if name == "logs":  # It may also come later.
    with pytest.raises(NotADirectoryError):
      ended(Pool(1), [first])
  assert not list(victim.iterdir())


def test_the_states_of_a_finished_run_are_removed_and_none_behind_a_link(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(training, "corpus_digest", lambda config: "text")
  monkeypatch.setattr(training, "load_run", lambda workdir: None)
  monkeypatch.setattr(training, "row_of", lambda *_, **__: LINE)
  monkeypatch.setattr(training, "evaluations_of", lambda *_: POINTS)
  workdir = tmp_path / "sweep"
  made = training.Training(workdir, Rows(workdir / "runs.csv", "mine"))
  states = made._directory(RUN) / "checkpoints"
  (states / "6").mkdir(parents=True)
  made._record(RUN, "", 1)
  assert states.parent.exists() and not states.exists()
  (tmp_path / "victim" / "checkpoints").mkdir(parents=True)
  states.parent.rmdir()
  states.parent.symlink_to(tmp_path / "victim")
  made._record(RUN, "", 1)
  assert (tmp_path / "victim" / "checkpoints").exists()


def test_what_runs_when_time_is_over_is_asked_to_stop(tmp_path):
  code = "import time; time.sleep(600)"
  pool = Pool(1, deadline_s=time.monotonic() + 0.5)
  started_s = time.monotonic()
  assert ended(pool, [job(tmp_path, "long", code)] * 2) == {}
  assert pool.is_late and time.monotonic() - started_s < 300


def test_an_error_of_the_caller_stops_all(tmp_path):
  def fail(number, reason):
    raise KeyboardInterrupt

  jobs = [job(tmp_path, "quick", "pass")]
  jobs.append(job(tmp_path, "long", "import time; time.sleep(600)"))
  started_s = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    Pool(2, deadline_s=math.inf).run(jobs, fail)
  assert time.monotonic() - started_s < 300


def test_processes_that_run_at_once_share_the_cores(monkeypatch):
  monkeypatch.setattr(process_group, "usable_cores", lambda: 9)
  assert Pool(2).cores == 4
  assert Pool(10).cores == 1


def test_on_slurm_srun_has_the_options_and_the_command(tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setenv("PATH", str(tmp_path))  # This machine may have Slurm.
    with pytest.raises(UsageError, match="srun"):
      Pool(1, slurm="--partition=gpu")
  srun = tmp_path / "srun"
  srun.write_text('#!/bin/sh\necho options $1 $2\nshift 2\nexec "$@"\n')
  srun.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  jobs = [job(tmp_path, name, CODES[name]) for name in ("works", "fails")]
  pool = Pool(2, slurm="--partition=gpu --gpus=1")
  assert pool.cores == 0  # The machines of Slurm are other ones.
  found = ended(pool, jobs)
  assert found == {"works": "", "fails": "no text"}
  assert jobs[0].log.read_text() == "options --partition=gpu --gpus=1\nfine\n"
  with pytest.raises(UsageError, match="--slurm: No closing quotation"):
    Pool(1, slurm="--comment='a run")
