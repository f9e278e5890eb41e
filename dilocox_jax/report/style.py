"""The look of all figures, so that a reader has to learn it only once.

The first colors are those of Okabe and Ito, which people with impaired color
vision can tell apart; markers tell the rest. A method has one color and one
marker in every picture, and AllReduce is black. Figures are matplotlib Figure
objects; pyplot and its global state are not used. The title states the
finding, the legend is outside the axes, and a line above each panel says
whether its numbers are measured or derived.
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
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
GREY, PALE = "#555555", "#B8B8B8"
LOSS_AXIS = "validation loss (nats a token)"
# Characters that fit into an inch of a title, a legend, a caption.
_TITLE, _LEGEND, _CAPTION = 10, 13, 16
_LEGEND_LINE = 6  # Characters for which the line beside a name has room.
# Proper name, color and marker by the start of a name without anything but
# letters: settings of a method begin with its name.
_METHODS = {
  "allreduce": ("AllReduce", "black", "."),
  "overlaploco": ("overlap_loco", COLOURS[0], "o"),
  "dilocox": ("DiLoCoX", COLOURS[1], "s"),
  "muloco": ("MuLoCo", COLOURS[2], "D"),
  "diloco": ("DiLoCo", COLOURS[3], "^"),
  "opendiloco": ("OpenDiLoCo", COLOURS[4], "v"),
  "streamingdiloco": ("Streaming DiLoCo", COLOURS[5], "P"),
  "streaming": ("Streaming DiLoCo", COLOURS[5], "P"),
  "cocktailsgd": ("CocktailSGD", "#8C564B", "X"),
  "cocktail": ("CocktailSGD", "#8C564B", "X"),
  "sparseloco": ("SparseLoCo", "#8A8A00", "*"),
  "eager": ("eager", "#6A3D9A", "<"),
  "delayed": ("delayed", "#B2182B", ">"),
  "ours": ("ours", "#B2182B", ">"),
}
_LINES = ("-", "--", ":", "-.")  # Settings of one method in one picture.


def _method(name: str) -> str:
  """Returns the longest key of `_METHODS` with which a name begins, or ""."""
  plain = re.sub(r"[^a-z]", "", name.lower())
  return max(filter(plain.startswith, _METHODS), key=len, default="")


def proper(name: str) -> str:
  """Returns a name for pictures: "dilocox_reset" is "DiLoCoX reset".

  Args:
    name: Name of a method or of a setting, which may have any characters.
  """
  key = _method(name)
  if not key:
    return escape.picture(name)
  begin = re.match("[^a-zA-Z]*".join(key), name, re.IGNORECASE)
  rest = name[begin.end() if begin else 0 :].replace("_", " ")
  return escape.picture(_METHODS[key][0] + rest)


class PlainFigure(Figure):
  """A figure that shows "$x$" as it is.

  The library would read a formula there, and refuse what is none.
  """

  def draw(self, renderer: Any) -> None:
    """Draws the figure, as `Figure` does."""
    for text in self.findobj(Text):
      text.set_parse_math(False)
    super().draw(renderer)


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Returns color, marker and line of each curve, by its name.

  Curves of one method differ in their lines. What is no method gets the colors
  in order.

  Args:
    names: Names of the curves, in order.
  """
  others = itertools.cycle(zip(COLOURS, MARKERS, strict=True))
  found: dict[str, dict[str, Any]] = {}
  seen = []
  for name in names:
    key = _method(name)
    color, marker = _METHODS[key][1:] if key else next(others)
    line = _LINES[seen.count(color) % len(_LINES)]
    seen.append(color)
    found[name] = {"color": color, "marker": marker, "linestyle": line}
  return found


def frame(
  panels: int, title: str, size: tuple[float, float] | None = None
) -> tuple[Figure, list[Axes]]:
  """Returns an empty figure and its axes.

  Args:
    panels: Number of axes side by side.
    title: What the figure shows; a long title gets several lines.
    size: Width and height (inches).
  """
  size = size or (6.4 if panels == 1 else 9.6, 4.2)
  # A number stays on a line with its error.
  title = textwrap.fill(
    title.replace(" ± ", "\u00a0±\u00a0"), int(_TITLE * size[0])
  )
  figure = PlainFigure(figsize=size, dpi=DPI, layout="constrained")
  figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # pyright: ignore
  figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
  axes = list(figure.subplots(1, panels, squeeze=False)[0])
  for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color="#E6E6E6", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, color=GREY)
  return figure, axes


