"""Clusters: their files, the numbers in them, routes and capacities."""

import copy
import json
import pathlib
import re
import textwrap
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from dilocox_jax.simulate import cluster_file
from dilocox_jax.simulate.cluster import (
  Cluster,
  Jitter,
  Link,
  Outage,
  Pair,
  Site,
  SiteOutage,
)
from dilocox_jax.simulate.cluster_file import cluster_from_mapping, load_cluster
from dilocox_jax.simulate.quantities import (
  COMPUTE,
  RATE,
  SHARE,
  SIZE,
  TIME,
  format_quantity,
  parse_quantity,
)

EXAMPLE = (
  pathlib.Path(__file__).parents[2] / "experiments/clusters/example.json"
)
LAB = {"name": "a", "up": "1 Gbit/s", "down": "2 Gbit/s"}
SHARED = Link(1e9, 2e9, rtt_s=0.02, loss=0.1, streams=4, window_bytes=4e6)
OWN = Link(3e8, 4e8, rtt_s=0.1, loss=0.2, window_bytes=1e6, is_shared=False)


def two_sites(**changes):
  """Two replicas behind one link, two with a link each."""
  sites = (Site("a", SHARED, 8), Site("b", OWN, 6, intra_bps=5e9))
  return Cluster(
    **{"name": "two", "sites": sites, "placement": (0, 1, 0, 1)} | changes
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
  assert (route.streams, route.window_bytes) == (4, 1e6)
  assert route.loss == pytest.approx(1 - 0.9 * 0.8)
  unlimited = Cluster("x", (Site("a", SHARED), Site("b", Link(1e9, 1e9))))
  assert unlimited.route(0, 1).window_bytes == 4e6
  assert unlimited.placement == (0, 1)


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1), (0, 0, 1)])
def test_every_link_that_is_used_has_a_capacity_and_no_other(placement):
  one = two_sites(placement=placement, pairs=PAIRED.pairs)
  ranks = range(one.num_replicas)
  used = {x for i in ranks for j in ranks for x in one.route(i, j).links}
  assert set(one.goodput_bps) == used


def test_links_carry_their_payload_or_what_was_measured():
  share, goodput = 1448 / 1514, PAIRED.goodput_bps
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


def test_an_outage_of_a_site_is_one_of_all_its_access_links():
  one = two_sites(outages=(SiteOutage("b", 5.0, 7.0),))
  links = "up:b/0", "down:b/0", "up:b/1", "down:b/1"
  assert one.link_outages == tuple(Outage(x, 5.0, 7.0) for x in links)


def test_the_example_is_read_as_it_looks():
  one = load_cluster(str(EXAMPLE), 4)
  names = [one.site(rank).name for rank in range(4)]
  assert names == ["Utrecht", "Utrecht", "Oslo", "Lisbon"]
  assert (one.sites[1].speed, one.sites[1].peak_flops) == (0.8, 312e12)
  assert one.goodput_bps["pair:Oslo>Lisbon"] == 350e6
  assert {(o.start_s, o.stop_s) for o in one.link_outages} == {(600, 660)}


def test_the_example_of_the_documentation_is_a_cluster():
  found = re.search(
    r"\n    \{.*\n    \}\n", cluster_file.__doc__ or "", re.DOTALL
  )
  assert found
  one = cluster_from_mapping(json.loads(textwrap.dedent(found.group())))
  assert [site.name for site in one.sites] == ["Utrecht", "Oslo", "home"]
  assert one.sites[2].link.up_bps == 40e6


