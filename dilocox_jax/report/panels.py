"""Pictures of a frame: loss against tokens, bytes and simulated time.

A curve is the mean over seeds, and the band around it reaches from the lowest
seed to the highest. At most six settings are in front (`curves`).
"""

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox_jax.report import style, units
from dilocox_jax.report.curves import (
  MAX_FRONT,
  Curve,
  choose_front,
  draw_curves,
)
from dilocox_jax.report.frame import Frame, Point, Setting, standard_error
from dilocox_jax.report.labels import PointLabel, place_labels

TOKENS, BYTES = "tokens", "bytes"  # Axes beside the names of clocks.
_KINDS = {
  TOKENS: "measured",
  BYTES: "loss measured, bytes derived from the plan",
}
_TIMED = "loss measured, time simulated"
_WIDE = 4  # Ratio of two ends from which the axis of time is logarithmic.
_FAR = 4.0
_MARK = {"color": style.GREY, "linewidth": 0.8, "dashes": (4, 3)}
_MARK_TEXT = {"color": style.GREY, "fontsize": 8, "ha": "right"}
_STEPS = {"color": style.GREY, "linestyle": ":", "drawstyle": "steps-post"}
_RING = {"marker": "o", "markersize": 8, "markerfacecolor": "none"}
_FRONT: dict[str, Any] = _STEPS | _RING | {"linewidth": 1.2, "zorder": 4}
_LINE_CHARACTERS = 12  # Characters of an axis' name that fit into an inch.
Along = Callable[[Point], float]


@dataclasses.dataclass(frozen=True)
class _View:
  """Which losses the axes have room for, and which settings are in front."""

  limits: tuple[float, float] | None
  above: str
  front: list[str]

  def is_seen(self, loss: float) -> bool:
    return self.limits is None or loss <= self.limits[1]


def loss_panels(
  frame: Frame,
  axes: Sequence[str],
  title: str,
  size: tuple[float, float] | None = None,
) -> Figure:
  """Draws validation loss against costs, one panel for each.

  Args:
    frame: What the report is about, at least one setting.
    axes: `TOKENS`, `BYTES` and names of clocks, from left to right.
    title: What the figure shows.
    size: Width and height (inches).
  """
  size = size or (4.8 * len(axes), 4.4)
  figure, panels = style.frame(len(axes), title, size)
  if all(len(points) < 2 for s in frame.settings for points in s.curves):
    _scatter(figure, panels[0], frame)
    return figure
  view = _view(frame, [axis for axis in axes if axis in frame.clocks])
  for ax, axis in zip(panels, axes, strict=True):
    divisor = _scale(ax, frame, view, axis)
    _draw_panel(ax, frame, view, _along(axis, divisor), axis)
    _cut_left(ax, frame, view, _along(axis, divisor))
  panels[0].set_ylabel(style.LOSS_AXIS)
  # Each curve has tokens, and some have no bytes.
  style.legend(figure, panels[-2 if len(panels) > 1 else 0], 4)
  for ax, axis in zip(panels, axes, strict=True):
    if axis == BYTES and len(frame.settings) > MAX_FRONT:
      place_labels(figure, ax, _front_names(frame))
  return figure


def _along(axis: str, divisor: float = 1.0) -> Along:
  if axis == TOKENS:
    return lambda point: point.tokens / divisor
  if axis == BYTES:
    return lambda point: float(point.sent_bytes)
  return lambda point: point.seconds.get(axis, 0.0) / divisor


def _points(frame: Frame) -> list[Point]:
  return [p for s in frame.settings for curve in s.curves for p in curve]


def _scale(ax: Axes, frame: Frame, view: _View, axis: str) -> float:
  """Labels the horizontal axis; returns the divisor of its unit."""
  along, points = _along(axis), _points(frame)
  costs = [x for point in points if (x := along(point)) > 0]
  if axis == BYTES:
    style.bytes_axis(ax, list(map(round, costs)))
    divisor = 1.0
  elif axis == TOKENS:
    divisor, unit = units.tokens_unit(max(costs, default=0))
    ax.set_xlabel(f"{unit}, all replicas")
  else:
    divisor = _time_axis(ax, frame, view, axis)
  return divisor


