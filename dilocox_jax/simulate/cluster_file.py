"""Clusters as JSON files, short enough to write by hand.

What all sites have in common is said once, every quantity carries its unit,
and a replica is placed by the name of its site:

    {
      "name": "two labs and a home",
      "every_site": {"num_devices": 8, "peak": "312 TFLOP/s",
                     "up": "1 Gbit/s", "down": "1 Gbit/s", "rtt": "40 ms"},
      "sites": [
        {"name": "Utrecht"},
        {"name": "Oslo", "speed": 0.8},
        {"name": "home", "num_devices": 1, "up": "40 Mbit/s"}
      ]
    }

A site needs "name", "up" and "down". It may have "rtt", "loss", "streams",
"window", "efficiency" and "shared" (its link); "num_devices", "peak",
"achieved", "memory" and "speed" (its devices); "intra" and "intra_rtt" (the
network inside). `cluster.py` says what each key means and what
its default is. A site with a "count" stands for so many equal sites:
{"name": "node", "count": 2} are "node0" and "node1", numbered by their places
in the list.

A cluster may have "description" (one line for readers), "num_devices" (devices
of all sites together, which share them evenly), "placement" (the site of every
replica, in the order of the ring), "pairs" (what was measured between two
sites), "jitter" and "outages". "comment" is allowed anywhere and is ignored.
The presets in `presets.json` have this form and are a good start: round numbers
to sweep over, and the settings of papers. The comment of a paper's preset says
what was published, what is recalled and not confirmed, and what is assumed, so
that nobody takes our assumption for a result of the paper.
"""

import dataclasses
import functools
import importlib.resources
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.checks import in_front, known, require, within_limits
from dilocox_jax.simulate.cluster import (
  Cluster,
  Jitter,
  Link,
  Pair,
  Site,
  SiteOutage,
)
from dilocox_jax.simulate.quantities import (
  RATE,
  Dimension,
  FileKey,
  file_keys,
  parse_quantity,
)


@functools.cache
def cluster_presets() -> dict[str, dict[str, Any]]:
  """Returns what the file of every preset would hold, by the preset's name."""
  folder = importlib.resources.files("dilocox_jax.simulate")
  return json.loads(folder.joinpath("presets.json").read_text("utf-8"))


def load_cluster(name_or_path: str, num_replicas: int | None = None) -> Cluster:
  """Returns a preset by its name, or the cluster that a file describes.

  Args:
    name_or_path: One of `cluster_presets`, or a JSON file.
    num_replicas: Number of replicas; None is as many as the cluster has. That
      of a file cannot be changed.

  Raises:
    ValueError: One line that says the field and what it expects.
  """
  path = pathlib.Path(name_or_path)
  is_path = path.suffix == ".json" or path.name != name_or_path or path.exists()
  if name_or_path in cluster_presets() or not is_path:
    return cluster_preset(name_or_path, num_replicas)
  if not path.is_file():
    raise ValueError(f"{name_or_path}: no such cluster file")
  with in_front(f"{name_or_path}: "):
    text = path.read_text(encoding="utf-8")
    try:
      values = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
      raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
      raise ValueError("its lists are nested too deeply") from None
    cluster = cluster_from_mapping(values)
    require(
      num_replicas in (None, cluster.num_replicas),
      f"it places {cluster.num_replicas} replicas, and the run has"
      f" {num_replicas}: set mesh.num_replicas={cluster.num_replicas}",
    )
  return cluster


def cluster_preset(name: str, num_replicas: int | None = None) -> Cluster:
  """Returns a cluster by its name.

  Args:
    name: One of `cluster_presets`.
    num_replicas: Number of replicas; None is as many as the setting has.

  Raises:
    ValueError: If there is no such preset, or not with so many replicas.
  """
  known("cluster preset", name, cluster_presets())
  values = cluster_presets()[name]
  if num_replicas is None:
    return cluster_from_mapping(values)
  within_limits("num_replicas", num_replicas, at_least=1)
  with in_front(f"{name}, num_replicas={num_replicas}: "):
    return cluster_from_mapping(values | _resized(values, num_replicas))


