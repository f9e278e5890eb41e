"""What a run would need and cost, without running it."""

import math
from unittest import mock

import jax
import numpy as np
import pytest

from dilocox_jax.api import method_plans, simulation_setup
from dilocox_jax.api.device_memory import device_memory
from dilocox_jax.api.simulation_setup import Options, set_up
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.plan.model.shapes import parameter_count
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
  start = 3 * schedule.sync_interval
  steps = range(start, start + schedule.sync_interval)
  in_flight = max(map(schedule.num_in_flight, steps), key=sum)
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


LARGE = {
  "model": {"preset": "qwen_107b"},
  "data": {"batch_size": 32, "sequence_length": 2048},
  "sync": {"method": "dilocox", "sync_interval": 125},
  "exchange": {"codec": "low_rank(rank=2048)+int(bits=4)"},
}


def test_every_method_is_priced_or_refused_and_what_fits_comes_first():
  config = from_mapping(LARGE)
  plans, refused = method_plans.compare_methods(config, "dilocox_107b")
  by_name = {plan.config.sync.method: plan for plan in plans}
  assert {*by_name} | {*refused} == {*METHODS}
  assert all(plan.tokens_per_s > 0 for plan in plans)
  order = [(not p.fits, -float(f"{p.tokens_per_s:.3g}")) for p in plans]
  order = list(zip(order, [p.bytes_per_day for p in plans], strict=True))
  assert order == sorted(order)
  assert plans[0].fits and plans[0].memory.total <= 80e9
  assert all("a device needs" in plan.reason for plan in plans if not plan.fits)
  # The fastest division that fits lets two of 80 devices idle; the smallest
  # would have 64 stages.
  base, mesh = by_name["allreduce"], by_name["allreduce"].config.mesh
  assert (mesh.num_stages, mesh.num_data_shards) == (39, 2)
  assert base.fits and base.speed_up == 1
  # The config's own method keeps its settings.
  for name, codec in (
    ("dilocox", "low_rank(rank=2048)+int(bits=4)"),
    ("muloco", "int(bits=2)"),
  ):
    assert by_name[name].config.exchange.codec == codec
    assert by_name[name].config.sync.sync_interval == 125


def test_who_meets_in_a_store_is_compared_with_others_that_do():
  config = from_mapping({"exchange.collective": "mailbox", "meet.grace_s": 5.0})
  plans, _ = method_plans.compare_methods(config, "1gbit", Options(0.5))
  apart = {plan.config.sync.method for plan in plans if plan.config.meets}
  assert apart == {*METHODS} - {"allreduce", "cocktail_sgd", "eager"}


def test_idle_devices_do_not_compute():
  base = from_mapping({"model": {"preset": "llama_150m"}})
  seconds = []
  for shards in (8, 4, 1):
    mesh = {"mesh.layout": "mesh", "mesh.num_data_shards": shards}
    setup = set_up(method_plans.changed(base, mesh), "1gbit", Options())
    seconds.append(max(setup.work.step_s))
  assert seconds[1:] == pytest.approx([2 * seconds[0], 8 * seconds[0]])


def test_a_stated_step_is_that_of_the_configs_mesh():
  plan = method_plans.plan_run(RunConfig(), "100mbit", Options(step_s=0.5))
  assert plan.rounds.compute_s == pytest.approx(0.5)
  assert plan.fits and plan.reason == ""  # Nobody said how much there is.


@pytest.mark.parametrize(
  ("compute_dtype", "token_bytes"), [("auto", 2 * 8192), ("float32", 4 * 8192)]
)
def test_a_hop_of_a_pipeline_sends_what_is_computed(compute_dtype, token_bytes):
  model = {"model.preset": "qwen_107b", "model.compute_dtype": compute_dtype}
  mesh = {"mesh.layout": "mesh", "mesh.num_stages": 2}
  config = from_mapping(model | mesh)
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
