"""Utilisation of the 107B model against settings of the run and the network."""

import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from dilocox_jax.report.line_panels import Panel, draw
from experiments.tables.dilocox_runs import (
  METHOD_CONFIGS,
  RTT_S,
  STEP_BASIS,
  Large,
)
from experiments.tables.runs import equal_links
from experiments.tables.table import FITTED_ELSEWHERE, Prediction, Table

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
# Methods in front where a panel has more than six lines.
_FRONT = ("DiLoCo", "OpenDiLoCo", "CocktailSGD", "DiLoCoX", "SparseLoCo")
_HELD = "simulated; else H 125, rank 2048, 4 bits, D = 2, 40 ms"


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns the sweeps, each with its figure.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
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
  return _table(
    "sweep_bandwidth",
    "Utilisation against bandwidth, every method, 107B",
    [panel],
    "Two clusters, 40 ms; the settings of the tables above. Methods that hide"
    " their exchange bend sharply where it no longer fits in the round; those"
    " that wait fall off slowly.",
  )


def _dilocox(large: Large, **changes) -> Callable[[float], float]:
  """Returns the utilisation of DiLoCoX, fields changed, by bandwidth."""
  interval = changes.pop("sync_interval", large.interval)
  codec = {"rank": large.rank} | changes
  rounds = large.varied("dilocox", 2, {"sync_interval": interval}, codec)

  def utilisation(bps: float) -> float:
    cluster = equal_links(2, bps, rtt_s=RTT_S)
    return rounds.on(cluster, large.step_s).utilisation

  return utilisation


def _over(
  label: str,
  values: Sequence[int],
  of: Callable[[int], Callable[[float], float]],
) -> Panel:
  curves = [of(value) for value in values]
  lines = {
    name: [utilisation(bps) for utilisation in curves]
    for name, bps in _SLOW_BPS.items()
  }
  return Panel(label, _HELD, values, lines)


def _exchange(large: Large) -> Table:
  panels = [
    _over("H (inner steps)", _INTERVALS, lambda h: _h(large, h)),
    _over("rank", _RANKS, lambda rank: _dilocox(large, rank=rank)),
    _over("bits", _BITS, lambda bits: _dilocox(large, bits=bits)),
  ]
  return _table(
    "sweep_exchange",
    "Utilisation of DiLoCoX against H, rank and bits, 107B",
    panels,
    "One thing varied, the others as in the paper. What a longer round, a"
    " smaller rank or fewer bits do to the loss is not in here.",
  )


def _h(large: Large, interval: int) -> Callable[[float], float]:
  return _dilocox(large, sync_interval=interval)


def _network(large: Large) -> Table:
  by_count = {
    name: [large.at("DiLoCoX", d, bps).utilisation for d in _CLUSTERS]
    for name, bps in _SLOW_BPS.items()
  }
  by_delay = {
    name: [
      large.on(
        "DiLoCoX", equal_links(2, 1e9, rtt_s=rtt_s, loss=loss)
      ).utilisation
      for rtt_s in RTTS_S
    ]
    for name, loss in _LOSSES.items()
  }
  panels = [
    Panel("clusters", _HELD, _CLUSTERS, by_count, is_log=False),
    Panel(
      "round trip (ms)",
      "simulated; 1 Gbit/s, 8 TCP streams, D = 2",
      [1000 * rtt_s for rtt_s in RTTS_S],
      by_delay,
    ),
  ]
  return _table(
    "sweep_network",
    "Utilisation of DiLoCoX against clusters and round trip, 107B",
    panels,
    "A round trip alone costs nothing that a round of a quarter of an hour"
    " would notice; together with lost packets it caps what TCP carries (Mathis"
    " et al., 1997; newer congestion controls do better).",
  )


def _table(
  name: str, title: str, panels: Sequence[Panel], reading: str
) -> Table:
  rows, cells = [], []
  columns = tuple(panels[0].lines)
  for panel in panels:
    if tuple(panel.lines) != columns:
      cells.append(("", *panel.lines))
    for index, value in enumerate(panel.values):
      varied = f"{panel.label} {value:.4g}"
      percents = [100 * shares[index] for shares in panel.lines.values()]
      rows += [
        Prediction(
          f"{line}, {varied}", percent, "percent", FITTED_ELSEWHERE, STEP_BASIS
        )
        for line, percent in zip(panel.lines, percents, strict=True)
      ]
      cells.append((varied, *(f"{percent:.1f}%" for percent in percents)))
  return Table(
    name,
    f"Sweep: {title}",
    rows,
    (reading,),
    ("varied", *columns),
    cells,
    {
      name: (
        f"{title}: simulated, {STEP_BASIS}.",
        draw(title, panels, front=_FRONT),
      )
    },
  )
