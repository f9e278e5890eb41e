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
"achieved", "speed" and "num_stages" (its devices); "intra" and "intra_rtt"
(the network inside). A cluster may have "placement" (the site of every
replica, in the order of the ring), "pairs" (what was measured between two
sites), "jitter" and "outages". `sites.py` says what each means and what it is
if left out; "comment" is allowed anywhere and means nothing. A preset printed
by `cluster_text` is a good start.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.presets import CLUSTER_PRESETS, cluster_preset
from dilocox_jax.simulate.quantities import (
  COMPUTE,
  RATE,
  SHARE,
  SIZE,
  TIME,
  Dimension,
  format_quantity,
  parse_quantity,
)
from dilocox_jax.simulate.sites import (
  Jitter,
  Link,
  Pair,
  Site,
  SiteOutage,
  unknown_name,
)

# For each key of a section: the attribute that it sets, and what it holds.
_LINK = {
  "up": ("up_bps", RATE),
  "down": ("down_bps", RATE),
  "rtt": ("rtt_s", TIME),
  "loss": ("loss", SHARE),
  "streams": ("streams", int),
  "window": ("window_bytes", SIZE),
  "efficiency": ("efficiency", SHARE),
  "shared": ("is_shared", bool),
}
_SITE = {
  "name": ("name", str),
  "num_devices": ("num_devices", int),
  "peak": ("peak_flops", COMPUTE),
  "achieved": ("achieved_fraction", SHARE),
  "speed": ("speed", float),
  "num_stages": ("num_stages", int),
  "intra": ("intra_bps", RATE),
  "intra_rtt": ("intra_rtt_s", TIME),
}
_PAIR = {
  "sites": ("sites", tuple),
  "rate": ("bps", RATE),
  "rtt": ("rtt_s", TIME),
}
_JITTER = {
  "step": ("step_sigma", SHARE),
  "transfer": ("transfer_sigma", SHARE),
  "seed": ("seed", int),
}
_OUTAGE = {
  "site": ("site", str),
  "start": ("start_s", TIME),
  "stop": ("stop_s", TIME),
}
_CLUSTER = {
  "name": ("name", str),
  "every_site": ("every_site", dict),
  "sites": ("sites", list),
  "placement": ("placement", list),
  "pairs": ("pairs", list),
  "jitter": ("jitter", dict),
  "outages": ("outages", list),
}
_JSON = {
  str: "a text",
  int: "a whole number",
  float: "a number",
  bool: "true or false",
  list: "a list",
  tuple: "a list of two names of sites",
  dict: "an object",
}


def load_cluster(name_or_path: str, num_replicas: int | None = None) -> Cluster:
  """A preset by its name, or the cluster that a file describes.

  Args:
    name_or_path: One of `CLUSTER_PRESETS`, or a JSON file.
    num_replicas: Replicas; None is as many as the cluster has. A file's own
      cannot be changed.

  Raises:
    ValueError: One line that says the field and what it expects.
  """
  path = pathlib.Path(name_or_path)
  is_path = path.suffix == ".json" or path.name != name_or_path or path.exists()
  if name_or_path in CLUSTER_PRESETS or not is_path:
    return cluster_preset(name_or_path, num_replicas)
  if not path.is_file():
    raise ValueError(f"{name_or_path}: no such cluster file")
  try:
    text = path.read_text(encoding="utf-8")
    cluster = cluster_from_mapping(json.loads(text, object_pairs_hook=_object))
  except json.JSONDecodeError as error:
    raise ValueError(f"{name_or_path}: not JSON: {error}") from None
  except ValueError as error:
    raise ValueError(f"{name_or_path}: {error}") from None
  if num_replicas not in (None, cluster.num_replicas):
    raise ValueError(
      f"{name_or_path}: num_replicas={num_replicas} must be the"
      f" {cluster.num_replicas} that are placed in the file"
    )
  return cluster


def cluster_from_mapping(values: Any) -> Cluster:
  """A cluster from what a file holds.

  Args:
    values: As JSON reads it.

  Raises:
    ValueError: One line that says the field and what it expects.
  """
  top = _read(_CLUSTER, values, "")
  common = _read(_LINK | _SITE, top.get("every_site", {}), "every_site")
  if not top.get("sites"):
    raise ValueError("sites is missing: write a list of at least one site")
  sites = [
    _site(common | _read(_LINK | _SITE, site, path), path)
    for path, site in _items(top, "sites")
  ]
  names = [site.name for site in sites]
  placement = []
  for path, name in _items(top, "placement"):
    if name not in names:
      raise ValueError(f"{path}: {unknown_name('site', name, names)}")
    placement.append(names.index(name))
  return Cluster(
    top.get("name", "cluster"),
    tuple(sites),
    tuple(placement),
    tuple(_section(Pair, _PAIR, *item) for item in _items(top, "pairs")),
    _section(Jitter, _JITTER, "jitter", top.get("jitter", {})),
    tuple(
      _section(SiteOutage, _OUTAGE, *item) for item in _items(top, "outages")
    ),
  )


