"""Replicas whose machines round differently train together.

One is told to use the instruction set SSE4.2 alone, so it adds in another
order and without fused products. It also rounds the factors of its products,
as accelerators do.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.mailbox.unlike import NOTED_ROUNDS
from tests.tiers import slow

ROOT = pathlib.Path(__file__).parents[2]
OTHER_MACHINE = {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}


def trained(folder, method, num_rounds, machines):
  """Trains replicas in programs of their own, and returns their files.

  Args:
    folder: Empty folder.
    method: Name of the method (`apart.METHODS`).
    num_rounds: Rounds of the run.
    machines: Environment and further arguments of each replica.
  """
  running = []
  for number, (environment, arguments) in enumerate(machines):
    command = [sys.executable, "-m", "tests.mailbox.unlike", folder / "place"]
    command += [str(number), method, str(num_rounds), folder / f"{number}.npz"]
    running.append(
      subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", **environment},
      )
    )
  try:
    assert [process.wait(500) for process in running] == [0] * len(running)
  finally:
    for process in running:
      process.kill()
  return [dict(np.load(folder / f"{n}.npz")) for n in range(len(running))]


def relative_gaps(one, other, num_rounds):
  """Distance of two replicas' leaves after a round, over the leaf's norm."""
  return [
    np.linalg.norm(one[f"{num_rounds}.{name}"] - other[f"{num_rounds}.{name}"])
    / np.linalg.norm(one[f"{num_rounds}.{name}"])
    for name in "abc"
  ]


@pytest.mark.parametrize(
  ("method", "num_rounds"),
  [("diloco", 40), *slow(("diloco", 200), ("dilocox", 200))],
)
def test_unlike_machines_train_together(tmp_path, method, num_rounds):
  machines = [({}, []), (OTHER_MACHINE, ["tf32"])]
  one, other = trained(tmp_path, method, num_rounds, machines)
  assert len(one["num_members"]) == num_rounds
  assert set(one["num_members"]) == set(other["num_members"]) == {2}
  largest = 0.0
  for noted in NOTED_ROUNDS:
    if noted <= num_rounds:
      gaps = relative_gaps(one, other, noted)
      print(f"{method}, {noted} rounds: {max(gaps):.1e}")
      # Far below what fingerprints allow (`fingerprints.difference`).
      assert max(gaps) < 0.5 * (63 + 1 + noted) * 2**-24
      largest = max(largest, *gaps)
  assert largest > 0, "this processor has no larger instruction set"
  assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


@pytest.mark.slow  # In threads of one process, other tests show the same.
def test_like_machines_agree_bit_for_bit(tmp_path):
  one, other = trained(tmp_path, "diloco", 10, [({}, []), ({}, [])])
  assert set(one["num_members"]) == {2}
  assert max(relative_gaps(one, other, 10)) == 0
  assert one["loss"] == other["loss"]
