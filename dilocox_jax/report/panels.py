"""Draws the losses of settings against tokens, bytes or simulated time.

A setting is a method with all its hyper-parameters, and its curve is the mean
over its seeds. At most six curves, the *front*, have a color and a name in the
legend. With several seeds they also have a band from the lowest loss to the
highest. All other curves are gray and lie behind the front.
"""

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

from dilocox_jax.report import escape, style, units
from dilocox_jax.report.frame import Frame, Point, Setting

# An axis is `TOKENS`, `BYTES` or the name of a clock.
TOKENS = "tokens"
BYTES = "bytes"
MAX_FRONT = 6  # Largest number of curves in color.
# Captions: how the numbers were obtained.
_KINDS = {
  TOKENS: "measured",
  BYTES: "loss measured, bytes derived from the plan",
}
_TIMED = "loss measured, time simulated"
# Number of median distances above the median loss beyond which a loss is out of
# view (`_loss_limits`).
_FAR = 4.0
# A time axis is logarithmic if the longest curve ends after more than this many
# times the time of the shortest one.
_WIDE = 4
# A logarithmic axis starts at least at the cost at which the shortest curve
# ends, divided by this number.
_LONGEST = 100
_MOST_MARKERS = 20  # Largest number of markers on a curve.
_LONGEST_CLOCK = 300  # Characters of a clock's description that are shown.
_LINE_CHARACTERS = 12  # Characters of an axis' name that fit into an inch.
# Arguments of `Axes.plot` for a curve behind the front.
_BEHIND: dict[str, Any] = {
  "color": style.PALE,
  "marker": ".",
  "markersize": 2.5,
  "linewidth": 0.9,
  "zorder": 1.8,
}
# Arguments of `Axes.plot` for the Pareto front.
_PARETO: dict[str, Any] = {
  "color": style.GRAY,
  "linestyle": ":",
  "drawstyle": "steps-post",
  "marker": "o",
  "markersize": 8,
  "markerfacecolor": "none",
  "linewidth": 1.2,
  "zorder": 4,
  "label": "Pareto front",
}
# Positions of a name relative to its point (1/72 inch), nearest first.
_OFFSETS = [
  (x * far, y * far)
  for far in (1.0, 2.0, 3.5)
  for x, y in ((8, 5), (8, -5), (-8, 5), (-8, -5), (0, 10), (0, -10))
]