def test_every_key_is_read_and_documented():
  """Values that differ from each other and from every default."""
  link = {"rtt": "1 ms", "loss": "1 %", "streams": 3, "window": "4 MiB"}
  link |= {"efficiency": "90 %", "shared": False}
  site = {"num_devices": 6, "peak": "1 PFLOP/s", "achieved": "50 %"}
  site |= {"memory": "80 GB", "speed": 0.5}
  site |= {"intra": "10 Gbit/s", "intra_rtt": "1 us"}
  values = {
    "name": "all",
    "sites": [LAB | link | site, LAB | {"name": "b"}],
    "placement": ["b", "a"],
    "pairs": [{"sites": ["a", "b"], "rate": "2 Mbit/s", "rtt": "3 ms"}],
    "jitter": {"step": "1 %", "transfer": "2 %", "seed": 7},
    "outages": [{"site": "b", "start": "1 s", "stop": "2 s"}],
  }
  assert cluster_from_mapping(values) == Cluster(
    "all",
    (
      Site(
        "a",
        Link(1e9, 2e9, 1e-3, 0.01, 3, 2.0**22, 0.9, is_shared=False),
        *(6, 1e15, 0.5, 80e9, 0.5, 1e10, 1e-6),
      ),
      Site("b", Link(1e9, 2e9)),
    ),
    (1, 0),
    (Pair(("a", "b"), 2e6, 3e-3),),
    Jitter(0.01, 0.02, 7),
    (SiteOutage("b", 1.0, 2.0),),
  )
  for key in [
    *values,
    *LAB,
    *link,
    *site,
    "every_site",
    "count",
    "num_devices",
  ]:
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
    ("sites.0.count", True, "count: True must be a whole number"),
    ("num_devices", 3, "num_devices=3 must be a multiple of the 2 sites"),
    ("num_devices", 0, "num_devices=0 must be at least 1"),
    ("description", 1, "description: 1 must be a text"),
    ("sites.0.up", 1000, r"sites\[0\].up: 1000 has no unit.* '1000 Mbit/s'"),
    ("sites.1.down", "-1 Gbit/s", r"sites\[1\]: down_bps=-1 Gbit/s .* than 0"),
    ("sites.1.up", "0 bit/s", "up_bps=0 bit/s must be more than 0 bit/s"),
    ("sites.0.down", MISSING, r"sites\[0\].down is missing: .* '1 Mbit/s'"),
    ("sites.0.name", MISSING, "name is missing: write a text"),
    ("sites.0.name", "a/b", "name='a/b' must be made of letters"),
    ("sites.0.name", "b", "name='b' must be that of one site only"),
    ("sites", [], "sites is missing"),
    ("sites", {}, "sites: {} must be a list"),
    ("sites.0", "a", r"sites\[0\]: 'a' must be an object"),
    ("sites.0.rtt", "-1 s", "rtt_s=-1 s must be at least 0 s and finite"),
    ("sites.0.rtt", "inf s", "rtt_s=inf s must be .* finite"),
    ("sites.0.loss", "100 %", "loss=100 % must be .* less than 100 %"),
    ("sites.0.streams", 0, "streams=0 must be at least 1"),
    ("sites.0.window", "0 B", "window_bytes=0 B must be more than 0 B"),
    ("sites.0.efficiency", "150 %", "efficiency=150 % .* at most 100 %"),
    ("sites.0.shared", 1, "shared: 1 must be true or false"),
    ("sites.0.num_devices", "8", "num_devices: '8' must be a whole number"),
    ("sites.0.num_devices", 0, "num_devices=0 must be at least 1"),
    ("sites.0.peak", "-1 TFLOP/s", "peak_flops=-1 TFLOP/s must be more than"),
    ("sites.0.achieved", "0 %", "achieved_fraction=0 % must be more than 0 %"),
    ("sites.0.memory", "0 B", "memory_bytes=0 B must be more than 0 B"),
    ("sites.0.speed", 10**400, "speed=inf must be more than 0 and finite"),
    ("sites.0.speed", 0, "speed=0 must be more than 0"),
    ("sites.0.speed", "fast", "speed: 'fast' must be a number"),
    ("sites.0.intra", "0 bit/s", "intra_bps=0 bit/s must be more than 0"),
    ("sites.0.intra_rtt", "-1 ms", "intra_rtt_s=-1 ms must be at least 0 s"),
    ("sites.0.dwn", "1 Mbit/s", r"sites\[0\]: unknown key 'dwn'.* 'down'"),
    ("every_site.peak", "3 TFLOPS", "every_site.peak: .* have FLOP/s, GFLOP/s"),
    ("every_site.pek", "1 TFLOP/s", "every_site: unknown key 'pek'.* 'peak'"),
    ("plcement", [], "unknown key 'plcement': did you mean 'placement'"),
    ("placement", ["a", "c"], r"placement\[1\]: unknown site 'c': have: a, b"),
    ("placement", ["a"], "placement leaves site 'b' without replica"),
    ("placement", list("aaab"), "'a': num_devices=8 .* of its 3 replicas"),
    ("pairs.0.sites", ["a"], r"pairs\[0\].sites: .* list of two names"),
    ("pairs.0.sites", ["a", "a"], "must be two different sites"),
    ("pairs.0.sites", ["a", "bb"], "unknown site 'bb': did you mean 'b'"),
    ("pairs.0.rate", "0 bit/s", "bps=0 bit/s must be more than 0 bit/s"),
    ("pairs.0.rtt", "-1 s", "rtt_s=-1 s must be at least 0 s"),
    ("pairs.0.rtt", MISSING, r"pairs\[0\].rtt is missing: write e.g. '1 ms'"),
    ("jitter.step", "-1 %", "jitter: step_sigma=-1 % must be at least 0 %"),
    ("jitter.transfer", "-1 %", "transfer_sigma=-1 % must be at least 0 %"),
    ("jitter.seed", -1, "seed=-1 must be at least 0"),
    ("outages.0.start", "-1 s", "start_s=-1 s must be at least 0 s"),
    ("outages.0.stop", "9 s", r"outages\[0\]: stop_s=9 s .* more than 9 s"),
    ("outages.0.site", "c", "unknown site 'c': have: a, b"),
  ],
)
def test_bad_input_is_told_its_place_and_its_range(path, value, words):
  values = {"sites": [LAB, LAB | {"name": "b"}], "every_site": {}, "jitter": {}}
  if path.startswith("pairs"):
    pair = {"sites": ["a", "b"], "rate": "1 Gbit/s", "rtt": "1 ms"}
    values["pairs"] = [pair]
  if path.startswith("outages"):
    values["outages"] = [{"site": "a", "start": "9 s", "stop": "10 s"}]
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


