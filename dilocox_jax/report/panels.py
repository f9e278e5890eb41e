"""Pictures of a frame: loss against tokens, bytes and simulated time.

A curve is the mean over seeds, and the band around it reaches from the lowest
seed to the highest. A reader tells about six curves apart. So at most six have
a color and a name in the legend, chosen by one rule for all figures: the
baseline, what the frame names, then the lowest losses. All others are thin and
gray behind them, where they still show the range of results.
"""

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

from dilocox_jax.report import escape, style, units
from dilocox_jax.report.frame import Frame, Point, Setting

TOKENS, BYTES = "tokens", "bytes"  # Axes beside the names of clocks.
MAX_FRONT = 6
_KINDS = {
  TOKENS: "measured",
  BYTES: "loss measured, bytes derived from the plan",
}
_TIMED = "loss measured, time simulated"
_FAR = 4.0
_WIDE = 4  # Ratio of two ends from which the axis of time is logarithmic.
_LONGEST = 100  # Ratio of a curve's end to where a logarithmic axis begins.
_MOST_MARKERS = 20
_LONGEST_CLOCK = 300  # Characters of the words that say what a clock times.
_LINE_CHARACTERS = 12  # Characters of an axis' name that fit into an inch.
_BEHIND: dict[str, Any] = {
  **{"color": style.PALE, "marker": ".", "markersize": 2.5},
  **{"linewidth": 0.9, "zorder": 1.8},
}
_PARETO: dict[str, Any] = {
  **{"color": style.GREY, "linestyle": ":", "drawstyle": "steps-post"},
  **{"marker": "o", "markersize": 8, "markerfacecolor": "none"},
  **{"linewidth": 1.2, "zorder": 4, "label": "Pareto front"},
}
# Places of a name relative to its point (points, 1/72 inch), nearest first.
_OFFSETS = [
  (x * far, y * far)
  for far in (1.0, 2.0, 3.5)
  for x, y in ((8, 5), (8, -5), (-8, 5), (-8, -5), (0, 10), (0, -10))
]


@dataclasses.dataclass(frozen=True)
class Curve:
  """One curve of a figure.

  Attributes:
    name: Name of the method.
    x: Horizontal values.
    y: Losses (nats a token), as many as `x`.
    low: Lower edge of the band around the curve; empty without a band.
    high: Upper edge of the band.
    label: Text of the legend; by default the name.
  """

  name: str
  x: Sequence[float | int]
  y: Sequence[float]
  low: Sequence[float] = ()
  high: Sequence[float] = ()
  label: str = ""