@dataclasses.dataclass(frozen=True)
class Curve:
  """One curve of a figure.

  Attributes:
    name: Name of the method or the setting.
    x: Costs (tokens, bytes or time), in the unit of the horizontal axis.
    y: Losses (nats a token), as many as `x`.
    low: Lower edge of the band around the curve; empty without a band.
    high: Upper edge of the band; empty without a band.
    label: Text of the legend; "" means the name.
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
  """Draws the curves in `front` in color, and all other curves in gray.

  The legend names the colored curves, and says how many others there are.

  Args:
    ax: Axes to draw into.
    curves: All curves. Curves without points are not drawn.
    front: Names of the colored curves, the thickest first, so that it is seen
      under the others. A name without a curve is skipped.
  """
  curves_by_name = {curve.name: curve for curve in curves if len(curve.x)}
  for number, (name, look) in enumerate(style.looks(front).items()):
    if name not in curves_by_name:
      continue
    curve = curves_by_name.pop(name)
    extra_width = 0.2 * (len(front) - 1 - number)
    marker_size = 3.5 + extra_width
    if len(curve.x) == 1:
      marker_size = 9
    # The markers of a long run would merge, so only some are drawn. The last
    # one is always drawn.
    spacing = math.ceil(len(curve.x) / _MOST_MARKERS)
    marked_points = list(range(len(curve.x) - 1, -1, -spacing))
    ax.plot(
      curve.x,
      curve.y,
      gid=name,
      label=curve.label or style.proper(name),
      markevery=marked_points,
      markersize=marker_size,
      linewidth=1.4 + extra_width,
      zorder=3,
      **look,
    )
    if len(curve.low):
      ax.fill_between(
        curve.x,
        curve.low,
        curve.high,
        color=look["color"],
        alpha=0.15,
        linewidth=0,
      )
  # The curves that are left are gray. Matplotlib leaves labels that start with
  # "_" out of the legend.
  for name, curve in curves_by_name.items():
    ax.plot(curve.x, curve.y, label=f"_{name}", gid=name, **_BEHIND)
  if curves_by_name:
    ax.plot([], [], color=style.PALE, label=f"{len(curves_by_name)} others")


def loss_panel(
  frame: Frame, axis: str, title: str, size: tuple[float, float] | None = None
) -> Figure:
  """Draws the validation loss of all settings against a cost.

  A horizontal line marks the frame's target loss, if there is one in view. A
  picture of bytes with more than six settings also has the Pareto front of loss
  and bytes.

  Args:
    frame: All settings, at least one.
    axis: Cost on the horizontal axis: `TOKENS`, `BYTES` or the name of a clock
      (simulated cluster).
    title: Title of the figure.
    size: Width and height (inches). None: 6.4 x 4.2.

  Returns:
    The figure, with a legend below the axes.
  """
  figure, (ax,) = style.frame(1, title, size)
  limits, above, front = _view(frame, axis)
  highest_loss = limits[1] if limits else math.inf
  divisor = _scale(ax, frame, axis, highest_loss)
  num_seeds = frame.num_seeds
  curves = [
    curve(setting, axis, divisor, num_seeds) for setting in frame.settings
  ]
  draw_curves(ax, curves, front)
  # A logarithmic axis cannot show zero bytes.
  pareto = [
    setting for setting in frame.pareto_front() if setting.sent_bytes > 0
  ]
  shows_pareto = axis == BYTES and len(frame.settings) > MAX_FRONT
  if shows_pareto and pareto:
    ax.plot(
      [setting.sent_bytes for setting in pareto],
      [setting.loss for setting in pareto],
      **_PARETO,
    )
  if limits:
    ax.set_ylim(*limits)
  else:
    # With few settings only a few high losses at the start are cut.
    last_losses = [setting.loss for setting in frame.settings]
    losses = [point.loss for point in _points(frame)]
    above = style.cut_high(ax, losses, last_losses)
  caption = _KINDS.get(axis, _TIMED)
  if num_seeds > 1:
    caption += f"; mean and band of {num_seeds} seeds"
  style.caption(ax, caption + above)
  if frame.target and frame.target <= highest_loss:
    style.mark(ax, frame.target, f"target {frame.target:g}")
  ax.set_ylabel(style.LOSS_AXIS)
  style.legend(figure, ax, 4)
  if shows_pareto:
    named_points = [
      (style.proper(setting.name), setting.sent_bytes, setting.loss)
      for setting in pareto
    ]
    name_points(figure, ax, named_points)
  return figure


def _points(frame: Frame) -> list[Point]:
  """Returns all evaluations in the curves of all settings."""
  return [
    point
    for setting in frame.settings
    for points in setting.curves
    for point in points
  ]


def _view(
  frame: Frame, axis: str
) -> tuple[tuple[float, float] | None, str, list[str]]:
  """Chooses the range of losses in view, and the curves in color (the front).

  Returns:
    The lowest and the highest loss of the axis (None if at most six settings
    have a finite loss); the end of the caption, about curves above the axis;
    and the names of the front.
  """
  last_losses = {
    setting.name: setting.loss
    for setting in frame.settings
    if math.isfinite(setting.loss)
  }
  losses = [point.loss for point in _points(frame) if math.isfinite(point.loss)]
  limits = None
  visible = last_losses
  above = ""
  # The starts of many curves are much the same, so the axis shows their ends,
  # except for a curve that ends far above the others.
  if len(last_losses) > MAX_FRONT and losses:
    limits = _loss_limits(losses, list(last_losses.values()))
    _, top = limits
    visible = {name: loss for name, loss in last_losses.items() if loss <= top}
    above = "; higher losses are above the axis"
    hidden = [name for name in last_losses if name not in visible]
    if hidden:
      above = f"; above the axis: {', '.join(map(style.proper, hidden))}"
  return limits, above, _front_names(frame, axis, visible)


def _loss_limits(
  losses: Sequence[float], last_losses: Sequence[float]
) -> tuple[float, float]:
  """Returns the lowest and the highest loss of an axis with many settings.

  The axis ends above the highest last loss that is not far above the others:
  not above their median by more than four times the median distance from it.

  Args:
    losses: All finite losses of all settings (nats a token).
    last_losses: Finite last loss of each setting (nats a token).
  """
  # Example: for last losses of 2.0, 2.1, 2.2, 2.3 and 9.0, the median is 2.2,
  # and the median distance 0.1, so losses above 2.2 + 4 * 0.1 = 2.6 are far.
  middle = statistics.median(last_losses)
  usual_distance = statistics.median(abs(loss - middle) for loss in last_losses)
  far_above = middle + _FAR * usual_distance
  low = min(losses)
  high = max(loss for loss in last_losses if loss <= far_above)
  # Room above for the starts of the curves, even if all end at nearly one loss.
  top = high + 0.6 * max(high - low, 0.05 * low)
  return low - 0.04 * (top - low), top


def _front_names(
  frame: Frame, axis: str, visible: Mapping[str, float]
) -> list[str]:
  """Returns the names of the curves in color, at most six.

  They come in this order:

  - The baseline of the first setting that has one.
  - If the axis is simulated time, the first to reach the target loss.
  - The setting that sends fewest bytes at about the baseline's loss.
  - `frame.front`.
  - The settings with the lowest last losses.

  Only settings in `visible` (last losses by name) are chosen.
  """
  names = [setting.baseline for setting in frame.settings if setting.baseline]
  names = names[:1]
  if axis in frame.clocks:
    first = first_to(frame, axis)
    if first:
      names.append(first.name)
  cheapest = frame.cheapest()
  if cheapest:
    names.append(cheapest.name)
  names += frame.front
  names += sorted(visible, key=visible.__getitem__)
  unique_names = dict.fromkeys(names)
  return [name for name in unique_names if name in visible][:MAX_FRONT]


def first_to(frame: Frame, clock: str) -> Setting | None:
  """Returns the setting that reaches the frame's target loss first, or None.

  The time of a setting is the mean over its seeds, on a clock (simulated
  cluster). If one of its evaluated seeds does not reach the loss, the setting
  does not count. A baseline does not count, and a setting counts only if it has
  a baseline with the same number of tokens. The result is None if no setting
  counts, or if the frame has no target loss.
  """
  if not frame.target:
    return None
  baselines = {setting.baseline for setting in frame.settings}
  first = None
  first_s = math.inf
  for setting in frame.settings:
    if setting.name in baselines or not frame.base(setting):
      continue
    times_s = setting.seconds_to(clock, frame.target)
    if times_s and statistics.fmean(times_s) < first_s:
      first = setting
      first_s = statistics.fmean(times_s)
  return first


def _cost(point: Point, axis: str) -> float:
  """Returns the cost of an evaluation: tokens, bytes or simulated seconds.

  It is 0 if the evaluation has no time on the clock (simulated cluster) `axis`.
  """
  if axis == TOKENS:
    return float(point.tokens)
  if axis == BYTES:
    return float(point.sent_bytes)
  return point.seconds.get(axis, 0.0)


def _scale(ax: Axes, frame: Frame, axis: str, highest_loss: float) -> float:
  """Labels the horizontal axis, and chooses its scale and its unit.

  Returns:
    The number by which a cost is divided to give its place on the axis.
  """
  costs = []
  for point in _points(frame):
    cost = _cost(point, axis)
    if point.loss <= highest_loss and cost > 0:
      costs.append(cost)
  last_costs = [
    _cost(points[-1], axis)
    for setting in frame.settings
    for points in setting.curves
  ]
  shortest = min(last_costs, default=0)
  if axis == TOKENS:
    divisor, unit = units.tokens_unit(max(costs, default=0))
    ax.set_xlabel(f"{unit}, {frame.counted_replicas}")
    return divisor
  if axis == BYTES:
    divisor = 1.0
    style.cost_axis(ax, costs, "sent by one replica", EngFormatter("B"))
  else:
    is_log = max(last_costs, default=0) > _WIDE * shortest
    # The unit suits the earliest point, or on a linear axis the shortest curve.
    divisor, unit = units.time_unit(
      min(costs if is_log else last_costs, default=0.0)
    )
    times = [cost / divisor for cost in costs]
    style.cost_axis(ax, times, f"simulated time ({unit})", is_log=is_log)
    width = int(_LINE_CHARACTERS * ax.bbox.width / style.DPI)
    description = escape.picture(frame.clocks[axis], longest=_LONGEST_CLOCK)
    lines = textwrap.fill(description, width)
    ax.set_xlabel(f"{ax.get_xlabel()}\n{lines}")
  if costs and ax.get_xscale() == "log":
    # The axis starts where the first curve comes into view. But the first point
    # of a method that never waits may be at a time of nearly zero, and the axis
    # would be empty for many powers of ten.
    low = max(min(costs), shortest / _LONGEST)
    ax.set_xlim(0.8 * low / divisor, 1.25 * max(costs) / divisor)
  return divisor


def curve(setting: Setting, axis: str, divisor: float, seeds: int) -> Curve:
  """Returns the curve of a setting: mean, lowest and highest loss over seeds.

  It has a point for every evaluation that all seeds have and that has a cost
  above 0. The cost of a point is that of the first seed.

  Args:
    setting: The setting.
    axis: Cost: `TOKENS`, `BYTES` or the name of a clock (simulated cluster).
    divisor: Number by which the costs are divided.
    seeds: Number of seeds that there should be, for the label of the curve.
  """
  has_band = len(setting.curves) > 1
  x = []
  y = []
  low = []
  high = []
  for points in zip(*setting.curves, strict=False):
    cost = _cost(points[0], axis)
    if cost <= 0:
      continue  # A logarithmic axis cannot show zero bytes or zero seconds.
    losses = [point.loss for point in points]
    x.append(cost / divisor)
    y.append(math.fsum(losses) / len(losses))
    if has_band:
      low.append(min(losses))
      high.append(max(losses))
  label = style.proper(setting.label)
  if seeds > 1:
    label += units.human_missing(len(setting.curves), seeds)
  return Curve(name=setting.name, x=x, y=y, low=low, high=high, label=label)


def name_points(
  figure: Figure, ax: Axes, points: Sequence[tuple[str, float, float]]
) -> None:
  """Writes names beside points so that no name covers a name or a point.

  A name is left out if there is no free space for it, or if its point is
  outside the vertical range of the axes.

  Args:
    figure: Figure of the axes. Everything else must be drawn already.
    ax: Axes of the points.
    points: Name, horizontal and vertical value of each point, the most
      important first.
  """
  # The pixels of points are known only after the figure was drawn.
  figure.draw_without_rendering()
  low, high = ax.get_ylim()
  visible_points = [(name, x, y) for name, x, y in points if low <= y <= high]
  boxes = []  # Boxes of all points, and then of all names.
  for _, x, y in visible_points:
    pixel = ax.transData.transform((x, y))
    boxes.append(Bbox([pixel - 6, pixel + 6]))
  for number, (name, x, y) in enumerate(visible_points):
    other_boxes = boxes[:number] + boxes[number + 1 :]
    for offset in _OFFSETS:
      text = _annotate(ax, name, point=(x, y), offset=offset)
      box = text.get_window_extent()
      is_free = not box.count_overlaps(other_boxes)
      if is_free and ax.bbox.containsx(box.x1):
        boxes.append(box)
        break
      text.remove()


def _annotate(
  ax: Axes,
  name: str,
  *,
  point: tuple[float, float],
  offset: tuple[float, float],
) -> Annotation:
  """Writes a name beside a point, with a line between the two.

  `offset` is the position of the name relative to the point (1/72 inch).
  """
  right, up = offset
  if right > 0:
    horizontal_alignment = "left"
  elif right < 0:
    horizontal_alignment = "right"
  else:
    horizontal_alignment = "center"
  text = ax.annotate(
    name,
    point,
    offset,
    textcoords="offset points",
    ha=horizontal_alignment,
    va="bottom" if up > 0 else "top",
    arrowprops={"arrowstyle": "-", "color": style.PALE, "linewidth": 0.6},
    parse_math=False,
    fontsize=8,
    color=style.GRAY,
    zorder=6,
  )
  # A white rim keeps a name readable where it crosses a curve.
  text.set_path_effects([withStroke(linewidth=2, foreground="white")])
  return text