def test_pairs_are_stated_once_and_a_cluster_is_an_object():
  twice = (*PAIRED.pairs, Pair(("a", "b"), 2e9, 0.0))
  with pytest.raises(ValueError, match=r"pairs must state \['a', 'b'\] only"):
    two_sites(pairs=twice)
  with pytest.raises(ValueError, match=r"a cluster: \[\] must be an object"):
    cluster_from_mapping([])


@pytest.mark.parametrize(
  "text, words",
  [
    ("{", "not JSON: Expecting"),
    ("[" * 100_000, "nested too deeply"),
    ('{"sites": [], "sites": []}', "'sites' is stated more than once"),
    ('{"sites": 1}', "sites: 1 must be a list"),
  ],
)
def test_an_error_in_a_file_names_the_file(text, words, tmp_path):
  path = tmp_path / "cluster.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=f"cluster.json: .*{words}"):
    load_cluster(str(path))


@pytest.mark.parametrize(
  "text, kind, value",
  [
    ("1 Gbit/s", RATE, 1e9),
    ("1.12 Gbit/s", RATE, 1.12e9),
    ("inf bit/s", RATE, float("inf")),
    ("40 ms", TIME, 0.04),
    ("0.1 s", TIME, 0.1),
    ("1.5 h", TIME, 5400.0),
    ("312 TFLOP/s", COMPUTE, 312e12),
    ("16 MiB", SIZE, 2.0**24),
    ("0.01 %", SHARE, 1e-4),
    ("0 s", TIME, 0.0),
  ],
)
def test_a_quantity_reads_and_prints_as_written(text, kind, value):
  assert parse_quantity(text, kind, "field") == value
  assert format_quantity(value, kind) == text


@hypothesis.given(
  st.sampled_from([RATE, TIME, SIZE, COMPUTE, SHARE]), st.floats(1e-15, 1e18)
)
def test_what_is_printed_reads_back_to_the_same_number(kind, value):
  assert parse_quantity(format_quantity(value, kind), kind, "field") == value


@pytest.mark.parametrize(
  "text, kind, words",
  [
    ("8 Mbit", SIZE, "no unit of a size"),
    ("1 Gb/s", RATE, "'1 Gb/s' has no .*: have bit/s, .* GB/s"),
    (" 1000 ", RATE, "x: 1000 has no unit: write e.g. '1000 Mbit/s'"),
    *((bad, TIME, "no time") for bad in ("fast", "", None, True, [1], "nan s")),
    ("1e999999 h", TIME, "too large"),
  ],
)
def test_what_is_no_quantity_is_refused(text, kind, words):
  with pytest.raises(ValueError, match=words):
    parse_quantity(text, kind, "x")


def test_bytes_are_eight_times_bits():
  assert parse_quantity("1 MB/s", RATE, "up") == 8e6
