"""What a run would need and cost, without running it."""

import dataclasses
import math
from unittest import mock

import jax
import numpy as np
import pytest

from dilocox_jax.api import method_plans, simulation_setup
from dilocox_jax.api.measured_gaps import measured_gaps
from dilocox_jax.api.simulation_setup import Options, cluster_of, set_up
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.device_memory import device_memory, factor_bytes
from dilocox_jax.config.run_gap import run_gap
from dilocox_jax.gap.gain import gain_of_size
from dilocox_jax.gap.law import Estimate
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.training import build, states
from tests import runs

MESHES = [
  {"num_stages": 1, "num_data_shards": 1},
  {"num_stages": 2, "num_data_shards": 1},
  {"num_stages": 2, "num_data_shards": 2},
]


def placed(config, cluster, options):
  """A run on a cluster by its name, ready to be timed."""
  return set_up(config, cluster_of(config, cluster), options)


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
    {"method": "diloco", "outer": {"optimizer": "schedule_free_sgd"}},
  ],
  ids=str,
)
def test_the_state_is_what_the_arrays_take(settings, mesh):
  config = runs.settings(layout="mesh", mesh=mesh, **settings)
  found = device_memory(config).state
  # Counters, and the embedding's second moment under Muon, come on top.
  assert found == pytest.approx(kept_bytes(config), rel=0.12)


@pytest.mark.parametrize("max_rank", [0, 16])
def test_the_factors_of_a_rank_are_counted(max_rank):
  # The factors of the first leaf are smaller than the leaf at low ranks only.
  shapes = {"blocks/narrow": (4, 32, 24), "blocks/wide": (4, 64, 64)}
  codec = LowRank(16, max_rank=max_rank)
  state = codec.init(list(shapes.values()), jax.random.key(0))
  kept = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  assert factor_bytes(shapes, Division(), codec) == kept


LARGE = {
  "model": {"preset": "qwen_107b"},
  "data": {"batch_size": 32, "sequence_length": 2048},
  "sync": {"method": "dilocox", "sync_interval": 125},
  "exchange": {"codec": "low_rank(rank=2048)+int(bits=4)"},
}


def test_every_method_is_priced_or_refused_and_what_fits_comes_first():
  config = from_mapping(LARGE)
  plans, refused = method_plans.compare_methods(config, "dilocox_107b")
  by_name = {plan.name: plan for plan in plans}
  assert {*by_name} | {*refused} == {*METHODS, "allreduce bf16"}
  assert all(plan.tokens_per_s > 0 for plan in plans)
  # The law has an expected loss for H = 125, too.
  order = [
    (
      not plan.has_room,
      not plan.fits,
      round(plan.worst_gap_at_equal_time, 3) if plan.is_measured else math.inf,
      round(plan.gap_at_equal_time, 3) if plan.is_measured else math.inf,
      plan.memory.total,
    )
    for plan in plans
  ]
  assert order == sorted(order)
  assert all(
    (plan.expected is None) == (plan.config.sync.named.exchanged == "gradient")
    for plan in plans
  )
  assert {p.name for p in plans if p.gap} == {"cocktail_sgd"}  # It has no H.
  assert plans[0].has_room and plans[0].memory.total <= 0.9 * 80e9
  assert all(
    ("a device needs" in plan.reason) == (not plan.has_room) for plan in plans
  )
  # The fastest division that fits has no stages, so no tick is idle. It uses 64
  # of 80 devices.
  base = by_name["allreduce"]
  mesh = by_name["allreduce"].config.mesh
  assert (mesh.num_stages, mesh.num_data_shards) == (1, 32)
  assert mesh.num_tensor_shards == 2
  assert base.fits and base.speed_up == 1
  # The config's own method keeps its settings.
  for name, codec in (
    ("dilocox", "low_rank(rank=2048)+int(bits=4)"),
    ("muloco", "int(bits=2)"),
  ):
    assert by_name[name].config.exchange.codec == codec
    assert by_name[name].config.sync.sync_interval == 125


SMALL = {"model.preset": "tiny", "data.batch_size": 8}


def small_plans(
  cluster="100mbit", memory=None, step_s=0.5, gain=None, **changes
):
  config = from_mapping(SMALL | changes)
  plans, _ = method_plans.compare_methods(
    config, cluster, Options(step_s), memory, gain
  )
  return plans


def test_a_single_replica_is_compared_with_nothing():
  config = from_mapping({"mesh.num_replicas": 1})
  with pytest.raises(ValueError, match="^mesh.num_replicas=1: .* at least 2$"):
    method_plans.compare_methods(config, "1gbit")


