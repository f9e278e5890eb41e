"""Fragments: parts of the parameter tree that are sent together.

A model's blocks are stacked: every leaf under "blocks" has a leading layer
axis. Fragment 0 is everything else (embedding, final norm, head); fragments
1 to P - 1 share the layers. With P = 1 the whole tree is fragment 0. The
layers of a fragment are a row of a table, so a program can pick a fragment by
its number and does not grow with P.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dilocox_jax.checks import one_of

BLOCKS = "blocks"  # Top-level key of the stacked leaves.
ORDERS = ("sequential", "strided")


@dataclasses.dataclass(frozen=True)
class Fragments:
  """A division of the parameter tree into P disjoint fragments.

  Attributes:
    num_fragments: Number of fragments, P.
    num_layers: Number of layers, the length of the layer axis.
    order: "sequential" (neighbouring layers together) or "strided"
      (interleaved, the default of Streaming DiLoCo, arXiv 2501.18512).
  """

  num_fragments: int
  num_layers: int
  order: str = "strided"

  def __post_init__(self):
    one_of("fragment_order", self.order, ORDERS)
    if self.num_fragments > max(self.num_layers, 1):
      raise ValueError(
        f"num_fragments={self.num_fragments} must not exceed "
        f"num_layers={self.num_layers}: lower sync.num_fragments"
      )

  def layers(self, fragment: int) -> np.ndarray:
    """Returns the layers of a fragment, 1 or higher, in ascending order."""
    groups = self.num_fragments - 1
    if self.order == "strided":
      return np.arange(fragment - 1, self.num_layers, groups)
    return np.array_split(np.arange(self.num_layers), groups)[fragment - 1]

  @property
  def layer_table(self) -> np.ndarray:
    """Layers of fragments 1 to P - 1, a row [K] int32 for each.

    K is the number of layers of the longest fragment. Shorter rows end in
    `num_layers`, which is no layer. With P = 4, seven layers are divided into

        strided     0 3 6      sequential   0 1 2
                    1 4 7                   3 4 7
                    2 5 7                   5 6 7
    """
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
    """Returns the leaf shapes of one fragment.

    Args:
      fragment: Index of the fragment.
      shapes: Leaf shapes of the whole tree by path ("blocks/..." are stacked).

    Returns:
      Shapes by path. All fragments of layers are kept and sent with as many
      layers as the longest has; shorter ones are filled up with zeros.
    """
    if self.num_fragments == 1:
      return dict(shapes)
    if fragment == 0:
      return {k: v for k, v in shapes.items() if not is_stacked(k)}
    count = self.layer_table.shape[1]
    return {k: (count, *v[1:]) for k, v in shapes.items() if is_stacked(k)}


def is_stacked(path: str) -> bool:
  """Whether the first axis of the leaf at a path is the layer."""
  return path.split("/", 1)[0] == BLOCKS
