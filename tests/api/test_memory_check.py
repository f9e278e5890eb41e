"""A run that does not fit is refused before it takes any memory."""

import dataclasses
import math
from unittest import mock

import jax.numpy as jnp
import pytest

import dilocox_jax as dx
from dilocox_jax.api import memory_check
from dilocox_jax.api import runs as api_runs
from dilocox_jax.api.memory_check import MARGIN, check_memory
from dilocox_jax.config import from_mapping
from dilocox_jax.config.device_memory import device_memory
from dilocox_jax.distributed import free_memory
from dilocox_jax.models.loss import LossModel
from dilocox_jax.report.units import human_bytes
from dilocox_jax.training.overrides import Overrides
from experiments.runtime import running
from tests import runs
from tests.experiments import programs

LARGE = {"model.preset": "llama_1_1b", "data.batch_size": 2}


def with_free(monkeypatch, free):
  monkeypatch.setattr(memory_check, "free_host_bytes", lambda: free)


@pytest.mark.parametrize("count", [1, 2])
def test_stacked_replicas_each_keep_a_state_and_step_in_turn(
  count, monkeypatch
):
  config = from_mapping(LARGE | {"mesh.num_replicas": count})
  memory = device_memory(config)
  needed = count * memory.state + memory.step
  with_free(monkeypatch, 1.001 * needed / MARGIN)
  check_memory(config)
  with_free(monkeypatch, 0.999 * needed / MARGIN)
  with pytest.raises(ValueError, match=f"{human_bytes(needed)} of m") as raised:
    check_memory(config)
  said = str(raised.value)
  assert f"({human_bytes(count * memory.state)} of it are kept" in said
  assert "\n" not in said and "check_memory=False tries" in said


def test_devices_of_a_cpu_share_the_memory_of_the_host(monkeypatch):
  mesh = {"mesh.layout": "mesh", "mesh.num_data_shards": 2}
  config = from_mapping(LARGE | mesh)
  memory = device_memory(config)
  with_free(monkeypatch, 0.999 * 4 * memory.total / MARGIN)
  with mock.patch("jax.local_device_count", return_value=4):
    with pytest.raises(ValueError, match="this machine has"):
      check_memory(config)
    with_free(monkeypatch, 1.001 * 4 * memory.total / MARGIN)
    check_memory(config)


@dataclasses.dataclass
class Device:
  limit: int | None
  device_kind: str = "H1000"

  def memory_stats(self):
    return self.limit and {"bytes_limit": self.limit}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_device_is_asked_what_it_has(platform, monkeypatch):
  monkeypatch.setattr(memory_check, "platform_name", lambda: platform)
  config = from_mapping(LARGE)
  memory = device_memory(config)
  needed = 2 * memory.total  # Both replicas run together.
  for limit, is_refused in [
    (round(0.999 * needed / MARGIN), True),
    (round(1.001 * needed / MARGIN), False),
    (None, False),
  ]:
    with mock.patch("jax.local_devices", return_value=[Device(limit)]):
      if is_refused:
        with pytest.raises(ValueError, match=r"a device \(H1000\) has"):
          check_memory(config)
      else:
        check_memory(config)


def test_of_a_model_of_ones_own_what_is_kept_is_counted(monkeypatch):
  def init(key):
    return {"w": jnp.zeros((1000, 1000))}

  overrides = Overrides(
    model=LossModel(init, lambda params, batch: params["w"].sum())
  )
  config = from_mapping({"sync.method": "diloco"})
  # Parameters, outer ones and their momentum of two replicas.
  with_free(monkeypatch, 2 * 3 * 4e6 / MARGIN - 1)
  with pytest.raises(ValueError, match="needs about 24.0 MB of memory"):
    check_memory(config, overrides)
  with_free(monkeypatch, 2 * 3 * 4e6 / MARGIN + 1)
  check_memory(config, overrides)


def test_the_doors_ask_before_they_build(tmp_path, monkeypatch):
  with_free(monkeypatch, 1e3)
  built = mock.Mock(side_effect=runs.Killed)
  monkeypatch.setattr(api_runs, "Trainer", built)
  settings = {"model": {"preset": "nano"}}
  with pytest.raises(ValueError, match="and this machine has 1.00 kB free"):
    dx.train(config=settings, workdir=tmp_path / "a")
  with pytest.raises(runs.Killed):
    dx.train(config=settings, workdir=tmp_path / "a", check_memory=False)
  monkeypatch.setattr(
    running, "Trainer", mock.Mock(side_effect=ValueError("b"))
  )
  flags = *runs.SMALL_FLAGS, f"--workdir={tmp_path / 'b'}"
  refused = programs.run("train", *flags)
  assert refused.returncode == 2
  assert "--nocheck_memory tries all the same" in refused.one_line
  tried = programs.run("train", *flags, "--nocheck_memory")
  assert tried.one_line == "error: b"


def test_the_least_of_host_and_control_groups_is_free(tmp_path):
  meminfo = tmp_path / "meminfo"
  meminfo.write_text(
    "MemTotal: 9 kB\nMemAvailable:  3000 kB\nSwapFree: 72 kB\n"
  )
  own = tmp_path / "cgroup"
  groups = tmp_path / "groups"
  own.write_text("1:cpu:/elsewhere\n0::/job/step\n")
  (groups / "job/step").mkdir(parents=True)

  def free():
    return free_memory.free_host_bytes(meminfo, own, groups)

  assert free() == 3072 * 1024
  for folder, limit in (
    ("job/step", "max"),
    ("job", "2000000"),
    ("", "5000000"),
  ):
    group = groups / folder
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text("600000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
  assert free() == 1_500_000
  own.unlink()
  meminfo.unlink()
  assert free() == math.inf