def test_the_loss_at_equal_time_ranks_and_bytes_do_not():
  plans = small_plans()
  by_name = {plan.name: plan for plan in plans}
  # All are hidden or nearly so at half a second a step, and sparse_loco sends
  # least. What AllReduce with two bytes loses was not measured.
  least = min(plans, key=lambda plan: plan.bytes_per_day)
  assert least.name == "sparse_loco"
  measured = [plan for plan in plans if plan.is_measured]
  assert plans[: len(measured)] == measured
  assert {plan.name for plan in plans[len(measured) :]} == {
    "delayed",
    "allreduce bf16",
  }
  losses = [plan.worst_gap_at_equal_time for plan in measured]
  assert losses == pytest.approx(sorted(losses), abs=6e-4)
  # s is extrapolated, so what AllReduce loses by its speed is the surest.
  assert plans[0].name == "allreduce"
  overlap = by_name["overlap_loco"]
  assert overlap.gap_at_equal_time < plans[0].gap_at_equal_time
  assert overlap.gap is not None
  assert overlap.gap.gap < 0.02 and overlap.gap.num_replicas == 2
  # Half of the speed costs what half as many steps do.
  slow = dataclasses.replace(
    by_name["muloco"], fastest_tokens_per_s=2 * by_name["muloco"].tokens_per_s
  )
  assert slow.expected is not None
  assert 1 + slow.gap_at_equal_time == pytest.approx(
    (1 + slow.expected.gap) * 2**0.0989
  )
  assert by_name["allreduce"].gap_at_equal_time > 0
  # A method without an expected gap has its measured one.
  cocktail = by_name["cocktail_sgd"]
  assert cocktail.gap is not None and cocktail.expected is None
  assert cocktail.gap_at_equal_time >= cocktail.gap.gap


def test_an_uncertain_gap_counts_against_a_plan():
  by_name = {plan.name: plan for plan in small_plans()}

  def with_range(name, gap, high):
    plan = by_name[name]
    assert plan.expected is not None
    rounds = by_name["muloco"].rounds
    expected = dataclasses.replace(plan.expected, gap=gap, low=-0.1, high=high)
    return dataclasses.replace(plan, rounds=rounds, expected=expected)

  def order(*plans):
    ranked = method_plans._ranked(
      [[plan] for plan in (*plans, by_name["allreduce"])]
    )
    return [plan.name for plan in ranked if not plan.is_baseline]

  uncertain = with_range("muloco", gap=0.01, high=0.09)
  sure = with_range("diloco", gap=0.02, high=0.03)
  assert order(uncertain, sure) == ["diloco", "muloco"]
  # The range of two plans ends alike: the expected loss decides.
  likely = with_range("muloco", gap=0.01, high=0.03)
  assert order(sure, likely) == ["muloco", "diloco"]
  # A measured gap has two standard errors on either side.
  cocktail = by_name["cocktail_sgd"]
  assert cocktail.gap is not None
  assert cocktail.gap_range.high == pytest.approx(
    cocktail.gap.gap + 2 * cocktail.gap.error
  )


def test_the_expected_gaps_follow_from_s():
  config = from_mapping(SMALL)

  def muloco(gain):
    plans, _ = method_plans.compare_methods(
      config, "100mbit", Options(0.5), gain=gain
    )
    (found,) = (plan for plan in plans if plan.name == "muloco")
    assert found.expected is not None
    return found.expected

  # Without losses s follows from the size of the model.
  size = gain_of_size(parameter_count(config.model.shape))
  assert muloco(None).gain == size
  stated = Estimate(0.05, 0.05, 0.05)
  assert muloco(stated) == run_gap(
    method_plans.changed(
      config, {"sync.method": "muloco", "sync.sync_interval": 25}
    ),
    stated,
  )


def test_the_gap_of_rounds_of_one_length_is_not_that_of_growing_ones():
  gap = measured_gaps("diloco", 4)[0]
  own = SMALL | {"sync.method": "diloco", **gap.settings}
  growing = {"sync.first_interval": 5, "sync.steps_per_doubling": 50}
  decaying = {"outer.schedule": "cosine"}
  for changes, expected in (({}, gap), (growing, None), (decaying, None)):
    config = from_mapping({**own, **changes, "mesh.num_replicas": 4})
    ((_, found),) = method_plans._candidates(config, "diloco")
    assert found == expected


def test_h_is_a_measured_one_or_its_double_and_a_run_has_eight_rounds():
  by_name = {plan.name: plan for plan in small_plans()}
  intervals = {
    name: plan.config.sync.named.schedule.sync_interval
    for name, plan in by_name.items()
    if plan.gap
  }
  # 500 steps in a round are more than an eighth of the 600 steps of the run.
  assert intervals == {
    "cocktail_sgd": 1,
    "diloco": 25,
    "dilocox": 20,
    "eager": 25,
    "muloco": 25,
    "overlap_loco": 16,
    "sparse_loco": 25,
    "streaming_diloco": 25,
  }
  few = by_name["open_diloco"]
  assert few.config.sync.sync_interval == 75 and few.gap is None
  for plan in by_name.values():
    if plan.gap:
      settings = plan.gap.settings
      assert plan.config.inner.optimizer == settings["inner.optimizer"]
      assert plan.config.outer.learning_rate == settings["outer.learning_rate"]
  four = small_plans(**{"mesh.num_replicas": 4})
  (found,) = (plan for plan in four if plan.name == "overlap_loco")
  schedule = found.config.sync.named.schedule
  assert (schedule.sync_interval, schedule.num_fragments) == (18, 6)
  # Another H was asked for: only where it was measured is its gap known.
  asked = {p.name: p for p in small_plans(**{"sync.sync_interval": 25})}
  assert asked["muloco"].gap and not asked["overlap_loco"].gap
  assert asked["overlap_loco"].config.sync.sync_interval == 25


