"""Loss against tokens, bytes and simulated time for all methods of a sweep.

A curve is the mean over seeds; the band around it reaches from the lowest
seed to the highest. At most six methods are in front (`curves`). The title of
a figure states what the numbers say, worked out by the same rule every time.
"""

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox_jax.report import style, units
from dilocox_jax.report.convergence.comparison import (
  Comparison,
  MethodResult,
  Point,
  human_seconds_to,
  mean_seconds_to,
)
from dilocox_jax.report.curves import (
  MAX_FRONT,
  Curve,
  choose_front,
  draw_curves,
)
from dilocox_jax.report.labels import PointLabel, place_labels
from dilocox_jax.report.spread import cheapest, pareto_front

_SIZE = (8.4, 5.6)
_FAR = 4.0
_MARK = {"color": style.GREY, "linewidth": 0.8, "dashes": (4, 3)}
_MARK_TEXT = {"color": style.GREY, "fontsize": 8, "ha": "right"}
_STEPS = {"color": style.GREY, "linestyle": ":", "drawstyle": "steps-post"}
_RING = {"marker": "o", "markersize": 8, "markerfacecolor": "none"}
_FRONT: dict[str, Any] = _STEPS | _RING | {"linewidth": 1.2, "zorder": 4}
_LINE_CHARACTERS = 90  # Characters that fit into the width of the figure.
Along = Callable[[Point], float]


@dataclasses.dataclass(frozen=True)
class _View:
  """Methods that a figure shows, and the losses that it has room for.

  Attributes:
    shown: Methods that the figure shows, in the order of the sweep.
    low: Lower end of the vertical axis (nats a token).
    top: Upper end.
    above: Names of methods that end above the axis.
    front: Names of methods in front.
    is_cut: Whether parts of curves are above the axis.
  """

  shown: list[MethodResult]
  low: float
  top: float
  above: list[str]
  front: list[str]
  is_cut: bool


def loss_by_tokens(found: Comparison) -> Figure:
  """Draws validation loss against the tokens of all replicas."""
  view = _view(found)
  most = max((p.tokens for p in _points(view.shown)), default=1)
  divisor, unit = units.tokens_unit(most)
  figure, (ax,) = style.frame(1, _tokens_title(found), size=_SIZE)
  _draw(ax, found, view, lambda point: point.tokens / divisor)
  ax.set_xlabel(f"{unit}, all replicas")
  return _finish(figure, ax, found, view, "measured")


def loss_by_bytes(found: Comparison) -> Figure:
  """Draws validation loss against the bytes that one replica sent.

  A grey line joins the ends of the methods on the Pareto front: no other
  method ends as low for as few bytes.
  """
  view = _view(found)
  figure, (ax,) = style.frame(1, _bytes_title(found), size=_SIZE)
  _draw(ax, found, view, lambda point: float(point.sent_bytes))
  sent = [p for p in _points(view.shown) if p.sent_bytes > 0]
  style.bytes_axis(ax, [point.sent_bytes for point in sent])
  visible = [point.sent_bytes for point in sent if point.loss <= view.top]
  if visible and ax.get_xscale() == "log":
    ax.set_xlim(left=0.8 * min(visible))
  front = [e for e in pareto_front(view.shown) if e.sent_bytes > 0]
  if front:
    ends = [(entry.sent_bytes, entry.spread.mean) for entry in front]
    label = "Pareto front of the ends"
    ax.plot(*zip(*ends, strict=True), label=label, **_FRONT)
  kind = "loss measured, bytes derived from the plan"
  return _finish(figure, ax, found, view, kind, front)


def loss_by_time(found: Comparison, clock: str) -> Figure:
  """Draws validation loss against simulated time.

  Args:
    found: Results of the sweep.
    clock: Name of the clock. Methods whose H was made for another clock are
      left out.
  """
  view = _view(found, clock)
  figure, (ax,) = style.frame(1, _time_title(found, clock), size=_SIZE)
  visible = [p for p in _points(view.shown) if p.loss <= view.top]
  first_s = min((p.seconds[clock] for p in visible), default=1.0)
  divisor, unit = units.time_unit(first_s)
  _draw(ax, found, view, lambda point: point.seconds[clock] / divisor)
  for each in found.equal_time:
    if each.clock == clock:
      # Schedules of the runs at equal time end here, so those runs do not end
      # where a curve crosses this line.
      end, along = each.budget_s / divisor, ax.get_xaxis_transform()
      ax.axvline(end, **_MARK)
      look = {"xycoords": along, "va": "top", **_MARK_TEXT}
      ax.annotate("equal time ", (end, 1), **look)
  what = textwrap.fill(found.clocks[clock], _LINE_CHARACTERS)
  ax.set_xlabel(f"simulated time ({unit}, log scale)\n{what}")
  style.log_axis(ax, (1, 2, 5), "{:,g}".format)
  ax.set_xlim(left=0.8 * first_s / divisor)
  return _finish(figure, ax, found, view, "loss measured, time simulated")


