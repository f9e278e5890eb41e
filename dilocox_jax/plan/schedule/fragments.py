"""Fragments: parts of the parameter tree that are sent together.

A model's blocks are stacked: every leaf under "blocks" has a leading layer
axis. Fragment 0 is everything else (embedding, final norm, head); fragments
1 to P - 1 share the layers. With P = 1 the whole tree is fragment 0. The
layers of a fragment are a row of a table, so a program can pick a fragment by
its number and does not grow with P.

If the order is "sliced" or "interleaved", a fragment has no layers of its own
but some rows of every leaf. So fragments are equal for any P, also in a model
of few layers. A slice has neighbouring rows, or every P-th row. Devices that
divide the rows of a replica have a part of each interleaved slice, so none has
to send rows to another one before an exchange.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dilocox_jax.checks import one_of

BLOCKS = "blocks"  # Top-level key of the stacked leaves.
ORDERS = ("sequential", "strided", "sliced", "interleaved")
Shapes = Mapping[str, tuple[int, ...]]  # Of leaves by path.
SLICED = ORDERS[2:]  # Orders in which fragments have rows of every leaf.


@dataclasses.dataclass(frozen=True)
class Fragments:
  """A division of the parameter tree into P disjoint fragments.

  Attributes:
    num_fragments: Number of fragments, P.
    num_layers: Number of layers, the length of the layer axis.
    order: "sequential" (neighbouring layers together), "strided"
      (interleaved, the default of Streaming DiLoCo, arXiv 2501.18512),
      "sliced" (each fragment has neighbouring rows of every leaf), or
      "interleaved" (every P-th row of every leaf).
  """

  num_fragments: int
  num_layers: int
  order: str = "strided"

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

  def layers(self, fragment: int) -> np.ndarray:
    """Returns the layers of a fragment, ascending (P > 1 and no slices)."""
    groups, layers = self.num_fragments - 1, np.arange(self.num_layers)
    if not fragment:
      return layers[:0]
    if self.order == "sequential":
      return np.array_split(layers, groups)[fragment - 1]
    return layers[fragment - 1 :: groups]

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
    width = -(-self.num_layers // groups) if groups else 0
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
    if not fragment:
      return {k: v for k, v in shapes.items() if not is_stacked(k)}
    count = self.layer_table.shape[1]
    return {k: (count, *v[1:]) for k, v in shapes.items() if is_stacked(k)}


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

  Args:
    num_rows: Rows of the leaf.
    num_fragments: P.
    order: "sliced" or "interleaved".
  """
  if order == "interleaved":
    return slice_rows(num_rows, num_fragments)
  return 1


def slice_rows(num_rows: int, num_fragments: int) -> int:
  """Returns the number of rows of a slice, those filled up included.

  Args:
    num_rows: Rows of the leaf.
    num_fragments: P.
  """
  return -(-num_rows // num_fragments)


def _sliced(
  path: str, shape: tuple[int, ...], num_fragments: int
) -> tuple[int, ...]:
  shape = shape or (1,)
  axis = row_axis(path, shape)
  rows = slice_rows(shape[axis], num_fragments)
  return (*shape[:axis], rows, *shape[axis + 1 :])


def is_stacked(path: str) -> bool:
  """Whether the first axis of the leaf at a path is the layer.

  It is below "blocks", as in "blocks/query/kernel", unless a number follows as
  in "blocks/0/kernel". Then each layer has leaves of its own.

  Args:
    path: Keys of the leaf, joined by "/".
  """
  first, _, rest = path.partition("/")
  return first == BLOCKS and not rest.split("/", 1)[0].isdigit()


def stacked_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of a leaf with a layer axis, [num_layers, ...].

  Codecs compress each layer by itself. A leaf that is not stacked has one.

  Args:
    path: Keys of the leaf, joined by "/".
    shape: Shape of the leaf.
  """
  return tuple(shape) if shape and is_stacked(path) else (1, *shape)
