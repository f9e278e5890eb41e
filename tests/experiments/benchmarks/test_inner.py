import dataclasses
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
from experiments.benchmarks import inner

SMALL = RunConfig(
  data=DataConfig(batch_size=4, sequence_length=8),
  model=ModelConfig(preset="nano", scan_unroll=1),
  inner=InnerConfig(accumulate_steps=2),
)
DIVIDED = MeshConfig(layout="mesh", num_stages=2, num_data_shards=2)


@pytest.mark.parametrize(
  "mesh",
  [MeshConfig(), pytest.param(DIVIDED, marks=pytest.mark.slow)],
  ids=["one", "eight"],
)
def test_rates_follow_from_the_measured_step(tmp_path, mesh, capsys):
  config = dataclasses.replace(SMALL, mesh=mesh)
  found = inner.run_inner(config, tmp_path, 3)
  saved = json.loads((tmp_path / "bench_inner.json").read_text())
  assert saved == found
  devices = 8 if mesh is DIVIDED else 1
  assert found["num_devices"] == devices
  assert found["parameters"] == parameter_count(config.model.shape)
  tokens = 2 * 4 * 8
  rate = tokens / found["step_s"]
  assert found["tokens_per_s"] == pytest.approx(rate)
  flops = rate * flops_per_token(config.model.shape, 8) / devices
  assert found["model_flops_per_s_per_device"] == pytest.approx(flops)
  assert found["mfu"] is None  # Nobody knows what this CPU could do.
  assert "tokens_per_s" in capsys.readouterr().out


def test_utilisation_is_the_share_of_the_devices_best(monkeypatch):
  monkeypatch.setitem(inner.DEVICE_PEAK_FLOPS, "cpu", 1e9)
  found = inner.measure_steps(SMALL, 1)
  share = found["model_flops_per_s_per_device"] / 1e9
  assert found["mfu"] == pytest.approx(share)
  assert found["argument_bytes"] > 2 * 4 * found["parameters"]
