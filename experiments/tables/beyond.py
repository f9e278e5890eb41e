"""Beyond the papers: one large model, every method, equal and measured links.

No paper compares more than a few methods, and none does so on the same links.
Here all methods of this repository train the same 107B model, with 2 to 20
clusters, with equal and with measured links, and with one slow site.
"""

import dataclasses
import functools
import pathlib

from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.presets import cluster_preset
from dilocox_jax.simulate.sites import Jitter
from experiments.tables.dilocox_runs import (
  METHOD_CONFIGS,
  RTT_S,
  STEP_BASIS,
  Large,
)
from experiments.tables.runs import equal_links, least
from experiments.tables.table import FITTED_ELSEWHERE, Prediction, Table

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
  rows, cells = [], []
  clusters = {count: even(links, count) for count in CLUSTER_COUNTS}
  for method in METHOD_CONFIGS:
    line = [method]
    for count, cluster in clusters.items():
      both = []
      for state, links_of in (
        ("even", cluster),
        ("strained", strained(cluster)),
      ):
        speed = large.tokens_per_s(large.on(method, links_of))
        name = f"{method}, {count} clusters, {state}"
        both.append(speed)
        rows.append(
          Prediction(name, speed, "tokens/s", FITTED_ELSEWHERE, STEP_BASIS)
        )
      line.append(" / ".join(map(_short, both)))
    cells.append(line)
  header = ("method", *(f"{count} clusters" for count in CLUSTER_COUNTS))
  return Table(
    f"beyond_{links}",
    f"Beyond the papers: 107B over {LINKS[links]}, tokens/s",
    rows,
    _links_notes(large, links),
    header,
    cells,
  )


def _short(speed: float) -> str:
  return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _links_notes(large: Large, links: str) -> list[str]:
  if links != "1gbit":
    return [
      "Only the links are DT-FM's; devices and steps are those of the table"
      " over 1 Gbit/s, and so is the reading."
    ]
  full = large.tokens_per_s(large.at("DiLoCoX", 2, 1e15))
  return [
    "A cell reads: all sites alike / the first site at half speed and 10 %"
    " lognormal jitter of steps and transfers (one seed). Without links it"
    f" would be {full:,.0f} tokens/s: the step of {large.step_s:.2f} s that"
    " DiLoCoX's published throughput gives, 32,768 tokens, whatever the number"
    f" of clusters, for the same devices are divided among them. H ="
    f" {large.interval} for all that have an H; codecs as in the repository's"
    f" configs, DiLoCoX at rank {large.rank}; Streaming DiLoCo with three"
    " layers a fragment and 4 steps of delay. Codecs cost no time. This is"
    " speed alone: what a method does to the loss is measured elsewhere.",
    "Every method here waits for all replicas sooner or later, so a site at"
    " half speed halves all that were bound by compute; a hidden exchange does"
    " not help. Those bound by their links lose less, since the links are"
    " nearly as fast as before. Selected values have no common places, so they"
    " (SparseLoCo, CocktailSGD) are gathered, and grow with the clusters.",
  ]


def _needed(large: Large) -> Table:
  rows, cells = [], []
  for method in METHOD_CONFIGS:
    line = [method]
    for count in CLUSTER_COUNTS:
      bps = needed_bps(large, method, count)
      rows.append(
        Prediction(
          f"{method}, {count} clusters",
          bps / 1e6,
          "Mbit/s",
          FITTED_ELSEWHERE,
          STEP_BASIS,
        )
      )
      line.append(_rate(bps))
    cells.append(line)
  header = ("method", *(f"{count} clusters" for count in CLUSTER_COUNTS))
  return Table(
    "beyond_needed",
    f"Beyond the papers: least bandwidth for {TARGET:.0%} utilisation, 107B",
    rows,
    [
      "Equal links, 40 ms between any two, settings as above, to 3 %. 'none'"
      " means that no bandwidth is enough: the round trips of the collectives"
      " alone take more than a hundredth of the time. Methods that meet at"
      " every step then need shorter round trips, not more bandwidth."
    ],
    header,
    cells,
  )


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
