"""How every figure looks, so that a reader learns to read them once.

Colours are Okabe and Ito's, told apart with impaired colour vision. Figures are
drawn on Figure objects, so that no global state is touched. The legend stands
outside the axes, the title says what is seen, and the line above each panel
says whether its numbers are measured or derived.
"""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dilocox_jax.report import units

DPI = 150
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
GREY, PALE = "#555555", "#B8B8B8"


def frame(
  panels: int, title: str, size: tuple[float, float] | None = None
) -> tuple[Figure, list[Axes]]:
  """An empty figure in the house style.

  Args:
    panels: Axes side by side.
    title: What is seen.
    size: Width and height (inches).
  """
  size = size or (6.4 if panels == 1 else 9.6, 4.2)
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
  """The line above a panel: what kind of numbers it shows."""
  ax.set_title(text, loc="left", fontsize=9, color=GREY)


def legend(figure: Figure, ax: Axes, columns: int) -> None:
  """Puts the legend below the axes, in at most so many columns."""
  handles, labels = ax.get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc="outside lower center",
    ncols=min(columns, len(labels)),
    frameon=False,
    fontsize=9,
  )


def cut_high(
  ax: Axes,
  losses: Sequence[float],
  what: str = "the first losses are above the axis",
) -> str:
  """Keeps a few high losses from flattening all the rest.

  Args:
    ax: Where they are drawn.
    losses: All of them.
    what: What to say of those that are cut.

  Returns:
    The end of a caption: "; " and `what` if the axis was cut, else nothing.
  """
  finite = sorted(loss for loss in losses if math.isfinite(loss))
  if not finite:
    return ""
  low, high = finite[0], finite[int(0.9 * (len(finite) - 1))]
  if finite[-1] - low <= 3 * (high - low) or high == low:
    return ""
  ax.set_ylim(low - 0.1 * (high - low), low + 1.5 * (high - low))
  return f"; {what}"


def bytes_axis(ax: Axes, sent_bytes: Sequence[int]) -> None:
  """Labels the horizontal axis in bytes, on a log scale if they spread.

  Args:
    ax: The axes.
    sent_bytes: All that is drawn, each positive; none is said to be none.
  """
  ax.set_xlabel("sent by one replica")
  if not sent_bytes:
    ax.text(0.5, 0.5, "nothing to show", ha="center", transform=ax.transAxes)
    return
  decades = math.log10(max(sent_bytes) / min(sent_bytes))
  if decades > 0.7:
    ax.set_xscale("log")
    ax.set_xlabel("sent by one replica (log scale)")
    subs = (1, 2, 5) if decades < 1.6 else (1, 3) if decades < 2.5 else (1,)
    ax.xaxis.set_major_locator(LogLocator(subs=subs))
    ax.xaxis.set_minor_formatter(NullFormatter())
  # After the scale, which brings its own formatter.
  ax.xaxis.set_major_formatter(lambda value, _: units.bytes_tick(value))
