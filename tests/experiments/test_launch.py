"""Several real processes through the real command line.

They compile everything anew, since JAX keeps programs of the first process
only: hence few runs, of a tiny model, without the compiler's optimizations.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dilocox_jax.metrics import read_rows
from experiments import launch
from experiments.runtime import file_lock
from experiments.runtime.command_line import UsageError
from tests import runs

CONFIG = pathlib.Path(__file__).parents[2] / "experiments/configs/dilocox.py"
SETTINGS = (
  f"--config={CONFIG}",
  *runs.SMALL_FLAGS,
  "--config.total_steps=15",
  "--config.exchange.codec=low_rank(rank=4)+int(bits=4)",
  "--config.adaptive.mode=off",
  "--config.outer.average_power=3.0",
  "--config.evaluation.interval_steps=0",
  "--config.checkpoint.interval_steps=3",
)
TWO_STAGES = "--config.mesh.num_stages=2"  # Hence two devices a process.
DEADLINE_S = 600


def start(module, *arguments):
  return subprocess.Popen(
    [sys.executable, "-m", module, *arguments],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def end(process):
  _, errors = process.communicate(timeout=DEADLINE_S)
  return process.returncode, errors


def together(workdir):
  given = (*SETTINGS, TWO_STAGES, f"--workdir={workdir}")
  return start("experiments.launch", "--processes=2", "--", *given)


def members(workdir):
  """Process ids by number of the training processes at a directory."""
  listed = subprocess.run(
    ["ps", "-A", "-ww", "-o", "pid=,args="],
    capture_output=True,
    text=True,
    check=True,
  )
  found = {}
  for line in listed.stdout.splitlines():
    pid, *arguments = line.split()
    if "experiments.train" in arguments and f"--workdir={workdir}" in arguments:
      found[int(arguments[-1].removeprefix("--process_id="))] = int(pid)
  return found


def num_rounds(workdir):
  path = workdir / "metrics.jsonl"
  written = read_rows(path) if path.exists() else []
  return sum(row["kind"] == "round" for row in written)


def errors_if_ended(process):
  """What a process printed, or None while it runs."""
  return None if process.poll() is None else process.communicate()[1]


def wait_for(count, workdir, why_ended):
  """Waits until a run has written so many rounds.

  Args:
    count: Number of rounds.
    workdir: Directory of the run.
    why_ended: Function that says why the run has ended; None while it has not.
  """
  wait_until(lambda: num_rounds(workdir) >= count, why_ended, f"round {count}")


def wait_until(is_there, why_ended, what):
  """Waits until something is there, as `wait_for` does for rounds."""
  give_up = time.monotonic() + DEADLINE_S
  while not is_there():
    reason = why_ended()
    assert reason is None, reason
    assert time.monotonic() < give_up, f"{what} never came"
    time.sleep(0.01)


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory):
  """A run of two processes that nobody disturbed."""
  workdir = tmp_path_factory.mktemp("whole")
  code, errors = end(together(workdir))
  assert code == 0, errors
  return workdir


@pytest.mark.slow
def test_two_processes_end_where_one_does(whole, tmp_path):
  """That both hold the same bits, they see to before every checkpoint."""
  code, errors = end(
    start("experiments.train", *SETTINGS, f"--workdir={tmp_path}")
  )
  assert code == 0, errors
  (state, record), (alone, _) = runs.saved(whole), runs.saved(tmp_path)
  assert record["position"]["is_finished"]
  found_at = jax.device_get((state.fragments, state.replica.params))
  expected = jax.device_get((alone.fragments, alone.replica.params))
  paths = jax.tree_util.tree_leaves_with_path(state.fragments[0].optimizer)
  assert any(".average" in jax.tree_util.keystr(path) for path, _ in paths)
  for found, wanted in zip(
    jax.tree.leaves(found_at), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
  rows, rows_alone = runs.rows(whole), runs.rows(tmp_path)
  assert [row["kind"] for row in rows] == [row["kind"] for row in rows_alone]
  for row, other in zip(rows, rows_alone, strict=True):
    assert row["tokens"] == other["tokens"]
    assert row["total_sent_bytes"] == other["total_sent_bytes"]
  losses = [row["loss"] for row in runs.rows(whole, "round")]
  alone_losses = [row["loss"] for row in runs.rows(tmp_path, "round")]
  np.testing.assert_allclose(losses, alone_losses, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_replicas_of_two_processes_come_and_go_as_on_one_device(tmp_path):
  """With low-rank factors, feedback and a round of delay."""
  given = (*SETTINGS, "--config.membership.absences=1:1-2")
  starts = {
    "two": ("experiments.launch", "--processes=2", "--"),
    "one": ("experiments.train",),
  }
  for name, first in starts.items():
    code, errors = end(start(*first, *given, f"--workdir={tmp_path / name}"))
    assert code == 0, errors
  two, one = (runs.rows(tmp_path / name, "round") for name in starts)
  for row, other in zip(two, one, strict=True):
    assert row["total_sent_bytes"] == other["total_sent_bytes"]
    assert row["tokens"] == other["tokens"]
    assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)
  away = [row["loss_per_replica"][1] is None for row in two]
  assert away == [False, True, True, False, False]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_and_costs_nothing(
  whole, tmp_path
):
  process = together(tmp_path)
  wait_for(3, tmp_path, lambda: errors_if_ended(process))
  os.kill(members(tmp_path)[1], signal.SIGKILL)
  code, errors = end(process)
  assert code == 128 + signal.SIGKILL
  last = errors.strip().splitlines()[-1]
  assert "process 1 was killed by SIGKILL" in last
  assert "the same command continues the run" in last
  assert "Traceback" not in errors
  assert not members(tmp_path), "a process outlived the launcher"
  assert not runs.rows(tmp_path, "final"), "it was killed too late"

  code, errors = end(together(tmp_path))
  assert code == 0, errors
  assert "continuing at step" in errors and "process 1" not in errors
  assert runs.metrics_text(tmp_path) == runs.metrics_text(whole)
  (state, record), (wanted, wanted_record) = map(runs.saved, (tmp_path, whole))
  assert record == wanted_record
  runs.assert_same_bits(state, wanted)


@pytest.mark.slow
def test_a_signal_to_the_launcher_saves_the_run_and_stops_all(whole, tmp_path):
  """It comes after the first round, while the second program is compiled."""
  process = together(tmp_path)
  wait_for(1, tmp_path, lambda: errors_if_ended(process))
  process.send_signal(signal.SIGTERM)
  code, errors = end(process)
  assert code == 128 + signal.SIGTERM, errors
  step = runs.rows(tmp_path, "round")[-1]["step"]
  last = errors.strip().splitlines()[-1]
  assert f"stopped by SIGTERM: saved at step {step} of 15" in last
  assert errors.count("stopped by") == 1 and "Traceback" not in errors
  assert not members(tmp_path), "a process outlived the launcher"

  code, errors = end(together(tmp_path))
  assert code == 0, errors
  assert f"continuing at step {step} of 15" in errors
  assert runs.metrics_text(tmp_path) == runs.metrics_text(whole)


BAD = {
  "devices that cannot be shared": (
    ["--config.mesh.num_replicas=3"],
    "2 processes cannot share 3 devices",
  ),
  "one replica alone": (
    [
      "--config.sync.warm_start=single",
      "--config.sync.warm_start_steps=3",
    ],
    "needs one process",
  ),
  "what the launcher sets": (["--num_processes=4"], "leave it out"),
  "a bad config": (["--config.total_steps=0"], "total_steps=0"),
}


@pytest.mark.parametrize("given, expected", BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_anything_starts(given, expected, tmp_path):
  flags = (*SETTINGS, f"--workdir={tmp_path}/run", *given)
  code, errors = end(start("experiments.launch", "--", *flags))
  assert code == 2
  (line,) = errors.strip().splitlines()
  assert line.startswith("error: ") and expected in line
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_launch_knows_the_parts_that_a_file_registers(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text("from tests.extensions import ternary\nternary.register()\n")
  flags = (
    f"--config={CONFIG.with_name('diloco.py')}",
    *(f"--parts={file}", "--config.exchange.codec=ternary"),
    "--config.mesh.num_replicas=3",
  )
  code, errors = end(start("experiments.launch", "--", *flags))
  assert code == 2 and "2 processes cannot share 3 devices" in errors, errors


def test_what_is_for_the_processes_must_stand_behind_the_dashes(tmp_path):
  flags = (*SETTINGS, f"--workdir={tmp_path}/run")
  code, errors = end(start("experiments.launch", "--step_s=1", "--", *flags))
  assert code == 2 and "--step_s=1 is for the processes" in errors
  launch._check_own(["--processes=2", "--devices", "gpu", "--help"])
  with pytest.raises(UsageError, match="--cluster=FILE"):
    launch._check_own(["--processes=2", "--cluster", "links.toml"])


def test_a_directory_has_one_launch_at_a_time(tmp_path):
  with file_lock.held(tmp_path / ".launch.lock", ""):
    flags = (*SETTINGS, f"--workdir={tmp_path}")
    code, errors = end(start("experiments.launch", "--", *flags))
  assert code == 75 and "another launch" in errors
  with file_lock.held(tmp_path / ".launch.lock", ""):
    pass  # Let go with the block.


def test_what_follows_two_dashes_is_for_the_processes():
  own, given = launch.split(["--processes=2", "--", "--workdir=x", "--", "y"])
  assert own == ["--processes=2"] and given == ["--workdir=x", "--", "y"]
  assert launch.split(["--help"]) == (["--help"], [])


BAD_LINKS = {
  "a delay of nothing": (["--rtt=40 ms"], "--rtt needs --link"),
  "a delay without a unit": (["--link=1gbit", "--rtt=40"], "has no unit"),
  "all packets lost": (["--link=1gbit", "--loss=100 %"], "less than 100 %"),
  "links twice": (["--link=1gbit", "--cluster=1gbit"], "both describe"),
  "no such cluster": (["--cluster=no.json"], "no such cluster file"),
  "too few processes": (["--processes=1", "--cluster=1gbit"], "--processes=2"),
  "no peer": (["--processes=1", "--link=1gbit"], "--processes=2 or more"),
}


@pytest.mark.parametrize("own, message", BAD_LINKS.values(), ids=BAD_LINKS)
def test_links_that_cannot_be_are_refused(own, message, tmp_path):
  flags = (*SETTINGS, f"--workdir={tmp_path}/run")
  code, errors = end(start("experiments.launch", *own, "--", *flags))
  (line,) = errors.strip().splitlines()
  assert code == 2 and message in line


@pytest.mark.parametrize(
  "text, bit_per_s",
  [("1gbit", 1e9), ("100mbit", 1e8), ("0.5 Gbit/s", 5e8), ("20 MB/s", 1.6e8)],
)
def test_a_link_is_written_as_tc_or_as_a_cluster_file_has_it(text, bit_per_s):
  assert launch.link_rate(text) == bit_per_s


@pytest.mark.parametrize(
  "text, message", [("fast", "is no rate"), ("1bit", "must lie between")]
)
def test_a_link_without_a_usable_rate_is_refused(text, message):
  with pytest.raises(UsageError, match=message):
    launch.link_rate(text)
