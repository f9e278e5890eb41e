"""Fits lines "doublings lost = a log2 M - b" to measured losses of M replicas.

The doublings lost say how many times AllReduce's batch may be halved until its
loss is that of the replicas (`experiments.gaps.doublings`). A line is fitted to
settings that differ only in how many replicas divide the sequences of a step.
Source: the form is that of this project's earlier probes
(docs/results/predictions.md).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dilocox_jax.report.frame import standard_error
from dilocox_jax.report.tables import markdown_table
from experiments.gaps import tuning
from experiments.gaps.design import HELD_OUT_REPLICAS, HELD_OUT_SIZE
from experiments.gaps.doublings import Cost, Estimate, costs, gap_of
from experiments.gaps.rows import GapRow, by_setting
from experiments.gaps.settings import Setting

_FEWEST_POINTS = 3  # Numbers of replicas that a line needs.


class Line(NamedTuple):
  """A straight line "doublings lost = a log2 M - b", fitted to some settings.

  In all of these settings M replicas take the same number of sequences in a
  step together. Only M differs. The doublings lost say how many times
  AllReduce's batch may be halved until its loss is that of the replicas.

  Attributes:
    setting: One of the settings.
    num_points: Number of settings that were fitted, each with its own M.
    slope: a, the doublings lost for each doubling of M.
    offset: b, in doublings.
    correlation: Correlation of the errors of a and b; 0 if one of them has no
      error.
    misses: By M, the gap that the line gives minus the measured gap. A gap is a
      fraction: 0.02 means a loss 2 % above AllReduce's.
  """

  setting: Setting
  num_points: int
  slope: Estimate
  offset: Estimate
  correlation: float
  misses: dict[int, float]


def lines(
  rows: Sequence[GapRow], field: str, doublings: str = "by_curve"
) -> list[Line]:
  """Fits "doublings lost = a log2 M - b" to groups of settings.

  The doublings lost say how many times AllReduce's batch may be halved until
  its loss is that of M replicas. The settings of a group differ only in M.
  Settings with M = 1 are left out, and settings whose doublings lost are NaN. A
  group with fewer than three values of M is left out.

  Args:
    rows: Finished runs. Runs that are held out to test predictions (`design`)
      are left out.
    field: Name of the loss that is compared, a field of `GapRow`.
    doublings: Which measure of the doublings lost is fitted, "by_curve" or
      "by_last_doubling" (fields of `Cost`).
  """
  rows_by_setting = by_setting([row for row in rows if not _is_held_out(row)])
  all_costs = _by_kind(costs(rows_by_setting, field), doublings)
  # The same costs by each seed alone: their spread gives the errors of a and b.
  seed_costs = [
    _by_kind(costs(rows_by_setting, field, seeds=(seed,)), doublings)
    for seed in tuning.RESULT_SEEDS
  ]
  fitted_lines = []
  for kind, points in all_costs.items():
    if len(points) < _FEWEST_POINTS:
      continue
    slope, offset = _fit(points, doublings)
    # A seed may lack points, whose doublings lost are NaN. A line needs two.
    seed_fits = [
      _fit(each[kind], doublings)
      for each in seed_costs
      if len(each.get(kind, ())) >= 2
    ]
    slopes = [seed_slope for seed_slope, _ in seed_fits]
    offsets = [seed_offset for _, seed_offset in seed_fits]
    fitted_lines.append(
      Line(
        setting=points[0].setting,
        num_points=len(points),
        slope=Estimate(slope, standard_error(slopes)),
        offset=Estimate(offset, standard_error(offsets)),
        correlation=_correlation(seed_fits),
        misses={
          cost.setting.replicas: (
            _line_gap(cost, slope, offset, doublings) - cost.gap.mean
          )
          for cost in points
        },
      )
    )
  return fitted_lines


def page_lines(rows: Sequence[GapRow], field: str) -> list[str]:
  """Returns the text of the page of `experiments.fit_gaps`, in Markdown.

  Args:
    rows: Finished runs.
    field: Name of the loss that is compared, a field of `GapRow`.
  """
  all_costs = costs(by_setting(rows), field)
  return [
    f"{len(rows)} finished runs. All gaps are measured: `{field}` at the best"
    f" rates, {len(tuning.RESULT_SEEDS)} seeds that chose no rates, paired with"
    " AllReduce. The error is the standard error of the mean.",
    "",
    "## Gaps",
    "",
    "s is the share by which AllReduce's loss falls from half of the sequences"
    " to all of them. The doublings lost are measured along AllReduce's losses"
    " at all batches (curve), or as if each doubling gained s (last doubling).",
    "",
    *markdown_table(
      ("setting", "gap", "s", "lost, curve", "lost, last doubling"),
      [_cost_row(cost) for cost in all_costs],
    ),
    "",
    "## Lines",
    "",
    "Doublings lost, along the curve, = a log2 M - b. The last column is the"
    " gap that the line gives less the measured one, in points, for each M.",
    "",
    *markdown_table(
      ("kind", "points", "a", "b", "misses"),
      [_line_row(line) for line in lines(rows, field)],
    ),
  ]


def _is_held_out(row: GapRow) -> bool:
  """Returns whether a run is left out of the fit, to test its predictions."""
  return row.size == HELD_OUT_SIZE or row.replicas == HELD_OUT_REPLICAS


def _by_kind(
  all_costs: Sequence[Cost], doublings: str
) -> dict[Setting, list[Cost]]:
  """Groups costs (`Cost`) whose settings differ only in the number of replicas.

  Costs of one replica are left out, and costs whose field `doublings` is NaN.
  The key is the group's setting with one replica that takes all sequences.
  """
  grouped: dict[Setting, list[Cost]] = {}
  for cost in all_costs:
    setting = cost.setting
    if setting.replicas == 1 or math.isnan(getattr(cost, doublings)):
      continue
    kind = dataclasses.replace(setting, replicas=1, batch=setting.global_batch)
    grouped.setdefault(kind, []).append(cost)
  return grouped


def _fit(points: Sequence[Cost], doublings: str) -> tuple[float, float]:
  """Fits a log2 M - b to the field `doublings` of costs; returns a and b."""
  log_replicas = [math.log2(cost.setting.replicas) for cost in points]
  lost = [getattr(cost, doublings) for cost in points]
  slope, intercept = np.polyfit(log_replicas, lost, deg=1)
  return float(slope), -float(intercept)


def _correlation(seed_fits: Sequence[tuple[float, float]]) -> float:
  """Returns the correlation of slope and offset.

  The result is 0 with fewer than two seeds, or if slope or offset are constant.
  `seed_fits` has slope and offset of each seed.
  """
  if len(seed_fits) < 2 or not np.all(np.std(seed_fits, axis=0) > 1e-9):
    return 0.0
  return float(np.corrcoef(np.transpose(seed_fits))[0, 1])


def _line_gap(cost: Cost, slope: float, offset: float, doublings: str) -> float:
  """Returns the gap to AllReduce that a line gives for measured replicas.

  The line gives the doublings lost. Each of them multiplies the loss by
  (1 + measured gap)^(1 / measured doublings lost).
  """
  lost = slope * math.log2(cost.setting.replicas) - offset
  mean_gain = 1 - (1 + cost.gap.mean) ** (-1 / getattr(cost, doublings))
  return gap_of(lost, mean_gain)


def _cost_row(cost: Cost) -> tuple[str, ...]:
  """Returns the cells of the table row of a measured gap."""
  return (
    cost.setting.name,
    f"{100 * cost.gap.mean:+.2f} ± {100 * cost.gap.error:.2f} %",
    f"{100 * cost.gain:.1f} %",
    f"{cost.by_curve:.2f}",
    f"{cost.by_last_doubling:.2f}",
  )


def _line_row(line: Line) -> tuple[str, ...]:
  """Returns the cells of the table row of a fitted line."""
  setting = line.setting
  kind = dataclasses.replace(setting, replicas=1, batch=setting.global_batch)
  misses = ", ".join(
    f"{replicas}: {100 * miss:+.2f}"
    for replicas, miss in sorted(line.misses.items())
  )
  return (
    kind.name,
    str(line.num_points),
    f"{line.slope.mean:.2f} ± {line.slope.error:.2f}",
    f"{line.offset.mean:.2f} ± {line.offset.error:.2f}",
    misses,
  )
