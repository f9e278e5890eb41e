"""Fragments: parts of the parameter tree that are sent together.

A model's blocks are stacked: every leaf under "blocks" has a leading layer
axis. Fragment 0 is everything else (embedding, final norm, head); fragments
1 to P - 1 share the layers. With P = 1 the whole tree is fragment 0. The
layers of a fragment are a row of a table, so a program can pick a fragment by
its number and does not grow with P.

If the order is "balanced", fragment 0 has layers too, so that all fragments
have about the same size. Otherwise a link that sends one fragment after the
other waits for the large ones: in a model of 107 billion parameters fragment 0
would hold 2 % of them, and take a whole turn of the link like the others.

If the order is "sliced" or "interleaved", a fragment has no layers of its own
but some rows of every leaf. So fragments are equal for any P, also in a model
of few layers. A slice has neighbouring rows, or every P-th row. Devices that
divide the rows of a replica have a part of each interleaved slice, so none has
to send rows to another one before an exchange.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np

from dilocox_jax.checks import one_of

BLOCKS = "blocks"  # Top-level key of the stacked leaves.
ORDERS = ("sequential", "strided", "balanced", "sliced", "interleaved")
SLICED = ORDERS[3:]  # Orders in which fragments have rows of every leaf.


@dataclasses.dataclass(frozen=True)
class Fragments:
  """A division of the parameter tree into P disjoint fragments.

  Attributes:
    num_fragments: Number of fragments, P.
    num_layers: Number of layers, the length of the layer axis.
    order: "sequential" (neighbouring layers together), "strided"
      (interleaved, the default of Streaming DiLoCo, arXiv 2501.18512),
      "balanced" (interleaved, and fragment 0 has layers too), "sliced" (each
      fragment has neighbouring rows of every leaf), or "interleaved" (every
      P-th row of every leaf).
    rest_in_layers: Size of everything outside the layers, as a number of
      layers. Only "balanced" reads it.
  """

  num_fragments: int
  num_layers: int
  order: str = "strided"
  rest_in_layers: float = 0.0

  def __post_init__(self):
    one_of("fragment_order", self.order, ORDERS)
    if self.num_fragments > max(self.num_layers, 1) and not self.is_sliced:
      raise ValueError(
        f"num_fragments={self.num_fragments} must not exceed "
        f"num_layers={self.num_layers}: lower sync.num_fragments"
      )

  @property
  def is_sliced(self) -> bool:
    """Whether fragments have rows of every leaf, and not whole layers."""
    return self.order in SLICED

  @property
  def are_alike(self) -> bool:
    """Whether there are several fragments, all with the same shapes."""
    return self.is_sliced and self.num_fragments > 1

  @property
  def first_layers(self) -> int:
    """Number of layers in fragment 0 (if there are more fragments).

    All other fragments have K layers. K is chosen so that the largest fragment
    is as small as it can be, and then so that little is filled up with zeros.

    Example: 78 layers, P = 16, and a rest as large as 1.9 layers. With K = 5
    fragment 0 has 78 - 15 * 5 = 3 layers, which makes it as large as 4.9.
    """
    groups = self.num_fragments - 1
    if self.order != "balanced" or not groups:
      return 0

    def cost(width: int) -> tuple[float | int, int, int]:
      left = self.num_layers - groups * width
      first = max(left, 0)
      return max(self.rest_in_layers + first, width), max(-left, 0), first

    widths = range(1, -(-self.num_layers // groups) + 1)
    return min(cost(width) for width in widths)[-1]

  def layers(self, fragment: int) -> np.ndarray:
    """Returns the layers of a fragment, ascending (P > 1 and no slices)."""
    groups, layers = self.num_fragments - 1, np.arange(self.num_layers)
    if self.order == "sequential":
      return [layers[:0], *np.array_split(layers, groups)][fragment]
    first = self.first_layers
    width = -(-(self.num_layers - first) // groups)
    return layers[_dealt(self.num_layers, [first] + [width] * groups)[fragment]]

  @property
  def layer_table(self) -> np.ndarray:
    """Layers of fragments 1 to P - 1, a row [K] int32 for each.

    K is the number of layers of the longest fragment. Shorter rows end in
    `num_layers`, which is no layer. With P = 4, seven layers are divided into

        strided     0 3 6      sequential   0 1 2
                    1 4 7                   3 4 7
                    2 5 7                   5 6 7
    """
    groups = 0 if self.is_sliced else self.num_fragments - 1
    left = self.num_layers - self.first_layers
    width = -(-left // groups) if groups else 0
    table = np.full((groups, width), self.num_layers, np.int32)
    for row in range(groups):
      layers = self.layers(row + 1)
      table[row, : len(layers)] = layers
    return table

  def shapes(
    self, fragment: int, shapes: Mapping[str, tuple[int, ...]]
  ) -> dict[str, tuple[int, ...]]:
    """Returns the leaf shapes of one fragment.

    Args:
      fragment: Index of the fragment.
      shapes: Leaf shapes of the whole tree by path ("blocks/..." are stacked).

    Returns:
      Shapes by path. All fragments of layers are kept and sent with as many
      layers as the longest has; shorter ones are filled up with zeros. So are
      slices.
    """
    if self.num_fragments == 1:
      return dict(shapes)
    if self.is_sliced:
      return {k: _sliced(k, v, self.num_fragments) for k, v in shapes.items()}
    count = self.layer_table.shape[1] if fragment else self.first_layers
    stacked = {k: (count, *v[1:]) for k, v in shapes.items() if is_stacked(k)}
    if fragment:
      return stacked
    rest = {k: v for k, v in shapes.items() if not is_stacked(k)}
    return rest | stacked if count else rest


def _dealt(num_layers: int, room: list[int]) -> list[list[int]]:
  """Deals layers to fragments in turn, passing over those that are full.

  Args:
    num_layers: Number of layers.
    room: Number of layers that each fragment may have.
  """
  dealt: list[list[int]] = [[] for _ in room]
  turns = itertools.cycle(range(len(room)))
  for layer in range(num_layers):
    fragment = next(p for p in turns if len(dealt[p]) < room[p])
    dealt[fragment].append(layer)
  return dealt


def row_axis(path: str, shape: tuple[int, ...]) -> int:
  """Returns the axis along which a leaf is sliced: the one after the layers.

  A stacked leaf with no other axis, such as a number for each layer, is sliced
  along its layers.

  Args:
    path: Path of the leaf.
    shape: Its shape, with at least one axis.
  """
  return min(int(is_stacked(path)), len(shape) - 1)


def slice_parts(num_rows: int, num_fragments: int, order: str) -> int:
  """Returns the number of parts of a slice, each of neighbouring rows.

  Rows, with those filled up, are numbered [parts, P, rows of a part]. With 6
  rows and P = 2, slice 1 has rows 3 to 5 in one part ("sliced"), or the rows 1,
  3 and 5 in three ("interleaved").
  """
  if order == "interleaved":
    return slice_rows(num_rows, num_fragments)
  return 1


def slice_rows(num_rows: int, num_fragments: int) -> int:
  """Returns the number of rows of a slice, those filled up included."""
  return -(-num_rows // num_fragments)


def _sliced(
  path: str, shape: tuple[int, ...], num_fragments: int
) -> tuple[int, ...]:
  shape = shape or (1,)
  axis = row_axis(path, shape)
  rows = slice_rows(shape[axis], num_fragments)
  return (*shape[:axis], rows, *shape[axis + 1 :])


def rest_in_layers(shapes: Mapping[str, tuple[int, ...]]) -> float:
  """Returns the size of all leaves outside the layers, in layers.

  Example: an embedding and a head of 30 values each, and 4 layers of 120
  values, give 60 / 120 = 0.5.

  Args:
    shapes: Leaf shapes of the whole tree by path.
  """
  total = sum(map(math.prod, shapes.values()))
  in_layers = {k: v for k, v in shapes.items() if is_stacked(k)}
  stacked = sum(map(math.prod, in_layers.values()))
  num_layers = next((v[0] for v in in_layers.values()), 0)
  return num_layers * (total - stacked) / stacked if stacked else 0.0


def is_stacked(path: str) -> bool:
  """Whether the first axis of the leaf at a path is the layer.

  It is below "blocks", as in "blocks/query/kernel", unless a number follows as
  in "blocks/0/kernel". Then each layer has leaves of its own.

  Args:
    path: Keys of the leaf, joined by "/".
  """
  first, _, rest = path.partition("/")
  return first == BLOCKS and not rest.split("/", 1)[0].isdigit()
