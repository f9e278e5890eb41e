"""Fragments: parts of the parameter tree that are sent together.

A model's blocks are stacked: every leaf under "blocks" has a leading layer
axis. Fragment 0 is everything else (embedding, final norm, head); fragments
1 to P - 1 share the layers. With P = 1 the whole tree is fragment 0. The
layers of a fragment are a row of a table, so a program can pick a fragment by
its number and does not grow with P.

If the order is "sliced" or "interleaved", a fragment has no layers of its own
but some rows of every leaf. So fragments are equal for any P, also in a model
of few layers. A slice has neighboring rows, or every P-th row. Devices that
divide the rows of a replica have a part of each interleaved slice, so none has
to send rows to another one before an exchange.

A tree of somebody else's may also be divided by whole leaves.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from dilocox_jax.checks import one_of

BLOCKS = "blocks"  # Top-level key of the stacked leaves.
ORDERS = ("sequential", "strided", "sliced", "interleaved")
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # Of leaves by path.
SLICED = ORDERS[2:]  # Orders in which fragments have rows of every leaf.


@dataclasses.dataclass(frozen=True)
class Fragments:
  """A division of the parameter tree into P disjoint fragments.

  Attributes:
    num_fragments: Number of fragments, P.
    num_layers: Number of layers, the length of the layer axis.
    order: "sequential" (neighboring layers together), "strided"
      (interleaved, the default of Streaming DiLoCo, arXiv 2501.18512),
      "sliced" (each fragment has neighboring rows of every leaf), or
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

  def slices(self, path: str, shape: Shape) -> tuple[Shape, int]:
    """Returns the shape of a leaf in slices, [..., parts, P, rows, ...].

    Parts are of neighboring rows. With 6 rows and P = 2, slice 1 has rows 3 to
    5 in one part ("sliced"), or the rows 1, 3 and 5 in three ("interleaved").
    Rows of zeros fill up what P does not divide. A leaf is sliced along the
    axis after the layers, and one that has no other axis along its layers.

    Args:
      path: Path of the leaf.
      shape: Its shape. A single number counts as one row.

    Returns:
      The shape, and the axis of the parts in it.
    """
    shape, count = shape or (1,), self.num_fragments
    axis = min(int(is_stacked(path)), len(shape) - 1)
    width = -(-shape[axis] // count)
    parts = width if self.order == "interleaved" else 1
    rows = width // max(parts, 1)
    return (*shape[:axis], parts, count, rows, *shape[axis + 1 :]), axis

  def shapes(self, fragment: int, shapes: Shapes) -> dict[str, Shape]:
    """Returns the leaf shapes of one fragment.

    Args:
      fragment: Index of the fragment.
      shapes: Leaf shapes of the whole tree by path ("blocks/..." are stacked).

    Returns:
      Shapes by path. All fragments of layers are kept and sent with as many
      layers as the longest has; shorter ones are filled up with zeros. So are
      slices.
    """

    def sliced(path: str) -> Shape:
      shape, axis = self.slices(path, shapes[path])
      rows = shape[axis] * shape[axis + 2]
      return (*shape[:axis], rows, *shape[axis + 3 :])

    if self.num_fragments == 1:
      return dict(shapes)
    if self.is_sliced:
      return {path: sliced(path) for path in shapes}
    if not fragment:
      return {k: v for k, v in shapes.items() if not is_stacked(k)}
    count = self.layer_table.shape[1]
    return {k: (count, *v[1:]) for k, v in shapes.items() if is_stacked(k)}


def is_stacked(path: str) -> bool:
  """Whether the first axis of the leaf at a path is the layer.

  It is below "blocks", as in "blocks/query/kernel", unless a number follows as
  in "blocks/0/kernel". Then each layer has leaves of its own.

  Args:
    path: Keys of the leaf, joined by "/".
  """
  first, _, rest = path.partition("/")
  return first == BLOCKS and not rest.split("/", 1)[0].isdigit()


def stacked_shape(path: str, shape: Shape) -> Shape:
  """Returns the shape of a leaf with a layer axis, [num_layers, ...].

  Codecs compress each layer by itself. A leaf that is not stacked has one.

  Args:
    path: Keys of the leaf, joined by "/".
    shape: Shape of the leaf.
  """
  return tuple(shape) if shape and is_stacked(path) else (1, *shape)


def balanced(shapes: Shapes, num_fragments: int) -> dict[str, int]:
  """Divides whole leaves such that the largest fragment stays small.

  Leaves are given out from the largest to the smallest, each to the fragment
  that has the fewest values so far. Example: leaves of 6, 5, 4 and 3 values in
  two fragments make (6, 3) and (5, 4).

  Args:
    shapes: Leaf shapes by path.
    num_fragments: P, at most the number of leaves.

  Returns:
    The number of every leaf's fragment, by path.

  Raises:
    ValueError: If there are fewer leaves than fragments.
  """
  if num_fragments > len(shapes):
    raise ValueError(
      f"num_fragments={num_fragments} must not exceed the number of leaves of "
      f"the tree, {len(shapes)}: lower it, or give fragments yourself"
    )
  sizes = {path: math.prod(shape) for path, shape in shapes.items()}
  totals, owner = [0] * num_fragments, {}
  for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
    owner[path] = fragment = totals.index(min(totals))
    totals[fragment] += sizes[path]
  return {path: owner[path] for path in shapes}


def by_path(
  shapes: Shapes, num_fragments: int, fragment_of: Callable[[str], int]
) -> dict[str, int]:
  """Divides whole leaves by a function of their path.

  Args:
    shapes: Leaf shapes by path.
    num_fragments: P.
    fragment_of: From a path to the number of its fragment, 0 to P - 1.

  Returns:
    The number of every leaf's fragment, by path.

  Raises:
    ValueError: If a number is out of range or a fragment has no leaf.
  """
  owner = {path: fragment_of(path) for path in shapes}
  for path, number in owner.items():
    if not 0 <= number < num_fragments:
      raise ValueError(
        f"leaf {path!r} is given fragment {number}, but num_fragments="
        f"{num_fragments} numbers them from 0 to {num_fragments - 1}"
      )
  for number in set(range(num_fragments)) - set(owner.values()):
    raise ValueError(
      f"fragment {number} has no leaf: lower num_fragments={num_fragments}, "
      "or give it one"
    )
  return owner
