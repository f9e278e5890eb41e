"""Streaming DiLoCo (arXiv 2501.18512): bandwidth needed, and hours.

Table 4 says which bandwidth a method needs for a utilisation. Table 1 says how
many hours one run takes.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure as Picture

from dilocox_jax.report import style
from experiments.tables import layers
from experiments.tables.table import (
  Figure,
  Fit,
  Prediction,
  Table,
  beside,
  described,
  load_published,
  rows_beside,
)

_FP4 = "Streaming + overlap, FP4"
_DATA_PARALLEL = "Data-Parallel"
_GBPS, _TBIT, _HOUR_S = 1e9, 1e12, 3600.0


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns the paper's two tables.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file or a figure is missing or wrong.
  """
  figures = load_published(folder / "streaming_diloco.json")
  return [_table_4(figures), _table_1(figures)]


def _models(figures: Mapping[str, Figure]) -> dict[str, layers.LayerModel]:
  return {
    name: layers.LayerModel(
      figures[f"table 4, {name}, parameters"].value,
      int(figures[f"table 4, {name}, layers"].value),
      figures[f"table 4, {name}, step time"].value,
    )
    for name in layers.TABLE_MODELS
  }


def _table_4(figures: Mapping[str, Figure]) -> Table:
  rows, cells = [], []
  models = _models(figures)
  for name, model in models.items():
    for method_name, method in layers.table_methods(model.num_layers).items():
      needed = layers.needed_bandwidth_bps(model, method)
      found = [
        _cell(figures[f"table 4, {name}, {method_name}, {target:.0%}"], bps)
        for target, bps in zip(layers.TARGETS, needed, strict=True)
      ]
      rows += [row for row, _ in found]
      cells.append([name, method_name, *(text for _, text in found)])
  steps = [abs(row.grid_steps or 0) for row in rows]
  header = ("model", "method", *(f"{target:.0%}" for target in layers.TARGETS))
  return described(
    "streaming_diloco_table_4",
    rows,
    header,
    cells,
    {"streaming_diloco": _picture(figures, models)},
    exact=steps.count(0),
    near=sum(step <= 1 for step in steps),
    worst=max(steps),
  )


def _cell(figure: Figure, needed_bps: float) -> tuple[Prediction, str]:
  """Returns the row of a published bandwidth, and what readers see of it."""
  published, needed_gbps = figure.value, needed_bps / _GBPS
  steps = layers.grid_index(needed_bps) - layers.grid_index(published * _GBPS)
  basis = "two constants for 75 cells"
  row = beside(figure, needed_gbps, Fit.HERE, basis, steps)
  text = f"{published:g} / {needed_gbps:.1f}" if steps else f"{published:g}"
  return row, text


def _picture(
  figures: Mapping[str, Figure], models: Mapping[str, layers.LayerModel]
) -> tuple[str, Picture]:
  picture, axes = style.frame(
    len(models),
    "Bandwidth needed, simulated and published",
    size=(12.0, 4.6),
  )
  looks = list(zip(style.COLOURS, style.MARKERS, strict=True))
  for ax, (name, model) in zip(axes, models.items(), strict=True):
    methods = layers.table_methods(model.num_layers)
    for look, (label, method) in zip(looks, methods.items(), strict=False):
      run = layers.simulate_layers(model, method, layers.GRID_BPS)
      ax.plot(
        layers.GRID_BPS / _GBPS, run.utilisation, color=look[0], label=label
      )
      published = [
        figures[f"table 4, {name}, {label}, {target:.0%}"].value
        for target in layers.TARGETS
      ]
      ax.plot(published, layers.TARGETS, look[1], color=look[0], markersize=5)
    ax.set_xscale("log")
    ax.set_xlabel("bandwidth (Gbit/s, log scale)")
    style.caption(ax, f"{name}: simulated (lines), published (markers)")
  axes[0].set_ylabel("compute utilisation")
  style.legend(picture, axes[0], 5)
  return (
    "Compute utilisation against bandwidth: simulated (lines; two constants"
    " fitted on the markers) and published (markers: the first bandwidth of a"
    " grid that reaches the utilisation).",
    picture,
  )


def _table_1(figures: Mapping[str, Figure]) -> Table:
  def of(what: str) -> float:
    return figures[f"table 1, {what}"].value

  model = _models(figures)["1B"]
  methods = layers.table_methods(model.num_layers)
  interval = figures["table 4, sync interval"].value
  num_steps = of("tokens") / (of("sequences per step") * of("sequence length"))

  def hours(name: str, model: layers.LayerModel, bps: float) -> float:
    method = methods[name]
    run = layers.simulate_layers(model, method, [bps])
    (step_s,) = run.steady_step_s(method.schedule.sync_interval)
    return step_s * num_steps / _HOUR_S

  bits, count = methods[_FP4].bits, model.num_parameters
  counted = of(f"{_FP4}, exchanged") * _TBIT / num_steps * interval / bits
  larger = dataclasses.replace(model, num_parameters=counted)
  dense_tbit = count * 16 * num_steps / _TBIT
  fp4_tbit = count * bits * num_steps / interval / _TBIT
  exact, fitted = "1.0 B parameters", f"{counted / 1e9:.3f} B parameters"
  dense, fp4 = f"table 1, {_DATA_PARALLEL}", f"table 1, {_FP4}"
  slow, free = "hours at 1 Gbit/s", "hours at infinite bandwidth"
  dense_h, free_h, larger_h, fp4_h = (
    hours(_DATA_PARALLEL, model, _GBPS),
    hours(_DATA_PARALLEL, model, math.inf),
    hours(_FP4, larger, _GBPS),
    hours(_FP4, model, _GBPS),
  )
  hides, sent = "the link hides no forward pass", "from the bits exchanged"
  rows = rows_beside(
    figures,
    (f"{dense}, {slow}", dense_h, Fit.NONE, f"{exact}; {hides}"),
    (f"{dense}, {free}", free_h, Fit.NONE, "compute alone"),
    (f"{fp4}, {slow}", larger_h, Fit.ELSEWHERE, f"{fitted}, {sent}"),
    (f"{fp4}, {slow}", fp4_h, Fit.ELSEWHERE, exact),
    (f"{dense}, exchanged", dense_tbit, Fit.NONE, f"{exact} of 16 bit"),
    (f"{fp4}, exchanged", fp4_tbit, Fit.NONE, f"{exact} of 4 bit"),
  )
  return described("streaming_diloco_table_1", rows)
