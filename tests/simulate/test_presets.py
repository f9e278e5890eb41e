import math

import pytest

from dilocox_jax.simulate.presets import CLUSTER_PRESETS, cluster_preset

SYMMETRIC = [name for name in CLUSTER_PRESETS if name.endswith("bit")]


@pytest.mark.parametrize("name", CLUSTER_PRESETS)
def test_every_preset_carries_its_name_and_connects_all_its_replicas(name):
  cluster = cluster_preset(name)
  assert cluster.name == name
  last = cluster.num_replicas - 1
  for ends in ((0, last), (last, 0)):
    links = cluster.route(*ends).links
    assert all(cluster.goodput_bps[link] > 0 for link in links)


@pytest.mark.parametrize("name", CLUSTER_PRESETS)
def test_every_preset_comes_with_two_replicas_and_with_eight(name):
  for num_replicas in (1, 2, 8):
    assert cluster_preset(name, num_replicas).num_replicas == num_replicas


@pytest.mark.parametrize("name", SYMMETRIC)
def test_a_symmetric_preset_has_the_rate_in_its_name_both_ways(name):
  scale = 1e6 if name.endswith("mbit") else 1e9
  bps = float(name.removesuffix("mbit").removesuffix("gbit")) * scale
  cluster = cluster_preset(name)
  for site in cluster.sites:
    assert site.link.up_bps == site.link.down_bps == bps
  assert cluster.route(0, 1).rtt_s == 0.04


def test_symmetric_presets_reach_from_100_mbit_to_100_gbit():
  rates = [cluster_preset(n).sites[0].link.up_bps for n in SYMMETRIC]
  assert rates == sorted(rates)
  assert (rates[0], rates[-1]) == (1e8, 1e11)


def test_at_home_the_way_up_is_the_narrow_one():
  link = cluster_preset("consumer").sites[0].link
  assert link.up_bps == 40e6 < link.down_bps == 1e9


def test_nothing_takes_time_on_infinite_links():
  cluster = cluster_preset("infinite")
  assert set(cluster.goodput_bps.values()) == {math.inf}
  assert cluster.route(0, 1).rtt_s == 0


@pytest.mark.parametrize(
  "name, num_devices", [("dilocox_107b", 160), ("dilocox_1.3b", 16)]
)
def test_dilocox_shares_its_devices_among_any_number_of_sites(
  name, num_devices
):
  for num_replicas in (2, 4, 8):
    sites = cluster_preset(name, num_replicas).sites
    assert sum(site.num_devices for site in sites) == num_devices
  with pytest.raises(ValueError, match="num_replicas=3 must divide the 16"):
    cluster_preset(name, 3)


def test_dilocox_achieves_what_its_recalled_throughput_implies():
  """6 N tokens/s over the peak of all devices."""
  for name, parameters, tokens_per_s in (
    ("dilocox_107b", 107e9, 3728),
    ("dilocox_1.3b", 1.316e9, 23880),
  ):
    cluster = cluster_preset(name)
    flops = sum(map(cluster.replica_flops, range(cluster.num_replicas)))
    assert flops == pytest.approx(6 * parameters * tokens_per_s, rel=0.02)


def test_opendiloco_is_as_slow_as_its_slowest_link():
  for num_replicas in (2, 4, 8):
    sites = cluster_preset("opendiloco", num_replicas).sites
    rates = [bps for s in sites for bps in (s.link.up_bps, s.link.down_bps)]
    assert (min(rates), max(rates)) == (127e6, 935e6)


def test_intellect_1_spends_on_its_ring_what_was_published():
  """The rate is fitted to this; see the docstring."""
  cluster = cluster_preset("intellect_1")
  others = cluster.num_replicas - 1
  bits = 8 * 2 * others / cluster.num_replicas * 1e10
  ring_s = bits / cluster.goodput_bps["up:node0"]
  compute_s = 38 * 60
  assert compute_s / (compute_s + ring_s) == pytest.approx(0.83, abs=0.01)


def test_a_peer_of_covenant_computes_a_round_in_20_minutes():
  step_flops = 6 * 72.7e9 * 393216
  compute_s = 30 * step_flops / cluster_preset("covenant_72b").replica_flops(0)
  assert compute_s == pytest.approx(20 * 60, rel=0.02)


def test_an_unknown_preset_is_answered_with_the_nearest_or_with_the_list():
  with pytest.raises(ValueError) as error:
    cluster_preset("dilocox_107")
  assert str(error.value) == (
    "unknown cluster preset 'dilocox_107': did you mean 'dilocox_107b'?"
  )
  with pytest.raises(ValueError) as error:
    cluster_preset("Mars")
  assert all(name in str(error.value) for name in CLUSTER_PRESETS)


def test_a_preset_needs_a_replica():
  with pytest.raises(ValueError, match="num_replicas=0 must be at least 1"):
    cluster_preset("1gbit", 0)
