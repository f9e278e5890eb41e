"""Presets hold what was published; files of users insist on their numbers."""

import ast
import csv
import math
import pathlib

import pytest

from dilocox_jax.simulate.cluster_file import (
  cluster_preset,
  cluster_presets,
  load_cluster,
)

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", cluster_presets())
def test_a_preset_is_described_and_connects_any_number_of_replicas(name):
  values, one = cluster_presets()[name], cluster_preset(name)
  assert one.name == values["name"] == name
  assert values["description"].endswith(".") and len(values["description"]) < 80
  last = one.num_replicas - 1
  for ends in ((0, last), (last, 0)):
    assert all(one.goodput_bps[link] > 0 for link in one.route(*ends).links)
  for num_replicas in (1, 2, 8):
    assert cluster_preset(name, num_replicas).num_replicas == num_replicas


@pytest.mark.parametrize("name", [n for n in cluster_presets() if "bit" in n])
def test_a_symmetric_preset_has_the_rate_in_its_name_both_ways(name):
  bps = float(name[:-4]) * {"m": 1e6, "g": 1e9}[name[-4]]
  one = cluster_preset(name)
  for site in one.sites:
    assert site.link.up_bps == site.link.down_bps == bps
  assert one.route(0, 1).rtt_s == 0.04


def test_homes_send_slowly_and_infinite_links_take_no_time():
  home = cluster_preset("consumer").sites[0].link
  assert (home.up_bps, home.down_bps) == (40e6, 1e9)
  infinite = cluster_preset("infinite")
  assert set(infinite.goodput_bps.values()) == {math.inf}
  assert infinite.route(0, 1).rtt_s == 0


def test_presets_of_papers_give_what_was_published():
  def flops(one):
    return sum(map(one.replica_flops, range(one.num_replicas)))

  # 6 N tokens a second over all devices.
  for name, parameters, tokens_per_s, devices in (
    ("dilocox_107b", 107e9, 3728, 160),
    ("dilocox_1.3b", 1.316e9, 23880, 16),
  ):
    expected = pytest.approx(6 * parameters * tokens_per_s, rel=0.02)
    for count in (2, 4, 8):
      one = cluster_preset(name, count)
      assert flops(one) == expected
      assert sum(site.num_devices for site in one.sites) == devices
  peer = cluster_preset("covenant_72b").replica_flops(0)
  compute_s = 30 * 6 * 72.7e9 * 393216 / peer
  assert compute_s == pytest.approx(20 * 60, rel=0.02)
  ring = cluster_preset("intellect_1")
  bits = 8 * 2 * (ring.num_replicas - 1) / ring.num_replicas * 1e10
  ring_s = bits / ring.goodput_bps["up:node0"]
  assert 38 * 60 / (38 * 60 + ring_s) == pytest.approx(0.83, abs=0.01)
  for count in (2, 4, 8):
    sites = cluster_preset("opendiloco", count).sites
    rates = [bps for s in sites for bps in (s.link.up_bps, s.link.down_bps)]
    assert (min(rates), max(rates)) == (127e6, 935e6)
    assert rates == sorted(rates)


@pytest.mark.parametrize(
  "call, words",
  [
    (lambda: load_cluster("dilocox_1.3"), "did you mean 'dilocox_1.3b'"),
    (lambda: load_cluster("Mars"), "have: .*1gbit.*streaming"),
    (lambda: load_cluster("absent.json"), "absent.json: no such cluster file"),
    (lambda: load_cluster(str(ROOT)), "no such cluster file"),
    (lambda: cluster_preset("1gbit", 0), "num_replicas=0 must be at least 1"),
    (lambda: cluster_preset("dilocox_1.3b", 3), "num_replicas=3: num_devices"),
    (
      lambda: load_cluster(str(ROOT / "experiments/clusters/example.json"), 5),
      "places 4 replicas, and the run has 5",
    ),
  ],
)
def test_a_cluster_that_is_not_there_is_refused(call, words):
  with pytest.raises(ValueError, match=words):
    call()


def _measured():
  """The table of ten regions: rate (bit/s) and round trip (s) by both ends."""
  text = (ROOT / "third_party" / "dtfm" / "dtfm_links.csv").read_text()
  lines = [line for line in text.splitlines() if not line.startswith("#")]
  return {
    frozenset((row["region_a"], row["region_b"])): (
      float(row["bandwidth_gbps"]) * 1e9,
      float(row["delay_ms"]) / 1e3,
    )
    for row in csv.DictReader(lines)
  }


@pytest.mark.parametrize("name", ["dtfm_multi_datacenter", "dtfm_worldwide"])
def test_the_pairs_of_a_scenario_are_those_of_the_table(name):
  table = _measured()
  for pair in cluster_preset(name).pairs:
    assert (pair.bps, pair.rtt_s) == pytest.approx(table[frozenset(pair.sites)])


@pytest.mark.parametrize(
  "scenario, num_replicas, regions",
  [
    ("dtfm_datacenter", 8, 0),
    ("dtfm_spot", 40, 0),
    ("dtfm_multi_datacenter", 2, 2),
    ("dtfm_regional", 4, 4),
    ("dtfm_worldwide", 8, 8),
  ],
)
def test_a_scenario_has_64_devices_and_all_pairs(
  scenario, num_replicas, regions
):
  one = cluster_preset(scenario)
  assert one.num_replicas == num_replicas
  assert sum(site.num_devices for site in one.sites) == 64
  assert len(one.pairs) == math.comb(regions, 2)


def test_the_regional_scenario_has_rates_of_its_own():
  def link(name):
    pairs = {frozenset(p.sites): p for p in cluster_preset(name).pairs}
    return pairs[frozenset(("Oregon", "Virginia"))].bps

  assert link("dtfm_regional") == 1.15e9
  assert link("dtfm_worldwide") == 0.79e9


def test_replicas_share_regions_in_blocks_and_bring_their_devices():
  many, few = (cluster_preset("dtfm_worldwide", n) for n in (20, 2))
  assert list(many.placement) == sorted(many.placement)
  assert {many.placement.count(index) for index in range(8)} == {2, 3}
  assert {many.num_devices(rank) for rank in range(20)} == {8}
  assert [site.name for site in few.sites] == ["Oregon", "Virginia"]
  assert len(few.pairs) == 1
  # Replicas of a region do not take each other's rate.
  one = cluster_preset("dtfm_regional", 8)
  assert one.route(0, 7).links[1] != one.route(1, 7).links[1]


def test_large_nodes_come_before_small_ones():
  counts = [
    [site.num_devices for site in cluster_preset("dtfm_spot", n).sites]
    for n in (4, 50)
  ]
  assert counts == [[4] * 4, [4] * 8 + [1] * 42]


def test_the_files_are_part_of_the_package():
  (found,) = [
    ast.literal_eval(keyword.value)
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    if isinstance(node, ast.Call)
    for keyword in node.keywords
    if keyword.arg == "package_data"
  ]
  folder = ROOT / "dilocox_jax" / "simulate"
  shipped = {f for p in found["dilocox_jax.simulate"] for f in folder.glob(p)}
  assert shipped == set(folder.glob("*.json")) != set()
