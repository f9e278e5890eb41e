"""What each method would cost on given clusters, and what fits."""

import pytest

from dilocox_jax.api import method_plans
from dilocox_jax.api.simulation_setup import Options, set_up
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.plan.schedule.methods import METHODS

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