def _cut_left(ax: Axes, frame: Frame, view: _View, along: Along) -> None:
  """Begins a logarithmic axis where the first curve comes into view."""
  points = [p for p in _points(frame) if view.is_seen(p.loss)]
  seen = [x for point in points if (x := along(point)) > 0]
  if seen and ax.get_xscale() == "log":
    ax.set_xlim(left=0.8 * min(seen))


def _time_axis(ax: Axes, frame: Frame, view: _View, clock: str) -> float:
  ends = [
    curve[-1].seconds[clock] for s in frame.settings for curve in s.curves
  ]
  width = int(_LINE_CHARACTERS * ax.bbox.width / style.DPI)
  what = textwrap.fill(frame.clocks[clock], width)
  if max(ends, default=0) <= _WIDE * min(ends, default=0):
    divisor, unit = units.time_unit(max(ends, default=0))
    ax.set_xlabel(f"simulated time ({unit})\n{what}")
    return divisor
  points = [p for p in _points(frame) if view.is_seen(p.loss)]
  first_s = min((s for p in points if (s := p.seconds[clock]) > 0), default=1.0)
  divisor, unit = units.time_unit(first_s)
  ax.set_xlabel(f"simulated time ({unit}, log scale)\n{what}")
  decades = math.log10(max(ends) / first_s) if first_s else 0
  style.log_axis(ax, (1, 3) if decades > 2 else (1, 2, 5), "{:,g}".format)
  return divisor


def _view(frame: Frame, clocks: Sequence[str]) -> _View:
  """Chooses what a figure shows.

  With many settings the axis shows where curves end, not where they begin,
  which is alike for all. One that ends far above the others would squeeze them,
  so the axis ends below it: farther above the median end than four times the
  median distance from it.
  """
  ends = {s.name: s.loss for s in frame.settings if math.isfinite(s.loss)}
  losses = [p.loss for p in _points(frame) if math.isfinite(p.loss)]
  limits, seen, above = None, ends, ""
  if len(ends) > MAX_FRONT and losses:
    middle = statistics.median(ends.values())
    usual = statistics.median(abs(loss - middle) for loss in ends.values())
    most = middle + _FAR * usual
    low, high = min(losses), max(x for x in ends.values() if x <= most)
    top = high + 0.6 * max(high - low, 0.05 * low)
    limits = low - 0.04 * (top - low), top
    seen = {name: loss for name, loss in ends.items() if loss <= top}
    above = "; higher losses are above the axis"
    if missing := [name for name in ends if name not in seen]:
      above = f"; above the axis: {', '.join(missing)}"
  baseline = next((s.baseline for s in frame.settings if s.baseline), "")
  first = first_to(frame, clocks[0]) if len(clocks) == 1 else None
  cheapest = frame.cheapest()
  wanted = [*(s.name for s in (first, cheapest) if s), *frame.front]
  return _View(limits, above, choose_front(seen, baseline, wanted))


def first_to(frame: Frame, clock: str) -> Setting | None:
  """Returns what reaches the target first, without AllReduce and the like.

  Args:
    frame: What the report is about.
    clock: Name of the clock.
  """
  baselines = {each.baseline for each in frame.settings}
  times = [
    (statistics.fmean(found), number)
    for number, each in enumerate(frame.settings)
    if frame.target and frame.base(each) and each.name not in baselines
    if (found := each.seconds_to(clock, frame.target))
  ]
  first_s, number = min(times, default=(math.inf, 0))
  return frame.settings[number] if math.isfinite(first_s) else None


