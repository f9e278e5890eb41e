import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

from dilocox_jax.plan.wire.collectives import Collective
from dilocox_jax.simulate.transfer import GLOO
from experiments.real_links import cases, collectives
from experiments.real_links.network import equal_cluster
from experiments.runtime.cluster_links import cluster_links

GOODPUT = 1448 / 1514 / 8  # Bytes of payload for each bit of the line.
MIB = 2**20
PLAIN = dataclasses.replace(GLOO, factors=())


def predicted(cluster, kind="all_reduce", transport=PLAIN):
  return cases.predicted_s(cluster, transport, Collective(kind, 16 * MIB))


def test_predictions_are_the_bytes_over_the_rate():
  for count, share in ((2, 1.0), (4, 1.5)):
    cluster = equal_cluster("100 Mbit/s", count)
    assert predicted(cluster) == pytest.approx(16 * MIB * share / 1e8 / GOODPUT)


def test_gloo_takes_longer_by_kind_and_number_of_processes():
  for count, place in ((2, 0), (4, 1)):
    cluster = equal_cluster("100 Mbit/s", count)
    for kind, *factors in GLOO.factors:
      payload_s = predicted(cluster, kind)
      assert predicted(cluster, kind, GLOO) == pytest.approx(
        factors[place] * payload_s
      )


def test_a_calibration_takes_each_kind_between_two_and_among_four(
  monkeypatch, tmp_path
):
  def measured(network, operands, repeats, folder):
    seconds = 1.0 if len(network.nodes) == 2 else 4.0
    return [(seconds, 100.0, 0.5)] * len(operands)

  monkeypatch.setattr(cases, "network_of", contextlib.nullcontext)
  monkeypatch.setattr(
    cases,
    "measure_collectives",
    lambda cluster, *rest: measured(cluster_links(cluster), *rest),
  )
  transport = cases.calibrated(tmp_path)
  assert [kind for kind, *_ in transport.factors] == list(collectives._MOVES)
  cluster = equal_cluster("60 Mbit/s", 4)
  for kind, pair, more in transport.factors:
    size = Collective(kind, 3 * MIB // 2)
    assert cases.predicted_s(cluster, transport, size) == pytest.approx(4.0)
    assert 0 < pair < more * 4


def test_collectives_over_an_open_link_are_measured(monkeypatch, tmp_path):
  throttled = []

  @contextlib.contextmanager
  def network(cluster):
    yield SimpleNamespace(throttle=lambda *each: throttled.append(each))

  monkeypatch.setattr(cases, "network_of", network)
  monkeypatch.setattr(
    cases,
    "measure_collectives",
    lambda _, given, *__: [(0.5, 1, 1)] * len(given),
  )
  transport = cases.calibrated_open(tmp_path)
  assert [link.up_bit_per_s for _, link in throttled] == [1e10, 1e10]
  pair = equal_cluster("10 Gbit/s", 2)
  for kind, *_ in GLOO.factors:
    whole = Collective(kind, 8 * MIB)
    assert cases.predicted_s(pair, transport, whole) == pytest.approx(0.5)


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
  for _, each in (*cases.all_cases(), *cases.quick_cases()):
    assert all(size >= MIB for _, size in each)
