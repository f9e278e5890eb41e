"""Replicas of two processes that meet in a folder (`cluster_runs`)."""

import os
import subprocess
import sys

import pytest

METHODS = ("diloco", "overlap_loco", "dilocox")


def assert_good(folder, *flags):
  command = [sys.executable, "-m", "tests.mailbox.cluster_runs", str(folder)]
  # The programs of the other tests are of another number of devices.
  environment = {**os.environ, "DILOCOX_JAX_CACHE": str(folder / "cache")}
  done = subprocess.run(
    [*command, *flags],
    env=environment,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_processes_with_two_secrets_are_refused_before_anything_is_written(
  tmp_path,
):
  assert_good(tmp_path, "--secrets")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_end_as_one_with_as_many_devices(method, tmp_path):
  assert_good(tmp_path, "--undisturbed", f"--method={method}")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_is_killed_costs_the_other_replica_no_step(
  method, tmp_path
):
  assert_good(tmp_path, "--runs=4", f"--method={method}")
