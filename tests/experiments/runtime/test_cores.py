import os
import sys

import pytest

from experiments import launch
from experiments.runtime import cores
from experiments.sweeps.pool import Job, Pool

SAYS = """
import os, sys, time
time.sleep(0.3)  # It is pinned once it runs.
own = sorted(os.sched_getaffinity(0))
print(own, os.environ["NPROC"], os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.parametrize(
  "usable, count, expected",
  [
    ([0, 1], 1, [[0, 1]]),
    ([0, 1], 2, [[0], [1]]),
    ([3, 5, 7, 8, 9], 2, [[3, 5], [7, 8]]),
    ([0, 1], 3, [[0, 1]] * 3),  # Too few to go round.
  ],
)
def test_cores_are_dealt_out_evenly(usable, count, expected, monkeypatch):
  monkeypatch.setattr(cores, "_usable", lambda: usable)
  assert cores.divided(count) == expected


@pytest.mark.skipif(
  not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
  reason="needs two cores to deal out",
)
def test_runs_side_by_side_have_cores_of_their_own(tmp_path):
  jobs = [
    Job(name, tmp_path / f"{name}.log", [sys.executable, "-c", SAYS])
    for name in ("a", "b", "c")
  ]
  Pool(2).run(jobs, lambda number, reason: None)
  said = [job.log.read_text() for job in jobs]
  share = len(os.sched_getaffinity(0)) // 2
  assert all(text.endswith(f"] {share} {share}\n") for text in said)
  assert said[0] != said[1] and said[2] in said[:2]


def test_processes_of_one_run_share_the_threads(monkeypatch):
  monkeypatch.setattr(cores, "_usable", lambda: [0, 1, 2, 3])
  monkeypatch.delenv("NPROC", raising=False)
  environment = launch._environment("cpu", 1, 1, 2)
  assert environment["NPROC"] == environment["OMP_NUM_THREADS"] == "2"


def test_a_process_with_one_core_has_a_second_thread_that_multiplies_nothing(
  monkeypatch,
):
  monkeypatch.setattr(cores, "_usable", lambda: [0, 1, 2, 3])
  assert cores.limits_beside_exchange(2) == cores.limits(2)
  found = cores.limits_beside_exchange(4, "--xla_a=1")
  assert found == {
    "NPROC": "2",
    "OMP_NUM_THREADS": "2",
    "XLA_FLAGS": "--xla_a=1 --xla_cpu_multi_thread_eigen=false",
  }