def test_on_a_slow_link_longer_rounds_pay_until_they_hide_the_exchange():
  gain = Estimate(0.02, 0.02, 0.02)

  def interval(**fields):
    plans = small_plans("100mbit", step_s=0.01, gain=gain, **fields)
    (found,) = (plan for plan in plans if plan.name == "overlap_loco")
    assert found.expected is not None
    return found.config.sync.named.schedule.sync_interval

  chosen = interval(total_steps=4000)
  assert chosen > 16 and chosen % 16 == 0
  assert interval(total_steps=8 * 16) == 16
  # A round has no fewer steps than the 16 fragments.
  assert interval(total_steps=8 * 5) == 16
  assert interval(total_steps=4000, **{"sync.sync_interval": 16}) == 16


def test_a_tenth_of_the_memory_must_be_left():
  gain = Estimate(0.02, 0.02, 0.02)  # With it, diloco comes first.
  needed = {plan.name: plan.memory.total for plan in small_plans(gain=gain)}
  most = needed["diloco"]
  for memory, has_room in [(most / 0.899, True), (most / 0.901, False)]:
    plans = small_plans(memory=memory, gain=gain)
    by_name = {plan.name: plan for plan in plans}
    plan = by_name["diloco"]
    assert plan.fits and plan.has_room == has_room
    assert ("less than 10 % is left" in plan.reason) == (not has_room)
    assert (plans[0].name == "diloco") == has_room
  none = small_plans(memory=min(needed.values()) / 0.95)
  assert not any(plan.has_room for plan in none) and none[0].fits


def test_allreduce_with_two_bytes_sends_half_and_is_compared_with_four():
  by_name = {plan.name: plan for plan in small_plans(step_s=0.001)}
  wide = by_name["allreduce"]
  narrow = by_name["allreduce bf16"]
  assert narrow.rounds.sent_bytes == pytest.approx(
    wide.rounds.sent_bytes / 2, rel=0.01
  )
  assert wide.speed_up == 1 and 1.5 < narrow.speed_up < 2.1


def test_the_baseline_sends_float32_whatever_codec_a_config_of_allreduce_has():
  own = {"sync.method": "allreduce", "exchange.codec": "bfloat16"}
  by_name = {plan.name: plan for plan in small_plans(step_s=0.001, **own)}
  assert by_name["allreduce"].config.exchange.codec == "float32"
  assert 1.5 < by_name["allreduce bf16"].speed_up < 2.1
  alone = method_plans.plan_run(
    from_mapping(SMALL | own), "100mbit", Options(0.001)
  )
  assert alone.config.exchange.codec == "bfloat16"
  assert 1.5 < alone.speed_up < 2.1


def test_on_a_fast_link_nothing_beats_allreduce():
  plans = small_plans("1gbit", step_s=20.0)
  assert plans[0].name == "allreduce"


def test_who_meets_in_a_store_is_compared_with_others_that_do():
  config = from_mapping(
    {"exchange.collective": "mailbox", "mailbox.grace_s": 5.0}
  )
  plans, _ = method_plans.compare_methods(config, "1gbit", Options(0.5))
  apart = {plan.name for plan in plans if plan.config.uses_mailbox}
  assert apart == {*METHODS} - {"allreduce", "cocktail_sgd", "eager"}


def test_idle_devices_do_not_compute():
  base = from_mapping({"model": {"preset": "llama_150m"}})
  seconds = []
  for shards in (8, 4, 1):
    mesh = {"mesh.layout": "mesh", "mesh.num_data_shards": shards}
    setup = placed(method_plans.changed(base, mesh), "1gbit", Options())
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
    placed(config, "dilocox_107b", Options())
  assert found.call_args.kwargs["hop_bytes"] == token_bytes * tokens


@pytest.mark.parametrize(
  ("optimizer", "copies"), [("adamw", 3), ("sgd", 1), ("lion", 2)]
)
def test_a_copied_state_has_the_optimizers_own(optimizer, copies):
  config = runs.settings(inner={"optimizer": optimizer})
  script = placed(config, "1gbit", Options(step_s=0.5)).script
  size = parameter_count(config.model.shape)
  assert script.copied_bytes == 4 * copies * size
