"""Runs that stop early, through the real command line: words and files."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import runs
from tests.experiments.test_kill import command, has_rows

ROOT = pathlib.Path(__file__).parents[2]
NO_SAVES = "--config.checkpoint.interval_steps=1000"
DEADLINE_S = 300


def train(*arguments, path: object = ROOT):
  return subprocess.run(
    [sys.executable, "-m", "experiments.train", *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(path)},
  )


def error_of(done, code):
  """The one error line of a run that ended with a code, without traceback."""
  errors = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
  assert done.returncode == code and len(errors) == 1, done.stderr
  assert "Traceback" not in done.stderr
  return errors[0]


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory):
  """A short run, and all that it printed."""
  workdir = tmp_path_factory.mktemp("whole")
  done = train(*runs.SMALL_FLAGS, f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  return workdir, done


def test_a_run_says_what_it_trains_before_its_first_step(whole):
  lines = whole[1].stderr.splitlines()
  first = next(i for i, line in enumerate(lines) if ": step " in line)
  model, text, method = lines[first - 3 : first]
  assert "model nano" in model and "parameters" in model and "cpu" in model
  assert "data synthetic" in text and "12 inner steps" in text
  assert "diloco: H = 3, P = 1, tau = 0, codec float32" in method
  assert "step 3 of 12" in lines[first]


@pytest.mark.slow
def test_a_run_with_a_cluster_says_how_long_it_would_take(tmp_path):
  done = train(
    *runs.SMALL_FLAGS,
    f"--workdir={tmp_path}",
    "--cluster=1gbit",
    "--step_s=300",
  )
  assert done.returncode == 0, done.stderr
  assert "simulated time: 1 h, cluster " in done.stderr


@pytest.mark.parametrize(
  "number, method",
  [
    (signal.SIGTERM, "diloco"),
    pytest.param(signal.SIGTERM, "dilocox", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, "streaming_diloco", marks=pytest.mark.slow),
  ],
)
def test_a_signal_saves_at_the_next_boundary_and_loses_nothing(
  number, method, tmp_path
):
  arguments = [*command(method, tmp_path / "stopped"), NO_SAVES]
  process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
  give_up = time.monotonic() + DEADLINE_S
  while not has_rows(tmp_path / "stopped", "round", 5):
    assert process.poll() is None and time.monotonic() < give_up
    time.sleep(0.001)
  process.send_signal(number)
  errors = process.communicate(timeout=DEADLINE_S)[1]
  assert process.returncode == 128 + number, errors
  line = errors.splitlines()[-1]
  step = runs.rows(tmp_path / "stopped", "round")[-1]["step"]
  assert 50 <= step < 400
  assert f"stopped by {number.name}: saved at step {step} of 400" in line
  assert "the same command goes on" in line and "Traceback" not in errors

  done = subprocess.run(arguments, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert f"continuing at step {step} of 400" in done.stderr
  other = [x.replace("stopped", "whole") for x in arguments]
  subprocess.run(other, capture_output=True, check=True)
  assert runs.metrics_text(tmp_path / "stopped") == runs.metrics_text(
    tmp_path / "whole"
  )


def test_a_run_whose_checkpoints_are_gone_is_not_overwritten(whole, tmp_path):
  """The same without a config that could be read."""
  workdir = tmp_path / "run"
  shutil.copytree(whole[0], workdir)
  shutil.rmtree(workdir / "checkpoints")
  for config in (None, b"{"):
    if config:
      (workdir / "config.json").write_bytes(config)
    before = runs.files(workdir)
    line = error_of(train(*runs.SMALL_FLAGS, f"--workdir={workdir}"), 2)
    assert "holds a run (config.json, run.json, metrics.jsonl)" in line
    assert "its checkpoints are gone" in line
    assert "take another --workdir, or move this one away" in line
    assert runs.files(workdir) == before


@pytest.mark.slow
def test_a_loss_that_is_not_finite_before_the_first_save_claims_no_checkpoint(
  tmp_path,
):
  done = train(
    *runs.SMALL_FLAGS,
    f"--workdir={tmp_path}",
    "--config.inner.learning_rate=1e30",
    "--config.inner.clip_norm=0",
  )
  line = error_of(done, 1)
  assert "is not finite at step" in line
  assert "no checkpoint was saved yet in" in line and "kept" not in line


@pytest.mark.parametrize(
  "arguments, hint",
  [
    (
      ["--config.data.source=text_files", "--config.data.glob=nowhere/*.txt"],
      "data.glob: no file matches the glob 'nowhere/*.txt'",
    ),
    (
      ["--config.checkpoint.init_from=nowhere"],
      "checkpoint.init_from=nowhere is not a run directory",
    ),
  ],
)
def test_missing_files_are_found_before_the_run_begins(
  arguments, hint, tmp_path
):
  done = train(*arguments, f"--workdir={tmp_path / 'run'}")
  assert hint in error_of(done, 2)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("section", ["inner", "outer"])
def test_an_optimizer_that_does_not_exist_is_named(section, tmp_path):
  done = train(
    *runs.SMALL_FLAGS,
    f"--workdir={tmp_path / 'run'}",
    f"--config.{section}.optimizer=adamv",
    "--distributed",  # It is found before this process looks for others.
  )
  assert f"{section}.optimizer='adamv' is not" in error_of(done, 2)


def test_more_steps_than_before_need_a_run_of_their_own(whole):
  done = train(
    *runs.SMALL_FLAGS, f"--workdir={whole[0]}", "--config.total_steps=20"
  )
  line = error_of(done, 2)
  assert "total_steps: 12 -> 20" in line and "checkpoint.init_from" in line
