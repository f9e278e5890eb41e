"""Figures of an ablation: loss against bytes, and against each field."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox_jax.report import style, units
from dilocox_jax.report.ablation.trials import SettingResult
from dilocox_jax.report.labels import PointLabel, place_labels
from dilocox_jax.report.spread import pareto_front

_MAX_LINES = 6
_ABOVE = "higher losses are above the axis (see the table)"
_POINT = {"fmt": "o", "markersize": 6, "elinewidth": 1}
_FRONT = _POINT | {
  "color": style.COLOURS[0],
  "label": "Pareto front: none ends lower at as few bytes",
}
_OTHERS = _POINT | {
  "color": style.GREY,
  "markerfacecolor": "none",
  "label": "other settings",
}
_BELOW = 0.12  # Share of the height that is left free below for names.


def pareto(results: Sequence[SettingResult]) -> Figure:
  """Draws validation loss against bytes and marks the Pareto front.

  Args:
    results: Settings on one corpus, at least one.
  """
  best = min(results, key=lambda result: result.spread.mean)
  title = f"Lowest loss: {best.name}, {units.human_loss(best.spread.mean)}"
  figure, (ax,) = style.frame(1, title, size=(8.4, 5.2))
  # A logarithmic axis has no place for zero bytes.
  shown = [result for result in results if result.sent_bytes > 0]
  front = [result for result in pareto_front(results) if result in shown]
  others = [result for result in shown if result not in front]
  for members, look in ((others, _OTHERS), (front, _FRONT)):
    if members:
      sent_bytes = [result.sent_bytes for result in members]
      _with_errors(ax, sent_bytes, members, **look)
  look: dict[str, Any] = {"color": style.COLOURS[0], "drawstyle": "steps-post"}
  means = [result.spread.mean for result in front]
  ax.plot([r.sent_bytes for r in front], means, linewidth=1.2, **look)
  cut = _cut(ax, shown, front)
  style.bytes_axis(ax, [result.sent_bytes for result in shown])
  ax.margins(x=0.12)
  ax.set_ylabel(style.LOSS_AXIS)
  error = "; bars: standard error of the mean" if _has_errors(results) else ""
  style.caption(ax, f"loss measured, bytes derived from the plan{error}{cut}")
  style.legend(figure, ax, 2)
  labels = [
    PointLabel(r.name, r.sent_bytes, r.spread.mean, is_required=r in front)
    for r in [*front, *others]
  ]
  place_labels(figure, ax, labels)
  return figure


def _cut(
  ax: Axes, shown: Sequence[SettingResult], front: Sequence[SettingResult]
) -> str:
  """Cuts high losses as `style.cut_high` does, but never the front."""
  losses = [result.spread.mean for result in shown]
  cut = style.cut_high(ax, losses, _ABOVE)
  low, high = ax.get_ylim()
  top = max((result.spread.mean for result in front), default=high)
  if top > high:
    high = top + 0.05 * (top - low)
  # The front ends in the lower right corner, where its names need room.
  ax.set_ylim(low - _BELOW * (high - low), high)
  return cut if any(loss > high for loss in losses) else ""


def _has_errors(results: Sequence[SettingResult]) -> bool:
  return any(math.isfinite(result.spread.standard_error) for result in results)


def _with_errors(
  ax: Axes,
  x: Sequence[float | int],
  results: Sequence[SettingResult],
  **look: Any,
) -> None:
  """Draws mean losses with their standard errors, if there are any."""
  means = [result.spread.mean for result in results]
  errors = [result.spread.standard_error for result in results]
  bars = errors if _has_errors(results) else None
  ax.errorbar(x, means, bars, capsize=2, **look)


Line = tuple[Mapping[str, Any], list[SettingResult]]


def _lines(results: Sequence[SettingResult], path: str) -> list[Line]:
  """Groups settings that differ in one field only, with what they share."""
  groups: dict[str, Line] = {}
  for result in results:
    if result.settings[path] is None:  # This setting does not use the field.
      continue
    others = {k: v for k, v in result.settings.items() if k != path}
    groups.setdefault(repr(others), (others, []))[1].append(result)
  return [line for line in groups.values() if len(line[1]) > 1]


def charted(results: Sequence[SettingResult]) -> list[str]:
  """Returns the fields in which settings differ that are equal otherwise.

  Args:
    results: Settings on one corpus.
  """
  fields = list(results[0].settings) if results else []
  return [path for path in fields if _lines(results, path)]


def hyper_parameter(results: Sequence[SettingResult], path: str) -> Figure:
  """Draws validation loss against the values of one field.

  Settings that are equal in all other fields make a line. With more than six
  lines, all are grey and their mean is in front.

  Args:
    results: Settings on one corpus.
    path: One of `charted(results)`.
  """
  lines = _lines(results, path)
  means = _means([line for _, line in lines], path)
  figure, (ax,) = style.frame(1, _title(path, means, len(lines)))
  place = _places(ax, [r.settings[path] for _, line in lines for r in line])
  is_crowd = len(lines) > _MAX_LINES
  for number, (others, line) in enumerate(lines):
    ordered = sorted(line, key=lambda result: place(result.settings[path]))
    places = [place(result.settings[path]) for result in ordered]
    look = {"color": style.PALE, "linewidth": 1.0}
    if not is_crowd:
      look = {"color": style.COLOURS[number], "linewidth": 1.6}
      look["label"] = _differs(others, [o for o, _ in lines])
    marker = style.MARKERS[number % len(style.MARKERS)]
    _with_errors(ax, places, ordered, marker=marker, markersize=5, **look)
  if is_crowd and means:
    points = sorted((place(value), mean) for value, mean in means.items())
    look = {"color": style.COLOURS[0], "marker": "o", "linewidth": 2.2}
    label = f"mean of {len(lines)} lines"
    ax.plot(*zip(*points, strict=True), label=label, **look)
  losses = [result.spread.mean for _, line in lines for result in line]
  cut = style.cut_high(ax, losses, _ABOVE)
  ax.ticklabel_format(axis="y", useOffset=False)
  kind = f"measured; other settings equal along a line{cut}"
  style.label(ax, kind, path, style.LOSS_AXIS)
  labels = ax.get_legend_handles_labels()[1]
  if labels and len(lines) > 1:
    longest = max(map(len, labels))
    style.legend(figure, ax, 1 if longest > 24 else 3)
  return figure


def _title(path: str, means: Mapping[Any, float], num_lines: int) -> str:
  """States which value ends lowest, if lines have values in common."""
  finite = {v: mean for v, mean in means.items() if math.isfinite(mean)}
  if len(finite) < 2:
    return f"Validation loss against {path}"
  best = min(finite, key=finite.__getitem__)
  title = f"{path} = {best} ends lowest: {units.human_loss(finite[best])}"
  return (
    title if num_lines == 1 else f"{title} in the mean of {num_lines} lines"
  )


def _means(
  lines: Sequence[Sequence[SettingResult]], path: str
) -> dict[Any, float]:
  """Returns the mean loss over lines, at the values that all lines have."""
  losses: dict[Any, list[float]] = {}
  for result in itertools.chain(*lines):
    losses.setdefault(result.settings[path], []).append(result.spread.mean)
  # A value that only some lines have would compare other settings, too.
  return {
    value: math.fsum(values) / len(lines)
    for value, values in losses.items()
    if len(values) == len(lines)
  }


def _places(ax: Axes, values: Sequence[Any]) -> Callable[[Any], float]:
  """Sets the horizontal ticks; returns the position of a value."""
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
  """Names what tells a line from the other lines."""
  parts = [
    f"{name}={value}"
    for name, value in others.items()
    if value is not None and any(line[name] != value for line in every)
  ]
  return ", ".join(parts) or "base"
