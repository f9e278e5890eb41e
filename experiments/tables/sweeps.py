"""Builds tables of the 107B model's utilisation in simulated runs.

Each table varies one thing: the bandwidth, a field of the config, the number of
clusters, or the round trip. Utilisation is the share of time in which replicas
take inner steps.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from dilocox_jax.report.line_panels import Panel, draw
from experiments.tables.dilocox_runs import (
  COUNTS,
  METHOD_CONFIGS,
  RTT_S,
  STEP_BASIS,
  Large,
  predicted,
)
from experiments.tables.runs import equal_links
from experiments.tables.table import Table, described

BANDWIDTHS_BPS = np.logspace(7, 12, 26)
_INTERVALS = (10, 25, 60, 125, 250, 500, 1000)
_RANKS = (128, 256, 512, 1024, 2048, 3072)
_BITS = (1, 2, 4, 8)
_CLUSTERS = (2, 3, 4, 6, 10, 14, 20)
RTTS_S = (0.001, 0.01, 0.04, 0.1, 0.2, 0.5)
_SLOW_BPS = {
  "30 Mbit/s": 30e6,
  "100 Mbit/s": 100e6,
  "300 Mbit/s": 300e6,
  "1 Gbit/s": 1e9,
}
_LOSSES = {"no loss": 0.0, "loss 1e-4": 1e-4, "loss 1e-3": 1e-3}
_LOSSES |= {"loss 1e-2": 1e-2}
# If a panel has more than six lines, these methods are drawn in front.
_FRONT = ("DiLoCo", "OpenDiLoCo", "SparseLoCo", "DiLoCoX", "overlap_loco")
# Conditions of a panel, as its title states them. "else" means: what the panel
# does not vary.
_CONDITIONS = "simulated; else H 125, rank 2048, 4 bits, D = 2, 40 ms"


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns one table for each sweep, with its figure.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: If a file is missing or wrong.
  """
  large = Large(folder)
  return [_bandwidth(large), _exchange(large), _network(large)]


def _bandwidth(large: Large) -> Table:
  lines = {
    method: [large.at(method, 2, bps).utilisation for bps in BANDWIDTHS_BPS]
    for method in METHOD_CONFIGS
  }
  panel = Panel(
    "bandwidth (Gbit/s)",
    "simulated; 2 clusters, 40 ms",
    list(BANDWIDTHS_BPS / 1e9),
    lines,
  )
  return _table("sweep_bandwidth", [panel])


def _over(label: str, values: Sequence[int], field: str, large: Large) -> Panel:
  """Returns a panel of utilisation against a field of DiLoCoX's config.

  Args:
    label: Label of the horizontal axis.
    values: Values of the field.
    field: `sync_interval`, or the rank or the bits of the codec.
    large: The runs of the 107B model.
  """
  lines: dict[str, list[float]] = {name: [] for name in _SLOW_BPS}
  for value in values:
    at = {"sync_interval": large.interval, "rank": large.rank, "bits": 4}
    at[field] = value
    sync = {"sync_interval": at["sync_interval"]}
    codec = f"low_rank(rank={at['rank']})+int(bits={at['bits']})"
    exchange = {"codec": codec}
    rounds = large.planned("dilocox", 2, COUNTS, sync=sync, exchange=exchange)
    for name, bps in _SLOW_BPS.items():
      cluster = equal_links(2, bps, rtt_s=RTT_S)
      lines[name].append(rounds.on(cluster, large.step_s).utilisation)
  return Panel(label, _CONDITIONS, values, lines)


def _exchange(large: Large) -> Table:
  panels = [
    _over("H (inner steps)", _INTERVALS, "sync_interval", large),
    _over("rank", _RANKS, "rank", large),
    _over("bits", _BITS, "bits", large),
  ]
  return _table("sweep_exchange", panels)


def _network(large: Large) -> Table:
  lines_over_clusters = {
    name: [
      large.at("DiLoCoX", num_clusters, bps).utilisation
      for num_clusters in _CLUSTERS
    ]
    for name, bps in _SLOW_BPS.items()
  }

  def utilisation(rtt_s: float, loss: float) -> float:
    cluster = equal_links(2, 1e9, rtt_s=rtt_s, loss=loss)
    return large.on("DiLoCoX", cluster).utilisation

  lines_over_rtt = {
    name: [utilisation(rtt_s, loss) for rtt_s in RTTS_S]
    for name, loss in _LOSSES.items()
  }
  rtts_ms = [1000 * rtt_s for rtt_s in RTTS_S]
  conditions = "simulated; 1 Gbit/s, 8 TCP streams, D = 2"
  panels = [
    Panel(
      "clusters", _CONDITIONS, _CLUSTERS, lines_over_clusters, is_log=False
    ),
    Panel("round trip (ms)", conditions, rtts_ms, lines_over_rtt),
  ]
  return _table("sweep_network", panels)


def _table(name: str, panels: Sequence[Panel]) -> Table:
  """Returns a table with one row for each value of each panel."""
  rows, cells = [], []
  is_one = len(panels) == 1
  columns = tuple(panels[0].lines)
  for panel in panels:
    if tuple(panel.lines) != columns:  # This row is a new header.
      cells.append(("", *panel.lines))
    for index, value in enumerate(panel.values):
      varied = f"{panel.label} {value:.4g}"
      percents = [100 * shares[index] for shares in panel.lines.values()]
      rows += [
        predicted(f"{line}, {varied}", percent, "percent")
        for line, percent in zip(panel.lines, percents, strict=True)
      ]
      label = f"{value:.4g}" if is_one else varied
      texts = (f"{p:.1f}%".replace("100.0", "100") for p in percents)
      cells.append((label, *texts))
  first = panels[0].label.partition("(")[2].rstrip(")") if is_one else "varied"
  table = described(name, rows, (first, *columns), cells)
  title = table.title.removeprefix("Sweep: ")
  caption = f"{title}: simulated, {STEP_BASIS}."
  pictures = {name: (caption, draw(title, panels, front=_FRONT))}
  return dataclasses.replace(table, pictures=pictures)
