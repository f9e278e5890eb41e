"""The look of all figures, so that a reader has to learn it only once.

The colours are those of Okabe and Ito, which people with impaired colour
vision can tell apart. Figures are matplotlib Figure objects; pyplot and its
global state are not used. The title states the finding, the legend is outside
the axes, and a line above each panel says whether its numbers are measured or
derived.
"""

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dilocox_jax.report import units

DPI = 150
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
GREY, PALE = "#555555", "#B8B8B8"
LOSS_AXIS = "validation loss (nats a token)"
_TITLE_CHARACTERS = 10  # Characters of a title that fit into an inch.
_LEGEND_CHARACTERS = 13  # Those of a legend, whose letters are smaller.
_LEGEND_LINE = 6  # Characters for which the line beside a name has room.
_CAPTION_CHARACTERS = 16  # The same of the line above a panel.


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
  title = textwrap.fill(title, int(_TITLE_CHARACTERS * size[0]))
  figure = Figure(figsize=size, dpi=DPI, layout="constrained")
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
  text = textwrap.fill(text, int(_CAPTION_CHARACTERS * ax.bbox.width / DPI))
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


def legend(figure: Figure, ax: Axes, columns: int) -> None:
  """Puts the legend of some axes below the figure.

  Args:
    figure: Figure to write into.
    ax: Axes whose lines are named.
    columns: Largest number of columns.
  """
  handles, _ = ax.get_legend_handles_labels()
  legend_below(figure, handles, columns)


def legend_below(figure: Figure, handles: Sequence[Any], columns: int) -> None:
  """Puts a legend of labelled artists below a figure.

  It has fewer columns where the names are too long for the figure's width.
  """
  look = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
  names = [str(handle.get_label()) for handle in handles]
  room = _LEGEND_CHARACTERS * figure.get_figwidth()
  columns = min(columns, len(handles))
  while columns > 1 and _legend_width(names, columns) > room:
    columns -= 1
  figure.legend(handles=handles, ncols=columns, **look)


def _legend_width(names: Sequence[str], columns: int) -> int:
  """Returns about how many characters a row takes, lines of curves included.

  Names fill one column after the other, and the first columns are the longest:
  five names in three columns stand 2, 2, 1.
  """
  least, more = divmod(len(names), columns)
  ends = [least * c + min(c, more) for c in range(columns + 1)]
  parts = [names[start:end] for start, end in itertools.pairwise(ends)]
  return sum(max(map(len, part)) + _LEGEND_LINE for part in parts)


def cut_high(
  ax: Axes,
  losses: Sequence[float],
  what: str = "the first losses are above the axis",
  kept: Sequence[float] = (),
) -> str:
  """Cuts the vertical axis where a few high losses would flatten the rest.

  Args:
    ax: Axes of the losses.
    losses: All losses in these axes.
    what: Words of the caption for losses that are cut.
    kept: Losses that stay in view, e.g. the last one of every curve.

  Returns:
    End of a caption: "; " and `what` if the axis was cut, else "".
  """
  finite = sorted(loss for loss in losses if math.isfinite(loss))
  if not finite:
    return ""
  low, high = finite[0], finite[int(0.9 * (len(finite) - 1))]
  high = max([high, *filter(math.isfinite, kept)])
  if finite[-1] - low <= 3 * (high - low) or high == low:
    return ""
  ax.set_ylim(low - 0.1 * (high - low), low + 1.5 * (high - low))
  return f"; {what}"


def log_axis(
  ax: Axes, subs: Sequence[int], text_of: Callable[[float], str]
) -> None:
  """Makes the horizontal axis logarithmic.

  Args:
    ax: Axes to scale.
    subs: Multiples of each power of ten that have a tick.
    text_of: Returns the text of a tick.
  """
  ax.set_xscale("log")
  ax.xaxis.set_major_locator(LogLocator(subs=subs))
  ax.xaxis.set_minor_formatter(NullFormatter())
  # Setting the scale replaces the formatter, so the formatter is set after it.
  ax.xaxis.set_major_formatter(lambda value, _: text_of(value))


def say_nothing_to_show(ax: Axes) -> None:
  """Writes into empty axes that there is nothing to show."""
  ax.text(0.5, 0.5, "nothing to show", ha="center", transform=ax.transAxes)


def bytes_axis(ax: Axes, sent_bytes: Sequence[int]) -> None:
  """Labels the horizontal axis in bytes, with a log scale if they spread.

  Args:
    ax: Axes to label.
    sent_bytes: All values that are drawn, each positive. Without any, the
      axes say that there is nothing to show.
  """
  ax.set_xlabel("sent by one replica")
  if not sent_bytes:
    say_nothing_to_show(ax)
    return
  decades = math.log10(max(sent_bytes) / min(sent_bytes))
  if decades > 0.7:
    ax.set_xlabel("sent by one replica (log scale)")
    subs = (1, 2, 5) if decades < 1.6 else (1, 3) if decades < 2.5 else (1,)
    log_axis(ax, subs, units.bytes_tick)
  else:
    ax.xaxis.set_major_formatter(lambda value, _: units.bytes_tick(value))
