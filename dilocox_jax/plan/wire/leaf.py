"""A parameter leaf as codecs see it: matrices or vectors of equal shape.

The blocks of a model are stacked, and a codec compresses each layer by itself.
So what is sent for a layer depends neither on other layers nor on how many
layers its fragment has.
"""

import dataclasses
import math
from collections.abc import Mapping

from dilocox_jax.plan.schedule.fragments import is_stacked

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """The shape of a leaf, with its layer axis separate.

  Attributes:
    num_layers: Number of layers; 1 for a leaf that is not stacked.
    shape: Shape of one layer.
  """

  num_layers: int
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    """Number of values in one layer."""
    return math.prod(self.shape)

  @property
  def stacked_shape(self) -> tuple[int, ...]:
    """Shape of the array with all layers, [num_layers, ...]."""
    return (self.num_layers, *self.shape)


def leaf_of(path: str, shape: tuple[int, ...]) -> Leaf:
  """Returns the leaf at a path, with a layer axis if it is stacked there."""
  if shape and is_stacked(path):
    return Leaf(shape[0], tuple(shape[1:]))
  return Leaf(1, tuple(shape))
