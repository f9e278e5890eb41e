"""Lines over something that is varied, side by side."""

import dataclasses
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dilocox_jax.report import style

_STYLES = ("-", "--")
_MOST_TICKS = 8


@dataclasses.dataclass(frozen=True)
class Panel:
  """One thing varied.

  Attributes:
    label: What is varied, with its unit.
    caption: What is held, and whether the numbers are derived.
    values: Along the horizontal axis, ascending and positive.
    lines: Label to shares of 1, one a value.
    is_log: Whether the horizontal axis is logarithmic.
  """

  label: str
  caption: str
  values: Sequence[float | int]
  lines: Mapping[str, Sequence[float]]
  is_log: bool = True

  def __post_init__(self):
    for name, shares in self.lines.items():
      if len(shares) != len(self.values):
        raise ValueError(
          f"line {name!r} has {len(shares)} shares for {len(self.values)}"
          " values"
        )


def draw(
  title: str, panels: Sequence[Panel], vertical: str = "compute utilisation"
) -> Figure:
  """Draws panels with one legend each.

  Args:
    title: What is seen.
    panels: Side by side.
    vertical: What the shares are of.
  """
  size = (7.2 if len(panels) == 1 else 4.6 * len(panels), 4.6)
  figure, axes = style.frame(len(panels), title, size=size)
  for ax, panel in zip(axes, panels, strict=True):
    _lines(ax, panel)
    _horizontal(ax, panel)
    ax.set_ylim(0, 1.03)
    style.caption(ax, panel.caption)
    ax.legend(
      loc="upper left",
      bbox_to_anchor=(0, -0.16),
      ncols=3 if len(panels) == 1 else 2,
      frameon=False,
      fontsize=8,
    )
  axes[0].set_ylabel(vertical)
  return figure


def _lines(ax: Axes, panel: Panel) -> None:
  for number, (name, shares) in enumerate(panel.lines.items()):
    cycle, place = divmod(number, len(style.COLOURS))
    ax.plot(
      panel.values,
      shares,
      color=style.COLOURS[place],
      linestyle=_STYLES[cycle % len(_STYLES)],
      marker=style.MARKERS[place],
      markersize=3.5,
      label=name,
    )


def _horizontal(ax: Axes, panel: Panel) -> None:
  """Scale and label; few values are all named."""
  ax.set_xlabel(panel.label + (" (log scale)" if panel.is_log else ""))
  if panel.is_log:
    ax.set_xscale("log")
  if len(panel.values) <= _MOST_TICKS:
    labels = [f"{value:g}" for value in panel.values]
    ax.set_xticks(list(panel.values), labels, fontsize=8)
    ax.xaxis.set_minor_locator(NullLocator())
