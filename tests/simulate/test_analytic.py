"""Formulas against textbooks, measured links, and limits."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Launch, Wait
from dilocox_jax.simulate.sites import Jitter, Link, Site
from dilocox_jax.simulate.transfer import GLOO, NCCL
from tests.oracles.events import simulate
from tests.simulate import small
from tests.simulate.test_agreement import METHODS

MEBIBYTES_16 = 16 * 2**20


def collective_s(one, kind, size_bytes=MEBIBYTES_16, transport=small.PLAIN):
  ops = [
    Launch(("x", 0, 0, 0), (Collective(kind, size_bytes),)),
    Wait(("x", 0, 0, 0)),
  ]
  return run_time(LinkCosts(one, transport), small.work(one), ops).total_s


def star(num_replicas, bps=1e9):
  return small.cluster(num_replicas, bps=bps, rtt_s=0.0)


# Predictions that were held against real throttled links (our notes, 4.3).
@pytest.mark.parametrize(
  "kind, num_replicas, seconds",
  [
    ("all_reduce", 2, 0.1404),
    ("all_reduce", 4, 0.2106),
    ("all_gather", 4, 0.4212),
    ("broadcast", 2, 0.1404),
    ("all_to_all", 2, 0.0702),
    ("all_to_all", 4, 0.1053),
  ],
)
def test_collectives_take_what_real_links_took(kind, num_replicas, seconds):
  found = collective_s(star(num_replicas), kind)
  assert found == pytest.approx(seconds, rel=1e-3)


def test_the_slowest_node_sets_the_pace_of_a_ring():
  sites = [Site(f"s{n}", small.link(1e9, rtt_s=0.0)) for n in range(3)]
  sites.append(Site("slow", small.link(1e8, rtt_s=0.0)))
  found = collective_s(Cluster("test", tuple(sites)), "all_reduce")
  assert found == pytest.approx(2.106, rel=1e-3)


@pytest.mark.parametrize(
  "placement, seconds", [((0, 0, 1, 1), 0.2106), ((0, 1, 0, 1), 0.4211)]
)
def test_rank_order_decides_how_often_a_ring_crosses_a_link(placement, seconds):
  link = Link(1e9, 1e9, rtt_s=0.0)
  sites = (Site("a", link, intra_rtt_s=0.0), Site("b", link, intra_rtt_s=0.0))
  found = collective_s(Cluster("test", sites, placement), "all_reduce")
  assert found == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_a_broadcast_never_divides_a_link(placement):
  # Replicas pass the operand on one after the other: 16 MiB at 1 Gbit/s take
  # 0.1404 s on each way between the sites, and nothing within a site.
  link = Link(1e9, 1e9, rtt_s=0.0)
  sites = tuple(
    Site(name, link, intra_bps=1e15, intra_rtt_s=0.0) for name in "ab"
  )
  one = Cluster("test", sites, placement)
  ways = sum(a != b for a, b in itertools.pairwise(placement))
  found = collective_s(one, "broadcast")
  operation = Collective("broadcast", MEBIBYTES_16)
  ops = [Launch(("x", 0, 0, 0), (operation,)), Wait(("x", 0, 0, 0))]
  by_events = simulate(small.link_costs(one), small.work(one), ops)
  assert found == pytest.approx(0.1404 * ways, rel=1e-3)
  assert found == pytest.approx(by_events.total_s, rel=1e-9)


@pytest.mark.parametrize("kind, rounds", [("all_reduce", 6), ("all_gather", 3)])
def test_every_round_of_a_ring_of_whole_messages_pays_the_latency(kind, rounds):
  far = small.cluster(4, bps=1e9, rtt_s=0.2)
  added = collective_s(far, kind) - collective_s(star(4), kind)
  assert added == pytest.approx(rounds * 0.1)


@pytest.mark.parametrize("num_replicas", [4, 8, 16, 32])
@pytest.mark.parametrize("delay_s", [1e-3, 5e-3, 1e-2])
def test_a_pipelined_ring_costs_few_delays_however_many_replicas(
  num_replicas, delay_s
):
  size_bytes = 128 * 2**20
  far = small.cluster(num_replicas, bps=1e9, rtt_s=2 * delay_s)
  found = collective_s(far, "all_reduce", size_bytes, NCCL)
  ops = [
    Launch(("x", 0, 0, 0), (Collective("all_reduce", size_bytes),)),
    Wait(("x", 0, 0, 0)),
  ]
  by_events = simulate(LinkCosts(far, NCCL), small.work(far), ops)
  assert by_events.total_s == pytest.approx(found, rel=1e-9)
  bytes_s = collective_s(star(num_replicas), "all_reduce", size_bytes)
  assert delay_s < found - bytes_s < 10 * delay_s  # Slow start included.
  waiting_s = collective_s(far, "all_reduce", size_bytes, GLOO)
  assert waiting_s > bytes_s + 4 * (num_replicas - 1) * delay_s


def test_a_short_message_waits_for_its_way():
  # n = 4 pieces of c / 4 each: 5 max(c, c / 4 + L) + c + L with c = 35.1 ms.
  far = small.cluster(4, bps=1e9, rtt_s=0.2)
  never = dataclasses.replace(NCCL, starts_slowly=False)
  found = collective_s(far, "all_reduce", transport=never)
  assert found == pytest.approx(5 * (0.0351 / 4 + 0.1) + 0.0351 + 0.1, rel=1e-3)


@pytest.mark.parametrize("num_rounds, left", [(4, 0), (4, 3)])
@pytest.mark.parametrize("codec_s", [0.0, 0.3])
def test_without_overlap_a_round_is_its_steps_and_its_exchange(
  num_rounds, left, codec_s
):
  one, interval, step_s = small.cluster(3), 6, 0.05
  total_steps = num_rounds * interval + left
  script, plan = small.script(
    "diloco", 3, sync_interval=interval, total_steps=total_steps
  )
  found = run_time(
    small.link_costs(one), small.work(one, step_s, codec_s), script.ops(plan)
  )
  operations = script.traffic.exchange(0)
  exchange_s = sum(
    collective_s(one, each.kind, each.operand_bytes) for each in operations
  )
  exchanges = num_rounds + (left > 0)
  expected = total_steps * step_s + exchanges * (exchange_s + codec_s)
  assert found.total_s == pytest.approx(expected)
  assert found.exposed_s == pytest.approx(exchanges * exchange_s)
  assert found.hidden_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("bps", [1e6, 3e7, 1e10])
def test_a_round_of_delay_takes_the_longer_of_steps_and_exchange(bps):
  one, interval, step_s, rounds = small.cluster(2, bps=bps), 5, 0.05, 7
  script, plan = small.script(
    "dilocox", sync_interval=interval, total_steps=rounds * interval
  )
  ops = list(script.ops(plan, rounds * interval))
  found = run_time(small.link_costs(one), small.work(one, step_s), ops)
  exchange_s = sum(
    collective_s(one, each.kind, each.operand_bytes)
    for each in script.traffic.exchange(0)
  )
  longer = max(interval * step_s, exchange_s)
  # The first round has nothing to wait for.
  waited = interval * step_s + (rounds - 1) * longer
  assert found.total_s == pytest.approx(waited)
  exposed = (rounds - 1) * max(0.0, exchange_s - interval * step_s)
  assert found.exposed_s == pytest.approx(exposed, abs=1e-9)


@pytest.mark.parametrize("name, changes", METHODS)
def test_with_links_that_cost_nothing_only_computing_is_left(name, changes):
  sites = tuple(
    Site(f"s{n}", Link(float("inf"), float("inf"), rtt_s=0.0)) for n in range(3)
  )
  one = Cluster("test", sites)
  script, plan = small.script(name, 3, **changes)
  found = run_time(small.link_costs(one), small.work(one), script.ops(plan))
  assert found.total_s == pytest.approx(0.05 * plan.total_steps)
  if "membership" not in changes:  # There nobody is always present.
    assert max(found.compute_s) == pytest.approx(found.total_s)


@settings(max_examples=30, deadline=None)
@given(
  method=st.sampled_from(METHODS),
  num_replicas=st.integers(2, 5),
  slow=st.floats(1e6, 1e9),
  faster=st.floats(1, 100),
  transport=st.sampled_from([small.PLAIN, NCCL, GLOO]),
)
def test_more_bandwidth_never_costs_time(
  method, num_replicas, slow, faster, transport
):
  name, changes = method
  script, plan = small.script(name, num_replicas, **changes)
  times = []
  for bps in (slow, slow * faster):
    one = small.cluster(num_replicas, bps=bps)
    link_costs = small.link_costs(one, transport)
    times.append(
      run_time(link_costs, small.work(one), script.ops(plan)).total_s
    )
  assert times[1] <= times[0] * (1 + 1e-12)


def jittered(num_replicas, sigmas, seeds):
  script, plan = small.script("diloco", num_replicas, sync_interval=20)
  found = []
  for seed in range(seeds):
    one = small.cluster(num_replicas, Jitter(sigmas[0], sigmas[1], seed))
    link_costs = small.link_costs(one)
    found.append(
      run_time(link_costs, small.work(one), script.ops(plan)).total_s
    )
  return np.mean(found), np.std(found) / np.sqrt(seeds)


@pytest.mark.parametrize("jitter", [(0.4, 0.0), (0.0, 0.4)])
def test_the_mean_of_jittered_runs_of_one_pair_converges(jitter):
  mean_s, error_s = jittered(1, jitter, 200)
  exact_s, _ = jittered(1, (0.0, 0.0), 1)
  assert abs(mean_s - exact_s) <= 4 * error_s


def test_two_replicas_wait_for_the_slower_one_as_order_statistics_say():
  mean_s, error_s = jittered(2, (0.3, 0.0), 300)
  exact_s, _ = jittered(2, (0.0, 0.0), 1)
  # Sums of 20 steps are nearly normal: E max = mean + sigma / sqrt(pi).
  sigma_s = 0.05 * np.sqrt(20 * (np.exp(0.3**2) - 1))
  expected_s = exact_s + 2 * sigma_s / np.sqrt(np.pi)
  assert abs(mean_s - expected_s) <= 4 * error_s + 0.02 * 2 * sigma_s


def test_a_thousand_uneven_sites_are_simulated():
  rng = np.random.default_rng(0)
  sites = tuple(
    Site(f"s{n}", small.link(bps), speed=speed)
    for n, (bps, speed) in enumerate(
      zip(rng.uniform(1e8, 1e9, 1000), rng.uniform(0.5, 1, 1000), strict=True)
    )
  )
  one = Cluster("test", sites)
  script, plan = small.script("diloco", 1000, total_steps=30)
  found = run_time(small.link_costs(one), small.work(one), script.ops(plan))
  slowest = (
    8
    * 2
    * 999
    / 1000
    * 4
    * sum(np.prod(shape) for shape in small.SHAPES.values())
    / min(site.link.up_bps for site in sites)
    / (1448 / 1514)
  )
  assert found.total_s > slowest
