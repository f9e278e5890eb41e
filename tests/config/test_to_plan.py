import jax

from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.config import to_plan
from dilocox_jax.plan.adaptive import RoundSetting
from dilocox_jax.plan.schedule.methods import streaming_diloco
from tests import runs


def test_the_plan_is_the_configs():
  config = runs.settings(
    method="streaming_diloco",
    sync_interval=8,
    num_fragments=2,
    overlap_steps=3,
    mixing_alpha=0.25,
    warm_start="single",
    warm_start_steps=5,
    steps_per_dispatch=4,
  )
  plan = to_plan.run_plan(config)
  assert plan.method == streaming_diloco(8, 2, 3, 0.25)
  assert plan.total_steps == 21 and plan.local_start == 5
  sizes = [(segment.phase, segment.num_steps) for segment in plan.segments()]
  assert sizes == [
    ("single", 4),
    ("single", 1),
    ("rounds", 8),
    ("rounds", 8),
  ]


def test_traffic_is_counted_on_the_shapes_that_the_model_really_has():
  config = runs.settings(num_replicas=3)
  programs = runs.programs(config)
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  parameter_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
  traffic = to_plan.traffic(config)
  # A ring passes 2 (M - 1) / M of the values and its flag on.
  flag_bytes = 4
  expected = -(-4 * (parameter_bytes + flag_bytes) // 3)
  assert traffic.exchange_bytes(0) == expected


def test_a_choice_changes_the_rank_and_the_interval_everywhere():
  config = runs.settings(
    exchange={"codec": "low_rank(rank=8)+int"}, adaptive={"mode": "rank"}
  )
  chosen = RoundSetting(rank=2, sync_interval=5)
  traffic = to_plan.traffic(config, chosen)
  assert traffic.method.schedule.sync_interval == 5
  assert traffic.method.schedule.overlap_steps == 5
  assert to_plan.run_plan(config, chosen).method == traffic.method
  # States keep room for the first rank.
  assert traffic.codec == LowRank(2, max_rank=8, then=Int())
  assert to_plan.traffic(config).method.schedule.sync_interval == 3