def _draw_panel(
  ax: Axes, frame: Frame, view: _View, along: Along, axis: str
) -> None:
  curves = [_curve(each, along, frame.num_seeds) for each in frame.settings]
  draw_curves(ax, curves, view.front)
  front = [s for s in frame.pareto_front() if s.sent_bytes > 0]
  if axis == BYTES and len(frame.settings) > MAX_FRONT and front:
    ends = [(setting.sent_bytes, setting.loss) for setting in front]
    ax.plot(*zip(*ends, strict=True), label="Pareto front", **_FRONT)
  kind = _KINDS.get(axis, _TIMED)
  seeds = f"; mean and band of {frame.num_seeds} seeds"
  kind += seeds if frame.num_seeds > 1 else ""
  losses = [point.loss for point in _points(frame)]
  cut = view.above
  if view.limits:
    ax.set_ylim(*view.limits)
  else:
    kept = [setting.loss for setting in frame.settings]
    cut = style.cut_high(ax, losses, kept=kept)
  style.caption(ax, kind + cut)
  if frame.target and view.is_seen(frame.target):
    ax.axhline(frame.target, **_MARK)
    look = {"xycoords": ax.get_yaxis_transform(), "va": "bottom", **_MARK_TEXT}
    ax.annotate(f"target {frame.target:g}", (1, frame.target), **look)


def _curve(setting: Setting, along: Along, num_seeds: int) -> Curve:
  """Mean, lowest and highest loss at the evaluations that all seeds have."""
  # A logarithmic axis has no place for zero bytes or zero seconds.
  rows = [
    (along(points[0]), [point.loss for point in points])
    for points in zip(*setting.curves, strict=False)
    if along(points[0]) > 0
  ]
  several = len(setting.curves) > 1
  missing = units.human_missing(len(setting.curves), num_seeds)
  return Curve(
    setting.name,
    x=[x for x, _ in rows],
    y=[math.fsum(losses) / len(losses) for _, losses in rows],
    low=[min(losses) for _, losses in rows] if several else [],
    high=[max(losses) for _, losses in rows] if several else [],
    label=setting.label + (missing if num_seeds > 1 else ""),
  )


def _front_names(frame: Frame) -> list[PointLabel]:
  return [
    PointLabel(each.name, each.sent_bytes, each.loss)
    for each in frame.pareto_front()
    if each.sent_bytes > 0
  ]


def _scatter(figure: Figure, ax: Axes, frame: Frame) -> None:
  """Draws the ends of runs against their bytes, and the Pareto front."""
  # A logarithmic axis has no place for zero bytes.
  shown = [s for s in frame.settings if s.sent_bytes > 0]
  shown = [s for s in shown if math.isfinite(s.loss)]
  front = [s for s in frame.pareto_front() if s in shown]
  others = [s for s in shown if s not in front]
  blue = style.COLOURS[0]
  look: dict[str, Any]
  hollow: dict[str, Any] = {"color": style.GREY, "markerfacecolor": "none"}
  for settings, look in (
    (others, hollow | {"label": "other settings"}),
    (front, {"color": blue, "label": "Pareto front: none ends lower at less"}),
  ):
    sent_bytes = [s.sent_bytes for s in settings]
    losses = [s.loss for s in settings]
    errors = [standard_error(s.losses) for s in settings]
    bars = errors if all(map(math.isfinite, errors)) else None
    if settings:
      ax.errorbar(
        sent_bytes, losses, bars, fmt="o", markersize=6, capsize=2, **look
      )
  ends = [(s.sent_bytes, s.loss) for s in front]
  ax.plot(
    [x for x, _ in ends],
    [y for _, y in ends],
    color=blue,
    drawstyle="steps-post",
  )
  cut = style.cut_high(
    ax,
    [s.loss for s in shown],
    "higher losses are above the axis (see the table)",
    kept=[s.loss for s in front],
  )
  style.bytes_axis(ax, [round(s.sent_bytes) for s in shown])
  ax.margins(x=0.12)
  ax.set_ylabel(style.LOSS_AXIS)
  error = "; bars: standard error" if frame.num_seeds > 1 else ""
  style.caption(ax, _KINDS[BYTES] + error + cut)
  style.legend(figure, ax, 2)
  place_labels(
    figure,
    ax,
    [
      PointLabel(s.name, s.sent_bytes, s.loss, is_required=s in front)
      for s in [*front, *others]
    ],
  )