def _points(entries: list[MethodResult]) -> list[Point]:
  return [p for e in entries for trace in e.traces for p in trace.points]


def _rivals(found: Comparison, clock: str = "") -> Iterator[MethodResult]:
  """Methods that a title may compare with their baseline.

  These have all their seeds. A baseline has the method's inner optimizer: a
  better inner optimizer is no merit of an exchange.
  """
  baselines = {entry.baseline for entry in found.entries}
  for entry in found.entries:
    base = found.entry(entry.baseline)
    counts = {len(each.traces) for each in (entry, base) if each}
    is_complete = counts == {found.seeds} and entry.is_on(clock)
    is_rival = is_complete and entry.name not in baselines
    if is_rival and math.isfinite(found.gap(entry)):
      yield entry


def _tokens_title(found: Comparison) -> str:
  rivals = list(_rivals(found))
  if not rivals:
    return "Validation loss at equal tokens"
  nearest = min(rivals, key=lambda entry: abs(found.gap(entry)))
  gap = _gap(found, nearest)
  title = f"At equal tokens {nearest.name} ends nearest to {nearest.baseline}"
  return f"{title}: its loss is {gap}"


def _gap(found: Comparison, entry: MethodResult) -> str:
  """Describes a gap with its error, and an average on one side only."""
  text = units.human_comparison(found.gap(entry), found.gap_error(entry))
  base = found.entry(entry.baseline)
  one_sided = entry.keeps_average and not (base and base.keeps_average)
  return f"{text}, with an average on its side only" if one_sided else text


def _bytes_title(found: Comparison) -> str:
  """Names the method that sends least of those that end near a baseline."""
  rivals = {e.name: e for e in _rivals(found) if e.sent_bytes > 0}
  name = cheapest(
    {name: found.gap(entry) for name, entry in rivals.items()},
    {name: entry.sent_bytes for name, entry in rivals.items()},
  )
  base = found.entry(rivals[name].baseline) if name else None
  if not base:
    return "Validation loss against bytes sent"
  ratio = units.human_ratio(base.sent_bytes / rivals[name].sent_bytes)
  gap = _gap(found, rivals[name])
  return f"{name} sends {ratio} less than {base.name}; its loss is {gap}"


def _first(found: Comparison, clock: str) -> MethodResult | None:
  """Returns the rival that reaches the target loss first on a clock."""
  rivals = [
    (mean_seconds_to(entry, clock, found.target_loss), entry)
    for entry in (_rivals(found, clock) if clock else ())
  ]
  first_s, first = min(
    rivals, key=lambda pair: pair[0], default=(math.inf, None)
  )
  return first if math.isfinite(first_s) else None


def _time_title(found: Comparison, clock: str) -> str:
  """Names the method that reaches the target loss first."""
  target = found.target_loss
  first = _first(found, clock)
  base = found.entry(first.baseline) if first else None
  if not base or not first:
    return f"Validation loss in simulated time on '{clock}'"
  soonest = human_seconds_to(first, clock, target)
  title = f"On '{clock}' {first.family} reaches loss {target:g} in {soonest}"
  if math.isfinite(mean_seconds_to(base, clock, target)):
    title += f", {base.name} in {human_seconds_to(base, clock, target)}"
  return title


