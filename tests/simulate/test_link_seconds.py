"""Seconds of rings and trees, as the examples of the module compute them."""

import pytest

from dilocox_jax.plan.operations import operation
from dilocox_jax.simulate.cluster import Cluster, Link, Site
from dilocox_jax.simulate.link_costs import (
  LinkCosts,
  message_steps,
  tree_steps,
)
from dilocox_jax.simulate.transfer import NCCL, Transport

SUM = operation("all_reduce", 128 * 2**20)
WHOLE = Transport(pieces=1, starts_slowly=False)


def costs(bps, count=32, transport=NCCL):
  """Replicas on links with a round trip of 20 ms, so 10 ms one way."""
  sites = [Site(f"s{n}", Link(bps, bps, rtt_s=0.02)) for n in range(count)]
  return LinkCosts(Cluster("x", tuple(sites)), transport)


@pytest.mark.parametrize(
  ("transport", "seconds"),
  [
    # A step sends 4 MiB in c = 35.08 ms: 62 c + L in pieces, 62 (c + L) whole.
    (NCCL, 62 * 0.035084 + 0.01),
    (WHOLE, 62 * (0.035084 + 0.01)),
  ],
)
def test_a_ring_waits_for_the_way_once_or_in_every_step(transport, seconds):
  ring = message_steps(SUM, 32, transport)
  found = costs(1e9, transport=transport)._seconds(ring)
  assert found == pytest.approx(seconds, rel=1e-4)


def test_a_fast_line_waits_for_the_way_of_each_piece():
  # c = 3.508 ms, and a piece of c / 4 travels 10 ms.
  found = costs(1e10)._seconds(message_steps(SUM, 32, NCCL))
  expected = 61 * (0.0035084 / 4 + 0.01) + 0.0035084 + 0.01
  assert found == pytest.approx(expected, rel=1e-4)


def test_a_tree_has_ten_hops_of_a_fifth():
  tree = tree_steps(SUM, 32, pieces=NCCL.pieces)
  assert len(tree) == 10
  assert tree[0].size_bytes == pytest.approx(2 * 128 * 2**20 / 10)
  # c = 22.45 ms: the way hides behind the pieces, but for the last.
  assert costs(1e10)._seconds(tree) == pytest.approx(0.2345, rel=1e-3)


@pytest.mark.parametrize(("bps", "hops"), [(1e9, 62), (1e10, 10)])
def test_what_is_faster_is_taken(bps, hops):
  assert len(costs(bps).steps(SUM)) == hops


def test_one_replica_sends_nothing():
  assert costs(1e9, count=1)._seconds(message_steps(SUM, 1, NCCL)) == 0.0
  assert len(costs(1e9, count=1).steps(SUM)) == 0


def test_a_transport_without_trees_has_rings():
  assert len(costs(1e10, transport=WHOLE).steps(SUM)) == 62