def cluster_text(cluster: Cluster) -> str:
  """The JSON of a cluster, without what is at its default.

  Args:
    cluster: Any; reading the text gives an equal one.
  """
  names = [site.name for site in cluster.sites]
  values: dict[str, Any] = {"name": cluster.name}
  values["sites"] = [
    _written(_SITE, site) | _written(_LINK, site.link) for site in cluster.sites
  ]
  if cluster.placement != tuple(range(len(names))):
    values["placement"] = [names[index] for index in cluster.placement]
  values["pairs"] = [_written(_PAIR, pair) for pair in cluster.pairs]
  values["jitter"] = _written(_JITTER, cluster.jitter)
  values["outages"] = [_written(_OUTAGE, outage) for outage in cluster.outages]
  parts = [
    f'  "{key}": {_lines(value)}' for key, value in values.items() if value
  ]
  return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(value: Any) -> str:
  """JSON on one line, or a line for each object of a list."""
  if not (isinstance(value, list) and isinstance(value[0], dict)):
    return json.dumps(value)
  return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"


def _object(items: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object, if no key is in it twice."""
  keys = [key for key, _ in items]
  for key in keys:
    if keys.count(key) > 1:
      raise ValueError(f"{key!r} is stated more than once in an object")
  return dict(items)


def _items(top: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
  return [(f"{key}[{i}]", item) for i, item in enumerate(top.get(key, []))]


def _read(
  keys: Mapping[str, tuple[str, Any]], values: Any, path: str
) -> dict[str, Any]:
  """Attributes and their values; `path` is where they stand in the file."""
  if not isinstance(values, Mapping):
    raise ValueError(f"{path or 'a cluster'}: {values!r} must be an object")
  found = {}
  for key, value in values.items():
    if key not in keys and key != "comment":
      where = f"{path}: " if path else ""
      raise ValueError(where + unknown_name("key", key, keys))
    if key in keys:
      attribute, kind = keys[key]
      found[attribute] = _value(kind, value, f"{path}.{key}".lstrip("."))
  return found


def _value(kind: Any, value: Any, path: str) -> Any:
  if isinstance(kind, Dimension):
    return parse_quantity(value, kind, path)
  if kind is float and type(value) is int:
    return float(value)
  if kind is tuple and isinstance(value, list):
    names = [name for name in value if isinstance(name, str)]
    value = tuple(names) if len(names) == len(value) == 2 else value
  if type(value) is not kind:
    raise ValueError(f"{path}: {value!r} must be {_JSON[kind]}")
  return value


def _site(found: dict[str, Any], path: str) -> Site:
  names = {attribute for attribute, _ in _LINK.values()}
  link = {name: found[name] for name in found if name in names}
  rest = {name: found[name] for name in found if name not in names}
  return _built(
    Site, _SITE, path, rest | {"link": _built(Link, _LINK, path, link)}
  )


def _section(cls: Any, keys: Any, path: str, values: Any) -> Any:
  return _built(cls, keys, path, _read(keys, values, path))


def _built(
  cls: Any, keys: Mapping[str, tuple[str, Any]], path: str, found: Any
) -> Any:
  """The value of a section, if nothing is missing and all is in range."""
  required = {
    field.name
    for field in dataclasses.fields(cls)
    if field.default is dataclasses.MISSING
  }
  for key, (attribute, kind) in keys.items():
    if attribute in required and attribute not in found:
      raise ValueError(f"{path}.{key} is missing: write {_example(kind)}")
  try:
    return cls(**found)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None


def _example(kind: Any) -> str:
  return (
    f"e.g. '1 {kind.example}'" if isinstance(kind, Dimension) else _JSON[kind]
  )


def _written(keys: Mapping[str, tuple[str, Any]], section: Any) -> Any:
  """The section as JSON, without defaults."""
  defaults = {f.name: f.default for f in dataclasses.fields(section)}
  written = {}
  for key, (attribute, kind) in keys.items():
    value = getattr(section, attribute)
    if value != defaults[attribute]:
      is_quantity = isinstance(kind, Dimension)
      written[key] = format_quantity(value, kind) if is_quantity else value
  return written
