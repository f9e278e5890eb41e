"""Loss against tokens, bytes and simulated hours, all methods in one picture.

A line is the mean over seeds, the band around it reaches from the lowest to
the highest. A score of lines needs colour, stroke and marker to be told apart,
and AllReduce, which all are held against, is the only black one.
"""

import math
import statistics
import textwrap
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dilocox_jax.report import style, units
from dilocox_jax.report.convergence.comparison import (
  Comparison,
  MethodResult,
  Point,
)

_STROKES = ("-", "--", ":", "-.")
_SIZE = (8.4, 6.2)
_FAR = 4.0
_MARK = {"color": style.GREY, "linewidth": 0.8, "dashes": (4, 3)}
_MARK_TEXT = {"color": style.GREY, "fontsize": 8, "ha": "right"}
_LINE_CHARACTERS = 90  # As many as the figure is wide.
Along = Callable[[Point], float]


def loss_by_tokens(found: Comparison) -> Figure:
  """Validation loss against the tokens of all replicas."""
  most = max((p.tokens for p in _points(found)), default=1)
  divisor, unit = units.tokens_unit(most)
  figure, ax = _frame(found, "at equal tokens")
  _lines(ax, found, lambda point: point.tokens / divisor)
  ax.set_xlabel(f"{unit}, all replicas")
  return _finish(figure, ax, found, "measured")


def loss_by_bytes(found: Comparison) -> Figure:
  """Validation loss against the bytes that one replica sent."""
  figure, ax = _frame(found, "against bytes sent")
  _lines(ax, found, lambda point: float(point.sent_bytes))
  every = [p.sent_bytes for p in _points(found) if p.sent_bytes > 0]
  style.bytes_axis(ax, every)
  return _finish(
    figure, ax, found, "loss measured, bytes derived from the plan"
  )


def loss_by_time(found: Comparison, clock: str) -> Figure:
  """Validation loss against simulated hours.

  Args:
    found: The results.
    clock: Which clock; methods whose H was made for another are left out.
  """
  figure, ax = _frame(found, f"on the clock '{clock}'")
  _lines(ax, found, lambda point: point.seconds[clock] / 3600, clock)
  _mark_equal_time(ax, found, clock)
  what = textwrap.fill(found.clocks[clock], _LINE_CHARACTERS)
  ax.set_xlabel(f"simulated hours (log scale)\n{what}")
  ax.set_xscale("log")
  ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  ax.xaxis.set_minor_formatter(NullFormatter())
  # After the scale, which brings its own formatter.
  ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
  return _finish(figure, ax, found, "loss measured, time simulated")


def _points(found: Comparison) -> list[Point]:
  return [
    point
    for entry in found.entries
    for trace in entry.traces
    for point in trace.points
  ]


def _finite(found: Comparison) -> list[MethodResult]:
  return [e for e in found.entries if math.isfinite(e.spread.mean)]


def _frame(found: Comparison, where: str) -> tuple[Figure, Axes]:
  ended = [e for e in _finite(found) if len(e.traces) == found.seeds]
  title = f"Validation loss {where}"
  if ended and where == "at equal tokens":
    best = min(ended, key=lambda entry: entry.spread.mean)
    reached = units.human_loss(best.spread.mean)
    title = f"Lowest mean loss {where}: {best.name}, {reached}"
  figure, (ax,) = style.frame(1, title, size=_SIZE)
  return figure, ax


def _mark_equal_time(ax: Axes, found: Comparison, clock: str) -> None:
  """Where the runs at equal time end, whose schedules end there too."""
  for each in found.equal_time:
    if each.clock == clock:
      where = each.budget_s / 3600
      ax.axvline(where, **_MARK)
      ax.annotate(
        "equal time ",
        (where, 1),
        xycoords=ax.get_xaxis_transform(),
        va="top",
        **_MARK_TEXT,
      )


def _lines(ax: Axes, found: Comparison, along: Along, clock: str = "") -> None:
  number = 0
  for entry in found.entries:
    colour, stroke, marker = "black", "-", "."
    if entry.name != "allreduce":
      cycle, place = divmod(number, len(style.COLOURS))
      colour, marker = style.COLOURS[place], style.MARKERS[place]
      stroke = _STROKES[cycle % len(_STROKES)]
      number += 1
    x, low, mean, high = _band(entry, along)
    if not x or (clock and entry.clock not in ("", clock)):
      continue
    ax.plot(
      x,
      mean,
      color=colour,
      linestyle=stroke,
      marker=marker,
      markersize=3,
      linewidth=1.4,
      label=_label(entry, found.seeds),
    )
    ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _label(entry: MethodResult, seeds: int) -> str:
  """Its name, and how many seeds a line stands for if not all have one."""
  drawn = sum(bool(trace.points) for trace in entry.traces)
  return entry.name if drawn == seeds else f"{entry.name} ({drawn} of {seeds})"


def _band(
  entry: MethodResult, along: Along
) -> tuple[list[float], list[float], list[float], list[float]]:
  """Where, lowest, mean and highest of the evaluations that all seeds have."""
  curves = [trace.points for trace in entry.traces if trace.points]
  rows = [
    (along(each[0]), [point.loss for point in each])
    for each in zip(*curves, strict=False)
    if along(each[0]) > 0
  ]
  return (
    [x for x, _ in rows],
    [min(losses) for _, losses in rows],
    [math.fsum(losses) / len(losses) for _, losses in rows],
    [max(losses) for _, losses in rows],
  )


def _finish(figure: Figure, ax: Axes, found: Comparison, kind: str) -> Figure:
  cut = _cut(ax, found)
  ax.set_ylabel("validation loss (nats a token)")
  has_curves = bool(ax.get_legend_handles_labels()[0])
  if has_curves and found.target_loss:
    ax.axhline(found.target_loss, **_MARK)
    ax.annotate(
      f"target {found.target_loss:g}",
      (1, found.target_loss),
      xycoords=ax.get_yaxis_transform(),
      va="bottom",
      **_MARK_TEXT,
    )
  style.caption(ax, f"{kind}; bands: all seeds{cut}")
  if has_curves:
    style.legend(figure, ax, 4)
  else:
    ax.text(0.5, 0.5, "nothing to show", ha="center", transform=ax.transAxes)
  return figure


def _cut(ax: Axes, found: Comparison) -> str:
  """Shows where curves end, not where they begin, which is alike for all.

  One that ends far above the others would squeeze them, so it is left out:
  farther above the middle one than four times what is usual on either side.
  """
  ends = {e.name: e.spread.mean for e in _finite(found)}
  losses = [p.loss for p in _points(found) if math.isfinite(p.loss)]
  if not ends or not losses:
    return ""
  middle = statistics.median(ends.values())
  usual = statistics.median(abs(loss - middle) for loss in ends.values())
  most = middle + _FAR * usual
  low, high = min(losses), max(x for x in ends.values() if x <= most)
  top = high + 0.6 * max(high - low, 0.05 * low)
  ax.set_ylim(low - 0.04 * (top - low), top)
  drawn = [np.asarray(line.get_xydata()) for line in ax.lines]
  seen = [x for each in drawn for x, y in each if y <= top]
  if seen and ax.get_xscale() == "log":
    ax.set_xlim(left=0.8 * min(seen))
  if hidden := [name for name, loss in ends.items() if loss > top]:
    return f"; above the axis: {', '.join(hidden)}"
  return "; higher losses are above the axis" if max(losses) > top else ""
