"""Reads clusters from JSON files that are short enough to write by hand.

Values that all sites have in common are written once, under "every_site". A
quantity with a unit is a text. For example:

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

A site needs "name", "up" and "down". `Link` and `Site` in `cluster.py` describe
these keys and the optional ones:

- The link of the site: "rtt", "loss", "streams", "efficiency" and "shared".
- Its devices: "num_devices", "peak", "achieved", "memory" and "speed".
- The network inside the site: "intra" and "intra_rtt".

A site with a "count" stands for that many equal sites: {"name": "node",
"count": 2} are "node0" and "node1", numbered by their positions in the list.

A file needs "sites". It may also have:

- "name", and "description" (one line of text).
- "num_devices": devices of all sites together, which share them evenly.
- "placement": the site of every replica, in the order of the ring.
- "pairs": measurements between two sites. Each has the names of the two sites
  ("sites"), "rate" and "rtt".
- "store": the link of an object store through which replicas exchange, with the
  keys of a site's link.

A "comment" is allowed anywhere and is ignored. The presets in `presets.json`
have this form. If the numbers of a preset come from a paper, a comment tells
which are published and which are recalled or assumed.
"""

import dataclasses
import functools
import importlib.resources
import json
import os
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import (
  check_limits,
  file_bytes,
  in_front,
  json_object,
  known,
  limited,
  of_type,
  require,
  within_limits,
)
from dilocox_jax.simulate.cluster import (
  MOST_DEVICES,
  Cluster,
  Link,
  Pair,
  Site,
)
from dilocox_jax.simulate.quantities import (
  COMPUTE,
  RATE,
  SHARE,
  SIZE,
  TIME,
  Dimension,
  parse_quantity,
)

# More sites than anybody has. The sites of a damaged count might not fit into
# memory.
_MOST_SITES = 10_000
# Dimension of a quantity, by the end of its attribute's name. A key of the file
# is the name without this end.
_DIMENSIONS = {
  "_bps": RATE,
  "_s": TIME,
  "_bytes": SIZE,
  "_flops": COMPUTE,
  "_fraction": SHARE,
  "loss": SHARE,
  "efficiency": SHARE,
}


@functools.cache
def cluster_presets() -> dict[str, dict[str, Any]]:
  """Returns the content of a cluster file for each preset, by its name.

  All calls return the same dict, so the caller must not change it.
  """
  folder = importlib.resources.files("dilocox_jax.simulate")
  return json.loads(folder.joinpath("presets.json").read_text("utf-8"))


def load_cluster(name_or_path: str, num_replicas: int | None = None) -> Cluster:
  """Returns a preset by its name, or the cluster that a file describes.

  Args:
    name_or_path: One of `cluster_presets`, or the path of a JSON file.
    num_replicas: Number of replicas. A preset of equal sites gets as many
      sites; any other cluster must have this number of replicas. None: any
      number.

  Raises:
    ValueError: One line, if there is no such preset or file, if a field of the
      file is wrong, or if the cluster has another number of replicas.
  """
  path = pathlib.Path(name_or_path)
  presets = cluster_presets()
  # A text with a folder or the ending ".json" is meant as a path.
  is_path = path.suffix == ".json" or path.name != name_or_path
  is_path = is_path or os.path.exists(path)
  with in_front(f"{name_or_path}: " if is_path else ""):
    if name_or_path in presets or not is_path:
      known("cluster preset", name_or_path, presets)
      values = _resized(presets[name_or_path], num_replicas)
    else:
      require(os.path.isfile(path), "no such cluster file")
      values = json_object(file_bytes(path), "the file")
    cluster = cluster_from_mapping(values)
    require(
      num_replicas in (None, cluster.num_replicas),
      f"it places {cluster.num_replicas} replicas, and the run has"
      f" {num_replicas}: set mesh.num_replicas={cluster.num_replicas}",
    )
  return cluster


def _resized(
  values: Mapping[str, Any], num_replicas: int | None
) -> Mapping[str, Any]:
  """Returns a preset with one site for each replica if its sites are equal.

  Sites are equal if they are one entry with a "count". Any other preset, and
  with `num_replicas` None every preset, is returned as it is.
  """
  first, *others = values["sites"]
  has_equal_sites = not others and "count" in first
  if num_replicas is None or not has_equal_sites:
    return values
  within_limits("num_replicas", num_replicas, at_least=1)
  return {**values, "sites": [first | {"count": num_replicas}]}


@dataclasses.dataclass(frozen=True)
class _File:
  """The content of a cluster file, whose sections are still mappings from JSON.

  The module's docstring describes each attribute. A key that the file lacks has
  the default.
  """

  sites: list
  name: str = "cluster"
  description: str = ""
  num_devices: int | None = limited(None, at_least=1, at_most=MOST_DEVICES)
  every_site: dict = dataclasses.field(default_factory=dict)
  placement: list = dataclasses.field(default_factory=list)
  pairs: list = dataclasses.field(default_factory=list)
  store: dict | None = None

  __post_init__ = check_limits


