import pytest

from dilocox_jax.simulate.cluster_file import cluster_from_mapping
from experiments.runtime.cluster_links import cluster_links
from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_network import Links, NodeLink, Uplink

SITE = {"up": "1 Gbit/s", "down": "2 Gbit/s", "rtt": "40 ms", "loss": "1 %"}
LINK = NodeLink(1e9, 2e9, 0.04, 0.01)


def links(*sites, **rest):
  values = {"every_site": SITE, "sites": list(sites), **rest}
  return cluster_links(cluster_from_mapping(values))


def test_a_replica_of_its_own_site_has_its_own_link():
  slow = links({"name": "a"}, {"name": "b", "up": "10 Mbit/s"})
  assert slow == Links([LINK, LINK._replace(up_bit_per_s=1e7)], [])


def test_replicas_of_a_site_share_its_uplink_in_any_order_of_ranks():
  sites = {"name": "a"}, {"name": "b"}
  found = links(*sites, placement=["a", "b", "a", "b"])
  assert found.nodes == [None] * 4
  assert found.uplinks == [Uplink((0, 2), LINK), Uplink((1, 3), LINK)]
  own = links({"name": "a", "shared": False}, placement=["a", "a"])
  assert own == Links([LINK, LINK], [])


PAIR = {"sites": ["a", "b"], "rate": "1 Gbit/s", "rtt": "1 ms"}
OUTAGE = {"site": "a", "start": "1 s", "stop": "2 s"}


@pytest.mark.parametrize(
  "rest, message",
  [
    ({"pairs": [PAIR]}, "has pairs"),
    ({"jitter": {"step": "1 %"}}, "has jitter"),
    ({"outages": [OUTAGE]}, "has outages"),
  ],
)
def test_what_links_cannot_have_is_refused(rest, message):
  with pytest.raises(UsageError, match=message):
    links({"name": "a"}, {"name": "b"}, **rest)


@pytest.mark.parametrize(
  ("name", "value"), [("window", "64 kB"), ("efficiency", "50 %")]
)
def test_what_tcp_has_by_itself_is_refused(name, value):
  with pytest.raises(UsageError, match=f"'b' states '{name}'"):
    links({"name": "a"}, {"name": "b", name: value})


def test_a_link_without_a_limit_is_refused():
  with pytest.raises(UsageError, match="'a' has no limit"):
    links({"name": "a", "up": "inf bit/s"}, {"name": "b"})
