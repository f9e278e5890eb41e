"""Beyond the papers: one large model, every method, equal and measured links.

No paper compares more than a few methods, and none does so on the same links.
Here all methods of this repository train the same 107B model, with 2 to 20
clusters, with equal and with measured links, and with one slow site.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.presets import cluster_preset
from dilocox_jax.simulate.sites import Jitter
from experiments.tables.dilocox_runs import (
  METHOD_CONFIGS,
  RTT_S,
  Large,
  predicted,
)
from experiments.tables.runs import equal_links, least
from experiments.tables.table import Prediction, Table, described

CLUSTER_COUNTS = (2, 4, 10, 20)
LINKS = {
  "1gbit": "1 Gbit/s and 40 ms between any two",
  "dtfm_datacenter": "DT-FM's data centre, 3.125 Gbit/s",
  "dtfm_spot": "DT-FM's spot instances, 1.25 Gbit/s",
  "dtfm_multi_datacenter": "DT-FM's two data centres, 1.12 Gbit/s",
  "dtfm_regional": "DT-FM's four regions, 1.02 to 1.25 Gbit/s",
  "dtfm_worldwide": "DT-FM's eight regions worldwide",
}
TARGET = 0.99
_JITTER = Jitter(step_sigma=0.1, transfer_sigma=0.1, seed=0)


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns throughputs by links, and the bandwidth each method needs.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  large = Large(folder)
  tables = [_on_links(large, links) for links in LINKS]
  return [*tables, _needed(large)]


def even(links: str, num_replicas: int) -> Cluster:
  """Returns equal clusters on some links.

  Args:
    links: One of `LINKS`.
    num_replicas: Number of clusters of the 107B run.
  """
  if links == "1gbit":
    return equal_links(num_replicas, 1e9, rtt_s=RTT_S)
  return cluster_preset(links, num_replicas)


def strained(cluster: Cluster) -> Cluster:
  """Returns the cluster with its first site at half speed, 10 % jitter."""
  first, *others = cluster.sites
  slow = dataclasses.replace(first, speed=0.5)
  return dataclasses.replace(cluster, sites=(slow, *others), jitter=_JITTER)


def _on_links(large: Large, links: str) -> Table:
  def cell(method: str, count: int) -> tuple[list[Prediction], str]:
    cluster, rows = even(links, count), []
    for state, sites in ("even", cluster), ("strained", strained(cluster)):
      speed = large.tokens_per_s(large.on(method, sites))
      name = f"{method}, {count} clusters, {state}"
      rows.append(predicted(name, speed, "tokens/s"))
    return rows, " / ".join(_short(row.predicted) for row in rows)

  return described(
    f"beyond_{links}",
    *_by_method(cell),
    notes="beyond_1gbit" if links == "1gbit" else "beyond_dtfm",
    links=LINKS[links],
    full=large.tokens_per_s(large.at("DiLoCoX", 2, 1e15)),
    step_s=large.step_s,
    interval=large.interval,
    rank=large.rank,
  )


def _needed(large: Large) -> Table:
  def cell(method: str, count: int) -> tuple[list[Prediction], str]:
    bps = needed_bps(large, method, count)
    row = predicted(f"{method}, {count} clusters", bps / 1e6, "Mbit/s")
    return [row], _rate(bps)

  return described("beyond_needed", *_by_method(cell), target=TARGET)


def _by_method(
  cell: Callable[[str, int], tuple[list[Prediction], str]],
) -> tuple[list[Prediction], Sequence[str], list[list[str]]]:
  """Returns rows, header and cells: a line a method, a column a count.

  Args:
    cell: Returns the rows and the text of a method with a number of clusters.
  """
  rows, lines = [], []
  for method in METHOD_CONFIGS:
    lines.append([method])
    for count in CLUSTER_COUNTS:
      predictions, text = cell(method, count)
      rows += predictions
      lines[-1].append(text)
  header = ("method", *(f"{count} clusters" for count in CLUSTER_COUNTS))
  return rows, header, lines


def _short(speed: float) -> str:
  return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def needed_bps(large: Large, method: str, num_replicas: int) -> float:
  """Returns the least line rate (bit/s) for 99 % of the time in compute.

  Args:
    large: Runs of the 107B model.
    method: One of `METHOD_CONFIGS`.
    num_replicas: Number of clusters.
  """

  @functools.cache
  def reaches(bps: float) -> bool:
    return large.at(method, num_replicas, bps).utilisation >= TARGET

  return least(reaches, 1e6, 1e13, precision=0.03)


def _rate(bps: float) -> str:
  if bps == float("inf"):
    return "none"
  for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
    if bps >= unit:
      return f"{bps / unit:.3g} {name}"
  return f"{bps:.3g} bit/s"
