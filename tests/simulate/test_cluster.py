"""Clusters: files and presets, the numbers in them, routes and capacities."""

import copy
import json
import math
import pathlib
import re
import textwrap
from typing import Any

import pytest

from dilocox_jax.simulate import cluster_file
from dilocox_jax.simulate.cluster import STORE, Cluster, Link, Pair, Site
from dilocox_jax.simulate.cluster_file import (
  cluster_from_mapping,
  cluster_presets,
  load_cluster,
)
from dilocox_jax.simulate.quantities import (
  COMPUTE,
  RATE,
  SHARE,
  SIZE,
  TIME,
  parse_quantity,
)
from tests import damage

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = str(ROOT / "experiments/clusters/example.json")
LAB = {"name": "a", "up": "1 Gbit/s", "down": "2 Gbit/s"}
SHARED = Link(1e9, 2e9, rtt_s=0.02, loss=0.1, streams=4)
OWN = Link(3e8, 4e8, rtt_s=0.1, loss=0.2, is_shared=False)


def two_sites(**changes):
  """Two replicas behind one link, two with a link each."""
  sites = (Site("a", SHARED, 8), Site("b", OWN, 6, intra_bps=5e9))
  return Cluster(
    **{"name": "two", "sites": sites, "placement": (0, 1, 0, 1)} | changes  # pyright: ignore
  )


PAIRED = two_sites(pairs=(Pair(("b", "a"), 5e8, 0.2),))


@pytest.mark.parametrize(
  "one, ends, links, rtt_s",
  [
    (two_sites(), (0, 1), ("up:a", "down:b/0"), 0.06),
    (two_sites(), (2, 3), ("up:a", "down:b/1"), 0.06),
    (two_sites(), (3, 2), ("up:b/1", "down:a"), 0.06),
    (two_sites(), (2, 0), ("inside:a",), 10e-6),
    (two_sites(), (3, 1), ("inside:b/1",), 10e-6),
    (two_sites(), (1, 1), (), 0.0),
    (PAIRED, (0, 3), ("up:a", "pair:a>b/1", "down:b/1"), 0.2),
    (PAIRED, (3, 0), ("up:b/1", "pair:b/1>a", "down:a"), 0.2),
  ],
)
def test_a_transfer_takes_the_links_between_its_replicas(
  one, ends, links, rtt_s
):
  assert one.route(*ends).links == links
  assert one.route(*ends).rtt_s == pytest.approx(rtt_s)


def test_a_route_is_as_good_as_the_worse_of_its_ends():
  route = two_sites().route(0, 1)
  assert route.streams == 4
  assert route.loss == pytest.approx(1 - 0.9 * 0.8)


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1), (0, 0, 1)])
def test_every_link_that_is_used_has_a_capacity_and_no_other(placement):
  one = two_sites(placement=placement, pairs=PAIRED.pairs)
  ranks = *range(one.num_replicas), STORE
  used = {x for i in ranks for j in ranks for x in one.route(i, j).links}
  assert set(one.goodput_bps) == used


def test_links_carry_their_payload_or_what_was_measured():
  share = 1448 / 1514
  goodput = PAIRED.goodput_bps
  for link, bps in {
    "up:a": 1e9 * share,
    "down:a": 2e9 * share,
    "up:b/1": 3e8 * share,
    "down:b/0": 4e8 * share,
    "pair:a>b/0": 5e8,
    "pair:b/0>a": 5e8,
    "inside:b/0": 5e9,
  }.items():
    assert goodput[link] == pytest.approx(bps)


def test_replicas_divide_the_devices_of_their_site():
  site = Site("a", SHARED, 8, 1e12, 0.5, speed=0.5)
  one = two_sites(sites=(site, Site("b", OWN, 6)))
  assert [one.num_devices(i) for i in range(4)] == [4, 3, 4, 3]
  assert one.replica_flops(0) == 4 * 1e12 * 0.5 * 0.5


def test_the_examples_are_read_as_they_look():
  one = load_cluster(EXAMPLE, 4)
  names = [one.site(rank).name for rank in range(4)]
  assert names == ["Utrecht", "Utrecht", "Oslo", "Lisbon"]
  assert (one.sites[1].speed, one.sites[1].peak_flops) == (0.8, 312e12)
  assert one.goodput_bps["pair:Oslo>Lisbon"] == 350e6
  text = cluster_file.__doc__ or ""
  found = re.search(r"\n    \{.*\n    \}\n", text, re.DOTALL)
  assert found
  one = cluster_from_mapping(json.loads(textwrap.dedent(found.group())))
  assert [site.name for site in one.sites] == ["Utrecht", "Oslo", "home"]
  assert one.sites[2].link.up_bps == 40e6


