"""Divides the parameter tree into P fragments: parts that are sent one by one.

With P = 1 the whole tree is fragment 0. With more fragments there are three
ways to divide the tree:

- By layers (orders "sequential" and "strided"). The layers are stacked: every
  leaf under "blocks" has a leading layer axis. Fragments 1 to P - 1 divide the
  layers. Fragment 0 has all other leaves (embedding, final norm, head).
- By rows (orders "sliced" and "interleaved"). Every fragment has some rows of
  every leaf. So fragments have nearly equal sizes. A "sliced" fragment has
  neighboring rows, an "interleaved" one every P-th row. If the devices of a
  replica divide the rows, each device has a part of every interleaved fragment.
- By whole leaves (`balanced`, `by_path`), for any tree.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping

import numpy as np

from dilocox_jax.checks import one_of, require, shown

BLOCKS = "blocks"  # Top-level key of the stacked leaves.
ORDERS = ("sequential", "strided", "sliced", "interleaved")
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # Shapes of leaves by path.
SLICED = ORDERS[2:]  # Orders in which fragments have rows of every leaf.


@dataclasses.dataclass(frozen=True)
class Fragments:
  """A division of the parameter tree into P disjoint fragments.

  Attributes:
    num_fragments: Number of fragments, P. In the orders "sequential" and
      "strided", several fragments need at least P layers.
    num_layers: Number of layers of the model. Stacked leaves have a leading
      axis of this length.
    order: What a fragment consists of: "sequential" (neighboring layers),
      "strided" (every (P - 1)-th layer, the default of Streaming DiLoCo, arXiv
      2501.18512), "sliced" (neighboring rows of every leaf), or "interleaved"
      (every P-th row of every leaf). If P > 1, fragment 0 of the first two
      orders has the leaves outside the layers, and no layers.
  """

  num_fragments: int
  num_layers: int
  order: str = "strided"

  def __post_init__(self):
    """Raises ValueError if there are too many fragments, or no such order."""
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
    """Returns the indices of the layers of a fragment, ascending.

    Call it only if there are several fragments and `is_sliced` is False.
    Fragment 0 has no layers.
    """
    num_layer_fragments = self.num_fragments - 1
    layers = np.arange(self.num_layers)
    if fragment == 0:
      return layers[:0]
    if self.order == "sequential":
      return np.array_split(layers, num_layer_fragments)[fragment - 1]
    return layers[fragment - 1 :: num_layer_fragments]

  @property
  def layer_table(self) -> np.ndarray:
    """Indices of the layers of fragments 1 to P - 1, [P - 1, K] int32.

    K is the number of layers of the longest fragment. Shorter rows are filled
    up with `num_layers`, which is no layer. The table is empty if P = 1 or if
    fragments are slices. With P = 4, the seven layers 0 to 6 are divided as
    below, where 7 fills up:

        strided     0 3 6      sequential   0 1 2
                    1 4 7                   3 4 7
                    2 5 7                   5 6 7
    """
    num_rows = 0 if self.is_sliced else self.num_fragments - 1
    width = -(-self.num_layers // num_rows) if num_rows else 0
    table = np.full((num_rows, width), self.num_layers, np.int32)
    for row in range(num_rows):
      layers = self.layers(row + 1)
      table[row, : len(layers)] = layers
    return table

  def slices(self, path: str, shape: Shape) -> tuple[Shape, int]:
    """Returns a shape that gives the P slices of a leaf an axis of their own.

    Reshape the leaf to this shape, [..., parts, P, rows, ...]. Then index p of
    the axis P selects slice p, which belongs to fragment p. The slice has
    `parts` groups of `rows` neighboring rows each. For example, a leaf of 6
    rows and P = 2:

        sliced       [1, 2, 3]   slice 1, [:, 1, :], has the rows 3, 4 and 5
        interleaved  [3, 2, 1]   slice 1, [:, 1, :], has the rows 1, 3 and 5

    A stacked leaf (`is_stacked`) has an axis of layers in front. It is sliced
    along the axis after the layers, or along the layers if it has no other
    axis. Any other leaf is sliced along its first axis.

    Args:
      path: Path of the leaf.
      shape: Shape of the leaf. A single number counts as one row.

    Returns:
      The shape, and the index of the axis `parts` in it. If P does not divide
      the number of rows, the shape has more rows than the leaf. Then the leaf
      must first be padded with rows of zeros.
    """
    shape = shape or (1,)
    axis = min(int(is_stacked(path)), len(shape) - 1)
    slice_rows = -(-shape[axis] // self.num_fragments)
    num_parts = slice_rows if self.order == "interleaved" else 1
    # A leaf without rows has no parts.
    part_rows = slice_rows // max(num_parts, 1)
    sliced_shape = (
      *shape[:axis],
      num_parts,
      self.num_fragments,
      part_rows,
      *shape[axis + 1 :],
    )
    return sliced_shape, axis

  def shapes(self, fragment: int, shapes: Shapes) -> dict[str, Shape]:
    """Returns the shapes of the leaves of one fragment, as it is sent.

    Args:
      fragment: Index of the fragment, 0 to P - 1.
      shapes: Shapes of the leaves of the whole tree, by path.

    Returns:
      Shapes of the leaves that the fragment has, by path. If fragments have
      unequal numbers of layers or rows, shorter ones are padded with zeros to
      the longest. With P > 1 slices, a leaf without axes has the shape (1,).
    """

    def sliced(path: str) -> Shape:
      shape, axis = self.slices(path, shapes[path])
      # The shape is [..., parts, P, rows, ...].
      num_parts, _, part_rows = shape[axis : axis + 3]
      return (*shape[:axis], num_parts * part_rows, *shape[axis + 3 :])

    if self.num_fragments == 1:
      return dict(shapes)
    if self.is_sliced:
      return {path: sliced(path) for path in shapes}
    if fragment == 0:  # It has the leaves outside the layers.
      return {
        path: shape for path, shape in shapes.items() if not is_stacked(path)
      }
    num_layers = self.layer_table.shape[1]
    return {
      path: (num_layers, *shape[1:])
      for path, shape in shapes.items()
      if is_stacked(path)
    }


def is_stacked(path: str) -> bool:
  """Returns whether the first axis of the leaf at a path is the layer axis.

  It is if the path begins with "blocks/", as in "blocks/query/kernel".
  Exception: if a number follows, as in "blocks/0/kernel", every layer has
  leaves of its own, which are not stacked.
  """
  first_key, _, other_keys = path.partition("/")
  second_key = other_keys.split("/", 1)[0]
  return first_key == BLOCKS and not second_key.isdigit()


def stacked_shape(path: str, shape: Shape) -> Shape:
  """Returns the shape of a leaf with a layer axis in front.

  A stacked leaf has this axis already, so the result is `shape` itself. For any
  other leaf, and for a leaf without axes, an axis of length 1 is added.
  """
  if shape and is_stacked(path):
    return tuple(shape)
  return (1, *shape)


def balanced(shapes: Shapes, num_fragments: int) -> dict[str, int]:
  """Assigns whole leaves to fragments so that these have similar sizes.

  Leaves are assigned from the largest to the smallest, each to the fragment
  with the fewest values so far. For example, leaves of 6, 5, 4 and 3 values
  make the two fragments (6, 3) and (5, 4).

  Args:
    shapes: Leaf shapes by path.
    num_fragments: Number of fragments, P, at most the number of leaves.

  Returns:
    Index of the fragment of every leaf, by path.

  Raises:
    ValueError: If there are fewer leaves than fragments.
  """
  if num_fragments > len(shapes):
    raise ValueError(
      f"num_fragments={num_fragments} must not exceed the number of leaves of "
      f"the tree, {len(shapes)}: lower it, or give fragments yourself"
    )
  sizes = {path: math.prod(shape) for path, shape in shapes.items()}
  fragment_sizes = [0] * num_fragments
  fragments = {}
  for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
    smallest = fragment_sizes.index(min(fragment_sizes))
    fragments[path] = smallest
    fragment_sizes[smallest] += sizes[path]
  return {path: fragments[path] for path in shapes}


def by_path(
  shapes: Shapes, num_fragments: int, fragment_of: Callable[[str], int]
) -> dict[str, int]:
  """Assigns each leaf to the fragment that a function of its path names.

  Args:
    shapes: Leaf shapes by path. Only the paths are read.
    num_fragments: Number of fragments, P.
    fragment_of: Function from a path to the index of its fragment, 0 to P - 1.

  Returns:
    Index of the fragment of every leaf, by path.

  Raises:
    ValueError: If an index is no whole number or out of range, or a fragment
      has no leaf.
  """
  fragments = {path: fragment_of(path) for path in shapes}
  for path, fragment in fragments.items():
    require(
      isinstance(fragment, numbers.Integral),
      f"leaf {path!r} is given fragment {shown(fragment)}, which is no whole "
      "number",
    )
    if not 0 <= fragment < num_fragments:
      raise ValueError(
        f"leaf {path!r} is given fragment {fragment}, but num_fragments="
        f"{num_fragments} numbers them from 0 to {num_fragments - 1}"
      )
  for fragment in set(range(num_fragments)) - set(fragments.values()):
    raise ValueError(
      f"fragment {fragment} has no leaf: lower num_fragments={num_fragments}, "
      "or give it one"
    )
  return fragments
