"""Benchmarks: names, paired ratios, rates of inner steps, PyTorch's side."""

import dataclasses
import importlib.util
import itertools
import json

import pytest

from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import (
  DataConfig,
  InnerConfig,
  MeshConfig,
  ModelConfig,
)
from dilocox_jax.plan.model.shapes import flops_per_token, parameter_count
from experiments.tools import bench
from experiments.tools.benchmarks import inner, peers, ratios
from tests.experiments.programs import run

BOUND = 3.6
SMALL = RunConfig(
  data=DataConfig(batch_size=4, sequence_length=8),
  model=ModelConfig(preset="nano", scan_unroll=1),
  inner=InnerConfig(accumulate_steps=2),
)
DIVIDED = MeshConfig(layout="mesh", num_stages=2, num_data_shards=2)
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (["--bench=foo"], ["foo", *bench.BENCHES]),
    (["--bench=round", "--config.seed=3"], ["reads no config"]),
    pytest.param(
      ["--bench=peers"],
      ["pip install 'dilocox_jax[peers]'"],
      marks=pytest.mark.skipif(HAS_TORCH, reason="PyTorch is there"),
    ),
  ],
)
def test_a_mistake_is_one_line(flags, words, tmp_path):
  done = run("tools.bench", *flags, f"--workdir={tmp_path}")
  assert done.returncode == 2
  assert [word for word in words if word not in done.one_line] == []


@pytest.fixture
def clock(monkeypatch):
  """A clock that only moves when a program says how long it took."""
  now = [0.0]
  monkeypatch.setattr(ratios.time, "perf_counter", lambda: now[0])

  def takes(*seconds):
    durations = itertools.cycle(seconds)

    def run():
      now[0] += next(durations)

    return run

  return takes


@pytest.mark.parametrize(
  ("slow", "fast", "scale", "median", "is_within"),
  [
    # The first call of each compiles; the pairs are then 4/2, 9/3 and 2/2.
    ((50.0, 4.0, 9.0, 2.0), (60.0, 2.0, 3.0, 2.0), 1.0, 2.0, True),
    ((8.0,), (2.0,), 4.0, 1.0, True),
    ((BOUND,), (1.0,), 1.0, BOUND, True),
    ((BOUND + 0.01,), (1.0,), 1.0, BOUND + 0.01, False),
  ],
)
def test_a_ratio_is_the_median_of_paired_times(
  clock, tmp_path, slow, fast, scale, median, is_within
):
  ratio = ratios.Ratio("made up", clock(*slow), clock(*fast), BOUND, scale)
  ratios.run_ratios("round", [ratio], tmp_path, 3)
  saved = json.loads((tmp_path / "bench_round.json").read_text())
  row = saved["ratios"]["made up"]
  assert row["median"] == pytest.approx(median)
  assert row["is_within_bound"] == is_within
  assert row["min"] <= row["median"] <= row["max"]


@pytest.mark.parametrize(
  "mesh",
  [MeshConfig(), pytest.param(DIVIDED, marks=pytest.mark.slow)],
  ids=["one", "eight"],
)
def test_rates_follow_from_the_measured_step(tmp_path, mesh, monkeypatch):
  monkeypatch.setitem(inner.DEVICE_PEAK_FLOPS, "cpu", 1e9)
  config = dataclasses.replace(SMALL, mesh=mesh)
  found = inner.run_inner(config, tmp_path, 3)
  assert json.loads((tmp_path / "bench_inner.json").read_text()) == found
  devices = 8 if mesh is DIVIDED else 1
  rate = 2 * 4 * 8 / found["step_s"]
  assert found["tokens_per_s"] == pytest.approx(rate)
  flops = rate * flops_per_token(config.model.shape, 8) / devices
  assert found["mfu"] == pytest.approx(flops / 1e9)
  parameters = parameter_count(config.model.shape)
  assert found["argument_bytes"] > 2 * 4 * parameters / devices


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="make bench-peers installs PyTorch")
def test_both_sides_train_the_same_model():
  # It compares losses of 60 steps itself.
  assert [ratio.baseline() for ratio in peers.peer_ratios()]
