"""Memory by formula against the arrays that a run would make."""

import math

import jax
import pytest

from dilocox_jax.api.device_memory import device_memory
from dilocox_jax.plan.model.shapes import parameter_shapes
from dilocox_jax.training import build, states
from tests import runs

MESHES = [
  {"num_stages": 1, "num_data_shards": 1},
  {"num_stages": 2, "num_data_shards": 1},
  {"num_stages": 2, "num_data_shards": 2},
]


def kept_bytes(config):
  sends = config.sync.named.exchanged
  phase = "rounds" if sends == "pseudo_gradient" else "data_parallel"
  schedule = config.sync.named.schedule
  in_flight = [schedule.depth] * schedule.num_fragments
  state = states.abstract(build.programs(config), phase, in_flight=in_flight)
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(state)
  )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
  "settings",
  [
    {"method": "allreduce", "sync_interval": None},
    {"method": "diloco"},
    {"method": "streaming_diloco", "num_fragments": 2, "overlap_steps": 2},
    {"method": "overlap_loco", "num_fragments": 3},
    {"method": "eager"},
    {"method": "diloco", "outer": {"average_power": 8.0}},
    {"method": "muloco", "outer": {"average_power": 8.0}},
    {"method": "diloco", "inner": {"optimizer": "sgd", "momentum": 0.9}},
    {"method": "diloco", "inner": {"optimizer": "sgd"}},
  ],
  ids=str,
)
def test_the_state_is_what_the_arrays_take(settings, mesh):
  config = runs.settings(layout="mesh", mesh=mesh, **settings)
  found = device_memory(config).state
  # Counters, and the embedding's second moment under Muon, come on top.
  assert found == pytest.approx(kept_bytes(config), rel=0.12)


def test_more_stages_need_less_and_whole_layers_need_more():
  one, two = (
    device_memory(
      runs.settings(layout="mesh", mesh={"num_stages": stages}, method="diloco")
    )
    for stages in (1, 2)
  )
  assert two.state < one.state
  assert two.total == two.state + two.step


def test_shards_compute_again_what_the_mesh_says():
  def step(remat):
    mesh = {"num_data_shards": 2, "remat": remat}
    config = runs.settings(layout="mesh", mesh=mesh, method="diloco")
    return device_memory(config).step

  assert step("full") < step("dots")


def test_muon_holds_whole_layers_where_devices_share_one():
  def step(optimizer, stages):
    mesh, inner = {"num_stages": stages}, {"optimizer": optimizer}
    config = runs.settings(
      layout="mesh", mesh=mesh, method="diloco", inner=inner
    )
    return config, device_memory(config).step

  config, with_muon = step("muon", 2)
  shape = config.model.shape
  sizes = {p: math.prod(s) for p, s in parameter_shapes(shape).items()}
  layers = sum(n for p, n in sizes.items() if p.startswith("blocks"))
  # Gradient and momentum in fp32 of half of the layers.
  assert with_muon - step("adamw", 2)[1] == 2 * 4 * layers // 2
  assert step("muon", 1)[1] == step("adamw", 1)[1]
