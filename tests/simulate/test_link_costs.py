"""Rounds of collectives, and what a message between two replicas costs."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.link_costs import LinkCosts, message_steps
from dilocox_jax.simulate.sites import Link
from dilocox_jax.simulate.transfer import GLOO, NCCL
from tests.simulate import small

KINDS = ("all_reduce", "all_gather", "all_to_all", "broadcast")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_a_replica_sends_in_rounds_what_the_plan_says(kind, num_replicas):
  operation = Collective(kind, 840)
  todo = message_steps(operation, num_replicas)
  sent = [0.0] * num_replicas
  for each in todo:
    for replica in range(num_replicas):
      if each.sender in (None, replica):
        sent[replica] += each.size_bytes
  assert max(sent) == pytest.approx(operation.sent_bytes(num_replicas))


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_rounds_everyone_has_everything_it_should(kind):
  count = 5
  # What each replica holds: parts it has heard of, by whom they were made.
  held = [{replica} for replica in range(count)]
  if kind == "broadcast":
    held = [{0}, *(set() for _ in range(count - 1))]
  direct = kind == "all_to_all"
  for each in message_steps(Collective(kind, 100), count):
    before = [set(one) for one in held]
    for sender in range(count):
      if each.sender in (None, sender):
        news = {sender} if direct else before[sender]
        held[(sender + each.hop) % count] |= news
  everything = {0} if kind == "broadcast" else set(range(count))
  assert all(one == everything for one in held)


def test_a_rate_is_that_of_the_narrowest_link_on_the_way():
  one = small.cluster(3, rtt_s=0.1)
  narrow = dataclasses.replace(one.sites[1], link=Link(3e8, 5e6, rtt_s=0.3))
  one = dataclasses.replace(one, sites=(one.sites[0], narrow, one.sites[2]))
  costs = LinkCosts(one, NCCL)
  goodput = np.array([5e6, 1e8, 1e8]) / 8 * 1448 / 1514
  np.testing.assert_allclose(costs.rate_bytes_per_s(1), goodput)
  np.testing.assert_allclose(costs.latency_s(1), [0.1, 0.1, 0.05])


def test_a_message_costs_one_round_trip_with_gloo_and_half_with_nccl():
  one = small.cluster(2, rtt_s=0.1)
  np.testing.assert_allclose(LinkCosts(one, GLOO).latency_s(1), 0.1)
  np.testing.assert_allclose(LinkCosts(one, NCCL).latency_s(1), 0.05)


def test_messages_that_meet_on_a_link_divide_it():
  one = dataclasses.replace(small.cluster(2), placement=(0, 1, 0, 1))
  np.testing.assert_allclose(
    LinkCosts(one, NCCL).rate_bytes_per_s(1), 1e8 / 8 * 1448 / 1514 / 2
  )


def test_every_link_of_a_route_carries_the_message():
  link_costs = small.link_costs(small.cluster(3))
  carried = link_costs.link_bytes(Collective("all_gather", 50))
  assert carried == {
    f"{way}:site {n}": 100 for way in ("up", "down") for n in range(3)
  }
  chain = link_costs.link_bytes(Collective("broadcast", 50))
  assert "up:site 2" not in chain and chain["up:site 1"] == 50