def cluster_from_mapping(values: Any) -> Cluster:
  """Returns the cluster that the content of a file describes.

  Args:
    values: Content of the file, as JSON reads it.

  Raises:
    ValueError: One line that names the field that is wrong or missing.
  """
  file = _build(_File, "", _read(_keys(_File), values, ""))
  require(bool(file.sites), "sites is missing: write a list of at least one")
  sites = list(_sites(file))
  names = [site.name for site in sites]
  for number, name in enumerate(file.placement):
    with in_front(f"placement[{number}]: "):
      known("site", name, names)
  pairs = [
    _build(Pair, path, _read(_keys(Pair), entry, path))
    for path, entry in _items("pairs", file.pairs)
  ]
  placement = tuple(map(names.index, file.placement))
  access = file.store or {"up": "inf bit/s", "down": "inf bit/s"}
  store = _build(Link, "store", _read(_keys(Link), access, "store"))
  return Cluster(
    name=file.name,
    sites=tuple(sites),
    placement=placement,
    pairs=tuple(pairs),
    store=store,
  )


def _items(key: str, entries: list) -> list[tuple[str, Any]]:
  """Returns the entries of a list as pairs such as ("sites[0]", entry)."""
  return [(f"{key}[{i}]", entry) for i, entry in enumerate(entries)]


@functools.cache
def _keys(kind: type) -> dict[str, tuple[str, Any]]:
  """Returns (attribute, `Dimension` or type) of a section's dataclass, by key.

  For example, the keys of `Link` are {"up": ("up_bps", RATE), ..., "streams":
  ("streams", int), "shared": ("is_shared", bool)}.
  """
  keys: dict[str, tuple[str, Any]] = {}
  for attribute, hint in typing.get_type_hints(kind).items():
    key = attribute.removeprefix("is_")
    dimension_or_type = hint
    for ending, dimension in _DIMENSIONS.items():
      if attribute.endswith(ending):
        # "loss" is both the whole name and its end.
        key = attribute.removesuffix(ending) or attribute
        dimension_or_type = dimension
    keys[key] = attribute, dimension_or_type
  return keys


def _read(keys: Mapping[str, Any], values: Any, path: str) -> dict[str, Any]:
  """Checks a section of a file, and returns its values by attribute.

  `keys` is a result of `_keys`, and `path` is where the section stands, for
  messages; "" is the whole file.
  """
  by_attribute = {}
  for key, value in of_type(path or "a cluster", values, dict).items():
    if key == "comment":
      continue
    with in_front(f"{path}: " if path else ""):
      known("key", key, keys)
    attribute, dimension_or_type = keys[key]
    value_path = f"{path}.{key}".lstrip(".")
    by_attribute[attribute] = _value(dimension_or_type, value, value_path)
  return by_attribute


def _value(dimension_or_type: Any, value: Any, path: str) -> Any:
  """Checks a value from JSON, and returns it as the attribute needs it.

  A quantity becomes a float, the names of `Pair.sites` become a tuple, and
  other values stay.
  """
  if isinstance(dimension_or_type, Dimension):
    return parse_quantity(value, dimension_or_type, path)
  if typing.get_origin(dimension_or_type) is tuple:
    # JSON has lists. The only attribute with a tuple is `Pair.sites`, of names.
    names = _items(path, of_type(path, value, list))
    return tuple(of_type(name_path, name, str) for name_path, name in names)
  return of_type(path, value, dimension_or_type)


def _sites(file: _File) -> list[Site]:
  """Builds the sites of a file, with the values of "every_site".

  A site with a "count" becomes that many sites. If the whole file states a
  "num_devices", all sites share these devices evenly.
  """
  keys = _keys(Link) | _keys(Site) | {"count": ("count", int)}
  # The file has the keys of a link in the section of its site.
  del keys["link"]
  common = _read(keys, file.every_site, "every_site")
  sites = []
  for path, entry in _items("sites", file.sites):
    values = common | _read(keys, entry, path)
    count = values.pop("count", None)
    link_values = {}
    for attribute, _ in _keys(Link).values():
      if attribute in values:
        link_values[attribute] = values.pop(attribute)
    link = _build(Link, path, link_values)
    site = _build(Site, path, values | {"link": link})
    if count is None:
      sites.append(site)
      continue
    within_limits(f"{path}.count", count, at_least=1, at_most=_MOST_SITES)
    for number in range(len(sites), len(sites) + count):
      sites.append(dataclasses.replace(site, name=f"{site.name}{number}"))
  if file.num_devices is None:
    return sites
  share, remainder = divmod(file.num_devices, len(sites))
  require(
    remainder == 0,
    f"num_devices={file.num_devices} must be a multiple of the"
    f" {len(sites)} sites",
  )
  return [dataclasses.replace(site, num_devices=share) for site in sites]


def _build(kind: Any, path: str, values: dict[str, Any]) -> Any:
  """Builds the dataclass `kind` of a section from its values by attribute.

  Raises ValueError if a value is missing or out of range. Its message begins
  with `path`, where the section stands.
  """
  required = {
    field.name
    for field in dataclasses.fields(kind)
    if field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
  }
  with in_front(f"{path}: " if path else ""):
    for key, (attribute, dimension_or_type) in _keys(kind).items():
      is_missing = attribute in required and attribute not in values
      hint = ""
      if isinstance(dimension_or_type, Dimension):
        hint = f": write e.g. '1 {dimension_or_type.example}'"
      require(not is_missing, f"{key} is missing{hint}")
    return kind(**values)
