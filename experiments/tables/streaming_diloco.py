"""Streaming DiLoCo (arXiv 2501.18512): bandwidth needed, and hours.

Table 4 says which bandwidth a method needs for a utilisation. Table 1 says how
many hours one run takes.
"""

import dataclasses
import math

from matplotlib.figure import Figure as Picture

from dilocox_jax.report import style
from experiments.tables import layers
from experiments.tables.table import (
  Figures,
  Fit,
  Prediction,
  Table,
  beside,
  load_published,
)

MODELS = ("1B", "10B", "100B")
_FP4 = "Streaming + overlap, FP4"
_DATA_PARALLEL = "Data-Parallel"
_GBPS, _TBIT, _HOUR_S = 1e9, 1e12, 3600.0
_CAPTION = (
  "Compute utilisation against bandwidth: simulated (lines; two constants"
  " fitted on the markers) and published (markers: the first bandwidth of a"
  " grid that reaches the utilisation)."
)


def build_tables() -> list[Table]:
  """Returns the paper's two tables."""
  figures = load_published("streaming_diloco")
  return [_table_4(figures), _table_1(figures)]


def model(figures: Figures, name: str) -> layers.LayerModel:
  """Returns a model of Table 4, whose step time is the paper's.

  Args:
    figures: Figures of the paper.
    name: One of `MODELS`.
  """

  def of(what: str) -> float:
    return figures[f"table 4, {name}, {what}"].value

  return layers.LayerModel(of("parameters"), int(of("layers")), of("step time"))


def _table_4(figures: Figures) -> Table:
  rows, cells = [], []
  for name in MODELS:
    one = model(figures, name)
    for label, method in layers.table_methods(one.num_layers).items():
      needed_bps = layers.needed_bandwidth_bps(one, method)
      found = [
        _row(figures, f"table 4, {name}, {label}, {target:.0%}", bps)
        for target, bps in zip(layers.TARGETS, needed_bps, strict=True)
      ]
      rows += found
      cells.append([name, label, *map(_cell, found)])
  steps = [abs(row.grid_steps or 0) for row in rows]
  near = sum(step <= 1 for step in steps)
  return Table(
    "streaming_diloco_table_4",
    rows,
    {"exact": steps.count(0), "near": near, "worst": max(steps)},
    ("model", "method", *(f"{target:.0%}" for target in layers.TARGETS)),
    cells,
    {"streaming_diloco": (_CAPTION, _picture(figures))},
  )


def _row(figures: Figures, name: str, needed_bps: float) -> Prediction:
  published_bps = figures[name].value * _GBPS
  steps = layers.grid_index(needed_bps) - layers.grid_index(published_bps)
  basis = "two constants for 75 cells"
  return beside(figures, name, needed_bps / _GBPS, Fit.HERE, basis, steps)


def _cell(row: Prediction) -> str:
  """Returns what readers see: both numbers where they differ."""
  published = f"{row.published.value:g}" if row.published else ""
  return f"{published} / {row.predicted:.1f}" if row.grid_steps else published


def _picture(figures: Figures) -> Picture:
  title = "Bandwidth needed, simulated and published"
  picture, axes = style.frame(len(MODELS), title, size=(12.0, 4.6))
  looks = list(zip(style.COLOURS, style.MARKERS, strict=True))
  for ax, name in zip(axes, MODELS, strict=True):
    one = model(figures, name)
    methods = layers.table_methods(one.num_layers)
    for (colour, marker), (label, method) in zip(
      looks, methods.items(), strict=False
    ):
      run = layers.simulate_layers(one, method, layers.GRID_BPS)
      ax.plot(
        layers.GRID_BPS / _GBPS, run.utilisation, color=colour, label=label
      )
      published = [
        figures[f"table 4, {name}, {label}, {target:.0%}"].value
        for target in layers.TARGETS
      ]
      ax.plot(published, layers.TARGETS, marker, color=colour, markersize=5)
    ax.set_xscale("log")
    ax.set_xlabel("bandwidth (Gbit/s, log scale)")
    style.caption(ax, f"{name}: simulated (lines), published (markers)")
  axes[0].set_ylabel("compute utilisation")
  style.legend(picture, axes[0], 5)
  return picture


def _table_1(figures: Figures) -> Table:
  def of(what: str) -> float:
    return figures[f"table 1, {what}"].value

  one = model(figures, "1B")
  methods = layers.table_methods(one.num_layers)
  interval = figures["table 4, sync interval"].value
  num_steps = of("tokens") / (of("sequences per step") * of("sequence length"))

  def hours(name: str, bps: float, model: layers.LayerModel = one) -> float:
    method = methods[name]
    ends_s = layers.simulate_layers(model, method, [bps]).ends_s[:, 0]
    last = method.schedule.sync_interval  # Steps of a whole round, with waits.
    return (ends_s[-1] - ends_s[-1 - last]) / last * num_steps / _HOUR_S

  bits, count = methods[_FP4].bits, one.num_parameters
  counted = of(f"{_FP4}, exchanged") * _TBIT / num_steps * interval / bits
  larger = dataclasses.replace(one, num_parameters=counted)
  dense_tbit = count * 16 * num_steps / _TBIT
  fp4_tbit = count * bits * num_steps / interval / _TBIT
  exact, fitted = "1.0 B parameters", f"{counted / 1e9:.3f} B parameters"
  dense, fp4 = f"table 1, {_DATA_PARALLEL}", f"table 1, {_FP4}"
  slow, free = "hours at 1 Gbit/s", "hours at infinite bandwidth"
  dense_h, free_h = (hours(_DATA_PARALLEL, x) for x in (_GBPS, math.inf))
  larger_h, fp4_h = hours(_FP4, _GBPS, larger), hours(_FP4, _GBPS)
  hides, sent = "the link hides no forward pass", "from the bits exchanged"
  rows = (
    (f"{dense}, {slow}", dense_h, Fit.NONE, f"{exact}; {hides}"),
    (f"{dense}, {free}", free_h, Fit.NONE, "compute alone"),
    (f"{fp4}, {slow}", larger_h, Fit.ELSEWHERE, f"{fitted}, {sent}"),
    (f"{fp4}, {slow}", fp4_h, Fit.ELSEWHERE, exact),
    (f"{dense}, exchanged", dense_tbit, Fit.NONE, f"{exact} of 16 bit"),
    (f"{fp4}, exchanged", fp4_tbit, Fit.NONE, f"{exact} of 4 bit"),
  )
  found = [beside(figures, *row) for row in rows]
  return Table("streaming_diloco_table_1", found)
