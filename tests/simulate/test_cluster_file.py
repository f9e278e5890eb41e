import copy
import json
import pathlib
import re
import textwrap

import pytest

from dilocox_jax.simulate import cluster_file
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.cluster_file import cluster_from_mapping
from dilocox_jax.simulate.presets import load_cluster
from dilocox_jax.simulate.sites import (
  Jitter,
  Link,
  Pair,
  Site,
  SiteOutage,
  file_keys,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "experiments" / "clusters" / "example.json"
LAB = {"name": "a", "up": "1 Gbit/s", "down": "2 Gbit/s"}
TWO = {"sites": [LAB, LAB | {"name": "b"}]}


def _changed(*path, value) -> dict:
  """The values of `TWO`, with one set."""
  values = copy.deepcopy(TWO)
  inside = values
  for key in path[:-1]:
    inside = inside[key]
  inside[path[-1]] = value
  return values


def test_the_example_is_read_as_it_looks():
  cluster = load_cluster(str(EXAMPLE))
  names = [cluster.site(rank).name for rank in range(4)]
  assert names == ["Utrecht", "Utrecht", "Oslo", "Lisbon"]
  oslo, lisbon = cluster.sites[1], cluster.sites[2]
  assert (oslo.speed, oslo.num_devices, oslo.peak_flops) == (0.8, 8, 312e12)
  assert (lisbon.link.up_bps, lisbon.link.down_bps) == (2e8, 1e9)
  assert (lisbon.link.rtt_s, lisbon.link.loss) == (0.06, 1e-4)
  assert cluster.route(2, 3).rtt_s == 0.07
  assert cluster.goodput_bps["pair:Oslo>Lisbon"] == 350e6
  assert (cluster.jitter.step_sigma, cluster.jitter.transfer_sigma) == (
    0.05,
    0.1,
  )
  assert {(o.start_s, o.stop_s) for o in cluster.link_outages} == {(600, 660)}


def test_the_example_of_the_documentation_is_a_cluster():
  text = cluster_file.__doc__ or ""
  example = re.search(r"\n    \{.*\n    \}\n", text, re.DOTALL)
  assert example
  cluster = cluster_from_mapping(json.loads(textwrap.dedent(example.group())))
  assert [site.name for site in cluster.sites] == ["Utrecht", "Oslo", "home"]
  assert cluster.sites[2].link.up_bps == 40e6


def test_the_documentation_names_every_key():
  sections = (cluster_file._CLUSTER, file_keys(Site), file_keys(Link))
  keys = [key for section in sections for key in section.values()]
  for key in (*keys, cluster_file._COUNT):
    assert f'"{key.name}"' in (cluster_file.__doc__ or "")


def test_every_key_is_read():
  """Values that differ from each other and from every default."""
  site = LAB | {
    "rtt": "1 ms",
    "loss": "1 %",
    "streams": 3,
    "window": "4 MiB",
    "efficiency": "90 %",
    "shared": False,
    "num_devices": 6,
    "peak": "1 PFLOP/s",
    "achieved": "50 %",
    "memory": "80 GB",
    "speed": 0.5,
    "num_stages": 2,
    "intra": "10 Gbit/s",
    "intra_rtt": "1 us",
  }
  values = {
    "name": "all",
    "sites": [site, LAB | {"name": "b"}],
    "placement": ["b", "a"],
    "pairs": [{"sites": ["a", "b"], "rate": "2 Mbit/s", "rtt": "3 ms"}],
    "jitter": {"step": "1 %", "transfer": "2 %", "seed": 7},
    "outages": [{"site": "b", "start": "1 s", "stop": "2 s"}],
  }
  keys = file_keys(Site) | file_keys(Link)
  assert set(site) == {key.name for key in keys.values()}
  only_read = {"every_site", "description", "num_devices"}
  assert set(values) == set(cluster_file._CLUSTER) - only_read
  link = Link(1e9, 2e9, 1e-3, 0.01, 3, 2.0**22, 0.9, is_shared=False)
  assert cluster_from_mapping(values) == Cluster(
    "all",
    (
      Site("a", link, 6, 1e15, 0.5, 80e9, 0.5, 2, 1e10, 1e-6),
      Site("b", Link(1e9, 2e9)),
    ),
    (1, 0),
    (Pair(("a", "b"), 2e6, 3e-3),),
    Jitter(0.01, 0.02, 7),
    (SiteOutage("b", 1.0, 2.0),),
  )


def test_a_site_overrides_what_is_said_of_every_site():
  values = {
    "every_site": {"up": "1 Gbit/s", "down": "1 Gbit/s", "speed": 2},
    "sites": [{"name": "a"}, {"name": "b", "up": "5 Mbit/s"}],
  }
  first, second = cluster_from_mapping(values).sites
  assert (first.link.up_bps, first.speed) == (1e9, 2.0)
  assert (second.link.up_bps, second.link.down_bps) == (5e6, 1e9)


def test_a_count_repeats_a_site_and_numbers_it_by_its_place():
  nodes = [LAB | {"count": 2}, LAB | {"name": "b"}, LAB | {"count": 1}]
  cluster = cluster_from_mapping({"sites": nodes})
  assert [site.name for site in cluster.sites] == ["a0", "a1", "b", "a3"]
  assert len({site.link for site in cluster.sites}) == 1


def test_sites_share_the_devices_of_the_cluster():
  nodes = [LAB | {"count": 4, "num_devices": 1}]
  cluster = cluster_from_mapping({"num_devices": 12, "sites": nodes})
  assert [site.num_devices for site in cluster.sites] == [3] * 4


@pytest.mark.parametrize(
  "values, message",
  [
    (
      _changed("sites", 0, "count", value=0),
      "sites[0].count=0 must be at least 1",
    ),
    (
      _changed("sites", 0, "count", value=True),
      "sites[0].count: True must be a whole number",
    ),
    (
      TWO | {"num_devices": 3},
      "num_devices=3 must be a multiple of the 2 sites",
    ),
    (TWO | {"num_devices": 0}, "num_devices=0 must be at least 1"),
    (TWO | {"description": 1}, "description: 1 must be a text"),
    (
      _changed("sites", 0, "up", value=1000),
      "sites[0].up: 1000 has no unit: write e.g. '1000 Mbit/s'",
    ),
    (
      _changed("sites", 1, "down", value="-1 Gbit/s"),
      "sites[1]: down_bps=-1 Gbit/s must be more than 0 bit/s",
    ),
    (
      {"sites": [{"name": "a", "up": "1 Gbit/s"}]},
      "sites[0].down is missing: write e.g. '1 Mbit/s'",
    ),
    (
      {"sites": [{"up": "1 Gbit/s", "down": "1 Gbit/s"}]},
      "sites[0].name is missing: write a text",
    ),
    ({}, "sites is missing: write a list of at least one site"),
    ({"sites": []}, "sites is missing: write a list of at least one site"),
    ({"sites": {}}, "sites: {} must be a list"),
    ({"sites": ["a"]}, "sites[0]: 'a' must be an object"),
    ([], "a cluster: [] must be an object"),
    (
      _changed("sites", 0, "num_devices", value="8"),
      "sites[0].num_devices: '8' must be a whole number",
    ),
    (
      _changed("sites", 0, "shared", value=1),
      "sites[0].shared: 1 must be true or false",
    ),
    (
      _changed("sites", 0, "speed", value=10**400),
      "sites[0]: speed=inf must be more than 0 and finite",
    ),
    (
      _changed("sites", 0, "speed", value="fast"),
      "sites[0].speed: 'fast' must be a number",
    ),
    (
      _changed("sites", 0, "num_stages", value=9),
      "site 'a': num_stages=9 must be at most the 8 devices of a replica",
    ),
    (
      _changed("every_site", value={"peak": "312 TFLOPS"}),
      "every_site.peak: '312 TFLOPS' has no unit of a compute rate: have"
      " FLOP/s, GFLOP/s, TFLOP/s, PFLOP/s, EFLOP/s",
    ),
    (
      _changed("placement", value=["a", "c"]),
      "placement[1]: unknown site 'c': have: a, b",
    ),
    (
      _changed("pairs", value=[{"sites": ["a"], "rate": "1 Gbit/s"}]),
      "pairs[0].sites: ['a'] must be a list of two names of sites",
    ),
    (
      _changed("pairs", value=[{"sites": ["a", "b"], "rate": "1 Gbit/s"}]),
      "pairs[0].rtt is missing: write e.g. '1 ms'",
    ),
    (
      _changed("jitter", value={"step": "-1 %"}),
      "jitter: step_sigma=-1 % must be at least 0 % and finite",
    ),
    (
      _changed("outages", value=[{"site": "a", "start": "9 s", "stop": "5 s"}]),
      "outages[0]: stop_s=5 s must be more than 9 s",
    ),
  ],
)
def test_bad_input_is_one_line_with_the_field_and_what_it_expects(
  values, message
):
  with pytest.raises(ValueError) as error:
    cluster_from_mapping(values)
  assert str(error.value) == message


@pytest.mark.parametrize(
  "path, near",
  [
    (("plcement",), "unknown key 'plcement': did you mean 'placement'?"),
    (("every_site",), "every_site: unknown key 'pek': did you mean 'peak'?"),
    (("sites", 0, "dwn"), "sites[0]: unknown key 'dwn': did you mean 'down'?"),
  ],
)
def test_a_misspelt_key_is_answered_with_the_nearest(path, near):
  value = {"pek": "1 TFLOP/s"} if path == ("every_site",) else "1 Gbit/s"
  with pytest.raises(ValueError) as error:
    cluster_from_mapping(_changed(*path, value=value))
  assert str(error.value).startswith(near)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "text, message",
  [
    ("{", "not JSON: Expecting property name"),
    ('{"sites": [], "sites": []}', "'sites' is stated more than once"),
    ('{"sites": 1}', "sites: 1 must be a list"),
  ],
)
def test_an_error_in_a_file_names_the_file(text, message, tmp_path):
  path = tmp_path / "cluster.json"
  path.write_text(text)
  with pytest.raises(ValueError) as error:
    load_cluster(str(path))
  assert str(error.value).startswith(f"{path}: {message}")


def test_a_name_that_is_neither_preset_nor_file_is_told_apart(tmp_path):
  with pytest.raises(ValueError, match="did you mean 'dilocox_1.3b'"):
    load_cluster("dilocox_1.3")
  with pytest.raises(ValueError, match="absent.json: no such cluster file"):
    load_cluster("absent.json")
  with pytest.raises(ValueError, match="no such cluster file"):
    load_cluster(str(tmp_path))


def test_a_preset_takes_a_number_of_replicas_and_a_file_insists_on_its_own():
  assert load_cluster("1gbit", 5).num_replicas == 5
  assert load_cluster(str(EXAMPLE), 4).num_replicas == 4
  with pytest.raises(ValueError, match="places 4 replicas, and the run has 5"):
    load_cluster(str(EXAMPLE), 5)