def test_every_key_is_read_and_documented():
  """Values that differ from each other and from every default."""
  link = {"rtt": "1 ms", "loss": "1 %", "streams": 3}
  link |= {"efficiency": "90 %", "shared": False}
  site = {"num_devices": 6, "peak": "1 PFLOP/s", "achieved": "50 %"}
  site |= {"memory": "80 GB", "speed": 2}
  site |= {"intra": "10 Gbit/s", "intra_rtt": "1 us"}
  pair = {"sites": ["a", "b"], "rate": "2 Mbit/s", "rtt": "3 ms"}
  values = {
    "name": "all",
    "sites": [LAB | link | site, LAB | {"name": "b"}],
    "placement": ["b", "a"],
    "pairs": [pair],
    "store": {"up": "3 Mbit/s", "down": "4 Mbit/s", "loss": "2 %"},
  }
  others = {"every_site", "count", "num_devices", "description"}
  own = Link(1e9, 2e9, 1e-3, 0.01, 3, 0.9, is_shared=False)
  assert cluster_from_mapping(values | {"description": "x"}) == Cluster(
    "all",
    (
      Site("a", own, 6, 1e15, 0.5, 80e9, 2.0, 1e10, 1e-6),
      Site("b", Link(1e9, 2e9)),
    ),
    (1, 0),
    (Pair(("a", "b"), 2e6, 3e-3),),
    Link(3e6, 4e6, loss=0.02),
  )
  for key in {*values, *LAB, *link, *site, *pair} | others:
    assert f'"{key}"' in (cluster_file.__doc__ or "")


def test_sites_have_common_values_numbers_and_a_share_of_the_devices():
  values = {
    "num_devices": 12,
    "every_site": {"up": "1 Gbit/s", "down": "1 Gbit/s", "speed": 2},
    "sites": [
      {"name": "a", "count": 2, "num_devices": 1},
      {"name": "b", "up": "5 Mbit/s"},
      {"name": "c", "count": 1},
    ],
  }
  sites = cluster_from_mapping(values).sites
  assert [site.name for site in sites] == ["a0", "a1", "b", "c3"]
  assert [site.num_devices for site in sites] == [3] * 4
  rates = [(site.link.up_bps, site.link.down_bps, site.speed) for site in sites]
  assert rates == [(1e9, 1e9, 2), (1e9, 1e9, 2), (5e6, 1e9, 2), (1e9, 1e9, 2)]


MISSING = object()


# Where a value stands in a file of the sites a and b, and what is said of it.
@pytest.mark.parametrize(
  "path, value, words",
  [
    ("sites.0.count", 0, r"sites\[0\].count=0 must be at least 1"),
    ("num_devices", 3, "num_devices=3 must be a multiple of the 2 sites"),
    ("sites.0.up", 1000, r"sites\[0\].up: 1000 has no unit.* '1000 Mbit/s'"),
    ("sites.0.down", MISSING, r"sites\[0\]: down is missing: .* '1 Mbit/s'"),
    ("sites.0.name", "a/b", "name='a/b' must be made of letters"),
    ("sites.0.name", "b", "name='b' must be that of one site only"),
    ("sites.0", "a", r"sites\[0\]='a' must be of type dict"),
    ("sites.0.rtt", "inf s", "rtt_s=inf must be .* below inf"),
    ("sites.0.peak", "inf FLOP/s", "peak_flops=inf must be .* below inf"),
    ("sites.0.efficiency", "150 %", "efficiency=1.5 .* at most 1"),
    ("sites.0.speed", 10**400, r"sites\[0\].speed=1000.* is too large"),
    ("sites.0.count", 10**9, "count=1000000000 must be .* at most 10000"),
    ("sites.0.num_devices", 10**30, "num_devices=1000.* at most 2147483648"),
    ("sites.0.dwn", "1 Mbit/s", r"sites\[0\]: unknown key 'dwn'.* 'down'"),
    ("placement", ["a", "c"], r"placement\[1\]: unknown site 'c': have: a, b"),
    ("placement", ["a"], "placement leaves site 'b' without replica"),
    ("placement", list("aaab"), "'a': num_devices=8 .* of its 3 replicas"),
    ("pairs.0.sites", ["a"], r"pairs\[0\]: sites=.* two different sites"),
  ],
)
def test_bad_input_is_told_its_place_and_its_range(path, value, words):
  pair = {"sites": ["a", "b"], "rate": "1 Gbit/s", "rtt": "1 ms"}
  values = {"sites": [LAB, LAB | {"name": "b"}], "every_site": {}}
  if path.startswith("pairs"):
    values["pairs"] = [pair]  # pyright: ignore
  inside: Any = copy.deepcopy(values)
  values = inside
  *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
  for key in way:
    inside = inside[key]
  inside[last] = value
  if value is MISSING:
    del inside[last]
  with pytest.raises(ValueError, match=words) as error:
    cluster_from_mapping(values)
  assert "\n" not in str(error.value)


def test_pairs_are_stated_once():
  twice = (*PAIRED.pairs, Pair(("a", "b"), 2e9, 0.0))
  with pytest.raises(ValueError, match=r"pairs must state \['a', 'b'\] only"):
    two_sites(pairs=twice)


@pytest.mark.parametrize("text", ["{", '{"sites": 1}'])
def test_an_error_in_a_file_names_the_file(text, tmp_path):
  path = tmp_path / "cluster.json"
  path.write_text(text)
  with pytest.raises(ValueError, match="cluster.json: "):
    load_cluster(str(path))


