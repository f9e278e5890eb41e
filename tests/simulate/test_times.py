"""Times of runs: by formula, event by event, and worked out by hand."""

import dataclasses
import json

import numpy as np
import pytest

from dilocox_jax.plan.operations import OPERATIONS, StoreShares, operation
from dilocox_jax.simulate.analytic import AnalyticClock, Work, run_time
from dilocox_jax.simulate.cluster import Cluster, Link, Site
from dilocox_jax.simulate.gloo import GLOO
from dilocox_jax.simulate.script import Compute, Launch, Wait
from dilocox_jax.simulate.transfer import NCCL
from tests.oracles.events import simulate
from tests.simulate import small

TRANSPORTS = {"whole messages": small.PLAIN, "nccl": NCCL, "gloo": GLOO}
# Cluster, codec, relative speeds of the replicas. Sums alone travel where
# replicas are uneven: the formula is no more than near for an all-to-all there.
TOPOLOGIES = {
  "one replica": (small.cluster(1), "fp32", None),
  "a pair that is far": (small.cluster(2, bps=3e7, rtt_s=0.3), "int4", None),
  "four lossy sites": (small.cluster(4, bps=2e9, loss=1e-4), "rank 2", None),
  "six near sites": (small.cluster(6, bps=1e10, rtt_s=0.0), "int8", None),
  "uneven": (small.uneven([1e7, 4e8, 6e7]), "fp32", (1.0, 0.3, 2.0)),
}
IN_STEP = {
  "shared links": (small.cluster(2, placement=(0, 1, 0, 1)), "fp32", None)
}
AGREE = [
  pytest.param(each, *schedule.values, id=f"{each}, {schedule.id}")
  for each in TOPOLOGIES | IN_STEP
  for schedule in small.SCHEDULES + (small.COPIED if each in TOPOLOGIES else [])
]


@pytest.mark.parametrize("topology, name, changes", AGREE)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_formula_and_events_agree(transport, topology, name, changes):
  one, codec, speeds = (TOPOLOGIES | IN_STEP)[topology]
  if (name, changes) in [each.values for each in small.COPIED]:
    codec = "fp32"  # Others scatter.
  script, plan = small.script(name, one.num_replicas, codec, **changes)
  work = small.work(one, codec_s=0.02, speeds=speeds)
  costs = small.link_costs(one, TRANSPORTS[transport])
  by_formula = run_time(costs, work, script.ops(plan))
  small.assert_agree(by_formula, simulate(costs, work, script.ops(plan)))


MEBIBYTES_16 = 16 * 2**20
KEY = ("x", 0, 0, 0)
NO_SLOW_START = dataclasses.replace(NCCL, starts_slowly=False)
RING = dataclasses.replace(NO_SLOW_START, has_trees=False)


def collective_s(one, kind, size=MEBIBYTES_16, transport=small.PLAIN):
  costs = small.link_costs(one, transport)
  work = small.work(one)
  ops = [Launch(KEY, (operation(kind, size),)), Wait(KEY)]
  found = run_time(costs, work, ops)
  small.assert_agree(found, simulate(costs, work, ops))
  return found.total_s


def star(num_replicas, rtt_s=0.0, **changes):
  return small.cluster(num_replicas, bps=1e9, rtt_s=rtt_s, **changes)


def two_sites(*placement):
  sites = [Site(x, Link(1e9, 1e9, rtt_s=0.0), intra_rtt_s=0.0) for x in "ab"]
  sites = [dataclasses.replace(site, intra_bps=1e15) for site in sites]
  return Cluster("test", tuple(sites), placement)


