"""Tools: paired ratios, rates of steps, links beside their predictions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.config.device_memory import device_memory
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import flops_per_token, parameter_count
from dilocox_jax.training import build
from dilocox_jax.trees import leaves_by_path
from experiments.tools import accelerator_speed as speed
from experiments.tools import bench_inner, bench_torch, timing
from tests.tiers import slow

SMALL = {
  "data": {"batch_size": 4, "sequence_length": 8},
  "model": {"preset": "nano", "scan_unroll": 1},
  "inner": {"accumulate_steps": 2},
}
DIVIDED = {"layout": "mesh", "num_stages": 2, "num_data_shards": 2}


@pytest.fixture
def clock(monkeypatch):
  """A clock that only moves when a program says how long it took."""
  now = [0.0]
  monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

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
    ((3.61,), (1.0,), 1.0, 3.61, False),
  ],
)
def test_a_ratio_is_the_median_of_paired_times(
  clock, slow, fast, scale, median, is_within
):
  ratio = timing.Ratio("made up", clock(*slow), clock(*fast), 3.6, scale)
  found = timing.measure_ratio(ratio, 3)
  assert found["median"] == pytest.approx(median)
  assert found["is_within_bound"] == is_within
  assert found["min"] <= found["median"] <= found["max"]


# Read from programs for an NVIDIA H200 (bytes).
COMPILED = {"150M": 13614775768, "300M": 22148327896, "1B": 21717065464}


@pytest.mark.parametrize("name", COMPILED)
def test_the_estimate_says_what_a_gpu_needs(name):
  config = speed.config_of(speed.FULL, name)
  assert device_memory(config).total == pytest.approx(COMPILED[name], rel=0.07)


@pytest.mark.parametrize("mesh", [{}, *slow(DIVIDED)])
def test_rates_follow_from_the_measured_step(mesh, monkeypatch):
  monkeypatch.setitem(bench_inner.DEVICE_PEAK_FLOPS, "cpu", 1e9)
  config = from_mapping(SMALL | {"mesh": mesh})
  found = bench_inner.measure_steps(config, 3)
  devices = 8 if mesh else 1
  rate = 2 * 4 * 8 / found["step_s"]
  assert found["tokens_per_s"] == pytest.approx(rate)
  flops = rate * flops_per_token(config.model.shape, 8) / devices
  assert found["mfu"] == pytest.approx(flops / 1e9)
  parameters = parameter_count(config.model.shape)
  assert found["argument_bytes"] > 2 * 4 * parameters / devices


def test_pytorch_computes_the_same_loss():
  """Runs in `make check-transformers`, which installs PyTorch."""
  torch = pytest.importorskip("torch")
  model = build.programs(from_mapping(SMALL)).model
  params = model.init(jax.random.key(0))
  tokens = np.arange(18).reshape(2, 9)
  leaves = leaves_by_path(jax.tree.map(np.array, params))
  theirs = bench_torch.peer_loss(MODEL_PRESETS["nano"], 8)
  found = theirs(bench_torch.peer_params(leaves), torch.tensor(tokens))
  expected = float(model.loss(params, jnp.asarray(tokens)))
  assert float(found) == pytest.approx(expected, abs=1e-4)
