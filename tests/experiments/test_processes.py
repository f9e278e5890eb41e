"""Real processes of runs: killed, stopped, and several of one run.

Moments are recognized by what a run has written, never by a clock, and each
test asserts that the process still lived when it was killed.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dilocox_jax.metrics import work_directory
from dilocox_jax.metrics.lines import read_rows
from tests import runs
from tests.experiments.programs import run
from tests.mailbox.slow_train import SMALL
from tests.tiers import slow

DEADLINE_S = 600
LONG = (
  *runs.SMALL_FLAGS,
  "--config.total_steps=160",
  "--sample_tokens=0",
  "--config.evaluation.interval_steps=20",
  "--config.checkpoint.interval_steps=20",
  "--config.sync.sync_interval=10",
)
EXTRA = {"streaming_diloco": ["--config.sync.num_fragments=2"]}
TOGETHER = (
  "--config.sync.method=dilocox",
  *runs.SMALL_FLAGS,
  "--config.total_steps=15",
  "--config.exchange.codec=low_rank(rank=4)+int(bits=4)",
  "--config.adaptive.mode=off",
  "--config.outer.average_power=3.0",
  "--config.evaluation.interval_steps=0",
  "--config.checkpoint.interval_steps=3",
)
TWO_STAGES = "--config.mesh.num_stages=2"  # Hence two devices a process.


def start(module, *arguments):
  return subprocess.Popen(
    [sys.executable, "-m", module, *map(str, arguments)],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def end(process):
  _, errors = process.communicate(timeout=DEADLINE_S)
  return process.returncode, errors


def long(method, workdir):
  own = f"--config.sync.method={method}", f"--workdir={workdir}"
  return *LONG, *EXTRA.get(method, ()), *own


def start_long(method, workdir):
  return start("tests.mailbox.slow_train", *long(method, workdir))


def start_two(workdir):
  return start(
    "experiments.launch", *TOGETHER, f"--workdir={workdir}", TWO_STAGES
  )


def has_rows(workdir, kind, count):
  path = workdir / "metrics.jsonl"
  written = read_rows(path) if path.exists() else []
  return sum(row["kind"] == kind for row in written) >= count


def partial_saves(workdir):
  return list((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


MOMENTS = {
  "before the first save": lambda w: has_rows(w, "round", 1),
  "between rounds": lambda w: has_rows(w, "evaluation", 4),
  "during a save": lambda w: has_rows(w, "round", 8) and partial_saves(w),
  "during the last save": lambda w: has_rows(w, "final", 1),
}


def wait_until(moment, process):
  give_up = time.monotonic() + DEADLINE_S
  while not moment():
    assert process.poll() is None, process.communicate()[1]
    assert time.monotonic() < give_up, "the moment never came"
    time.sleep(0.0005)


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory):
  """The run that nobody disturbed, by method."""

  @functools.cache
  def whole(method):
    workdir = tmp_path_factory.mktemp(method)
    finish(method, workdir)
    return workdir

  return whole


def finish(method, workdir):
  """Takes such a run to its end in this process."""
  with pytest.MonkeyPatch.context() as patch:
    for each in SMALL:
      patch.setattr(*each)
    done = run("train", *long(method, workdir))
  assert done.returncode == 0, done.stderr


def assert_same_run(workdir, other):
  assert runs.metrics_text(workdir) == runs.metrics_text(other)
  state, record = runs.saved(workdir)
  expected, expected_record = runs.saved(other)
  assert record == expected_record and record["position"]["is_finished"]
  runs.assert_same_bits(state, expected)
  assert not partial_saves(workdir), "what the kill left was not swept"


@pytest.mark.parametrize(
  ("method", "moment"),
  [
    ("diloco", "during a save"),
    *slow(
      ("diloco", "before the first save"),
      ("streaming_diloco", "between rounds"),
      ("dilocox", "during the last save"),
    ),
  ],
)
def test_a_killed_run_continues_to_the_same_bits(
  method, moment, whole, tmp_path
):
  process = start_long(method, tmp_path)
  wait_until(lambda: MOMENTS[moment](tmp_path), process)
  process.kill()
  code, _ = end(process)
  assert code == -signal.SIGKILL, "the run had ended when it was killed"
  finish(method, tmp_path)
  assert_same_run(tmp_path, whole(method))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("number", "method"), [(signal.SIGINT, "diloco"), (signal.SIGTERM, "dilocox")]
)
def test_a_signal_saves_at_the_next_boundary_and_loses_nothing(
  number, method, whole, tmp_path
):
  process = start_long(method, tmp_path)
  wait_until(lambda: has_rows(tmp_path, "round", 5), process)
  process.send_signal(number)
  code, errors = end(process)
  assert code == 128 + number, errors
  line = errors.splitlines()[-1]
  step = runs.rows(tmp_path, "round")[-1]["step"]
  assert 50 <= step < 160 and "Traceback" not in errors
  assert number.name in line and f"saved at step {step}" in line
  code, errors = end(start_long(method, tmp_path))
  assert code == 0 and f"continuing at step {step}" in errors
  assert_same_run(tmp_path, whole(method))


# Several processes of one run.


def members(workdir):
  """Process ids by number of the training processes at a directory."""
  command = ["ps", "-A", "-ww", "-o", "pid=,args="]
  listed = subprocess.run(command, capture_output=True, text=True, check=True)
  found = {}
  for line in listed.stdout.splitlines():
    pid, *arguments = line.split()
    if "experiments.train" in arguments and f"--workdir={workdir}" in arguments:
      found[int(arguments[-1].removeprefix("--process_id="))] = int(pid)
  return found


@pytest.fixture(scope="module", name="two")
def two_fixture(tmp_path_factory):
  """A run of two processes that nobody disturbed."""
  workdir = tmp_path_factory.mktemp("two")
  code, errors = end(start_two(workdir))
  assert code == 0, errors
  return workdir


@pytest.mark.slow
def test_two_processes_end_where_one_does(two, tmp_path):
  """That both hold the same bits, they see to before every checkpoint."""
  done = run("train", *TOGETHER, f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  state, record = runs.saved(two)
  alone, _ = runs.saved(tmp_path)
  assert record["position"]["is_finished"]
  found_at = jax.device_get((state.fragments, state.replica.params))
  expected = jax.device_get((alone.fragments, alone.replica.params))
  for found, wanted in zip(
    jax.tree.leaves(found_at), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
  for row, other in zip(runs.rows(two), runs.rows(tmp_path), strict=True):
    for key in ("kind", "tokens", "total_sent_bytes"):
      assert row[key] == other[key]
    if row["kind"] == "round":
      assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_and_costs_nothing(two, tmp_path):
  process = start_two(tmp_path)
  wait_until(lambda: has_rows(tmp_path, "round", 3), process)
  os.kill(members(tmp_path)[1], signal.SIGKILL)
  code, errors = end(process)
  assert code == 128 + signal.SIGKILL and "Traceback" not in errors
  last = errors.strip().splitlines()[-1]
  assert "process 1 was killed by SIGKILL" in last and "continues" in last
  assert not members(tmp_path), "a process outlived the launcher"
  assert not runs.rows(tmp_path, "final"), "it was killed too late"
  code, errors = end(start_two(tmp_path))
  assert code == 0 and "continuing at step" in errors, errors
  assert_same_run(tmp_path, two)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no signal")
def test_a_launcher_that_is_killed_leaves_nothing_in_the_way(two, tmp_path):
  process = start_two(tmp_path)
  wait_until(lambda: has_rows(tmp_path, "round", 3), process)
  process.kill()
  assert end(process)[0] == -signal.SIGKILL
  assert not runs.rows(tmp_path, "final"), "it was killed too late"
  give_up = time.monotonic() + DEADLINE_S
  while members(tmp_path):
    assert time.monotonic() < give_up, "a process outlived the launcher"
    time.sleep(0.01)
  code, errors = end(start_two(tmp_path))
  assert code == 0 and "continuing at step" in errors, errors
  assert_same_run(tmp_path, two)


@pytest.mark.slow
def test_a_signal_to_the_launcher_saves_the_run_and_stops_all(two, tmp_path):
  """It comes after the first round, while the second program is compiled."""
  process = start_two(tmp_path)
  wait_until(lambda: has_rows(tmp_path, "round", 1), process)
  process.send_signal(signal.SIGTERM)
  code, errors = end(process)
  assert code == 128 + signal.SIGTERM, errors
  step = runs.rows(tmp_path, "round")[-1]["step"]
  assert f"saved at step {step} of 15" in errors.strip().splitlines()[-1]
  assert errors.count("stopped by") == 1 and "Traceback" not in errors
  assert not members(tmp_path), "a process outlived the launcher"
  code, errors = end(start_two(tmp_path))
  assert code == 0, errors
  assert_same_run(tmp_path, two)


def free_address():
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_process_that_finds_no_other_says_so_in_one_line(tmp_path):
  """JAX's runtime would abort it after two minutes, with a trace of C++."""
  given = (*TOGETHER, f"--workdir={tmp_path}", "--distributed")
  given += ("--num_processes=2", "--start_timeout_s=1")
  cases = (
    (free_address(), 0, 75, "process 1 of 2 did not come to"),
    ("no-such-host.invalid:9876", 1, 2, "cannot resolve no-such-host.invalid"),
  )
  started = [
    start(
      "experiments.train",
      *given,
      f"--coordinator={address}",
      f"--process_id={number}",
    )
    for address, number, *_ in cases
  ]
  for process, (_, number, code, says) in zip(started, cases, strict=True):
    found, errors = end(process)
    (line,) = errors.splitlines()
    assert found == code and line.startswith(f"error: process {number}: {says}")


@pytest.mark.parametrize(
  ("program", "lock"), [("launch", ".launch.lock"), ("train", ".train.lock")]
)
def test_a_directory_has_one_run_at_a_time(program, lock, tmp_path):
  with work_directory.locked(tmp_path / lock, ""):
    done = run(program, *TOGETHER, f"--workdir={tmp_path}")
  assert done.returncode == 75 and "another" in done.stderr
