"""Rounds whose replicas are apart and meet in a store."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from dilocox_jax.meeting.store import Store
from tests.meeting import apart
from tests.outer.problem import assert_close, assert_equal


@pytest.mark.parametrize("name", apart.METHODS)
def test_apart_is_as_together(name):
  num_replicas = 3
  losses, outer = apart.together(name, num_replicas)
  store = Store("memory:///")
  rules = apart.rules(num_replicas)

  def replica(number):
    return apart.alone(store, name, number, num_replicas, rules=rules)

  found = apart.in_threads(replica, num_replicas)
  for number, (own_losses, own_outer) in enumerate(found):
    assert_equal(own_outer, found[0][1])
    assert_close(own_outer, outer, 1e-6)
    assert_close(own_losses[0], losses[number], 1e-6)
  assert np.ptp(losses, axis=0).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", apart.METHODS)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_processes_that_meet_in_a_folder_are_as_together(
  name, num_replicas, tmp_path
):
  module = "tests.meeting.apart"
  command = [sys.executable, "-m", module, str(tmp_path / "run"), name]
  files = [tmp_path / f"{number}.npz" for number in range(num_replicas)]
  running = [
    subprocess.Popen([*command, str(number), str(num_replicas), str(file)])
    for number, file in enumerate(files)
  ]
  assert [process.wait(300) for process in running] == [0] * num_replicas
  losses, outer = apart.together(name, num_replicas)
  first = list(np.load(files[0]).values())[1:]
  for number, file in enumerate(files):
    own_losses, *own_outer = np.load(file).values()
    assert_equal(own_outer, first)
    assert_close(own_outer, jax.tree.leaves(outer), 1e-6)
    assert_close(own_losses[0], losses[number], 1e-6)
