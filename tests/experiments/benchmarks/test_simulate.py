import itertools
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dilocox_jax.simulate import engine
from dilocox_jax.simulate.graph import Graph
from experiments.benchmarks import simulate

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_a_rate_is_a_count_by_the_seconds_it_took(monkeypatch):
  # Three runs of 2, 4 and 1 seconds; one task is a start and an end.
  clock = itertools.chain([0.0, 2.0, 2.0, 6.0, 6.0, 7.0])
  monkeypatch.setattr(simulate.time, "process_time", lambda: next(clock))
  graph = Graph()
  graph.task("step", "gpu", 1.0)
  rate = simulate.Rate(
    "events", graph, {"up": 1.0}, lambda t: t.num_events, 0.75
  )
  row = simulate.measure_rate(rate, 3)
  assert (row["min"], row["median"], row["max"]) == (0.5, 1.0, 2.0)
  assert row["count"] == 2 and row["is_within_bound"]


def test_as_many_flows_are_under_way_as_the_bench_says():
  graph, links = simulate.contended(8, 320, lambda _: math.inf)
  timeline = engine.run_graph(graph, links)
  early_s = timeline.end_s.max() / 4
  under_way = (timeline.start_s <= early_s) & (early_s < timeline.end_s)
  assert np.sum(under_way) == simulate.NUM_CONCURRENT


@pytest.mark.slow
def test_the_bench_writes_its_rates_and_does_not_load_jax(tmp_path):
  script = (
    "import sys; from experiments import bench;"
    "from experiments.runtime import command_line;"
    f"sys.argv = ['bench', '--bench=simulate', '--workdir={tmp_path}',"
    " '--repeats=3']; command_line.main(bench.main, bench.define_flags);"
    "assert 'jax' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
  rates = json.loads((tmp_path / "bench_simulate.json").read_text())["rates"]
  assert {name: row["bound"] for name, row in rates.items()} == {
    "events": 100_000,
    "solves of 32 flows": 10_000,
    "solves of 32 flows with limits": 10_000,
  }