# 16 MiB at 956 Mbit/s of payload: 0.1404 s. The first six were held against
# real throttled links.
@pytest.mark.parametrize(
  "one, kind, transport, seconds",
  [
    (star(2), "all_reduce", small.PLAIN, 0.1404),
    (star(4), "all_reduce", small.PLAIN, 0.2106),
    (star(4), "all_gather", small.PLAIN, 3 * 0.1404),
    (star(2), "broadcast", small.PLAIN, 0.1404),
    (star(2), "all_to_all", small.PLAIN, 0.0702),
    (star(4), "all_to_all", small.PLAIN, 0.1053),
    # A slow node sets the pace; a ring may cross a link once or twice.
    (small.uneven([1e9, 1e9, 1e8, 1e9]), "all_reduce", small.PLAIN, 2.106),
    (two_sites(0, 0, 1, 1), "all_reduce", small.PLAIN, 0.2106),
    (two_sites(0, 1, 0, 1), "all_reduce", small.PLAIN, 0.4211),
    (two_sites(0, 0, 1, 1), "broadcast", small.PLAIN, 0.1404),
    (two_sites(0, 1, 0, 1), "broadcast", small.PLAIN, 3 * 0.1404),
    # Whole messages wait for their way; pieces c / 4 + way, K = 6, c = 35.1 ms.
    (star(4, 0.2), "all_reduce", small.PLAIN, 0.2106 + 6 * 0.1),
    (star(4, 0.2), "all_gather", small.PLAIN, 3 * 0.1404 + 3 * 0.1),
    (star(4, 0.2), "all_reduce", RING, 6 * 0.1 + 0.0351 * (1 + 5 / 4)),
    # A tree of M = 5 goes up 3 hops and down 3, with 2 / 6 of the operand each.
    (star(5, 0.2), "all_reduce", NO_SLOW_START, 6 * 0.1 + 0.0468 * (1 + 5 / 4)),
    (star(2), "all_gather", GLOO, 1.5 * 0.1404),
    (star(2), "all_reduce", GLOO, 0.1404 * (1 + 66 / 3028)),
  ],
)
def test_a_collective_takes_what_was_worked_out(one, kind, transport, seconds):
  found = collective_s(one, kind, transport=transport)
  assert found == pytest.approx(seconds, rel=3e-3)


@pytest.mark.parametrize("num_replicas", [4, 8, 16, 32])
@pytest.mark.parametrize("bps", [1e9, 1e10, 1e11])
def test_over_warm_connections_an_allreduce_costs_at_most_ten_delays(
  num_replicas, bps
):
  what = "all_reduce", 128 * 2**20
  near, far = (
    small.cluster(num_replicas, bps=bps, rtt_s=rtt_s) for rtt_s in (0.0, 0.02)
  )
  extra_s = collective_s(far, *what, NO_SLOW_START) - collective_s(near, *what)
  assert 0.0099 < extra_s < 0.1


@pytest.mark.parametrize("bps", [1e6, 3e7, 1e10])
@pytest.mark.parametrize("method", ["diloco", "dilocox"])
def test_a_round_is_the_sum_or_the_longer_of_steps_and_exchange(method, bps):
  one = small.cluster(3, bps=bps)
  steps_s = 5 * 0.05
  rounds = 7
  script, plan = small.script(method, 3, sync_interval=5, total_steps=35)
  ops = small.ops_up_to(script, plan, 35)
  found = run_time(small.link_costs(one), small.work(one), ops)
  (operation,) = script.traffic.exchange(0)
  exchange_s = collective_s(one, operation.kind, operation.operand_bytes)
  exposed_s = exchange_s
  sent = rounds
  if method == "dilocox":  # The first round has nothing to wait for.
    exposed_s = max(0.0, exchange_s - steps_s)
    sent = rounds - 1
  assert found.exposed_s == pytest.approx(sent * exposed_s, abs=1e-9)
  assert found.total_s == pytest.approx(rounds * steps_s + sent * exposed_s)
  hidden_s = sent * (exchange_s - exposed_s)
  assert found.hidden_s == pytest.approx(hidden_s, abs=1e-9)


@pytest.mark.parametrize("name, changes", small.SCHEDULES + small.COPIED)
def test_links_that_cost_nothing_leave_the_steps(name, changes):
  one = small.cluster(3, bps=np.inf, rtt_s=0.0)
  script, plan = small.script(name, 3, **changes)
  found = run_time(small.link_costs(one), small.work(one), script.ops(plan))
  assert found.total_s == pytest.approx(0.05 * plan.total_steps)


@pytest.mark.parametrize("codec", ["int4", "rank 2"])
def test_an_all_to_all_over_uneven_links_is_at_most_a_little_longer(codec):
  rng = np.random.default_rng(3)
  for count in (3, 4, 6):
    one = small.uneven(rng.uniform(1e7, 1e8, count))
    script, plan = small.script("diloco", count, codec, sync_interval=10)
    args = small.link_costs(one), small.work(one)
    events, formula = (
      find(*args, script.ops(plan)).total_s for find in (simulate, run_time)
    )
    assert 1 - 1e-9 < events / formula < 1.12


