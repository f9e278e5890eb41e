"""Payloads that reduce the number of values, which another payload then rounds.

*Projections* are linear and the same on all replicas. So projecting and then
averaging is the same as averaging and then projecting, and what they carry may
be averaged before it is decoded. A projection may need several exchanges in
turn. *Selections* differ by replica and must be decoded before the mean.
"""

import dataclasses
from typing import ClassVar

from dilocox_jax.checks import limited
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Payload, Wire, group_shape

INDEX_CODINGS = ("packed", "bitmap")
FACTORISATIONS = ("shared", "local")


@dataclasses.dataclass(frozen=True)
class LowRank(Payload):
  """Sends each matrix as two thin factors.

  A leaf is factorised if it is a matrix and the factors have fewer values than
  the matrix has. Otherwise the next payload gets it whole.

  Wire: rank (rows + columns) values for each matrix and power iteration. A
  matrix of 128 x 344 at rank 16 is 7,552 values instead of 44,032.

  Attributes:
    rank: Columns of a factor (count).
    power_iterations: Passes over the matrix (count); "shared" exchanges both
      factors in each.
    factorisation: "shared" (PowerSGD: the factors are averaged, one after the
      other) or "local" (each replica factorises alone and sends both).
  """

  rank: int = limited(16, at_least=1)
  power_iterations: int = limited(1, at_least=1)
  factorisation: str = limited("shared", choices=FACTORISATIONS)

  @property
  def role(self) -> str:  # type: ignore[override]
    """A projection if factors are made together, else a selection."""
    return "projection" if self.factorisation == "shared" else "selection"

  def factorises(self, leaf: Leaf) -> bool:
    """Whether a leaf is sent as factors."""
    is_matrix = len(leaf.shape) == 2
    return is_matrix and self.rank * sum(leaf.shape) < leaf.size

  def carried(self, leaf: Leaf) -> tuple[Leaf, ...]:
    """Returns the factors, left and right in turn."""
    if not self.factorises(leaf):
      return (leaf,)
    pair = tuple(Leaf(leaf.num_layers, (n, self.rank)) for n in leaf.shape)
    return pair * (self.power_iterations if self.is_projection else 1)


@dataclasses.dataclass(frozen=True)
class TopK(Payload):
  """Sends the largest values of each block, and their places.

  Wire: for "packed", ceil(log2(block)) bits for each kept value; for "bitmap",
  one bit for each value of the block. The next payload sends the kept values.
  In a block of 4096, 64 kept values need 96 bytes packed, or a bitmap of 512;
  from 342 kept values on the bitmap is smaller.

  Attributes:
    fraction: Share of a block's values that is kept.
    block_size: Most values of a block (count).
    indices: Coding of the places: "packed" or "bitmap".
  """

  role: ClassVar[str] = "selection"
  fraction: float = limited(1 / 64, above=0, at_most=1)
  block_size: int = limited(4096, at_least=1)
  indices: str = limited("packed", choices=INDEX_CODINGS)

  def num_kept(self, width: int) -> int:
    """Returns the number of values kept of a block."""
    return max(1, round(self.fraction * width))

  def index_bits(self, width: int) -> int:
    """Returns the number of bits of one packed index."""
    return max(1, (width - 1).bit_length())

  def carried(self, leaf: Leaf) -> tuple[Leaf, ...]:
    """Returns the array of kept values of all blocks."""
    groups, width = group_shape(leaf, "block", self.block_size)
    return (Leaf(leaf.num_layers, (groups * self.num_kept(width),)),)

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Returns the array of indices."""
    groups, width = group_shape(leaf, "block", self.block_size)
    bits = width
    if self.indices == "packed":
      bits = self.num_kept(width) * self.index_bits(width)
    return (Wire("indices", (leaf.num_layers, groups, -(-bits // 8)), 1),)


@dataclasses.dataclass(frozen=True)
class RandomMask(Payload):
  """Sends randomly chosen values, the same ones on all replicas.

  Wire: nothing of its own, since replicas share the seed of the mask. The next
  payload sends the chosen values.

  Attributes:
    fraction: Share of the values that is sent.
  """

  fraction: float = limited(0.1, above=0, at_most=1)
  role: ClassVar[str] = "projection"

  def num_kept(self, size: int) -> int:
    """Returns the number of values chosen of a layer."""
    return max(1, round(self.fraction * size))

  def carried(self, leaf: Leaf) -> tuple[Leaf, ...]:
    """Returns the array of chosen values."""
    return (Leaf(leaf.num_layers, (self.num_kept(leaf.size),)),)