def _resized(values: Mapping[str, Any], num_replicas: int) -> dict[str, Any]:
  """Returns the keys of a preset that differ for a number of replicas."""
  sites = values["sites"]
  if "pairs" in values:
    return _spread(sites, values["pairs"], num_replicas)
  if "count" not in sites[-1]:
    return {"sites": _evenly_spaced(sites, num_replicas)}
  # Only the last sites grow in number: DT-FM's 8 large and 32 small nodes
  # become 8 and 42 for 50 replicas, and 4 large ones for 4.
  resized, left = [], num_replicas
  for site in sites:
    count = left if site is sites[-1] else min(left, site["count"])
    left -= count
    resized += [site | {"count": count}] if count else []
  return {"sites": resized}


def _spread(
  sites: Sequence[dict], pairs: Sequence[dict], num_replicas: int
) -> dict[str, Any]:
  """Places replicas over regions in blocks: 8 over 4 are 0 0 1 1 2 2 3 3.

  Every replica brings the devices of one. With fewer replicas than regions
  only the first regions are used.
  """
  names = [site["name"] for site in sites[:num_replicas]]
  placement = [
    names[rank * len(names) // num_replicas] for rank in range(num_replicas)
  ]
  used = [
    site | {"num_devices": site["num_devices"] * placement.count(site["name"])}
    for site in sites[:num_replicas]
  ]
  between = [pair for pair in pairs if set(pair["sites"]) <= set(names)]
  return {"sites": used, "placement": placement, "pairs": between}


def _evenly_spaced(sites: Sequence[dict], num_replicas: int) -> list[dict]:
  """Returns sites whose rates lie between those of the first and the last.

  Rates are evenly spaced in ratio. Example: 127 and 935 Mbit/s make 127, 345
  and 935 Mbit/s for three sites.
  """
  first, last = (
    parse_quantity(site["up"], RATE, "up") / 1e6
    for site in (sites[0], sites[-1])
  )
  shares = [rank / max(num_replicas - 1, 1) for rank in range(num_replicas)]
  rates = [f"{round(first * (last / first) ** x)} Mbit/s" for x in shares]
  return [
    {"name": f"site{rank}", "up": rate, "down": rate}
    for rank, rate in enumerate(rates)
  ]


# The keys of a whole file, by name; those of its sections are in `cluster.py`.
_CLUSTER = {name: FileKey(name, str) for name in ("name", "description")}
_CLUSTER |= {name: FileKey(name, dict) for name in ("every_site", "jitter")}
_LISTS = ("sites", "placement", "pairs", "outages")
_CLUSTER |= {name: FileKey(name, list) for name in _LISTS}
_CLUSTER["num_devices"] = FileKey("num_devices", int, 1)
_COUNT = FileKey("count", int, 1)
_TOO_LARGE = 10**300  # Of a whole number that a float has to hold.
_JSON = {
  str: "a text",
  int: "a whole number",
  float: "a number",
  bool: "true or false",
  list: "a list",
  tuple: "a list of two names of sites",
  dict: "an object",
}


def cluster_from_mapping(values: Any) -> Cluster:
  """Returns the cluster that the content of a file describes.

  Args:
    values: Content of the file, as JSON reads it.

  Raises:
    ValueError: One line that says the field and what it expects.
  """
  top = _read(_CLUSTER, values, "")
  if not top.get("sites"):
    raise ValueError("sites is missing: write a list of at least one site")
  sites = _sites(top)
  names = [site.name for site in sites]
  placement = []
  for path, name in _items(top, "placement"):
    with in_front(f"{path}: "):
      known("site", name, names)
    placement.append(names.index(name))
  return Cluster(
    top.get("name", "cluster"),
    tuple(sites),
    tuple(placement),
    tuple(_section(Pair, *item) for item in _items(top, "pairs")),
    _section(Jitter, "jitter", top.get("jitter", {})),
    tuple(_section(SiteOutage, *item) for item in _items(top, "outages")),
  )


def unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns a JSON object, if no key is in it twice."""
  keys = [key for key, _ in items]
  for key in keys:
    if keys.count(key) > 1:
      raise ValueError(f"{key!r} is stated more than once in an object")
  return dict(items)


def _items(top: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
  return [(f"{key}[{i}]", item) for i, item in enumerate(top.get(key, []))]


def _read(keys: Mapping[str, FileKey], values: Any, path: str) -> dict:
  """Returns the values of a section by attribute.

  Args:
    keys: The keys of the section, by attribute.
    values: The section as JSON reads it.
    path: Where it stands in the file, for messages.
  """
  if not isinstance(values, Mapping):
    raise ValueError(f"{path or 'a cluster'}: {values!r} must be an object")
  attributes = {key.name: attribute for attribute, key in keys.items()}
  read = {}
  for name, value in values.items():
    if name == "comment":
      continue
    with in_front(f"{path}: " if path else ""):
      known("key", name, attributes)
    holds = keys[attributes[name]].holds
    read[attributes[name]] = _value(holds, value, f"{path}.{name}".lstrip("."))
  return read


def _value(holds: type | Dimension, value: Any, path: str) -> Any:
  if isinstance(holds, Dimension):
    return parse_quantity(value, holds, path)
  if holds is float and type(value) is int:
    value = float(value) if abs(value) < _TOO_LARGE else math.inf
  if holds is tuple and isinstance(value, list):
    names = [name for name in value if isinstance(name, str)]
    value = tuple(names) if len(names) == len(value) == 2 else value
  if type(value) is not holds:
    raise ValueError(f"{path}: {value!r} must be {_JSON[holds]}")
  return value


def _sites(top: Mapping[str, Any]) -> list[Site]:
  """Returns the sites, with those that have a count repeated."""
  keys = file_keys(Link) | file_keys(Site)
  common = _read(keys, top.get("every_site", {}), "every_site")
  sites = []
  for path, entry in _items(top, "sites"):
    values = common | _read(keys | {"count": _COUNT}, entry, path)
    count = values.pop("count", None)
    site = _site(values, path)
    if count is None:
      sites.append(site)
      continue
    _COUNT.check(f"{path}.count", count)
    for number in range(len(sites), len(sites) + count):
      sites.append(dataclasses.replace(site, name=f"{site.name}{number}"))
  if (total := top.get("num_devices")) is None:
    return sites
  error = f"num_devices={total} must be a multiple of the {len(sites)} sites"
  require(not total % len(sites), error)
  share = total // len(sites)
  return [dataclasses.replace(site, num_devices=share) for site in sites]


def _site(values: dict[str, Any], path: str) -> Site:
  link_keys = file_keys(Link)
  link = {name: values[name] for name in values if name in link_keys}
  rest = {name: values[name] for name in values if name not in link_keys}
  return _built(Site, path, rest | {"link": _built(Link, path, link)})


def _section(cls: Any, path: str, values: Any) -> Any:
  return _built(cls, path, _read(file_keys(cls), values, path))


def _built(cls: Any, path: str, values: dict[str, Any]) -> Any:
  """Returns the section, if nothing is missing and all is in range."""
  defaults = {field.name: field.default for field in dataclasses.fields(cls)}
  for attribute, key in file_keys(cls).items():
    is_required = defaults[attribute] is dataclasses.MISSING
    if is_required and attribute not in values:
      is_quantity = isinstance(key.holds, Dimension)
      example = (
        f"e.g. '1 {key.holds.example}'" if is_quantity else _JSON[key.holds]
      )
      raise ValueError(f"{path}.{key.name} is missing: write {example}")
  with in_front(f"{path}: "):
    return cls(**values)
