"""What a run would need and cost, without running it."""

import math
from unittest import mock

import jax
import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.api import method_plans, simulation_setup
from dilocox_jax.api.device_memory import device_memory
from dilocox_jax.api.simulation_setup import Options, set_up
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.plan.model.shapes import parameter_count, parameter_shapes
from dilocox_jax.plan.schedule.methods import METHODS
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
    {"method": "muloco", "outer": {"average_power": 8.0}},
    {"method": "diloco", "inner": {"optimizer": "sgd", "momentum": 0.9}},
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


LARGE = {
  "model": {"preset": "qwen_107b"},
  "data": {"batch_size": 32, "sequence_length": 2048},
  "sync": {"method": "dilocox", "sync_interval": 125},
  "exchange": {"codec": "low_rank(rank=2048)+int(bits=4)"},
}


@pytest.fixture(scope="module", name="large")
def large_fixture():
  config = from_mapping(LARGE)
  return method_plans.compare_methods(config, "dilocox_107b")


def test_every_method_is_priced_or_refused(large):
  plans, refused = large
  assert {p.config.sync.method for p in plans} | {*refused} == {*METHODS}
  assert all(plan.tokens_per_s > 0 for plan in plans)


def test_what_fits_comes_first_and_the_fastest_of_it(large):
  plans, _ = large
  order = [(not plan.fits, -plan.tokens_per_s) for plan in plans]
  assert order == sorted(order)
  assert plans[0].fits and plans[0].memory.total <= 80e9
  assert all("a device needs" in plan.reason for plan in plans if not plan.fits)


def test_devices_may_idle_where_all_of_them_do_not_fit(large):
  (base,) = [p for p in large[0] if p.config.sync.method == "allreduce"]
  used = base.config.mesh.num_stages * base.config.mesh.num_data_shards
  assert base.fits and used < 80
  assert base.speed_up == 1


def test_the_configs_own_method_keeps_its_settings(large):
  (own,) = [p for p in large[0] if p.config.sync.method == "dilocox"]
  assert own.config.exchange.codec == "low_rank(rank=2048)+int(bits=4)"
  assert own.config.sync.sync_interval == 125
  (other,) = [p for p in large[0] if p.config.sync.method == "muloco"]
  assert other.config.exchange.codec == "int(bits=2)"
  assert other.config.sync.sync_interval == 125


def test_idle_devices_do_not_compute():
  base = from_mapping({"model": {"preset": "llama_150m"}})
  seconds = []
  for shards in (8, 4, 1):
    mesh = {"mesh.layout": "mesh", "mesh.num_data_shards": shards}
    setup = set_up(method_plans.changed(base, mesh), "1gbit", Options())
    seconds.append(max(setup.work.step_s))
  assert seconds[1:] == pytest.approx([2 * seconds[0], 8 * seconds[0]])


def test_layouts_divide_the_batch_and_leave_none_out():
  found = list(method_plans.layouts(RunConfig(), 4))  # 8 sequences, 4 layers.
  sizes = {(x["mesh.num_stages"], x["mesh.num_data_shards"]) for x in found}
  assert sizes == {(1, 1), (1, 2), (1, 4), (2, 2), (4, 1)}
  assert all(method_plans.changed(RunConfig(), layout) for layout in found)
  assert list(method_plans.layouts(RunConfig(), 1)) == [{}]


def test_a_stated_step_is_that_of_the_configs_mesh():
  plan = method_plans.plan_run(RunConfig(), "100mbit", Options(step_s=0.5))
  assert plan.rounds.compute_s == pytest.approx(0.5)
  assert plan.fits and plan.reason == ""  # Nobody said how much there is.


STEP_S = 9.0


@pytest.mark.parametrize(
  ("boundary", "compute_dtype", "token_bytes"),
  [
    ("none", "auto", 2 * 8192),
    ("none", "float32", 4 * 8192),
    ("bfloat16", "float32", 2 * 8192),
    ("int8", "auto", 8192 + 4),
  ],
)
def test_a_hop_of_a_pipeline_sends_what_its_boundary_sends(
  boundary, compute_dtype, token_bytes
):
  config = from_mapping(
    {
      "model": {"preset": "qwen_107b", "compute_dtype": compute_dtype},
      "mesh": {"layout": "mesh", "num_stages": 2, "boundary": boundary},
    }
  )
  tokens = config.tokens_per_replica_step
  with mock.patch.object(simulation_setup, "step_seconds") as found:
    found.return_value = np.ones(2), 0.0
    set_up(config, "dilocox_107b", Options())
  assert found.call_args.args[3] == token_bytes * tokens


@pytest.mark.parametrize(
  ("optimizer", "copies"), [("adamw", 3), ("sgd", 1), ("lion", 2)]
)
def test_a_copied_state_has_the_optimizers_own(optimizer, copies):
  config = runs.settings(inner={"optimizer": optimizer})
  script = set_up(config, "1gbit", Options(step_s=0.5)).script
  size = parameter_count(config.model.shape)
  assert script.copied_bytes == 4 * copies * size


def seconds(rounds, interval, fragments, overlap, order, bits):
  """Simulated time of some rounds of a 107B model over 1 Gbit/s."""
  config = from_mapping(
    {
      "total_steps": rounds * interval,
      "model": {"preset": "qwen_107b"},
      "data": {"batch_size": 8, "sequence_length": 2048},
      "sync": {
        "method": "delayed",
        "sync_interval": interval,
        "num_fragments": fragments,
        "overlap_steps": overlap,
        "fragment_order": order,
      },
      "exchange": {"codec": f"int(bits={bits})"},
    }
  )
  return dx.estimate(config, "dilocox_107b", step_s=STEP_S).total_s


# One bit a value takes the line for 14.2 steps, so H = 15 at least; 2 bits for
# 28.3, so H = 29.
@pytest.mark.parametrize(
  ("interval", "fragments", "overlap", "order", "bits"),
  [
    (16, 8, 2, "sliced", 1),
    (16, 16, 1, "sliced", 1),
    (30, 15, 2, "sliced", 2),
  ],
)
def test_equal_fragments_keep_replicas_and_line_busy(
  interval, fragments, overlap, order, bits
):
  shape = interval, fragments, overlap, order, bits
  four_rounds_s = seconds(8, *shape) - seconds(4, *shape)
  assert 4 * interval * STEP_S / four_rounds_s > 0.99
  assert overlap <= interval / fragments + 1


def test_fragments_of_whole_layers_do_not():
  shape = 16, 4, 4, "strided", 1
  four_rounds_s = seconds(8, *shape) - seconds(4, *shape)
  assert 4 * 16 * STEP_S / four_rounds_s < 0.92
