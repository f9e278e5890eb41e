"""Payloads that leave fewer values than there were, for another to round.

*Projections* are linear and the same on all replicas: the mean of what they
leave is what they would leave of the mean, so it may be averaged before it is
spread out again, and a projection may ask for several exchanges in turn.
*Selections* differ by replica and must be undone before the mean.
"""

import dataclasses
from typing import ClassVar

from dilocox_jax.checks import one_of
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import (
  Payload,
  Wire,
  group_shape,
  share,
)

INDEX_CODINGS = ("packed", "bitmap")
FACTORISATIONS = ("shared", "local")


@dataclasses.dataclass(frozen=True)
class LowRank(Payload):
  """Each matrix as two thin factors.

  A leaf is factorised if it is a matrix and the factors hold fewer values
  than it does; otherwise it is handed on whole.

  Wire: rank (rows + columns) values a matrix and power iteration.

  Attributes:
    rank: Columns of a factor (count).
    power_iterations: Passes over the matrix; "shared" exchanges both factors
      in each.
    factorisation: "shared" (PowerSGD: factors are averaged one after the
      other) or "local" (each replica factorises alone and sends both).
  """

  rank: int = 16
  power_iterations: int = 1
  factorisation: str = "shared"

  def __post_init__(self):
    one_of("factorisation", self.factorisation, FACTORISATIONS)
    if self.rank < 1 or self.power_iterations < 1:
      raise ValueError(
        f"rank={self.rank} and power_iterations={self.power_iterations} "
        "must be at least 1"
      )

  @property
  def is_projection(self) -> bool:  # type: ignore[override]
    """Factors made together may be averaged."""
    return self.factorisation == "shared"

  def factorises(self, leaf: Leaf) -> bool:
    """Whether a leaf is sent as factors."""
    if len(leaf.shape) != 2:
      return False
    return self.rank * sum(leaf.shape) < leaf.size

  def carried(self, leaf: Leaf) -> tuple[Leaf, ...]:
    """The factors, left and right in turn."""
    if not self.factorises(leaf):
      return (leaf,)
    pair = tuple(Leaf(leaf.num_layers, (n, self.rank)) for n in leaf.shape)
    return pair * (self.power_iterations if self.is_projection else 1)


@dataclasses.dataclass(frozen=True)
class TopK(Payload):
  """The largest values of each block, and where they stand.

  Wire: for "packed", ceil(log2(block)) bits a kept value; for "bitmap", one
  bit a value of the block; the kept values are left to the next payload.

  Attributes:
    fraction: Share of a block's values that is kept.
    block_size: Values a block at most (count).
    indices: "packed" or "bitmap".
  """

  fraction: float = 1 / 64
  block_size: int = 4096
  indices: str = "packed"

  def __post_init__(self):
    share("fraction", self.fraction)
    one_of("indices", self.indices, INDEX_CODINGS)
    if self.block_size < 1:
      raise ValueError(f"block_size={self.block_size} must be at least 1")

  def num_kept(self, width: int) -> int:
    """Values kept of a block."""
    return max(1, round(self.fraction * width))

  def index_bits(self, width: int) -> int:
    """Bits of one packed index."""
    return max(1, (width - 1).bit_length())

  def carried(self, leaf: Leaf) -> tuple[Leaf, ...]:
    """The kept values of all blocks."""
    groups, width = group_shape(leaf, "block", self.block_size)
    return (Leaf(leaf.num_layers, (groups * self.num_kept(width),)),)

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """The indices."""
    groups, width = group_shape(leaf, "block", self.block_size)
    bits = width
    if self.indices == "packed":
      bits = self.num_kept(width) * self.index_bits(width)
    return (Wire("indices", (leaf.num_layers, groups, -(-bits // 8)), 1),)


@dataclasses.dataclass(frozen=True)
class RandomMask(Payload):
  """A random part of the values, drawn alike on all replicas.

  Wire: nothing of its own, since the seed is shared; the part's values are
  left to the next payload.

  Attributes:
    fraction: Share of the values.
  """

  fraction: float = 0.1
  is_projection: ClassVar[bool] = True

  def __post_init__(self):
    share("fraction", self.fraction)

  def num_kept(self, size: int) -> int:
    """Values drawn of a layer."""
    return max(1, round(self.fraction * size))

  def carried(self, leaf: Leaf) -> tuple[Leaf, ...]:
    """The drawn values."""
    return (Leaf(leaf.num_layers, (self.num_kept(leaf.size),)),)
