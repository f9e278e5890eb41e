"""Draws utilisation against bandwidth, predicted and measured."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from dilocox_jax.report import style
from experiments.real_links.bandwidths import BandwidthRow, Curve


def utilisation_figure(
  rows: Sequence[BandwidthRow], curves: Sequence[Curve]
) -> Figure:
  """Draws the simulator's curves, and markers where methods were measured.

  Args:
    rows: Methods over some links.
    curves: The same methods over more of them.
  """
  figure, (ax,) = style.frame(
    1, "Utilisation of replicas over slow links", size=(7.2, 5.4)
  )
  # There are more methods than colours: later ones are dashed and hollow.
  lines, fillings = ("-", "--"), (None, "white")
  for number, curve in enumerate(curves):
    turn, place = divmod(number, len(style.COLOURS))
    colour = style.COLOURS[place]
    own = [row for row in rows if row.label == curve.label]
    ax.plot(
      [rate / 1e6 for rate in curve.rates_bps],
      curve.utilisation,
      lines[turn % 2],
      color=colour,
    )
    marker: dict[str, Any] = {
      "marker": style.MARKERS[place],
      "color": colour,
      "markerfacecolor": fillings[turn % 2] or colour,
    }
    ax.plot(
      [row.rate_bps / 1e6 for row in own],
      [row.utilisation for row in own],
      linestyle="",
      **marker,
    )
    ax.plot([], [], lines[turn % 2], label=curve.label, **marker)
  ax.set_xscale("log")
  ax.set_ylim(0, None)
  style.label(
    ax,
    "lines: simulated; markers: measured",
    "link, up and down (Mbit/s, log scale)",
    "share of the time in inner steps",
  )
  style.legend(figure, ax, 3)
  return figure
