"""Processes of one run behind slow links, one of which is killed."""

import os
import pathlib
import signal
import subprocess
import time

import pytest

from tests import runs
from tests.experiments.test_launch import (
  SETTINGS,
  end,
  errors_if_ended,
  members,
  start,
  wait_for,
)

pytestmark = pytest.mark.usefixtures("namespaces")
NUM_STEPS = 60
GIVEN = (*SETTINGS, f"--config.total_steps={NUM_STEPS}")
RATE_BPS = 400e3  # An exchange of the small model takes longer than its steps.
END_S = 30


def launched(workdir):
  own = ("--processes=2", "--link=400kbit", "--")
  return start("experiments.launch", *own, *GIVEN, f"--workdir={workdir}")


def children(process):
  """Process ids of the children, which hold namespaces or train."""
  listed = subprocess.run(
    ["ps", "-o", "pid=", "--ppid", str(process.pid)],
    capture_output=True,
    text=True,
    check=True,
  )
  return listed.stdout.split()


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory):
  """A run over the same links that nobody disturbed."""
  workdir = tmp_path_factory.mktemp("whole")
  code, errors = end(launched(workdir))
  assert code == 0, errors
  return workdir


@pytest.mark.slow
def test_a_process_killed_over_a_slow_link_ends_all_and_costs_nothing(
  whole, tmp_path
):
  process = launched(tmp_path)
  wait_for(8, tmp_path, lambda: errors_if_ended(process))
  started = children(process)
  assert len(started) == 5  # Two nodes, the switch, and the two processes.
  killed = time.monotonic()
  os.kill(members(tmp_path)[1], signal.SIGKILL)
  code, errors = end(process)
  assert time.monotonic() - killed < END_S
  assert code == 128 + signal.SIGKILL
  last = errors.strip().splitlines()[-1]
  assert "process 1 was killed by SIGKILL" in last
  assert "the same command continues the run" in last
  assert not members(tmp_path), "a process outlived the launcher"
  outlived = [pid for pid in started if pathlib.Path(f"/proc/{pid}").exists()]
  assert not outlived, "a network outlived the launcher"
  assert not runs.rows(tmp_path, "final"), "it was killed too late"

  code, errors = end(launched(tmp_path))
  assert code == 0, errors
  assert "continuing at step" in errors
  assert runs.metrics_text(tmp_path) == runs.metrics_text(whole)
  (state, record), (wanted, wanted_record) = map(runs.saved, (tmp_path, whole))
  assert record == wanted_record
  runs.assert_same_bits(state, wanted)
