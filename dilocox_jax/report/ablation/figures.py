"""Figures of an ablation: what a byte buys, and what each setting does.

They look like the figures of a run. Names stand beside their points; those of
the Pareto front always, others where they find room, since the table has them
all.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from dilocox_jax.report import style, units
from dilocox_jax.report.ablation.trials import SettingResult, pareto_front

_MAX_LINES = 6
_ABOVE = "higher losses are above the axis (see the table)"
_BELOW = 0.12  # Share of the height that is left free below.
_OFFSETS = [  # Of a label from its point (points), the nearest first.
  (x * far, y * far)
  for far in (1, 2, 3.5)
  for x, y in ((8, 5), (8, -5), (-8, 5), (-8, -5), (0, 10), (0, -10))
]


def pareto(found: Sequence[SettingResult]) -> Figure:
  """Validation loss against bytes a replica, the Pareto front marked.

  Args:
    found: Settings on one corpus.
  """
  front = pareto_front(found)
  figure, (ax,) = style.frame(1, _title(found), size=(8.4, 5.2))
  shown = [entry for entry in found if entry.total_sent_bytes > 0]
  others = [entry for entry in shown if entry not in front]
  marked = [entry for entry in front if entry in shown]
  _points(ax, others, style.GREY, "none", "other settings")
  blue = style.COLOURS[0]
  _points(
    ax, marked, blue, blue, "Pareto front: none ends lower at as few bytes"
  )
  ax.plot(
    [entry.total_sent_bytes for entry in marked],
    [entry.validation_loss for entry in marked],
    color=blue,
    drawstyle="steps-post",
    linewidth=1.2,
  )
  cut = _cut(ax, shown, marked)
  style.bytes_axis(ax, [entry.total_sent_bytes for entry in shown])
  ax.margins(x=0.12)
  ax.set_ylabel("validation loss (nats a token)")
  error = "; bars: standard error of the mean" if _has_errors(found) else ""
  style.caption(ax, f"loss measured, bytes derived from the plan{error}{cut}")
  style.legend(figure, ax, 2)
  _label(figure, ax, marked, others)
  return figure


def _cut(
  ax: Axes, shown: Sequence[SettingResult], marked: Sequence[SettingResult]
) -> str:
  """Cuts high losses as `style.cut_high` does, but none of the front."""
  losses = [entry.validation_loss for entry in shown]
  cut = style.cut_high(ax, losses, _ABOVE)
  low, high = ax.get_ylim()
  top = max((entry.validation_loss for entry in marked), default=high)
  if top > high:
    high = top + 0.05 * (top - low)
  # The front ends in a corner: names need room below it.
  ax.set_ylim(low - _BELOW * (high - low), high)
  return cut if any(loss > high for loss in losses) else ""


def _title(found: Sequence[SettingResult]) -> str:
  best = min(found, key=lambda entry: entry.validation_loss)
  reached = units.human_loss(best.validation_loss)
  return f"Lowest loss: {best.name}, {reached}"


def _has_errors(found: Sequence[SettingResult]) -> bool:
  return any(math.isfinite(entry.standard_error) for entry in found)


def _points(
  ax: Axes, found: Sequence[SettingResult], colour: Any, fill: Any, label: str
) -> None:
  if found:
    ax.errorbar(
      [entry.total_sent_bytes for entry in found],
      [entry.validation_loss for entry in found],
      [entry.standard_error for entry in found] if _has_errors(found) else None,
      fmt="o",
      color=colour,
      markerfacecolor=fill,
      markersize=6,
      capsize=2,
      elinewidth=1,
      label=label,
    )


def _label(
  figure: Figure,
  ax: Axes,
  marked: Sequence[SettingResult],
  others: Sequence[SettingResult],
) -> None:
  """Puts names beside points such that none covers another or a point."""
  figure.draw_without_rendering()  # Fixes the axes, in pixels.
  taken = [_around(ax, entry) for entry in (*marked, *others)]
  for entry in (*marked, *others):
    is_marked = entry in marked
    x, y = entry.total_sent_bytes, entry.validation_loss
    if not ax.get_ylim()[0] <= y <= ax.get_ylim()[1]:
      continue
    for number, (dx, dy) in enumerate(_OFFSETS):
      text = ax.annotate(
        entry.name,
        (x, y),
        (dx, dy),
        textcoords="offset points",
        ha="left" if dx > 0 else "right" if dx < 0 else "center",
        va="bottom" if dy > 0 else "top",
        fontsize=8,
        color=style.COLOURS[0] if is_marked else style.GREY,
        fontweight="bold" if is_marked else "normal",
        arrowprops={"arrowstyle": "-", "color": "#B8B8B8", "linewidth": 0.6},
      )
      box = text.get_tightbbox()
      is_last = is_marked and number == len(_OFFSETS) - 1
      if box is None or is_last or _has_room(box, taken, ax, entry):
        taken.append(box or _around(ax, entry))
        break
      text.remove()


def _around(ax: Axes, entry: SettingResult) -> Bbox:
  """The pixels that a point covers."""
  x, y = ax.transData.transform((entry.total_sent_bytes, entry.validation_loss))
  return Bbox.from_extents(x - 6, y - 6, x + 6, y + 6)


def _has_room(
  box: Bbox, taken: Sequence[Bbox], ax: Axes, entry: SettingResult
) -> bool:
  own, inside = _around(ax, entry), ax.get_window_extent()
  is_inside = inside.contains(box.x0, box.y0) and inside.contains(
    box.x1, box.y1
  )
  others = [other for other in taken if other.bounds != own.bounds]
  return bool(is_inside) and not any(box.overlaps(other) for other in others)


Line = tuple[Mapping[str, Any], list[SettingResult]]


def _lines(found: Sequence[SettingResult], path: str) -> list[Line]:
  """Settings that differ in one field alone, with what they have in common."""
  groups: dict[str, Line] = {}
  for entry in found:
    if entry.settings[path] is None:  # Where other settings leave it unset.
      continue
    others = {k: v for k, v in entry.settings.items() if k != path}
    groups.setdefault(repr(others), (others, []))[1].append(entry)
  return [line for line in groups.values() if len(line[1]) > 1]


def charted(found: Sequence[SettingResult]) -> list[str]:
  """Fields that some settings differ in while all the rest is equal.

  Args:
    found: Settings on one corpus.
  """
  fields = list(found[0].settings) if found else []
  return [path for path in fields if _lines(found, path)]


def hyper_parameter(found: Sequence[SettingResult], path: str) -> Figure:
  """Validation loss against the values of one field.

  Settings that are equal otherwise make a line; where that would be many, the
  lines are pale and their mean stands out.

  Args:
    found: Settings on one corpus.
    path: One of `charted(found)`.
  """
  lines = _lines(found, path)
  figure, (ax,) = style.frame(1, f"What {path} does to the loss")
  place = _places(ax, [e.settings[path] for _, line in lines for e in line])
  is_crowd = len(lines) > _MAX_LINES
  for number, (others, line) in enumerate(lines):
    ordered = sorted(line, key=lambda entry: place(entry.settings[path]))
    ax.errorbar(
      [place(entry.settings[path]) for entry in ordered],
      [entry.validation_loss for entry in ordered],
      [entry.standard_error for entry in ordered]
      if _has_errors(ordered)
      else None,
      marker=style.MARKERS[number % len(style.MARKERS)],
      color=style.PALE if is_crowd else style.COLOURS[number],
      markersize=5,
      capsize=2,
      linewidth=1.0 if is_crowd else 1.6,
      label=None if is_crowd else _differs(others, [o for o, _ in lines]),
    )
  if is_crowd:
    _mean(ax, [line for _, line in lines], path, place)
  cut = style.cut_high(
    ax, [entry.validation_loss for _, line in lines for entry in line], _ABOVE
  )
  ax.set_xlabel(path)
  ax.set_ylabel("validation loss (nats a token)")
  style.caption(ax, f"measured; other settings equal along a line{cut}")
  if len(lines) > 1:
    style.legend(figure, ax, 1 if _is_long(ax) else 3)
  return figure


def _is_long(ax: Axes) -> bool:
  return max(map(len, ax.get_legend_handles_labels()[1])) > 24


def _places(ax: Axes, values: Sequence[Any]):
  """Where a value stands on the horizontal axis."""
  known = list(dict.fromkeys(values))
  numbers = sorted(v for v in known if type(v) in (int, float))
  if len(numbers) < len(known):
    ax.set_xticks(range(len(known)), [str(value) for value in known])
    return known.index
  if min(numbers) > 0 and max(numbers) / min(numbers) >= 4:
    ax.set_xscale("log")
  ax.set_xticks(numbers, [f"{value:g}" for value in numbers])
  ax.set_xticks([], minor=True)
  return float


def _differs(
  others: Mapping[str, Any], every: Sequence[Mapping[str, Any]]
) -> str:
  """What tells a line from the other lines."""
  parts = [
    f"{name}={value}"
    for name, value in others.items()
    if value is not None and any(each[name] != value for each in every)
  ]
  return ", ".join(parts) or "base"


def _mean(
  ax: Axes, lines: Sequence[Sequence[SettingResult]], path: str, place: Any
) -> None:
  """The mean over lines, at the values that all of them have."""
  losses: dict[float, list[float]] = {}
  for entry in itertools.chain(*lines):
    at = place(entry.settings[path])
    losses.setdefault(at, []).append(entry.validation_loss)
  shared = sorted(at for at, each in losses.items() if len(each) == len(lines))
  means = [math.fsum(losses[at]) / len(lines) for at in shared]
  label = f"mean of {len(lines)} lines"
  colour = style.COLOURS[0]
  ax.plot(shared, means, color=colour, marker="o", linewidth=2.2, label=label)
