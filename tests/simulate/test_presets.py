import ast
import csv
import math
import pathlib

import pytest

from dilocox_jax.simulate.presets import (
  cluster_preset,
  cluster_presets,
  load_cluster,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
SYMMETRIC = [name for name in cluster_presets() if name.endswith("bit")]
REGIONS = ["dtfm_multi_datacenter", "dtfm_regional", "dtfm_worldwide"]


@pytest.mark.parametrize("name", cluster_presets())
def test_every_preset_carries_its_name_and_connects_all_its_replicas(name):
  cluster = cluster_preset(name)
  assert cluster.name == name
  last = cluster.num_replicas - 1
  for ends in ((0, last), (last, 0)):
    links = cluster.route(*ends).links
    assert all(cluster.goodput_bps[link] > 0 for link in links)


def test_every_preset_is_described_in_a_line():
  for name, values in cluster_presets().items():
    assert values["name"] == name
    assert values["description"].endswith(".")
    assert len(values["description"]) <= 80


@pytest.mark.parametrize("name", cluster_presets())
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
  assert (min(rates), max(rates), len(set(rates))) == (1e8, 1e11, 9)


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
  with pytest.raises(ValueError, match="num_replicas=3: num_devices=16"):
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
  """The rate is fitted to this; see the comment in the file."""
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
  assert all(name in str(error.value) for name in cluster_presets())


def test_a_preset_needs_a_replica():
  with pytest.raises(ValueError, match="num_replicas=0 must be at least 1"):
    cluster_preset("1gbit", 0)


def _pair(cluster, left, right):
  (pair,) = [p for p in cluster.pairs if set(p.sites) == {left, right}]
  return pair.bps, pair.rtt_s


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


def test_all_pairs_of_ten_regions_were_measured():
  table = _measured()
  assert len(frozenset().union(*table)) == 10
  assert len(table) == math.comb(10, 2)


@pytest.mark.parametrize("name", ["dtfm_multi_datacenter", "dtfm_worldwide"])
def test_the_pairs_of_a_scenario_are_those_of_the_table(name):
  table = _measured()
  for pair in cluster_preset(name).pairs:
    assert (pair.bps, pair.rtt_s) == pytest.approx(table[frozenset(pair.sites)])


def test_farther_regions_are_slower():
  """Rate falls with delay, so rows cannot have got mixed up."""
  pairs = sorted(_measured().values(), key=lambda pair: pair[1])
  assert min(bps for bps, _ in pairs[:15]) > max(bps for bps, _ in pairs[-15:])


@pytest.mark.parametrize(
  "scenario, num_replicas",
  [
    ("dtfm_datacenter", 8),
    ("dtfm_spot", 40),
    ("dtfm_multi_datacenter", 2),
    ("dtfm_regional", 4),
    ("dtfm_worldwide", 8),
  ],
)
def test_every_scenario_has_64_devices(scenario, num_replicas):
  cluster = cluster_preset(scenario)
  assert cluster.num_replicas == num_replicas
  assert sum(site.num_devices for site in cluster.sites) == 64


@pytest.mark.parametrize("scenario", REGIONS)
def test_every_two_regions_of_a_scenario_are_measured(scenario):
  cluster = cluster_preset(scenario)
  assert len(cluster.pairs) == math.comb(len(cluster.sites), 2)


def test_the_regional_scenario_has_figures_of_its_own():
  assert _pair(cluster_preset("dtfm_regional"), "Oregon", "Virginia") == (
    1.15e9,
    0.067,
  )
  assert _pair(cluster_preset("dtfm_worldwide"), "Oregon", "Virginia") == (
    0.79e9,
    0.067,
  )
  assert _pair(cluster_preset("dtfm_multi_datacenter"), "Ohio", "Virginia") == (
    1.12e9,
    0.011,
  )


def test_more_replicas_than_regions_share_regions_and_bring_their_devices():
  cluster = cluster_preset("dtfm_worldwide", 20)
  assert list(cluster.placement) == sorted(cluster.placement)
  counts = [cluster.placement.count(index) for index in range(8)]
  assert set(counts) == {2, 3}
  assert {cluster.num_devices(rank) for rank in range(20)} == {8}


def test_fewer_replicas_than_regions_use_the_first_ones():
  cluster = cluster_preset("dtfm_worldwide", 2)
  assert [site.name for site in cluster.sites] == ["Oregon", "Virginia"]
  assert len(cluster.pairs) == 1


def test_replicas_of_a_region_do_not_take_each_others_rate():
  cluster = cluster_preset("dtfm_regional", 8)
  here, there = cluster.route(0, 7).links, cluster.route(1, 7).links
  pairs = [next(n for n in path if "pair" in n) for path in (here, there)]
  assert pairs[0] != pairs[1]
  assert cluster.goodput_bps[cluster.route(0, 1).links[0]] == 2e9


def test_the_files_are_part_of_the_package():
  """Whoever moves it must tell the packaging."""
  tree = ast.parse((ROOT / "setup.py").read_text())
  (data,) = [
    ast.literal_eval(keyword.value)
    for node in ast.walk(tree)
    if isinstance(node, ast.Call)
    for keyword in node.keywords
    if keyword.arg == "package_data"
  ]
  folder = ROOT / "dilocox_jax" / "simulate"
  shipped = {f for p in data["dilocox_jax.simulate"] for f in folder.glob(p)}
  present = {f for f in (folder / "data").rglob("*") if f.is_file()}
  assert present
  assert present <= shipped


def test_a_file_of_nested_lists_is_refused(tmp_path):
  (tmp_path / "deep.json").write_text("[" * 100_000)
  with pytest.raises(ValueError, match="nested too deeply"):
    load_cluster(str(tmp_path / "deep.json"))
