"""A run simulated from its rows costs what its plan says."""

import pytest

from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.recorded import RecordedRound, recorded_ops
from dilocox_jax.simulate.script import Compute
from tests.simulate import small


def rows_of(script, plan):
  return [
    RecordedRound(
      segment.num_steps,
      script.traffic.segment_bytes(segment),
      segment.phase == "rounds",
    )
    for segment in plan.segments()
  ]


@pytest.mark.parametrize(
  "name, settings",
  [
    ("diloco", {"sync_interval": 10}),
    ("dilocox", {"sync_interval": 8}),
    ("delayed", {"sync_interval": 8, "overlap_steps": 3}),
    ("delayed", {"sync_interval": 8, "overlap_steps": 12}),
    ("delayed", {"sync_interval": 8, "overlap_steps": 16}),
    ("allreduce", {"total_steps": 12}),
    ("diloco", {"warm_start": "data_parallel", "warm_start_steps": 10}),
  ],
)
def test_rows_cost_what_the_plan_of_the_same_run_costs(name, settings):
  one = small.cluster(2, bps=3e7, rtt_s=0.03)
  script, plan = small.script(name, 2, **settings)
  link_costs, work = small.link_costs(one), small.work(one)
  planned, recorded = (
    AnalyticClock(link_costs, work),
    AnalyticClock(link_costs, work),
  )
  rounds = recorded_ops(rows_of(script, plan), script.traffic)
  for segment, ops in zip(plan.segments(), rounds, strict=True):
    expected = planned.walk(script.segment(segment))
    found = recorded.walk(ops)
    assert found.num_steps == expected.num_steps
    assert found.now_s == pytest.approx(expected.now_s, rel=1e-6)


def test_rounds_may_differ_in_length_and_bytes():
  rows = [RecordedRound(5, 0), RecordedRound(5, 900), RecordedRound(2, 100)]
  script, _ = small.script("dilocox", 4, sync_interval=5)
  found = list(recorded_ops(rows, script.traffic))
  steps = [
    sum(op.num_steps for op in ops if isinstance(op, Compute)) for ops in found
  ]
  assert steps == [5, 5, 2]
  one = small.cluster(4)
  clock = AnalyticClock(small.link_costs(one), small.work(one))
  for ops in found:
    outcome = clock.walk(ops)
  assert outcome.sent_bytes == pytest.approx(1000, abs=6)


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_all_of_an_exchange_shrinks_with_an_adaptive_rank(num_replicas):
  adapted, _ = small.script("dilocox", num_replicas, "rank 2", sync_interval=5)
  planned, _ = small.script("dilocox", num_replicas, "rank 16", sync_interval=5)
  expected = adapted.traffic.exchange_bytes(0)
  assert expected < 0.2 * planned.traffic.exchange_bytes(0)
  (ops,) = recorded_ops([RecordedRound(5, expected)], planned.traffic)
  one = small.cluster(num_replicas)
  found = AnalyticClock(small.link_costs(one), small.work(one)).walk(ops)
  assert found.sent_bytes == pytest.approx(expected, abs=6)
