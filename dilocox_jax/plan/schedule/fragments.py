"""Which parameters travel together.

A model's blocks are stacked: every leaf under "blocks" has a leading layer
axis. Fragment 0 is everything else (embedding, final norm, head); fragments
1 to P - 1 share the layers. With P = 1 the whole tree is fragment 0. The
layers of a fragment are a row of a table, so that a program can pick a
fragment by a number and need not grow with P.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

BLOCKS = "blocks"  # Top-level key of the stacked leaves.
ORDERS = ("sequential", "strided")


@dataclasses.dataclass(frozen=True)
class Fragments:
  """A division of the tree into P disjoint fragments that cover it.

  Attributes:
    num_fragments: P.
    num_layers: Length of the layer axis.
    order: "sequential" (neighbouring layers together) or "strided"
      (interleaved, the default of Streaming DiLoCo, arXiv 2501.18512).
  """

  num_fragments: int
  num_layers: int
  order: str = "strided"

  def __post_init__(self):
    if self.order not in ORDERS:
      raise ValueError(
        f"fragment_order={self.order!r} must be one of {', '.join(ORDERS)}"
      )
    if self.num_fragments > max(self.num_layers, 1):
      raise ValueError(
        f"num_fragments={self.num_fragments} must not exceed "
        f"num_layers={self.num_layers}: lower sync.num_fragments"
      )

  def layers(self, fragment: int) -> np.ndarray:
    """The layers of a fragment >= 1, ascending."""
    groups = self.num_fragments - 1
    if self.order == "strided":
      return np.arange(fragment - 1, self.num_layers, groups)
    return np.array_split(np.arange(self.num_layers), groups)[fragment - 1]

  @property
  def layer_table(self) -> np.ndarray:
    """Layers by fragment, [P - 1, K] int32; short rows end in num_layers."""
    groups = self.num_fragments - 1
    width = -(-self.num_layers // groups) if groups else 0
    table = np.full((groups, width), self.num_layers, np.int32)
    for row in range(groups):
      layers = self.layers(row + 1)
      table[row, : len(layers)] = layers
    return table

  def shapes(
    self, fragment: int, shapes: Mapping[str, tuple[int, ...]]
  ) -> dict[str, tuple[int, ...]]:
    """Leaf shapes of one fragment.

    Args:
      fragment: Index of the fragment.
      shapes: Shapes of the whole tree by path ("blocks/..." are stacked).

    Returns:
      Path to shape. Layer fragments are all as long as the longest, which is
      how they are held and sent: short ones end in zeros.
    """
    if self.num_fragments == 1:
      return dict(shapes)
    if fragment == 0:
      return {k: v for k, v in shapes.items() if not is_stacked(k)}
    count = self.layer_table.shape[1]
    return {k: (count, *v[1:]) for k, v in shapes.items() if is_stacked(k)}


def is_stacked(path: str) -> bool:
  """Whether the leaf at a path has a layer axis in front."""
  return path.split("/", 1)[0] == BLOCKS
