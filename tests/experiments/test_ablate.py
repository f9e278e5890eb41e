"""The binary that ablates: what it runs, keeps, reports and refuses."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import runs

CONFIG = """
from ml_collections import config_dict

from experiments.configs import diloco


def get_config():
  config = config_dict.ConfigDict()
  config.base = base = diloco.get_config()
  base.total_steps = 12
  base.data.source = "synthetic"
  base.data.batch_size = 2
  base.data.sequence_length = 16
  base.model.preset = "nano"
  base.model.scan_unroll = 1
  base.inner.warmup_steps = 2
  base.sync.sync_interval = 3
  base.evaluation.num_sequences = 4
  base.checkpoint.interval_steps = 3
  config.runs = {runs}
  config.lock()
  return config
"""
PLAIN = {"name": "plain"}
HALF = {"name": "half", "codec.name": "float16"}
LOST = {"name": "lost", "checkpoint.init_from": "nowhere"}
DEADLINE_S = 120


def command(workdir, settings, *arguments):
  config = workdir.parent / f"{len(settings)}.py"
  config.write_text(CONFIG.replace("{runs}", repr(settings)))
  return [
    *(sys.executable, "-m", "experiments.ablate", f"--config={config}"),
    *(f"--workdir={workdir}", *arguments),
  ]


def ablate(workdir, settings, *arguments):
  return subprocess.run(
    command(workdir, settings, *arguments),
    capture_output=True,
    text=True,
    check=False,
  )


def finals(workdir):
  """The bytes of what each run measured, by its directory."""
  return {
    path.parent.name: path.read_bytes()
    for path in (workdir / "runs").glob("*/metrics.jsonl")
  }


def assert_one_line(done, code, hint):
  assert done.returncode == code, done.stderr
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ") and hint in line


@pytest.mark.slow
def test_runs_have_the_parts_that_the_config_file_registers(tmp_path):
  file, workdir = tmp_path / "own.py", tmp_path / "out"
  registers = "from tests.extensions import ternary\nternary.register()\n"
  own = [{"name": "own", "codec.name": "ternary"}]
  file.write_text(registers + CONFIG.replace("{runs}", repr(own)))
  done = ablate(workdir, own, f"--config={file}")
  assert done.returncode == 0, done.stderr
  (config,) = workdir.glob("runs/*/config.json")
  assert json.loads(config.read_text())["codec"]["name"] == "ternary"


@pytest.mark.slow
def test_a_failed_run_is_reported_and_a_finished_one_is_kept(tmp_path):
  workdir = tmp_path / "ablation"
  done = ablate(workdir, [LOST, PLAIN])
  assert_one_line(done, 1, "1 of 2 runs failed")
  for text in (done.stdout, (workdir / "report.md").read_text()):
    assert "init_from=nowhere is not a run directory" in text
  kept = finals(workdir)
  (plain,) = (name for name in kept if name.startswith("plain"))
  log = (workdir / "logs" / f"{plain}.log").read_text()

  done = ablate(workdir, [PLAIN, HALF, PLAIN | {"name": "again"}])
  assert done.returncode == 0, done.stderr
  assert "ablation: 2 runs, 1 to do" in done.stdout
  assert finals(workdir)[plain] == kept[plain]
  assert (workdir / "logs" / f"{plain}.log").read_text() == log
  document = json.loads((workdir / "ablation.json").read_text())
  rows = {row["run"]: row for row in document["runs"]}
  assert set(rows) == {"plain", "half"} and not document["failed"]
  ratio = rows["plain"]["total_sent_bytes"] / rows["half"]["total_sent_bytes"]
  assert ratio == pytest.approx(rows["half"]["times_fewer_bytes"], rel=1e-6)
  (final,) = runs.rows(workdir / "runs" / plain, "final")
  assert rows["plain"]["validation_loss"] == final["outer_loss"]
  record = (workdir / "runs" / plain / "run.json").read_text()
  assert "experiments.train --config.total_steps=12" in record


@pytest.mark.parametrize(
  "settings, arguments, hint",
  [
    ([PLAIN, {"codec.nam": "int"}], (), "did you mean 'name'?"),
    ([PLAIN, {"codec.bits": 5}], (), "run 'bits=5': codec.bits=5"),
    ([{"inner.optimizer": "adamm"}], (), "inner.optimizer='adamm'"),
    ([{"data.source": "text_files", "data.glob": "no/*"}], (), "no/*"),
    ([PLAIN], ("--config.base.total_stepz=3",), "did you mean 'total_steps'?"),
    ([PLAIN], ("--config.bass.total_steps=3",), "did you mean 'base'?"),
    ([PLAIN], ("--processes=0",), "processes"),
    ([], (), "nothing to run"),
  ],
)
def test_a_mistake_is_answered_with_one_line_before_anything_runs(
  settings, arguments, hint, tmp_path
):
  workdir = tmp_path / "ablation"
  assert_one_line(ablate(workdir, settings, *arguments), 2, hint)
  assert not workdir.exists()


def start_and_stop(command, is_moment):
  """Starts an ablation and ends it, children too, when a moment has come."""
  process = subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )
  give_up = time.monotonic() + DEADLINE_S
  while not is_moment():
    assert process.poll() is None, "the ablation ended before the moment came"
    assert time.monotonic() < give_up, "the moment never came"
    time.sleep(0.01)
  os.kill(process.pid, signal.SIGTERM)
  output, _ = process.communicate()
  assert process.returncode == 130 and "the same command goes on" in output


@pytest.mark.slow
def test_an_interrupted_ablation_continues_to_the_same_results(tmp_path):
  workdir, whole = tmp_path / "stopped", tmp_path / "whole"
  arguments = ("--config.base.total_steps=60", "--processes=2")
  settings = [PLAIN, HALF]

  def has_saved():
    found = list((workdir / "runs").glob("plain*/checkpoints/[0-9]*"))
    return len(found) > 1

  start_and_stop(command(workdir, settings, *arguments), has_saved)
  for at in (workdir, whole):
    done = ablate(at, settings, *arguments)
    assert done.returncode == 0, done.stderr
  assert finals(workdir) == finals(whole)
  (log,) = (workdir / "logs").glob("plain*")
  assert "continuing at step" in log.read_text()
