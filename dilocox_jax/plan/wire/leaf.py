"""One parameter leaf as codecs see it: a pile of equal matrices or vectors.

A model's blocks are stacked, and each layer is compressed by itself, so that
what is sent for a layer depends neither on its neighbours nor on how many
layers a fragment has.
"""

import dataclasses
import math
from collections.abc import Mapping

from dilocox_jax.plan.schedule.fragments import is_stacked

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """A leaf with its layer axis set apart.

  Attributes:
    num_layers: Matrices or vectors in it; 1 where leaves are not stacked.
    shape: Shape of one of them.
  """

  num_layers: int
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    """Values in one layer (count)."""
    return math.prod(self.shape)

  @property
  def stacked_shape(self) -> tuple[int, ...]:
    """Shape of the array that holds all layers."""
    return (self.num_layers, *self.shape)


def leaf_of(path: str, shape: tuple[int, ...]) -> Leaf:
  """The leaf at a path: under "blocks" the first axis is the layer."""
  if is_stacked(path):
    return Leaf(shape[0], tuple(shape[1:]))
  return Leaf(1, tuple(shape))