def test_idle_time_at_the_limit_is_not_over_it_by_rounding():
  """Four steps of 0.05 s take 0.2 s, after which TCP starts slowly."""
  one = small.cluster(2, bps=1e9, rtt_s=0.1)
  script, plan = small.script("diloco", 2, sync_interval=4, total_steps=4000)
  ops = list(script.ops(plan))
  work = small.work(one)
  costs = small.link_costs(one, NCCL)
  slow = run_time(costs, work, ops)
  never = run_time(small.link_costs(one, NO_SLOW_START), work, ops)
  # Only the first exchange of the run starts slowly.
  (collective,) = script.traffic.exchange(0)
  extra_s = costs.slow_start_s(costs.steps(collective)[0])
  added_s = slow.exchange_s - never.exchange_s
  np.testing.assert_allclose(added_s, extra_s, rtol=1e-6)


EXCHANGES = [
  Launch(KEY, (operation(kind, 1_000_000),), members)
  for kind in OPERATIONS
  for members in (None, (0, 2))
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("launch", EXCHANGES)
def test_a_later_start_moves_all_times_and_nothing_else(launch, transport):
  """Long runs count on it (`simulate.long_runs`)."""
  one = small.uneven([1e7, 4e8, 6e7])
  ops = [Compute(3), launch, Compute(1), Wait(KEY, launch.members)]
  work = small.work(one, codec_s=0.02, speeds=(1.0, 0.3, 2.0))
  outcomes = []
  for start_s in (0.0, -1000.0):
    clock = AnalyticClock(small.link_costs(one, TRANSPORTS[transport]), work)
    state = clock.get_state()
    moved = {name: [start_s] * 3 for name in ("_now", "_channel")}
    clock.set_state(state | moved)
    outcomes.append(clock.walk(ops))
  early = outcomes[1]
  late = outcomes[0]
  moved_s = {
    "busy_until_s": early.busy_until_s + 1000,
    "end_s": early.end_s + 1000,
  }
  for field in dataclasses.fields(early):
    value = moved_s.get(field.name, getattr(early, field.name))
    np.testing.assert_allclose(value, getattr(late, field.name), atol=1e-9)


def test_a_clock_goes_on_from_where_it_was():
  """Idle lines and exchanges under way included."""
  one = small.cluster(2, bps=1e10, rtt_s=0.1)
  script, plan = small.script("delayed", 2, sync_interval=4, overlap_steps=6)
  costs = small.link_costs(one, GLOO)
  ops = list(script.ops(plan))
  whole = run_time(costs, small.work(one), ops)
  for cut in range(0, len(ops), 3):
    first, second = (AnalyticClock(costs, small.work(one)) for _ in range(2))
    first.walk(ops[:cut])
    second.set_state(json.loads(json.dumps(first.get_state())))
    small.assert_agree(second.walk(ops[cut:]), whole)


def test_a_store_is_written_once_and_read_by_the_others_as_they_come():
  access = Link(5e7, 3e7, rtt_s=0.06)
  one = dataclasses.replace(star(3, rtt_s=0.04), store=access)
  costs = small.link_costs(one)
  size = 10**6
  share = 1448 / 1514 / 8 / 3
  rtt_s = 0.05
  write_s = rtt_s + size / (3e7 * share)
  read_s = rtt_s + size / (5e7 * share)
  ops = [Compute(1), Launch(KEY, (operation("mailbox", size),)), Wait(KEY)]
  for step_s, expected in (
    # Both reads take one round trip, and three requests are for the agreement.
    ([1, 1, 1], [1 + write_s + 2 * (read_s - rtt_s) + 4 * rtt_s] * 3),
    # Those that wait have read one message before.
    (
      [1, 9, 1],
      [9 + write_s + n * (read_s - rtt_s) + 4 * rtt_s for n in (1, 2, 1)],
    ),
  ):
    found = run_time(costs, Work(np.array(step_s), np.zeros(3)), ops)
    np.testing.assert_allclose(found.busy_until_s, expected)


def test_a_mean_in_shares_takes_six_requests_and_reads_two_messages_at_most():
  num_replicas = 8
  access = Link(5e7, 3e7, rtt_s=0.06)
  one = dataclasses.replace(star(num_replicas, rtt_s=0.04), store=access)
  costs = small.link_costs(one)
  size = 8 * 10**6
  share = 1448 / 1514 / 8 / num_replicas
  rtt_s = 0.05
  read_s = (num_replicas - 1) * size / num_replicas / (5e7 * share)
  write_s = size / (3e7 * share)
  exchange = StoreShares(size, residual_bytes=4 * size)
  ops = [Compute(1), Launch(KEY, (exchange,)), Wait(KEY)]
  work = Work(np.ones(num_replicas), np.zeros(num_replicas))
  found = run_time(costs, work, ops)
  expected = 1 + write_s + 5 * write_s / num_replicas + 2 * read_s + 6 * rtt_s
  np.testing.assert_allclose(found.busy_until_s, [expected] * num_replicas)
