"""Defines the look of all figures.

`looks` gives a built-in method the same color and marker in all pictures, and
AllReduce is black. `COLORS` are from the palette of Okabe and Ito, which people
with impaired color vision can tell apart. The *caption* is a line above each
panel that says how its numbers were obtained, e.g. "measured".
"""

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullFormatter

from dilocox_jax.report import escape

DPI = 150
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
GRAY = "#555555"
PALE = "#B8B8B8"
LOSS_AXIS = "validation loss (nats a token)"
# Characters of a title, a legend and a caption that fit into an inch.
_TITLE = 10
_LEGEND = 13
_CAPTION = 16
_LEGEND_LINE = 6  # Width of the line beside a name in a legend, in characters.
# Proper name, color and marker of each method. A key is the start of a
# setting's name, in lower case and without all characters that are not letters.
_METHODS = {
  "allreduce": ("AllReduce", "black", "."),
  "overlaploco": ("overlap_loco", COLORS[0], "o"),
  "dilocox": ("DiLoCoX", COLORS[1], "s"),
  "muloco": ("MuLoCo", COLORS[2], "D"),
  "diloco": ("DiLoCo", COLORS[3], "^"),
  "opendiloco": ("OpenDiLoCo", COLORS[4], "v"),
  "streamingdiloco": ("Streaming DiLoCo", COLORS[5], "P"),
  "streaming": ("Streaming DiLoCo", COLORS[5], "P"),
  "cocktailsgd": ("CocktailSGD", "#8C564B", "X"),
  "cocktail": ("CocktailSGD", "#8C564B", "X"),
  "sparseloco": ("SparseLoCo", "#8A8A00", "*"),
  "eager": ("eager", "#6A3D9A", "<"),
  "delayed": ("delayed", "#B2182B", ">"),
  "ours": ("ours", "#B2182B", ">"),
}
# Line styles of the first, second, ... setting of one color in a picture.
_LINES = ("-", "--", ":", "-.")


def _method(name: str) -> str:
  """Returns the longest key of `_METHODS` with which a name starts, or ""."""
  letters = re.sub(r"[^a-z]", "", name.lower())
  keys = [key for key in _METHODS if letters.startswith(key)]
  return max(keys, key=len, default="")


def proper(name: str) -> str:
  """Returns a name for pictures: "dilocox_reset" is "DiLoCoX reset".

  A name that begins with no known method is only escaped for pictures.
  """
  key = _method(name)
  if not key:
    return escape.picture(name)
  proper_name, _, _ = _METHODS[key]
  method_part = re.match("[^a-zA-Z]*".join(key), name, re.IGNORECASE)
  suffix = name
  if method_part:
    suffix = name[method_part.end() :]
  return escape.picture(proper_name + suffix.replace("_", " "))


