"""Predicts the tables 4 and 1 of Streaming DiLoCo (arXiv 2501.18512).

Table 4 has the bandwidth that a method needs for a given compute utilization.
Table 1 has the hours that a run takes and the bits that it exchanges.
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
# Names of methods in the paper's tables (`layers.table_methods`).
_FP4 = "Streaming + overlap, FP4"
_DATA_PARALLEL = "Data-Parallel"
_GBPS = 1e9
_TBIT = 1e12
_HOUR_S = 3600.0
_CAPTION = (
  "Compute utilization against bandwidth: simulated (lines; two constants"
  " fitted on the markers) and published (markers: the first bandwidth of a"
  " grid that reaches the utilization)."
)


def build_tables() -> list[Table]:
  """Returns the tables 4 and 1 of the paper, in this order."""
  figures = load_published("streaming_diloco")
  return [_table_4(figures), _table_1(figures)]


def model(figures: Figures, name: str) -> layers.LayerModel:
  """Returns a model of Table 4, with the size and step time in the table.

  `figures` has the published numbers of the paper. `name` is one of `MODELS`.
  """

  def value(figure: str) -> float:
    return figures[f"table 4, {name}, {figure}"].value

  return layers.LayerModel(
    num_parameters=value("parameters"),
    num_layers=int(value("layers")),
    step_s=value("step time"),
  )


def _table_4(figures: Figures) -> Table:
  """Builds the table of bandwidths that methods need for each utilization."""
  rows = []
  cells = []
  for name in MODELS:
    layer_model = model(figures, name)
    methods = layers.table_methods(layer_model.num_layers)
    for label, method in methods.items():
      needed_bps = layers.needed_bandwidth_bps(layer_model, method)
      method_rows = [
        _bandwidth_row(figures, _cell_name(name, label, target), bps)
        for target, bps in zip(layers.TARGETS, needed_bps, strict=True)
      ]
      rows += method_rows
      cells.append([name, label, *(_cell(row) for row in method_rows)])
  grid_errors = [abs(row.grid_steps or 0) for row in rows]
  num_near = sum(error <= 1 for error in grid_errors)
  return Table(
    name="streaming_diloco_table_4",
    rows=rows,
    numbers={
      "exact": grid_errors.count(0),
      "near": num_near,
      "worst": max(grid_errors),
    },
    header=(
      "model",
      "method",
      *(f"{target:.0%}" for target in layers.TARGETS),
    ),
    cells=cells,
    pictures={"streaming_diloco": (_CAPTION, _picture(figures))},
  )


def _cell_name(model_name: str, method_name: str, target: float) -> str:
  """Returns the name of a published number: "table 4, 1B, DiLoCo, 90%"."""
  return f"table 4, {model_name}, {method_name}, {target:.0%}"


def _bandwidth_row(
  figures: Figures, name: str, needed_bps: float
) -> Prediction:
  """Returns the predicted and the published bandwidth of a cell (Gbit/s).

  `name` is the name of the published number. `needed_bps` is the prediction, a
  value of `layers.GRID_BPS`.
  """
  published_bps = figures[name].value * _GBPS
  grid_steps = layers.grid_index(needed_bps) - layers.grid_index(published_bps)
  return beside(
    figures,
    name,
    needed_bps / _GBPS,
    kind=Fit.HERE,
    basis="two constants for 75 cells",
    grid_steps=grid_steps,
  )


def _cell(row: Prediction) -> str:
  """Returns the published number as text, e.g. "1.4".

  If the prediction differs, it follows after a slash: "1.4 / 1.7".
  """
  published = f"{row.published.value:g}" if row.published else ""
  if row.grid_steps:
    return f"{published} / {row.predicted:.1f}"
  return published


def _picture(figures: Figures) -> Picture:
  """Draws utilization against bandwidth, with a panel for each model.

  Lines are simulated, and markers are published.
  """
  title = "Bandwidth needed, simulated and published"
  picture, axes = style.frame(len(MODELS), title, size=(12.0, 4.6))
  looks = list(zip(style.COLORS, style.MARKERS, strict=True))
  for ax, name in zip(axes, MODELS, strict=True):
    layer_model = model(figures, name)
    methods = layers.table_methods(layer_model.num_layers)
    # There are more looks than methods.
    for (color, marker), (label, method) in zip(
      looks, methods.items(), strict=False
    ):
      run = layers.simulate_layers(layer_model, method, layers.GRID_BPS)
      ax.plot(
        layers.GRID_BPS / _GBPS, run.utilization, color=color, label=label
      )
      published_gbps = [
        figures[_cell_name(name, label, target)].value
        for target in layers.TARGETS
      ]
      ax.plot(published_gbps, layers.TARGETS, marker, color=color, markersize=5)
    ax.set_xscale("log")
    ax.set_xlabel("bandwidth (Gbit/s, log scale)")
    style.caption(ax, f"{name}: simulated (lines), published (markers)")
  axes[0].set_ylabel("compute utilization")
  style.legend(picture, axes[0], 5)
  return picture


def _table_1(figures: Figures) -> Table:
  """Builds the table of the hours of two methods and the bits they exchange.

  The hours of the streaming method are predicted twice: for the number of
  parameters that follows from its published bits, and for the stated number.
  """

  def value(figure: str) -> float:
    return figures[f"table 1, {figure}"].value

  layer_model = model(figures, "1B")
  methods = layers.table_methods(layer_model.num_layers)
  interval = figures["table 4, sync interval"].value
  step_tokens = value("sequences per step") * value("sequence length")
  num_steps = value("tokens") / step_tokens

  def hours(name: str, bps: float, model: layers.LayerModel) -> float:
    """Returns the hours of a run, if all rounds take as long as the last."""
    method = methods[name]
    ends_s = layers.simulate_layers(model, method, [bps]).ends_s[:, 0]
    round_steps = method.schedule.sync_interval
    round_s = ends_s[-1] - ends_s[-1 - round_steps]
    return round_s / round_steps * num_steps / _HOUR_S

  def row(
    method: str, figure: str, predicted: float, kind: Fit, basis: str
  ) -> Prediction:
    name = f"table 1, {method}, {figure}"
    return beside(figures, name, predicted, kind=kind, basis=basis)

  bits = methods[_FP4].bits
  num_parameters = layer_model.num_parameters
  # The number of parameters that the published bits stand for, if each round
  # sends every parameter once.
  fitted_parameters = (
    value(f"{_FP4}, exchanged") * _TBIT / num_steps * interval / bits
  )
  fitted_model = dataclasses.replace(
    layer_model, num_parameters=fitted_parameters
  )
  stated = "1.0 B parameters"
  fitted = f"{fitted_parameters / 1e9:.3f} B parameters"
  rows = [
    row(
      _DATA_PARALLEL,
      "hours at 1 Gbit/s",
      hours(_DATA_PARALLEL, _GBPS, layer_model),
      kind=Fit.NONE,
      basis=f"{stated}; the link hides no forward pass",
    ),
    row(
      _DATA_PARALLEL,
      "hours at infinite bandwidth",
      hours(_DATA_PARALLEL, math.inf, layer_model),
      kind=Fit.NONE,
      basis="compute alone",
    ),
    row(
      _FP4,
      "hours at 1 Gbit/s",
      hours(_FP4, _GBPS, fitted_model),
      kind=Fit.ELSEWHERE,
      basis=f"{fitted}, from the bits exchanged",
    ),
    row(
      _FP4,
      "hours at 1 Gbit/s",
      hours(_FP4, _GBPS, layer_model),
      kind=Fit.ELSEWHERE,
      basis=stated,
    ),
    row(
      _DATA_PARALLEL,
      "exchanged",
      num_parameters * 16 * num_steps / _TBIT,
      kind=Fit.NONE,
      basis=f"{stated} of 16 bit",
    ),
    row(
      _FP4,
      "exchanged",
      num_parameters * bits * num_steps / interval / _TBIT,
      kind=Fit.NONE,
      basis=f"{stated} of 4 bit",
    ),
  ]
  return Table("streaming_diloco_table_1", rows)
