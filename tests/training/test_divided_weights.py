"""Weights of other libraries, read onto the devices that hold their parts.

The module is also the program of a process whose memory is measured.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.models import weights
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.model.shapes import ModelShape, parameter_count
from dilocox_jax.training import build, start
from dilocox_jax.training.checkpoint import RefusedError
from dilocox_jax.trees import leaves_by_path, nested
from experiments.runtime.placement import free_port
from tests import runs

SMALL = ModelShape(4, 16, 4, 32, 64, num_kv_heads=2, qk_norm=True)
# A checkpoint of 2.2 GB in fp32.
LARGE = ModelShape(8, 2048, 16, 5632, 32000)
# Bytes that the memory of a process may grow, for each byte that its devices
# hold.
MOST_MEMORY = 1.2
DIVISIONS = {
  "data": Division(num_data_shards=4),
  "data and tensor": Division(num_data_shards=2, num_tensor_shards=2),
  "stages": Division(num_data_shards=2, num_stages=2),
  "none": Division(),
}


def leaves_of(shape) -> dict[str, Any]:
  rng = np.random.default_rng(0)
  return {
    path: np.float32(rng.normal(size=size))
    for path, size in shape.parameter_shapes.items()
  }


@pytest.fixture(scope="module", name="small")
def small_fixture(tmp_path_factory):
  """A folder with a checkpoint, and its parameters by path."""
  pytest.importorskip("safetensors", reason="needs the extra `weights`")
  folder = tmp_path_factory.mktemp("small")
  leaves = leaves_of(SMALL)
  weights.write_checkpoint(folder, SMALL, nested(leaves))
  return folder, leaves


@pytest.mark.parametrize("name", DIVISIONS)
def test_a_process_reads_every_part_once_and_no_more(small, name, monkeypatch):
  folder, leaves = small
  replicas = Replicas(2, "mesh", DIVISIONS[name])
  read = collections.Counter()
  plain_part = weights.StoredCheckpoint.part

  def part(self, path, index):
    values = plain_part(self, path, index)
    read[path] += values.size
    return values

  monkeypatch.setattr(weights.StoredCheckpoint, "part", part)
  checkpoint = start.foreign_checkpoint(SMALL, folder)
  params = replicas.place_state(checkpoint.params(), None)
  found = leaves_by_path(params)
  assert found.keys() == leaves.keys()
  for path, leaf in leaves.items():
    np.testing.assert_array_equal(found[path], leaf)
    assert read[path] == leaf.size
  expected = replicas.state_shardings(params, None)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
  assert shardings == expected
  if name != "none":
    kernel = found["blocks/mlp/up/kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4


def nano_with(**changes):
  sizes = {"model": {"vocab_size": 256}}
  return runs.settings(method="diloco", **(sizes | changes))


def test_a_run_starts_from_a_divided_checkpoint(tmp_path):
  """The whole model, and a model of which adapters alone are trained."""
  shape = nano_with().model.shape
  leaves = leaves_of(shape)
  weights.write_checkpoint(tmp_path, shape, nested(leaves))
  changes = {
    "layout": "mesh",
    "mesh": {"num_data_shards": 2},
    "checkpoint": {"init_from": str(tmp_path)},
  }
  config = nano_with(**changes)
  state: Any = start.first_state(config, runs.programs(config), "rounds")
  params = leaves_by_path(state.fragments[0].params)
  config = from_mapping(config.to_mapping() | {"lora": {"rank": 2}})
  overrides = start.with_trainable(config)
  frozen = leaves_by_path(build.programs(config, overrides).rounds.frozen)
  for path, leaf in leaves.items():
    np.testing.assert_array_equal(params[path], leaf)
    np.testing.assert_array_equal(frozen[path], leaf)
  kernel = "blocks/mlp/up/kernel"
  for found in (params, frozen):
    part = found[kernel].addressable_shards[0].data
    assert part.size == leaves[kernel].size // 2


def test_a_value_that_is_not_finite_is_one_line(tmp_path):
  config = nano_with(checkpoint={"init_from": str(tmp_path)})
  shape = config.model.shape
  leaves = leaves_of(shape)
  leaves["blocks/mlp/up/kernel"][...] = np.nan
  weights.write_checkpoint(tmp_path, shape, nested(leaves))
  with pytest.raises(RefusedError, match="not finite") as error:
    start.first_state(config, runs.programs(config), "rounds")
  assert str(error.value).startswith(f"checkpoint.init_from={tmp_path}: ")
  assert "\n" not in str(error.value)


# The memory of processes that read a large checkpoint.


class Drawn:
  """A leaf that has values only while it is written."""

  def __init__(self, size):
    self.size = size

  def __array__(self, dtype=None, copy=None):
    leaf = np.empty(self.size, np.float32)
    leaf[...] = np.linspace(-1, 1, self.size[-1], dtype=np.float32)
    return leaf


@pytest.fixture(scope="module", name="large")
def large_fixture(tmp_path_factory):
  """A folder with a checkpoint of 2.2 GB, which is removed afterwards."""
  pytest.importorskip("safetensors", reason="needs the extra `weights`")
  folder = tmp_path_factory.mktemp("large")
  leaves = {path: Drawn(size) for path, size in LARGE.parameter_shapes.items()}
  weights.write_checkpoint(folder, LARGE, nested(leaves))
  yield folder
  for path in folder.iterdir():
    path.unlink()


def measure(folder, division, process, num_processes, port):
  """Prints how much memory a process needs to read its parts."""
  if num_processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process)
  replicas = Replicas(1, "mesh", Division(**division))
  assert replicas.mesh.size == jax.device_count()
  # The runtime of JAX needs memory, too.
  jax.device_put(np.ones(4), jax.local_devices()[0]).block_until_ready()
  before = memory("VmRSS")
  path = pathlib.Path(folder)
  checkpoint = start.foreign_checkpoint(LARGE, path)
  params = replicas.place_state(checkpoint.params(), None)
  jax.block_until_ready(params)
  growth = memory("VmHWM") - before
  leaves = jax.tree.leaves(params)
  held = sum(
    shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards
  )
  print(json.dumps({"held": held, "growth": growth}))


def memory(name):
  """A field of this process's status that says how much memory it has."""
  status = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(status.partition(f"{name}:")[2].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
  ("num_processes", "devices", "division"),
  [
    (1, 8, {"num_data_shards": 8}),
    (1, 8, {"num_data_shards": 2, "num_tensor_shards": 4}),
    (2, 1, {"num_data_shards": 2}),
  ],
)
def test_a_host_needs_little_more_memory_than_its_devices_hold(
  large, num_processes, devices, division
):
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
  }
  port = free_port()
  started = []
  for process in range(num_processes):
    arguments = [str(large), division, process, num_processes, port]
    command = [sys.executable, "-m", "tests.training.test_divided_weights"]
    started.append(
      subprocess.Popen(
        [*command, json.dumps(arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
      )
    )
  total = 0
  for each in started:
    output, _ = each.communicate()
    assert each.returncode == 0
    figures = json.loads(output)
    print(num_processes, division, figures)
    assert figures["growth"] <= MOST_MEMORY * figures["held"]
    total += figures["held"]
  assert total >= 4 * parameter_count(LARGE)


if __name__ == "__main__":
  measure(*json.loads(sys.argv[1]))