def draw_curves(
  ax: Axes, curves: Sequence[Curve], front: Sequence[str]
) -> None:
  """Draws curves: those in front with their method's look, the others gray.

  Each curve is a little thicker than the next, so that none hides an equal one.

  Args:
    ax: Axes to draw into.
    curves: All curves. One without points gets no line and no legend entry.
    front: Names of the curves in front, the thickest first.
  """
  drawn = {curve.name: curve for curve in curves if len(curve.x)}
  for number, (name, look) in enumerate(style.looks(front).items()):
    if name not in drawn:
      continue
    curve, wider = drawn.pop(name), 0.2 * (len(front) - 1 - number)
    size: dict[str, Any] = {"linewidth": 1.4 + wider, "zorder": 3}
    size["markersize"] = 3.5 + wider if len(curve.x) > 1 else 9
    # Markers of a long run would merge; the last one is always drawn.
    spacing = -(-len(curve.x) // _MOST_MARKERS)
    marked = list(range(len(curve.x) - 1, -1, -spacing))
    label = curve.label or style.proper(name)
    ax.plot(
      curve.x, curve.y, gid=name, label=label, markevery=marked, **size, **look
    )
    if len(curve.low):
      band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
      ax.fill_between(curve.x, curve.low, curve.high, **band)
  # Matplotlib leaves labels that begin with "_" out of the legend.
  for name, curve in drawn.items():
    ax.plot(curve.x, curve.y, label=f"_{name}", gid=name, **_BEHIND)
  if drawn:
    ax.plot([], [], color=style.PALE, label=f"{len(drawn)} others")


def loss_panel(
  frame: Frame, axis: str, title: str, size: tuple[float, float] | None = None
) -> Figure:
  """Draws validation loss against a cost.

  Args:
    frame: What the report is about, at least one setting.
    axis: `TOKENS`, `BYTES` or the name of a clock.
    title: What the figure shows.
    size: Width and height (inches).
  """
  figure, (ax,) = style.frame(1, title, size)
  limits, cut, front = _view(frame, axis)
  most = limits[1] if limits else math.inf
  divisor, seeds = _scale(ax, frame, axis, most), frame.num_seeds
  curves = [curve(each, axis, divisor, seeds) for each in frame.settings]
  draw_curves(ax, curves, front)
  pareto = [each for each in frame.pareto_front() if each.sent_bytes > 0]
  is_named = axis == BYTES and len(frame.settings) > MAX_FRONT
  if is_named and pareto:
    ends = [(setting.sent_bytes, setting.loss) for setting in pareto]
    ax.plot(*zip(*ends, strict=True), **_PARETO)
  if limits:
    ax.set_ylim(*limits)
  else:
    ends = [setting.loss for setting in frame.settings]
    cut = style.cut_high(ax, [point.loss for point in _points(frame)], ends)
  band = f"; mean and band of {seeds} seeds" if seeds > 1 else ""
  style.caption(ax, _KINDS.get(axis, _TIMED) + band + cut)
  if frame.target and frame.target <= most:
    style.mark(ax, frame.target, f"target {frame.target:g}")
  ax.set_ylabel(style.LOSS_AXIS)
  style.legend(figure, ax, 4)
  if is_named:
    names = [(style.proper(s.name), s.sent_bytes, s.loss) for s in pareto]
    name_points(figure, ax, names)
  return figure


def _points(frame: Frame) -> list[Point]:
  return [p for s in frame.settings for curve in s.curves for p in curve]


def _view(
  frame: Frame, axis: str
) -> tuple[tuple[float, float] | None, str, list[str]]:
  """Returns the limits of the losses, what is above them, and who is in front.

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
      above = f"; above the axis: {', '.join(map(style.proper, missing))}"
  baseline = next((s.baseline for s in frame.settings if s.baseline), "")
  first = first_to(frame, axis) if axis in frame.clocks else None
  named = [each.name for each in (first, frame.cheapest()) if each]
  lowest = sorted(seen, key=seen.__getitem__)
  wanted = dict.fromkeys((baseline, *named, *frame.front, *lowest))
  return limits, above, [name for name in wanted if name in seen][:MAX_FRONT]


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


def _cost(point: Point, axis: str) -> float:
  if axis in (TOKENS, BYTES):
    return float(point.tokens if axis == TOKENS else point.sent_bytes)
  return point.seconds.get(axis, 0.0)


def _scale(ax: Axes, frame: Frame, axis: str, most: float) -> float:
  """Labels the horizontal axis; returns the divisor of its unit.

  Args:
    ax: Axes to label.
    frame: What the report is about.
    axis: As in `loss_panel`.
    most: Largest loss in view.
  """
  seen = [p for p in _points(frame) if p.loss <= most]
  costs = [cost for p in seen if (cost := _cost(p, axis)) > 0]
  ends = [_cost(curve[-1], axis) for s in frame.settings for curve in s.curves]
  if axis == TOKENS:
    divisor, unit = units.tokens_unit(max(costs, default=0))
    ax.set_xlabel(f"{unit}, all replicas")
    return divisor
  if axis == BYTES:
    divisor = 1.0
    style.cost_axis(ax, costs, "sent by one replica", EngFormatter("B"))
  else:
    is_log = max(ends, default=0) > _WIDE * min(ends, default=0)
    first_s = min(costs if is_log else ends, default=0.0)
    divisor, unit = units.time_unit(first_s)
    times, name = [cost / divisor for cost in costs], f"simulated time ({unit})"
    style.cost_axis(ax, times, name, is_log=is_log)
    width = int(_LINE_CHARACTERS * ax.bbox.width / style.DPI)
    words = escape.picture(frame.clocks[axis], longest=_LONGEST_CLOCK)
    what = textwrap.fill(words, width)
    ax.set_xlabel(f"{ax.get_xlabel()}\n{what}")
  if costs and ax.get_xscale() == "log":
    # A log axis begins where the first curve comes into view. A first round
    # that waits for nothing may have taken next to no time.
    low = max(min(costs), min(ends, default=0) / _LONGEST)
    ax.set_xlim(0.8 * low / divisor, 1.25 * max(costs) / divisor)
  return divisor


def curve(setting: Setting, axis: str, divisor: float, seeds: int) -> Curve:
  """Returns mean, lowest and highest loss where all seeds were evaluated.

  Args:
    setting: What is drawn.
    axis: As in `loss_panel`.
    divisor: What the costs are divided by.
    seeds: How many runs the setting should have.
  """
  # A logarithmic axis has no place for zero bytes or zero seconds.
  rows = [
    (_cost(points[0], axis) / divisor, [point.loss for point in points])
    for points in zip(*setting.curves, strict=False)
    if _cost(points[0], axis) > 0
  ]
  several = len(setting.curves) > 1
  missing = units.human_missing(len(setting.curves), seeds)
  return Curve(
    setting.name,
    x=[x for x, _ in rows],
    y=[math.fsum(losses) / len(losses) for _, losses in rows],
    low=[min(losses) for _, losses in rows] if several else [],
    high=[max(losses) for _, losses in rows] if several else [],
    label=style.proper(setting.label) + (missing if seeds > 1 else ""),
  )


def name_points(
  figure: Figure, ax: Axes, points: Sequence[tuple[str, float, float]]
) -> None:
  """Writes names beside points, where they cover no other name or point.

  Args:
    figure: Figure of the axes. All else must be drawn already.
    ax: Axes of the points.
    points: Name and place of each point, the most important first.
  """
  figure.draw_without_rendering()  # Only now pixels of points are known.
  low, high = ax.get_ylim()
  points = [point for point in points if low <= point[2] <= high]
  places = [ax.transData.transform(point[1:]) for point in points]
  taken = [Bbox([place - 6, place + 6]) for place in places]
  for number, (name, *place) in enumerate(points):
    others = taken[:number] + taken[number + 1 :]
    for x, y in _OFFSETS:
      text = ax.annotate(
        name,
        (place[0], place[1]),
        (x, y),
        textcoords="offset points",
        ha="left" if x > 0 else "right" if x else "center",
        va="bottom" if y > 0 else "top",
        arrowprops={"arrowstyle": "-", "color": style.PALE, "linewidth": 0.6},
        parse_math=False,
        **{"fontsize": 8, "color": style.GREY, "zorder": 6},
      )
      # A white rim keeps a name readable where it crosses a curve.
      text.set_path_effects([withStroke(linewidth=2, foreground="white")])
      box = text.get_window_extent()
      if not box.count_overlaps(others) and ax.bbox.containsx(box.x1):
        taken.append(box)
        break
      text.remove()
