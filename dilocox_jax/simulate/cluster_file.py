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
"achieved", "memory", "speed" and "num_stages" (its devices); "intra" and
"intra_rtt" (the network inside). `sites.py` says what each key means and what
its default is. A site with a "count" stands for so many equal sites:
{"name": "node", "count": 2} are "node0" and "node1", numbered by their places
in the list.

A cluster may have "description" (one line for readers), "num_devices" (devices
of all sites together, which share them evenly), "placement" (the site of every
replica, in the order of the ring), "pairs" (what was measured between two
sites), "jitter" and "outages". "comment" is allowed anywhere and is ignored.
The presets in `data/` are files of this kind and a good start.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import in_front, known
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.quantities import (
  Dimension,
  parse_quantity,
)
from dilocox_jax.simulate.sites import (
  FileKey,
  Jitter,
  Link,
  Pair,
  Site,
  SiteOutage,
  file_keys,
)

# The keys of a whole file, by name; those of its sections are in `sites.py`.
_CLUSTER = {
  key.name: key
  for key in (
    FileKey("name", str),
    FileKey("description", str),
    FileKey("num_devices", int),
    FileKey("every_site", dict),
    FileKey("sites", list),
    FileKey("placement", list),
    FileKey("pairs", list),
    FileKey("jitter", dict),
    FileKey("outages", list),
  )
}
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
    numbers = range(len(sites), len(sites) + count)
    sites += [
      dataclasses.replace(site, name=f"{site.name}{number}")
      for number in numbers
    ]
  if (total := top.get("num_devices")) is None:
    return sites
  if total % len(sites):
    raise ValueError(
      f"num_devices={total} must be a multiple of the {len(sites)} sites"
    )
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
      example = (
        f"e.g. '1 {key.holds.example}'"
        if isinstance(key.holds, Dimension)
        else _JSON[key.holds]
      )
      raise ValueError(f"{path}.{key.name} is missing: write {example}")
  with in_front(f"{path}: "):
    return cls(**values)