def caption(ax: Axes, text: str) -> None:
  """Writes the line above a panel, which says what kind of numbers it shows."""
  text = textwrap.fill(text, int(_CAPTION * ax.bbox.width / DPI))
  ax.set_title(text, loc="left", fontsize=9, color=GREY)


def label(ax: Axes, kind: str, horizontal: str, vertical: str = "") -> None:
  """Writes the caption of a panel and the names of its axes.

  Args:
    ax: Axes to label.
    kind: Text of the caption, e.g. "measured".
    horizontal: What the horizontal axis shows, with its unit.
    vertical: What the vertical axis shows, with its unit.
  """
  caption(ax, kind)
  ax.set_xlabel(horizontal)
  ax.set_ylabel(vertical)


def mark(ax: Axes, height: float, name: str) -> None:
  """Draws a level across a panel, with its name at the right end."""
  ax.axhline(height, color=GREY, linewidth=0.8, dashes=(4, 3))
  look = {"ha": "right", "va": "bottom", "fontsize": 8, "color": GREY}
  ax.annotate(name, (1, height), xycoords=ax.get_yaxis_transform(), **look)


def legend(figure: Figure, ax: Axes, columns: int) -> None:
  """Puts a legend below a figure.

  It has fewer columns where the names are too long for the figure's width.

  Args:
    figure: Figure to write into.
    ax: Axes whose lines are named.
    columns: Largest number of columns.
  """
  handles, names = ax.get_legend_handles_labels()
  room = _LEGEND * figure.get_figwidth()
  columns = min(columns, len(handles))
  while columns > 1 and _legend_width(names, columns) > room:
    columns -= 1
  look = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
  figure.legend(handles=handles, ncols=columns, **look)  # pyright: ignore


def _legend_width(names: Sequence[str], columns: int) -> int:
  """Returns about how many characters a row takes, lines of curves included.

  Names fill one column after the other, and the first columns are the longest:
  five names in three columns stand 2, 2, 1.
  """
  least, more = divmod(len(names), columns)
  ends = [least * c + min(c, more) for c in range(columns + 1)]
  parts = [names[start:end] for start, end in itertools.pairwise(ends)]
  return sum(max(map(len, part)) + _LEGEND_LINE for part in parts)


def cut_high(ax: Axes, losses: Sequence[float], kept: Sequence[float]) -> str:
  """Cuts the vertical axis where a few high losses would flatten the rest.

  Args:
    ax: Axes of the losses.
    losses: All losses in these axes.
    kept: Losses that stay in view, e.g. the last one of every curve.

  Returns:
    End of a caption that says so, or "" if nothing was cut.
  """
  finite = sorted(filter(math.isfinite, losses))
  if not finite:
    return ""
  low, high = finite[0], finite[int(0.9 * (len(finite) - 1))]
  high = max([high, *filter(math.isfinite, kept)])
  if finite[-1] - low <= 3 * (high - low) or high == low:
    return ""
  ax.set_ylim(low - 0.1 * (high - low), low + 1.5 * (high - low))
  return "; the first losses are above the axis"


def cost_axis(
  ax: Axes,
  costs: Sequence[float],
  name: str,
  text_of: Callable[[float], str] | None = None,
  is_log: bool | None = None,
) -> None:
  """Labels the horizontal axis of a cost.

  Args:
    ax: Axes to label.
    costs: All values that are drawn, each positive. Without any, the axes say
      that there is nothing to show.
    name: What the axis shows, with its unit in brackets.
    text_of: Returns the text of a tick; by default the number.
    is_log: Whether it is logarithmic; by default if the costs spread.
  """
  if not costs:
    ax.text(0.5, 0.5, "nothing to show", ha="center", transform=ax.transAxes)
  decades = math.log10(max(costs) / min(costs)) if costs else 0.0
  if decades > 0.7 if is_log is None else is_log:
    # "time (s)" becomes "time (s, log scale)".
    name = re.sub(r"\)$|$", ", log scale)", name, count=1)
    name = name if "(" in name else name.replace(", log", " (log")
    ax.set_xscale("log")
    subs = (1, 2, 5) if decades < 1.6 else (1, 3) if decades < 2.5 else (1,)
    ax.xaxis.set_major_locator(LogLocator(subs=subs))
    ax.xaxis.set_minor_formatter(NullFormatter())
    text_of = text_of or "{:,g}".format
  ax.set_xlabel(name)
  if text_of:  # Setting the scale replaces the formatter, so this comes last.
    ax.xaxis.set_major_formatter(lambda value, _: text_of(value))
