"""Processes of one run behind slow links: killed, and slowed down further."""

import os
import pathlib
import signal
import statistics
import subprocess
import threading
import time

import pytest

from dilocox_jax.metrics import read_rows
from experiments.runtime.throttled_network import NodeLink
from experiments.tools.real_links.network import (
  equal_cluster,
  network_of,
  train_together,
)
from tests import runs
from tests.experiments.test_launch import (
  SETTINGS,
  end,
  errors_if_ended,
  members,
  num_rounds,
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


@pytest.mark.slow
def test_a_link_that_drops_to_a_tenth_slows_the_run_and_loses_nothing(
  whole, tmp_path
):
  cluster = equal_cluster(f"{RATE_BPS / 1e3} kbit/s", 2)
  with network_of(cluster) as network:
    flags = (*GIVEN, f"--workdir={tmp_path}")
    training = threading.Thread(target=train_together, args=(network, flags))
    training.start()
    wait_for(
      10, tmp_path, lambda: None if training.is_alive() else "it ended early"
    )
    for node in range(2):
      network.throttle(node, NodeLink(RATE_BPS / 10, RATE_BPS / 10))
    dropped = num_rounds(tmp_path)
    training.join()
  assert runs.metrics_text(tmp_path) == runs.metrics_text(whole)
  runs.assert_same_bits(runs.saved(tmp_path)[0], runs.saved(whole)[0])
  timing = read_rows(tmp_path / "timing.jsonl")
  walls = [row["wall_s"] for row in timing if row["event"] == "round"]
  before, after = walls[4:dropped], walls[dropped + 2 :]
  assert len(after) >= 5
  assert statistics.median(after) > 3 * statistics.median(before)
