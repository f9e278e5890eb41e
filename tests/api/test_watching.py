"""A run that is watched from Python: its rows, its rounds and its progress."""

import logging
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.api import progress
from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.training.trainer import Trainer
from tests import runs

TOKENS = np.arange(4000) % 23
CONFIG = {
  "model": {"preset": "nano", "scan_unroll": 1},
  "sync": {"sync_interval": 2},
  "data": {"batch_size": 2, "sequence_length": 8},
  "evaluation": {"num_sequences": 2},
}


def train(workdir, **changes):
  arguments: dict[str, Any] = {
    "data": (TOKENS, TOKENS[:500]),
    "method": "diloco",
    "replicas": 2,
    "steps": 8,
    "config": CONFIG,
    "quiet": True,
  }
  return dx.train(workdir=workdir, **(arguments | changes))


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
  runs.share_programs(monkeypatch)


def test_a_log_gets_every_row_and_again_those_after_the_checkpoint(
  tmp_path, monkeypatch
):
  first_rows = []
  starts = []

  class Log(dx.RunLog):
    def open(self, start):
      starts.append(start)

    def write(self, row):
      first_rows.append(row)

  with monkeypatch.context() as patch, pytest.raises(runs.Killed):
    patch.setattr(Trainer, "_dispatch", runs.killed(6))
    train(tmp_path, log=Log())
  later_rows = []

  class LaterLog(Log):
    def write(self, row):
      later_rows.append(row)

  train(tmp_path, log=LaterLog())
  assert [start.resume_step for start in starts] == [None, 6]
  assert starts[0].workdir == tmp_path
  assert starts[0].config["sync"]["sync_interval"] == 2
  for name in ("metrics.jsonl", "timing.jsonl"):
    is_timing = name == "timing.jsonl"
    logged = [
      row
      for row in [*first_rows, *later_rows]
      if (row["kind"] == "timing") == is_timing
    ]
    assert read_rows(tmp_path / name) == logged


def test_a_function_sees_the_state_after_each_round(tmp_path):
  seen = []

  def look(finished_round):
    params = jax.device_get(finished_round.outer_params)
    steps = int(finished_round.state.step)
    seen.append((finished_round.step, finished_round.total_steps, steps))
    looked_at.append(params)

  looked_at = []
  watched = train(tmp_path / "watched", on_round=look)
  assert seen == [(step, 8, step) for step in (2, 4, 6, 8)]
  # Plain DiLoCo has nothing in flight, so the flush changes nothing.
  final = jax.device_get(watched.params)
  jax.tree.map(np.testing.assert_array_equal, looked_at[-1], final)
  unwatched = train(tmp_path / "unwatched")
  text = runs.metrics_text(unwatched.workdir)
  assert runs.metrics_text(watched.workdir) == text


def test_a_wrong_watcher_is_refused_before_anything_is_written(tmp_path):
  with pytest.raises(TypeError, match="on_round=3 must be a function of a"):
    train(tmp_path / "run", on_round=3)
  with pytest.raises(TypeError, match="log=3 must be a function of a row"):
    train(tmp_path / "run", log=3)
  with pytest.raises(ValueError, match="log='curves' must be one of"):
    train(tmp_path / "run", log="curves")
  assert not (tmp_path / "run").exists()


# Where a bar is shown.


@pytest.fixture(name="terminal")
def terminal_fixture(monkeypatch):
  """Standard error is a terminal."""
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
  monkeypatch.setenv("TERM", "xterm")
  for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
    monkeypatch.delenv(name, raising=False)


def test_a_bar_needs_a_terminal_that_moves_its_cursor(terminal, monkeypatch):
  assert progress.bar_console() is not None
  monkeypatch.setenv("TERM", "dumb")
  assert progress.bar_console() is None


def test_a_file_or_a_pipe_gets_lines(monkeypatch):
  monkeypatch.setenv("FORCE_COLOR", "1")
  monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
  assert progress.bar_console() is None


def test_a_notebook_needs_widgets_for_a_bar(monkeypatch):
  real_console = progress.Console

  def console(**arguments):
    return real_console(**arguments, force_jupyter=True)

  monkeypatch.setattr(progress, "Console", console)
  widgets = types.SimpleNamespace(find_spec=lambda name: None)
  monkeypatch.setattr(progress.importlib, "util", widgets)
  assert progress.bar_console() is None
  widgets.find_spec = lambda name: name == "ipywidgets" or None
  assert progress.bar_console() is not None


def test_the_default_handler_of_python_puts_nothing_in_front(capsys):
  """Orbax installs such a handler when it is imported."""
  root = logging.getLogger()
  handlers = root.handlers[:]
  handler = logging.StreamHandler(sys.stderr)
  handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
  root.handlers[:] = [handler]
  try:
    with progress.shown_progress():
      logging.getLogger("dilocox_jax.training").info("a line")
    assert capsys.readouterr().err == "a line\n"
    assert logging.getLogger("dilocox_jax").propagate
  finally:
    root.handlers[:] = handlers