def test_a_damaged_file_is_one_line_or_a_cluster(tmp_path):
  path = tmp_path / "cluster.json"
  whole = {
    "name": "two",
    "every_site": {"up": "1 Gbit/s", "down": "1 Gbit/s", "rtt": "40 ms"},
    "sites": [{"name": "a", "speed": 0.8, "loss": "1 %"}, LAB | {"count": 1}],
    "placement": ["a", "a1"],
    "pairs": [{"sites": ["a", "a1"], "rate": "1 Gbit/s", "rtt": "1 ms"}],
    "store": {"up": "1 Gbit/s", "down": "1 Gbit/s"},
  }
  cases = [*damage.in_fields(whole)]
  flipped = damage.in_bytes(json.dumps(whole).encode(), flips=100)
  cases += [(what, content.decode("latin-1")) for what, content in flipped]
  for what, text in cases:
    path.write_text(text, "latin-1")
    found = damage.outcome(what, lambda: load_cluster(str(path)))
    if found:
      rates = [bps for bps in found.goodput_bps.values() if bps != math.inf]
      assert rates and min(rates) > 0, what


@pytest.mark.parametrize(
  "text, kind, value",
  [
    ("1.12 Gbit/s", RATE, 1.12e9),
    ("1 MB/s", RATE, 8e6),
    ("inf bit/s", RATE, math.inf),
    ("0.1 ms", TIME, 1e-4),
    ("1.5 h", TIME, 5400.0),
    ("312 TFLOP/s", COMPUTE, 312e12),
    ("16 MiB", SIZE, 2.0**24),
    ("0.01 %", SHARE, 1e-4),
    ("8 Mbit", SIZE, "no unit of a size"),
    ("-80 GB", SIZE, "x: '-80 GB' is below 0"),
    ("1 Gb/s", RATE, "'1 Gb/s' has no .*: have bit/s, .* GB/s"),
    (" 1000 ", RATE, "x: 1000 has no unit: write e.g. '1000 Mbit/s'"),
    *((bad, TIME, "no time") for bad in ("fast", "", None, True, [1], "nan s")),
    ("1e999999 h", TIME, "out of range"),
    ("1e999 Mbit/s", RATE, "x: '1e999 Mbit/s' is out of range"),  # Not inf.
    ("9" * 5000 + " ms", TIME, r"\(5,005 characters\) is out of range"),
  ],
)
def test_a_quantity_is_a_number_with_a_unit_of_its_kind(text, kind, value):
  if not isinstance(value, str):
    assert parse_quantity(text, kind, "x") == value
    return
  with pytest.raises(ValueError, match=value):
    parse_quantity(text, kind, "x")


@pytest.mark.parametrize("name", cluster_presets())
def test_a_preset_is_connected(name):
  one = load_cluster(name)
  assert one.name == name
  last = one.num_replicas - 1
  for ends in ((0, last), (last, 0)):
    assert all(one.goodput_bps[link] > 0 for link in one.route(*ends).links)
  if name.startswith("dtfm"):
    pairs = {"dtfm_worldwide": 28, "dtfm_regional": 6}
    pairs |= {"dtfm_multi_datacenter": 1}
    assert len(one.pairs) == pairs.get(name, 0)
    assert sum(site.num_devices for site in one.sites) == 64
  if name.endswith("bit"):
    bps = float(name[:-4]) * {"m": 1e6, "g": 1e9}[name[-4]]
    link = load_cluster(name, 3).sites[2].link
    assert (link.up_bps, link.down_bps, link.rtt_s) == (bps, bps, 0.04)


def test_presets_of_papers_give_what_was_published():
  # 6 N tokens a second over all devices.
  for name, parameters, tokens_per_s, devices in (
    ("dilocox_107b", 107e9, 3728, 160),
    ("dilocox_1.3b", 1.316e9, 23880, 16),
  ):
    for count in (2, 4, 8):
      one = load_cluster(name, count)
      flops = sum(map(one.replica_flops, range(count)))
      assert flops == pytest.approx(6 * parameters * tokens_per_s, rel=0.02)
      assert sum(site.num_devices for site in one.sites) == devices


@pytest.mark.parametrize(
  "name, num_replicas, words",
  [
    ("dilocox_1.3", None, "did you mean 'dilocox_1.3b'"),
    ("Mars", None, "have: .*1gbit.*streaming"),
    ("absent.json", None, "absent.json: no such cluster file"),
    (str(ROOT), None, "no such cluster file"),
    ("a" * 300, None, "unknown cluster preset"),
    (f"/{'a' * 300}.json", None, "no such cluster file"),
    ("1gbit", 0, "num_replicas=0 must be at least 1"),
    ("dilocox_1.3b", 3, "num_devices=16 must be a multiple"),
    ("opendiloco", 3, "places 4 replicas, and the run has 3"),
    (EXAMPLE, 5, "places 4 replicas, and the run has 5"),
  ],
)
def test_a_cluster_that_is_not_there_is_refused(name, num_replicas, words):
  with pytest.raises(ValueError, match=words):
    load_cluster(name, num_replicas)
