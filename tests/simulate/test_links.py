"""Messages of collectives, and what a route leaves of its links."""

import dataclasses
import math

import numpy as np
import pytest

from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.cluster import Route
from dilocox_jax.simulate.link_costs import LinkCosts, message_steps
from dilocox_jax.simulate.transfer import (
  GLOO,
  NCCL,
  limit_bytes_per_s,
  slow_start_s,
)
from tests.simulate import small

KINDS = ("all_reduce", "all_gather", "all_to_all", "broadcast")
ROUTE = Route(("up:a", "down:b"), 0.04, 0.0, 1)
GIGABIT = 125e6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_replica_gets_everything_and_sends_what_the_plan_says(
  kind, count
):
  # What each replica holds: parts that it has heard of, by who made them.
  held = [{replica} for replica in range(count)]
  if kind == "broadcast":
    held = [{0}, *(set() for _ in range(count - 1))]
  sent = np.zeros(count)
  operation = Collective(kind, 840)
  for each in message_steps(operation, count):
    before = [set(one) for one in held]
    for sender in range(count) if each.sender is None else [each.sender]:
      sent[sender] += each.size_bytes
      news = {sender} if kind == "all_to_all" else before[sender]
      held[(sender + each.hop) % count] |= news
  everything = {0} if kind == "broadcast" else set(range(count))
  assert all(one == everything for one in held)
  assert max(sent) == pytest.approx(operation.sent_bytes(count))


def test_a_collective_that_nobody_knows_is_refused():
  with pytest.raises(ValueError, match="kind='gossip' is not a collective"):
    message_steps(Collective("gossip", 8), 2)


def test_a_rate_is_that_of_the_narrowest_link_and_shared():
  share = 1448 / 1514 / 8
  costs = LinkCosts(small.uneven([1e8, 5e6, 4e8]))
  expected = share * np.array([5e6, 5e6, 1e8])
  np.testing.assert_allclose(costs.rate_bytes_per_s(1), expected)
  rtts_s = np.array([0.01, 0.2, 0.0025])
  ways_s = (rtts_s + np.roll(rtts_s, -1)) / 4
  np.testing.assert_allclose(costs.latency_s(1), ways_s)
  np.testing.assert_allclose(
    dataclasses.replace(costs, transport=GLOO).latency_s(1), 2 * ways_s
  )
  shared = LinkCosts(small.cluster(2, placement=(0, 1, 0, 1)))
  np.testing.assert_allclose(shared.rate_bytes_per_s(1), 1e8 * share / 2)


def test_every_link_of_a_route_carries_the_message():
  costs = small.link_costs(small.cluster(3))
  carried = costs.link_bytes(Collective("all_gather", 50))
  ways = [f"{way}:site {n}" for way in ("up", "down") for n in range(3)]
  assert carried == dict.fromkeys(ways, 100)
  chain = costs.link_bytes(Collective("broadcast", 50))
  assert "up:site 2" not in chain and chain["up:site 1"] == 50


@pytest.mark.parametrize(
  "changes, mbit_per_s",
  [
    # 1448 bytes sqrt(1.5) / (40 ms sqrt(0.001)).
    ({"loss": 1e-3}, 11.217),
    ({"loss": 1e-3, "streams": 8}, 8 * 11.217),
    ({"loss": 1e-5}, 10 * 11.217),
    ({}, math.inf),
    ({"rtt_s": 0.0, "loss": 0.1}, math.inf),
  ],
)
def test_loss_limits_a_transfer(changes, mbit_per_s):
  route = dataclasses.replace(ROUTE, **changes)
  found = 8e-6 * limit_bytes_per_s(route)
  assert found == pytest.approx(mbit_per_s, rel=1e-4)


NEAR = dataclasses.replace(ROUTE, rtt_s=0.0)
NEVER = dataclasses.replace(NCCL, starts_slowly=False)


@pytest.mark.parametrize(
  "transport, route, rate, size, seconds",
  [
    # 5 MB in flight are 345 times 10 segments: 8.43 round trips, in which
    # 7.2 MB go out that would else have taken 57.5 ms.
    (NCCL, ROUTE, GIGABIT, 1e9, 0.3373 - 0.0575),
    (NCCL, ROUTE, GIGABIT, 1e8, 0.3373 - 0.0575),
    (NCCL, ROUTE, 1e3, 1e9, 0.0),
    (NEVER, ROUTE, GIGABIT, 1e9, 0.0),
    (NCCL, NEAR, math.inf, 1e9, 0.0),
    # Ten segments over ln 2 go out in the first round trip, at any rate.
    (NCCL, ROUTE, math.inf, 14480 / math.log(2), 0.04),
    (NCCL, ROUTE, 1e10, 14480 / math.log(2), 0.04 - 1.448e-6 / math.log(2)),
  ],
)
def test_slow_start_doubles_ten_segments_until_the_line_is_full(
  transport, route, rate, size, seconds
):
  found = slow_start_s(transport, route, rate, size)
  assert found == pytest.approx(seconds, abs=1e-4 if size > 1e6 else 1e-9)


@pytest.mark.parametrize("size", [10.0, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("streams", [1, 8])
def test_more_bandwidth_never_makes_a_first_message_slower(size, streams):
  route = dataclasses.replace(ROUTE, streams=streams)
  rates = [1.3**n for n in range(20, 110)]
  times = [slow_start_s(NCCL, route, r, size) + size / r for r in rates]
  assert np.all(np.diff(times) <= 1e-12 * np.array(times[:-1]))


def test_gloo_sends_in_turn_between_two():
  assert GLOO.slowness("all_to_all", 2) > GLOO.slowness("all_to_all", 3) > 1
  assert GLOO.slowness("broadcast", 2) == NCCL.slowness("all_gather", 2) == 1
