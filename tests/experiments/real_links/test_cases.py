import pytest

from dilocox_jax.plan.wire.collectives import Collective
from dilocox_jax.simulate.transfer import GLOO, TCP
from experiments.real_links import cases
from experiments.real_links.network import equal_cluster

GOODPUT = 1448 / 1514 / 8  # Bytes of payload for each bit of the line.
MIB = 2**20


def predicted(cluster, kind="all_reduce", transport=TCP):
  return cases.predicted_s(cluster, transport, Collective(kind, 16 * MIB))


def test_predictions_are_the_bytes_over_the_rate():
  for count, share in ((2, 1.0), (4, 1.5)):
    cluster = equal_cluster("100 Mbit/s", count)
    assert predicted(cluster) == pytest.approx(16 * MIB * share / 1e8 / GOODPUT)


def test_gloo_gathers_by_turns_between_two_and_only_there():
  pair, four = (equal_cluster("100 Mbit/s", count) for count in (2, 4))
  for kind, factor in GLOO.pair_slowness:
    full = predicted(pair, kind)
    assert predicted(pair, kind, GLOO) == pytest.approx(factor * full)
    assert predicted(four, kind, GLOO) == predicted(four, kind)
  assert predicted(pair, transport=GLOO) == predicted(pair)


def test_a_shared_uplink_is_used_twice_by_a_bad_order_of_ranks():
  good, bad = (cases._two_sites(order) for order in ("AABB", "ABAB"))
  assert predicted(bad) == pytest.approx(2 * predicted(good))


def test_the_slowest_node_sets_the_pace():
  slow = cases._one_slow("1 Gbit/s", "100 Mbit/s")
  assert predicted(slow) == pytest.approx(
    predicted(equal_cluster("100 Mbit/s", 4)), rel=0.35
  )
  assert predicted(slow) > 5 * predicted(equal_cluster("1 Gbit/s", 4))


def test_cases_have_large_messages_and_names_of_their_own():
  names = [cluster.name for cluster, _ in cases.all_cases()]
  assert len(names) == len(set(names))
  for _, collectives in (*cases.all_cases(), *cases.quick_cases()):
    assert all(size >= MIB for _, size in collectives)
