"""Many loss curves in one picture, a few of them in front.

A reader tells about six curves apart. So at most six have a colour and a name
in the legend; all others are drawn thin and grey behind them, where they still
show the range of results. Which six is decided by one rule for all figures:
the baseline, then a priority list if there is one, then the lowest losses.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from dilocox_jax.report import style
from dilocox_jax.report.looks import looks

MAX_FRONT = 6
_MOST_MARKERS = 20
_THIN = {"linewidth": 0.9, "markersize": 2.5, "zorder": 1.8}
_BEHIND: dict[str, Any] = {"color": style.PALE, "marker": ".", **_THIN}


@dataclasses.dataclass(frozen=True)
class Curve:
  """One curve of a figure.

  Attributes:
    name: Name of the method.
    x: Horizontal values.
    y: Losses (nats a token), as many as `x`.
    low: Lower edge of the band around the curve; empty without a band.
    high: Upper edge of the band.
    label: Text of the legend; by default the name.
  """

  name: str
  x: Sequence[float | int]
  y: Sequence[float]
  low: Sequence[float] = ()
  high: Sequence[float] = ()
  label: str = ""


def choose_front(
  losses: Mapping[str, float], baseline: str, priority: Sequence[str] = ()
) -> list[str]:
  """Returns the names of the curves to draw in front, baseline first.

  Args:
    losses: Finite final loss of each curve that can be seen, by name.
    baseline: Name of the curve that the others are compared with.
    priority: Names that come next, most important first. Names without a
      curve are skipped.

  Returns:
    At most six names. The lowest losses fill up what `priority` leaves.
  """
  lowest = sorted(losses, key=losses.__getitem__)
  names = dict.fromkeys((baseline, *priority, *lowest))
  return [name for name in names if name in losses][:MAX_FRONT]


def draw_curves(
  ax: Axes,
  curves: Sequence[Curve],
  front: Sequence[str],
  width_step: float = 0.2,
) -> None:
  """Draws curves: those in front with their method's look, the others grey.

  Args:
    ax: Axes to draw into.
    curves: All curves. One without points gets no line and no legend entry.
    front: Names of the curves in front, the thickest first.
    width_step: How much thicker (points) each curve is than the next one. So
      no curve hides an equal one below it.
  """
  drawn = {curve.name: curve for curve in curves if len(curve.x)}
  own = looks(front)
  for number, name in enumerate(front):
    if name not in drawn:
      continue
    curve = drawn.pop(name)
    wider = width_step * (len(front) - 1 - number)
    look: dict[str, Any] = {"label": curve.label or name, "zorder": 3}
    look |= {"markersize": 3.5 + wider, "linewidth": 1.4 + wider} | own[name]
    # Markers of a long run would merge; the last one is always drawn.
    spacing = -(-len(curve.x) // _MOST_MARKERS)
    look["markevery"] = list(range(len(curve.x) - 1, -1, -spacing))
    ax.plot(curve.x, curve.y, gid=name, **look)
    if len(curve.low):
      band = {"color": own[name]["color"], "alpha": 0.15, "linewidth": 0}
      ax.fill_between(curve.x, curve.low, curve.high, **band)
  # Matplotlib leaves labels that begin with "_" out of the legend.
  for name, curve in drawn.items():
    ax.plot(curve.x, curve.y, label=f"_{name}", gid=name, **_BEHIND)
  if drawn:
    ax.plot([], [], color=style.PALE, label=f"{len(drawn)} others")
