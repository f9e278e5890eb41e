import dataclasses

import pytest

from dilocox_jax.simulate.cluster import Cluster, Outage
from dilocox_jax.simulate.sites import Link, Pair, Site, SiteOutage

SHARED = Link(1e9, 2e9, rtt_s=0.02, loss=0.1, streams=4, window_bytes=4e6)
OWN = Link(3e8, 4e8, rtt_s=0.1, loss=0.2, window_bytes=1e6, is_shared=False)


def _two_sites(**changes) -> Cluster:
  """Two replicas behind one link, two with a link each."""
  sites = (Site("a", SHARED, 8), Site("b", OWN, 6, intra_bps=5e9))
  return Cluster(
    **{"name": "two", "sites": sites, "placement": (0, 1, 0, 1)} | changes
  )


def test_replicas_behind_a_shared_link_leave_over_the_same_one():
  cluster = _two_sites()
  assert cluster.route(0, 1).links == ("up:a", "down:b/0")
  assert cluster.route(2, 3).links == ("up:a", "down:b/1")


def test_replicas_with_a_link_each_are_counted_at_their_site():
  cluster = _two_sites()
  assert cluster.route(1, 0).links == ("up:b/0", "down:a")
  assert cluster.route(3, 2).links == ("up:b/1", "down:a")


def test_replicas_of_a_site_talk_inside_it_and_to_themselves_over_nothing():
  cluster = _two_sites()
  assert cluster.route(0, 2).links == cluster.route(2, 0).links == ("inside:a",)
  assert cluster.route(3, 1).links == ("inside:b/1",)
  assert cluster.route(0, 2).rtt_s == cluster.sites[0].intra_rtt_s
  assert cluster.route(1, 1).links == ()
  assert cluster.route(1, 1).rtt_s == 0


def test_a_measured_pair_limits_each_direction_and_sets_the_delay():
  cluster = _two_sites(pairs=(Pair(("b", "a"), 5e8, 0.2),))
  assert cluster.route(0, 3).links == ("up:a", "pair:a>b/1", "down:b/1")
  assert cluster.route(3, 0).links == ("up:b/1", "pair:b/1>a", "down:a")
  assert cluster.route(0, 3).rtt_s == cluster.route(3, 0).rtt_s == 0.2


def test_each_end_of_a_path_adds_half_of_its_round_trip():
  assert _two_sites().route(0, 1).rtt_s == pytest.approx((0.02 + 0.1) / 2)


def test_a_route_is_as_good_as_the_worse_of_its_ends():
  route = _two_sites().route(0, 1)
  assert route.streams == 4
  assert route.window_bytes == 1e6
  assert route.loss == pytest.approx(1 - 0.9 * 0.8)
  unlimited = Cluster("x", (Site("a", SHARED), Site("b", Link(1e9, 1e9))))
  assert unlimited.route(0, 1).window_bytes == 4e6


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1), (0, 0, 1)])
def test_every_link_of_every_path_has_a_capacity_and_no_other_has(placement):
  cluster = _two_sites(placement=placement, pairs=(Pair(("a", "b"), 5e8, 0.2),))
  ranks = range(cluster.num_replicas)
  used = {
    link for i in ranks for j in ranks for link in cluster.route(i, j).links
  }
  assert set(cluster.goodput_bps) == used


def test_links_carry_their_payload_and_what_was_measured():
  cluster = _two_sites(pairs=(Pair(("a", "b"), 5e8, 0.2),))
  goodput = cluster.goodput_bps
  assert goodput["up:a"] == 1e9 * SHARED.efficiency
  assert goodput["down:a"] == 2e9 * SHARED.efficiency
  assert goodput["up:b/1"] == 3e8 * OWN.efficiency
  assert goodput["down:b/0"] == 4e8 * OWN.efficiency
  assert goodput["pair:a>b/0"] == goodput["pair:b/0>a"] == 5e8
  assert goodput["inside:b/0"] == 5e9


def test_placement_defaults_to_a_replica_a_site_in_order():
  cluster = Cluster("x", (Site("a", SHARED), Site("b", OWN), Site("c", OWN)))
  assert cluster.placement == (0, 1, 2)
  assert [cluster.site(i).name for i in range(3)] == ["a", "b", "c"]


def test_a_bad_rank_order_crosses_the_shared_link_twice():
  def crossings(placement):
    cluster = _two_sites(placement=placement)
    edges = [(i, (i + 1) % 4) for i in range(4)]
    return sum("up:a" in cluster.route(*edge).links for edge in edges)

  assert crossings((0, 0, 1, 1)) == 1
  assert crossings((0, 1, 0, 1)) == 2


def test_replicas_divide_the_devices_of_their_site():
  site = Site("a", SHARED, 8, 1e12, 0.5, speed=0.5)
  cluster = _two_sites(sites=(site, Site("b", OWN, 6)))
  assert [cluster.num_devices(i) for i in range(4)] == [4, 3, 4, 3]
  assert cluster.replica_flops(0) == 4 * 1e12 * 0.5 * 0.5


def test_an_outage_of_a_site_is_one_of_all_its_access_links():
  cluster = _two_sites(
    outages=(SiteOutage("a", 1.0, 2.0), SiteOutage("b", 5.0, 7.0))
  )
  assert cluster.link_outages == (
    Outage("up:a", 1.0, 2.0),
    Outage("down:a", 1.0, 2.0),
    Outage("up:b/0", 5.0, 7.0),
    Outage("down:b/0", 5.0, 7.0),
    Outage("up:b/1", 5.0, 7.0),
    Outage("down:b/1", 5.0, 7.0),
  )


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"placement": (0, 0)}, "placement leaves site 'b' without replica"),
    (
      {"placement": (0, 0, 0, 1)},
      "site 'a': num_devices=8 must be a multiple of its 3 replicas",
    ),
    (
      {"sites": (Site("a", SHARED, 8, num_stages=5), Site("b", OWN))},
      "site 'a': num_stages=5 must be at most the 4 devices of a replica",
    ),
    (
      {"sites": (Site("a", SHARED), Site("a", OWN))},
      "name='a' must be that of one site only",
    ),
    (
      {"pairs": (Pair(("a", "bb"), 1e9, 0.0),)},
      "unknown site 'bb': did you mean 'b'?",
    ),
    (
      {"pairs": (Pair(("a", "b"), 1e9, 0.0), Pair(("b", "a"), 2e9, 0.0))},
      "pairs must state ['a', 'b'] only once",
    ),
    (
      {"outages": (SiteOutage("c", 0.0, 1.0),)},
      "unknown site 'c': have: a, b",
    ),
  ],
)
def test_a_cluster_that_does_not_fit_together_is_refused(changes, message):
  with pytest.raises(ValueError) as error:
    _two_sites(**changes)
  assert str(error.value) == message


def test_a_changed_copy_forgets_what_the_original_derived():
  cluster = _two_sites()
  assert cluster.goodput_bps["up:a"] == 1e9 * SHARED.efficiency
  faster = Site("a", dataclasses.replace(SHARED, up_bps=7e9), 8)
  changed = dataclasses.replace(cluster, sites=(faster, cluster.sites[1]))
  assert changed.goodput_bps["up:a"] == 7e9 * SHARED.efficiency
