"""Clusters by name: round numbers to sweep over, and the settings of papers.

A preset is one file in `data/`, written as users write their own clusters
(see `cluster_file.py`). The comment in a file for a paper says what was
published, what is recalled and not confirmed, and what is assumed, so that
nobody takes our assumption for a result of the paper.
"""

import functools
import importlib.resources
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.checks import in_front, known, require, within_limits
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.cluster_file import cluster_from_mapping, unique_keys
from dilocox_jax.simulate.quantities import RATE, parse_quantity


@functools.cache
def cluster_presets() -> dict[str, dict[str, Any]]:
  """Returns the content of every preset's file, by the name of the preset."""
  folder = importlib.resources.files("dilocox_jax.simulate").joinpath("data")
  files = sorted(folder.iterdir(), key=lambda file: file.name)
  return {
    file.name.removesuffix(".json"): json.loads(file.read_text("utf-8"))
    for file in files
  }


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
      raise ValueError(
        "not a cluster: its lists are nested too deeply"
      ) from None
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
