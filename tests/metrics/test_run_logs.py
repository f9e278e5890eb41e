"""Logs that get the rows of a run, and how a user asks for them."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest

import dilocox_jax as dx
from dilocox_jax.metrics import run_logs
from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.metrics.recorder import Recorder
from dilocox_jax.metrics.run_logs import (
  LogStart,
  SeveralLogs,
  as_log,
  opened,
  scalars,
)

START = LogStart(
  workdir=pathlib.Path("run"), config={"seed": 1}, resume_step=None
)


class Diary(dx.RunLog):
  """Writes down every call."""

  def __init__(self, page="first"):
    self.calls = [page]

  def open(self, start):
    self.calls.append(start)

  def write(self, row):
    self.calls.append(row)

  def close(self, error):
    self.calls.append(error)


@pytest.fixture(name="diaries")
def diaries_fixture(monkeypatch):
  """Registers the log `diary` for a test."""
  monkeypatch.setattr(run_logs, "LOGS", type(run_logs.LOGS)("log"))
  dx.register_log("diary", Diary)


def test_a_log_gets_the_rows_of_the_files(tmp_path):
  rows = []
  recorder = Recorder(tmp_path, log=as_log(rows.append))
  recorder.record_timing(step=2, event="round", wall_s=0.5)
  recorder.record_evaluation(
    step=2,
    tokens=8,
    total_sent_bytes=5,
    outer_loss=1.5,
    mean_loss=None,
    replica_loss=2.0,
  )
  written = [
    *read_rows(tmp_path / "timing.jsonl"),
    *read_rows(tmp_path / "metrics.jsonl"),
  ]
  assert rows == written
  assert [row["kind"] for row in rows] == ["timing", "evaluation"]
  assert rows[1]["mean_loss"] is None


def test_a_process_that_writes_no_files_has_no_log():
  rows = []
  recorder = Recorder(None, log=as_log(rows.append))
  recorder.record_timing(step=2, event="round", wall_s=0.5)
  assert not rows


def test_a_log_may_be_a_function_an_object_or_a_name(diaries):
  rows = []

  class Writer:
    def write(self, row):
      rows.append(row)

  for log in (rows.append, Writer()):
    as_log(log).write({"step": 1})
  assert rows == [{"step": 1}, {"step": 1}]
  diary = Diary()
  assert as_log(diary) is diary
  named: Any = as_log("diary(page=last)")
  assert named.calls == ["last"]


def test_several_logs_get_the_same_calls(diaries):
  log: Any = as_log("diary(page=one)+diary(page=two)")
  with opened(log, START):
    log.write({"step": 1})
  assert [each.calls for each in log._logs] == [
    [page, START, {"step": 1}, None] for page in ("one", "two")
  ]


def test_logs_that_are_open_are_closed_if_the_next_one_cannot_be_opened():
  error = RuntimeError("nobody has logged in")

  class Refused(Diary):
    def open(self, start):
      raise error

  logs: list[Any] = [Diary(), Diary(), Refused(), Diary()]
  with pytest.raises(RuntimeError) as caught:
    with opened(SeveralLogs(logs), START):
      raise AssertionError("the block does not begin")
  assert caught.value is error
  both = ["first", START, error]
  assert [each.calls for each in logs] == [both, both, ["first"], ["first"]]


@pytest.mark.parametrize("ends_with", [None, KeyError("of the run")])
def test_all_logs_are_closed_also_if_one_cannot_be(ends_with):
  error = RuntimeError("the disk is full")

  class Full(Diary):
    def close(self, error_of_run):
      super().close(error_of_run)
      raise error

  logs: list[Any] = [Diary(), Full(), Diary()]
  with pytest.raises(RuntimeError) as caught:
    with opened(SeveralLogs(logs), START):
      if ends_with is not None:
        raise ends_with
  assert caught.value is error
  assert [each.calls for each in logs] == [["first", START, ends_with]] * 3


def test_a_log_hears_of_the_error_that_ends_a_run():
  diary = Diary()
  error = RuntimeError("the disk is full")
  with pytest.raises(RuntimeError), opened(diary, START):
    raise error
  assert diary.calls[-1] is error


@pytest.mark.parametrize(
  ("log", "message"),
  [
    ("tensorbord", "log='tensorbord' must be one of .*tensorboard"),
    ("wandb(team=a)", "log wandb: it has no setting team .it has: project"),
    ("wandb, tensorboard", "must be written like 'tensorboard'"),
  ],
)
def test_a_wrong_name_is_one_line(log, message):
  with pytest.raises(ValueError, match=message):
    as_log(log)


def test_what_is_no_log_is_named():
  with pytest.raises(TypeError, match="log=7 must be a function of a row"):
    as_log(7)
  with pytest.raises(TypeError, match=r"log=Diary is a class: .* Diary\(\)"):
    as_log(Diary)
  with pytest.raises(ValueError, match="int must be derived from"):
    dx.register_log("number", int)


@pytest.mark.parametrize(
  ("log", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_a_missing_package_is_one_line_that_names_the_extra(
  log, package, monkeypatch
):
  monkeypatch.setitem(sys.modules, package, None)  # An import of it fails.
  message = f"log {log}: it needs the package {package}: pip install "
  with pytest.raises(ValueError, match=message) as caught:
    as_log(log)
  assert str(caught.value).endswith(f"'dilocox_jax[{log}]'")


def test_a_command_names_a_wrong_log_before_anything_starts(tmp_path):
  command = [sys.executable, "-m", "experiments.train", "--log=wandbb"]
  command.append(f"--workdir={tmp_path / 'run'}")
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.startswith("error: log='wandbb' must be one of")
  assert done.stderr.count("\n") == 1
  assert not list((tmp_path / "run").glob("*.json*"))


def test_numbers_have_names_for_curves():
  row = {
    "kind": "round",
    "step": 6,
    "phase": "rounds",
    "loss": 2.5,
    "loss_per_replica": [2.0, 3.0],
    "grad_norm": None,
    "drift": [{"fragment": 3, "step": 6, "cosine": 0.5, "observed": {"a": 1}}],
  }
  assert scalars(row) == {
    "round/loss": 2.5,
    "round/loss_per_replica/0": 2.0,
    "round/loss_per_replica/1": 3.0,
    "round/drift/fragment_3/step": 6,
    "round/drift/fragment_3/cosine": 0.5,
    "round/drift/fragment_3/observed/a": 1,
  }


def test_the_final_evaluation_is_the_last_point_of_the_curve():
  final = {"kind": "final", "step": 9, "outer_loss": 1.5, "flushed": True}
  assert scalars(final) == {"evaluation/outer_loss": 1.5}
  timing = {"kind": "timing", "step": 9, "event": "flush", "wall_s": 0.5}
  assert scalars(timing) == {"timing/flush/wall_s": 0.5}