class PlainFigure(Figure):
  """A figure that shows a text such as "$x$" as it is, not as a formula."""

  def draw(self, renderer: Any) -> None:
    """Draws the figure, as `Figure` does."""
    # A text between "$" that is no formula would raise an error.
    for text in self.findobj(Text):
      text.set_parse_math(False)
    super().draw(renderer)


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Returns color, marker and line style of each curve, by its name.

  Up to four curves of one method differ in line style. Curves whose names begin
  with no known method get `COLORS` in order. The values are keyword arguments
  of `Axes.plot`.
  """
  looks_of_others = itertools.cycle(zip(COLORS, MARKERS, strict=True))
  looks_by_name: dict[str, dict[str, Any]] = {}
  used_colors = []
  for name in names:
    key = _method(name)
    if key:
      _, color, marker = _METHODS[key]
    else:
      color, marker = next(looks_of_others)
    line_style = _LINES[used_colors.count(color) % len(_LINES)]
    used_colors.append(color)
    looks_by_name[name] = {
      "color": color,
      "marker": marker,
      "linestyle": line_style,
    }
  return looks_by_name


def frame(
  panels: int, title: str, size: tuple[float, float] | None = None
) -> tuple[Figure, list[Axes]]:
  """Returns a figure with empty axes, which are also called panels.

  Args:
    panels: Number of axes side by side.
    title: Title of the figure. A long title gets several lines.
    size: Width and height (inches); None: 6.4 x 4.2 for one panel, 9.6 x 4.2
      for several.

  Returns:
    The figure, and its axes from left to right.
  """
  if size is None:
    size = (6.4, 4.2) if panels == 1 else (9.6, 4.2)
  # No-break spaces keep a number on one line with its error.
  title = title.replace(" ± ", "\u00a0±\u00a0")
  title = textwrap.fill(title, int(_TITLE * size[0]))
  figure = PlainFigure(figsize=size, dpi=DPI, layout="constrained")
  figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # pyright: ignore
  figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
  axes = list(figure.subplots(1, panels, squeeze=False)[0])
  for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color="#E6E6E6", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, color=GRAY)
  return figure, axes


def caption(ax: Axes, text: str) -> None:
  """Writes the line above a panel, e.g. "measured"; a long one is wrapped."""
  text = textwrap.fill(text, int(_CAPTION * ax.bbox.width / DPI))
  ax.set_title(text, loc="left", fontsize=9, color=GRAY)


def label(ax: Axes, kind: str, horizontal: str, vertical: str = "") -> None:
  """Writes the caption of a panel and the names of its axes.

  Args:
    ax: Axes to label.
    kind: Text of the caption, e.g. "measured".
    horizontal: Name of the horizontal axis, with its unit.
    vertical: Name of the vertical axis, with its unit; "": none.
  """
  caption(ax, kind)
  ax.set_xlabel(horizontal)
  ax.set_ylabel(vertical)


def mark(ax: Axes, height: float, name: str) -> None:
  """Draws a horizontal line across a panel, with a name at its right end."""
  ax.axhline(height, color=GRAY, linewidth=0.8, dashes=(4, 3))
  ax.annotate(
    name,
    (1, height),
    xycoords=ax.get_yaxis_transform(),
    ha="right",
    va="bottom",
    fontsize=8,
    color=GRAY,
  )


def legend(figure: Figure, ax: Axes, columns: int) -> None:
  """Puts a legend of the lines in `ax` below a figure.

  It has at most `columns` columns, and fewer if names are long.
  """
  handles, names = ax.get_legend_handles_labels()
  available_width = _LEGEND * figure.get_figwidth()
  columns = min(columns, len(handles))
  while columns > 1 and _legend_width(names, columns) > available_width:
    columns -= 1
  figure.legend(
    handles=handles,
    ncols=columns,
    loc="outside lower center",
    frameon=False,
    fontsize=9,
  )


def _legend_width(names: Sequence[str], columns: int) -> int:
  """Returns the width of a legend in characters, approximately.

  The names fill one column after the other: five names in three columns are
  divided into 2, 2 and 1.
  """
  names_per_column, num_longer = divmod(len(names), columns)
  width = 0
  start = 0
  for column in range(columns):
    end = start + names_per_column
    if column < num_longer:
      end += 1
    longest_name = max(len(name) for name in names[start:end])
    width += longest_name + _LEGEND_LINE
    start = end
  return width


def cut_high(
  ax: Axes, losses: Sequence[float], shown_losses: Sequence[float]
) -> str:
  """Cuts the vertical axis if a few high losses would flatten the curves.

  The main range goes from the lowest loss to the 90th percentile, or higher to
  include `shown_losses`. If all losses together span more than three times this
  range, the axis ends half a range above it. Example: of ten losses, nine are
  from 2 to 3, and one is 11. They span 9, so the axis is cut at 3.5. Nothing is
  cut if the main range is a single loss.

  Args:
    ax: Axes of the losses.
    losses: All losses in these axes. Losses that are not finite do not count.
    shown_losses: Losses that must stay in view, e.g. the last of every curve.

  Returns:
    A text for the end of the caption; "" if nothing was cut.
  """
  finite_losses = sorted(filter(math.isfinite, losses))
  if not finite_losses:
    return ""
  low = finite_losses[0]
  percentile_90 = finite_losses[int(0.9 * (len(finite_losses) - 1))]
  high = max([percentile_90, *filter(math.isfinite, shown_losses)])
  is_spread_small = finite_losses[-1] - low <= 3 * (high - low)
  if is_spread_small or high == low:
    return ""
  ax.set_ylim(low - 0.1 * (high - low), low + 1.5 * (high - low))
  return "; some losses are above the axis"


def cost_axis(
  ax: Axes,
  costs: Sequence[float],
  name: str,
  text_of: Callable[[float], str] | None = None,
  is_log: bool | None = None,
) -> None:
  """Labels the horizontal axis of a cost, and chooses its scale.

  Args:
    ax: Axes to label.
    costs: All values that are drawn, each positive. If there are none, the
      panel says that there is nothing to show.
    name: Name of the axis with its unit. "log scale" is added if the axis is
      logarithmic.
    text_of: Function from the value of a tick to its text; None: the number.
    is_log: Whether the axis is logarithmic; None: it is if the largest cost is
      more than about five times the smallest cost.
  """
  decades = 0.0
  if costs:
    decades = math.log10(max(costs) / min(costs))
  else:
    ax.text(0.5, 0.5, "nothing to show", ha="center", transform=ax.transAxes)
  if is_log is None:
    is_log = decades > 0.7
  if is_log:
    if name.endswith(")"):
      name = f"{name.removesuffix(')')}, log scale)"
    else:
      name = f"{name} (log scale)"
    ax.set_xscale("log")
    # The wider the axis, the fewer ticks a power of ten has.
    if decades < 1.6:
      ticks_per_decade = (1, 2, 5)
    elif decades < 2.5:
      ticks_per_decade = (1, 3)
    else:
      ticks_per_decade = (1,)
    ax.xaxis.set_major_locator(LogLocator(subs=ticks_per_decade))
    ax.xaxis.set_minor_formatter(NullFormatter())
    text_of = text_of or "{:,g}".format
  ax.set_xlabel(name)
  if text_of:
    # This comes last, because setting the scale replaces the formatter.
    ax.xaxis.set_major_formatter(lambda value, _: text_of(value))
