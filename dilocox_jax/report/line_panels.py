"""Panels side by side, each with lines over one quantity that is varied."""

import dataclasses
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dilocox_jax.report import style
from dilocox_jax.report.curves import (
  MAX_FRONT,
  Curve,
  choose_front,
  draw_curves,
)

_MOST_TICKS = 8


@dataclasses.dataclass(frozen=True)
class Panel:
  """One quantity that is varied.

  Attributes:
    label: Name of the quantity, with its unit.
    caption: What is held constant, and whether the numbers are derived.
    values: Values of the quantity, ascending and positive.
    lines: Compute utilisation, one per value, by label of the line.
    is_log: Whether the horizontal axis is logarithmic.
  """

  label: str
  caption: str
  values: Sequence[float | int]
  lines: Mapping[str, Sequence[float]]
  is_log: bool = True


def draw(
  title: str, panels: Sequence[Panel], front: Sequence[str] = ()
) -> Figure:
  """Draws panels side by side, each with a legend of its own.

  Args:
    title: What the figure shows.
    panels: The panels, from left to right.
    front: Lines to draw in front, after the first one, if a panel has more
      than six.
  """
  size = (7.2 if len(panels) == 1 else 4.6 * len(panels), 4.6)
  figure, axes = style.frame(len(panels), title, size=size)
  for ax, panel in zip(axes, panels, strict=True):
    _lines(ax, panel, front)
    _horizontal(ax, panel)
    ax.set_ylim(0, 1.03)
    style.caption(ax, panel.caption)
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.16)}
    columns = 3 if len(panels) == 1 else 2
    ax.legend(ncols=columns, frameon=False, fontsize=8, **place)
  axes[0].set_ylabel("compute utilisation")
  return figure


def _lines(ax: Axes, panel: Panel, front: Sequence[str]) -> None:
  curves = [Curve(name, panel.values, y) for name, y in panel.lines.items()]
  # Six lines or fewer are all in front and keep their order. Of more, the
  # named ones come first, then those with the largest shares.
  names = list(panel.lines)
  if len(names) > MAX_FRONT:
    ranks = {name: -sum(shares) for name, shares in panel.lines.items()}
    names = choose_front(ranks, names[0], front)
  # Lines often coincide at full utilisation, so widths differ a lot.
  draw_curves(ax, curves, names, width_step=2.8 / len(names))


def _horizontal(ax: Axes, panel: Panel) -> None:
  """Sets scale, label and ticks; up to eight values all have a tick."""
  # "bandwidth (Gbit/s)" becomes "bandwidth (Gbit/s, log scale)".
  joined = panel.label.removesuffix(")") + ", log scale)"
  is_bracketed = panel.label.endswith(")")
  named = joined if is_bracketed else f"{panel.label} (log scale)"
  ax.set_xlabel(named if panel.is_log else panel.label)
  if panel.is_log:
    style.log_axis(ax, (1,), "{:,g}".format)
  if len(panel.values) <= _MOST_TICKS:
    labels = [f"{value:g}" for value in panel.values]
    ax.set_xticks(list(panel.values), labels, fontsize=8)
    ax.xaxis.set_minor_locator(NullLocator())
