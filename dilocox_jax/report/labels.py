"""Names beside points of a figure, placed so that they cover nothing."""

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from dilocox_jax.report import style

# Places of a name relative to its point (points, 1/72 inch), nearest first.
_OFFSETS = [
  (x * far, y * far)
  for far in (1.0, 2.0, 3.5)
  for x, y in ((8, 5), (8, -5), (-8, 5), (-8, -5), (0, 10), (0, -10))
]
_POINT_PIXELS = 6


@dataclasses.dataclass(frozen=True)
class PointLabel:
  """Name of a point.

  Attributes:
    name: Text.
    x: Horizontal position of the point, in data units.
    y: Vertical position of the point, in data units.
    is_required: Whether the name is shown even if there is no room. Such
      names are bold.
  """

  name: str
  x: float | int
  y: float
  is_required: bool = False


def place_labels(
  figure: Figure, ax: Axes, labels: Sequence[PointLabel]
) -> None:
  """Writes names beside their points; optional ones only where there is room.

  Args:
    figure: Figure of the axes. All else must be drawn already.
    ax: Axes of the points.
    labels: Names, the most important first.
  """
  if not labels:
    return
  figure.draw_without_rendering()  # Only now pixels of points are known.
  low, high = ax.get_ylim()
  labels = [label for label in labels if low <= label.y <= high]
  taken = [_around(ax, label) for label in labels]
  for label in labels:
    for number, offset in enumerate(_OFFSETS):
      text = _write(ax, label, offset)
      box = text.get_tightbbox()
      is_last = label.is_required and number == len(_OFFSETS) - 1
      if box is None or is_last or _has_room(box, taken, ax, label):
        taken.append(box or _around(ax, label))
        break
      text.remove()


def _write(ax: Axes, label: PointLabel, offset: tuple[float, float]):
  dx, dy = offset
  text = ax.annotate(
    label.name,
    (label.x, label.y),
    offset,
    textcoords="offset points",
    ha="left" if dx > 0 else "right" if dx < 0 else "center",
    va="bottom" if dy > 0 else "top",
    fontsize=8,
    color=style.COLOURS[0] if label.is_required else style.GREY,
    fontweight="bold" if label.is_required else "normal",
    arrowprops={"arrowstyle": "-", "color": style.PALE, "linewidth": 0.6},
    zorder=6,
  )
  # A white rim keeps a name readable where it crosses a curve.
  text.set_path_effects([withStroke(linewidth=2, foreground="white")])
  return text


def _around(ax: Axes, label: PointLabel) -> Bbox:
  """Returns the pixels that the marker of a point covers."""
  x, y = ax.transData.transform((label.x, label.y))
  far = _POINT_PIXELS
  return Bbox.from_extents(x - far, y - far, x + far, y + far)


def _has_room(
  box: Bbox, taken: Sequence[Bbox], ax: Axes, label: PointLabel
) -> bool:
  """Whether a text lies inside the axes and covers nothing but its point."""
  point, inside = _around(ax, label), ax.get_window_extent()
  is_inside = inside.contains(box.x0, box.y0) and inside.contains(
    box.x1, box.y1
  )
  others = [other for other in taken if other.bounds != point.bounds]
  return bool(is_inside) and not any(box.overlaps(other) for other in others)
