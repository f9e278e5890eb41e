import ast
import math
import pathlib

import pytest

from dilocox_jax.simulate import dtfm

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _pair(cluster, left, right):
  (pair,) = [p for p in cluster.pairs if set(p.sites) == {left, right}]
  return pair.bps, pair.rtt_s


def test_all_pairs_of_ten_regions_were_measured():
  table = dtfm.measured_pairs()
  regions = {name for ends in table for name in ends}
  assert len(regions) == 10
  assert len(table) == math.comb(10, 2)


def test_measured_figures_are_bits_and_seconds():
  table = dtfm.measured_pairs()
  first = table[frozenset(("Oregon", "Virginia"))]
  assert (first.bps, first.rtt_s) == (0.79e9, 0.067)
  last = table[frozenset(("Frankfurt", "Ireland"))]
  assert (last.bps, last.rtt_s) == (1.08e9, 0.024)


def test_farther_regions_are_slower():
  """Rate falls with delay, so rows cannot have got mixed up."""
  pairs = sorted(dtfm.measured_pairs().values(), key=lambda pair: pair.rtt_s)
  near, far = pairs[:15], pairs[-15:]
  assert min(p.bps for p in near) > max(p.bps for p in far)


@pytest.mark.parametrize(
  "scenario, num_replicas",
  [
    (dtfm.datacenter, 8),
    (dtfm.spot, 40),
    (dtfm.multi_datacenter, 2),
    (dtfm.regional, 4),
    (dtfm.worldwide, 8),
  ],
)
def test_every_scenario_has_64_devices(scenario, num_replicas):
  cluster = scenario()
  assert cluster.num_replicas == num_replicas
  assert sum(site.num_devices for site in cluster.sites) == 64


@pytest.mark.parametrize(
  "scenario", [dtfm.multi_datacenter, dtfm.regional, dtfm.worldwide]
)
def test_every_two_regions_of_a_scenario_are_measured(scenario):
  cluster = scenario()
  assert len(cluster.pairs) == math.comb(len(cluster.sites), 2)


def test_the_regional_scenario_has_figures_of_its_own():
  assert _pair(dtfm.regional(), "Oregon", "Virginia") == (1.15e9, 0.067)
  assert _pair(dtfm.worldwide(), "Oregon", "Virginia") == (0.79e9, 0.067)
  assert _pair(dtfm.multi_datacenter(), "Ohio", "Virginia") == (1.12e9, 0.011)


def test_more_replicas_than_regions_share_regions_and_bring_their_devices():
  cluster = dtfm.worldwide(20)
  assert list(cluster.placement) == sorted(cluster.placement)
  counts = [cluster.placement.count(index) for index in range(8)]
  assert set(counts) == {2, 3}
  assert {cluster.num_devices(rank) for rank in range(20)} == {8}


def test_fewer_replicas_than_regions_use_the_first_ones():
  cluster = dtfm.worldwide(2)
  assert [site.name for site in cluster.sites] == ["Oregon", "Virginia"]
  assert len(cluster.pairs) == 1


def test_replicas_of_a_region_do_not_take_each_others_rate():
  cluster = dtfm.regional(8)
  here, there = cluster.route(0, 7).links, cluster.route(1, 7).links
  pairs = [next(n for n in path if "pair" in n) for path in (here, there)]
  assert pairs[0] != pairs[1]
  assert cluster.goodput_bps[cluster.route(0, 1).links[0]] == 2e9


def test_the_table_is_part_of_the_package():
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