def _view(found: Comparison, clock: str = "") -> _View:
  """Chooses what a figure shows.

  The axis shows where curves end, not where they begin, which is alike for
  all. A method that ends far above the others would squeeze them, so the axis
  ends below it. Far means: farther above the median end than four times the
  median distance from it.
  """
  shown = [entry for entry in found.entries if entry.is_on(clock)]
  ends = {e.name: e.spread.mean for e in shown if math.isfinite(e.spread.mean)}
  losses = [p.loss for p in _points(shown) if math.isfinite(p.loss)]
  if not ends or not losses:
    return _View(shown, 0.0, math.inf, [], [], False)
  middle = statistics.median(ends.values())
  usual = statistics.median(abs(loss - middle) for loss in ends.values())
  most = middle + _FAR * usual
  low, high = min(losses), max(x for x in ends.values() if x <= most)
  top = high + 0.6 * max(high - low, 0.05 * low)
  seen = {name: loss for name, loss in ends.items() if loss <= top}
  above = [name for name in ends if name not in seen]
  # A sweep may list families. On the clock 1gbit, "ours" means ours_1gbit;
  # without a clock it means the first method of that family.
  priority = []
  for name in found.front:
    members = [e.name for e in shown if name in (e.name, e.family)]
    priority += [member for member in members if member in seen][:1]
  # The title speaks of the one that is first, so it is in front too.
  if (first := _first(found, clock)) and first.name in seen:
    priority.insert(MAX_FRONT - 2, first.name)
  front = choose_front(seen, found.baseline, priority)
  return _View(shown, low, top, above, front, max(losses) > top)


def _draw(ax: Axes, found: Comparison, view: _View, along: Along) -> None:
  curves = [_curve(entry, along, found.seeds) for entry in view.shown]
  colours = [name for name in found.front if name != found.baseline]
  places = {
    entry.name: colours.index(name)
    for entry in view.shown
    for name in (entry.name, entry.family)
    if name in colours
  }
  draw_curves(ax, curves, view.front, found.baseline, places=places)


def _curve(entry: MethodResult, along: Along, seeds: int) -> Curve:
  """Mean, lowest and highest loss at the evaluations that all seeds have.

  Seeds that diverged are left out if others did not, since they end early.
  """
  begun = [trace for trace in entry.traces if trace.points]
  ended = [trace for trace in begun if math.isfinite(trace.loss)]
  traces = [trace.points for trace in ended or begun]
  # A logarithmic axis has no place for zero bytes or zero seconds.
  rows = [
    (along(points[0]), [point.loss for point in points])
    for points in zip(*traces, strict=False)
    if along(points[0]) > 0
  ]
  return Curve(
    entry.name,
    x=[x for x, _ in rows],
    y=[math.fsum(losses) / len(losses) for _, losses in rows],
    low=[min(losses) for _, losses in rows],
    high=[max(losses) for _, losses in rows],
    label=entry.name
    + (", average" if entry.keeps_average else "")
    + units.human_missing(len(traces), seeds),
  )


def _finish(
  figure: Figure,
  ax: Axes,
  found: Comparison,
  view: _View,
  kind: str,
  named: Sequence[MethodResult] = (),
) -> Figure:
  """Adds axis, target, caption and legend, and the names of grey curves."""
  ax.set_ylabel(style.LOSS_AXIS)
  if not _points(view.shown):
    style.caption(ax, kind)
    style.say_nothing_to_show(ax)
    return figure
  if math.isfinite(view.top):
    margin = 0.04 * (view.top - view.low)
    ax.set_ylim(view.low - margin, view.top)
  if found.target_loss and found.target_loss <= view.top:
    ax.axhline(found.target_loss, **_MARK)
    target, along = found.target_loss, ax.get_yaxis_transform()
    look = {"xycoords": along, "va": "bottom", **_MARK_TEXT}
    ax.annotate(f"target {target:g}", (1, target), **look)
  cut = "; higher losses are above the axis" if view.is_cut else ""
  if view.above:
    cut = f"; above the axis: {', '.join(view.above)}"
  seeds = f"mean and band of {found.seeds} seeds"
  style.caption(ax, f"{kind}; {seeds}{cut}")
  style.legend(figure, ax, 4)
  place_labels(figure, ax, _names(ax, view, named))
  return figure


def _names(
  ax: Axes, view: _View, named: Sequence[MethodResult]
) -> list[PointLabel]:
  """Names at the ends of curves: those asked for, and low grey ones.

  A reader asks at once which grey curve is lower than all in front.
  """
  ends = {
    name: np.asarray(line.get_xydata())[-1]
    for line in ax.lines
    if (name := line.get_gid())
  }
  front = min((ends[n][1] for n in view.front if n in ends), default=0.0)
  wanted = [entry.name for entry in named]
  wanted += [name for name, (_, loss) in ends.items() if loss < front]
  wanted = [name for name in dict.fromkeys(wanted) if name in ends]
  return [PointLabel(name, *ends[name]) for name in wanted]
