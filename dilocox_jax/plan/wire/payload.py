"""Payloads, which describe the arrays that a codec sends.

A codec is built from its payload, so predicted bytes and sent bytes cannot
differ. The payloads in this file send every value, as a float or as a code of
few bits, and are the last link of a chain. Payloads that send fewer values are
in `reduction`, and chains of payloads are in `chain`.
"""

import dataclasses
import math
from typing import ClassVar

from dilocox_jax.checks import check_limits, limited
from dilocox_jax.plan.wire.leaf import Leaf

FLOATS = ("float32", "bfloat16", "float16")
BITS = (8, 4, 2, 1)
SCALES = ("block", "row", "tensor")
ROUNDINGS = ("nearest", "stochastic")
# Places in a chain, and what a payload there must say. Projections are linear
# and the same on all replicas; selections must be decoded before the mean.
ROLES = {
  "projection": "carried",
  "selection": "carried",
  "quantiser": "own_wires",
}
SCALE_BYTES = 2  # bfloat16: fp16 would underflow on small pseudo-gradients.


@dataclasses.dataclass(frozen=True)
class Wire:
  """Describes an array that is sent.

  Attributes:
    name: Name of the contents, e.g. "codes" or "scales".
    shape: Shape of the array. The first axis is the layer.
    item_bytes: Size of an element (bytes).
  """

  name: str
  shape: tuple[int, ...]
  item_bytes: int

  @property
  def num_bytes(self) -> int:
    """Size of the array (bytes)."""
    return math.prod(self.shape) * self.item_bytes


class Payload:
  """Describes what a codec sends.

  Attributes:
    role: Place in a chain, one of `ROLES`.
  """

  role: ClassVar[str] = ""

  def __post_init__(self):
    """Raises ValueError if a field is outside its limits."""
    check_limits(self)

  @property
  def is_projection(self) -> bool:
    """Whether what is carried may be averaged before it is decoded."""
    return self.role == "projection"

  def slices(self, leaf: Leaf, count: int) -> Leaf:
    """Cuts a leaf into slices of equal length, with zeros at the end.

    A reduce-scatter encodes each slice by itself. So a payload that gives
    neighbouring values a meaning together must not cut between them. A leaf of
    10 values becomes 3 slices of 4 values, the last of them with two zeros.

    Args:
      leaf: The leaf; its layers are cut as one array.
      count: Number of slices.

    Returns:
      The slices as layers of one leaf, [count, ...].
    """
    return Leaf(count, (-(-leaf.num_layers * leaf.size // count),))

  def carried(self, leaf: Leaf) -> tuple[Leaf, ...]:
    """Returns the shapes of the arrays that this payload passes on.

    The next payload of the chain encodes and sends them. A payload that ends a
    chain passes on nothing.

    Args:
      leaf: Shape of the leaf that this payload encodes.
    """
    return ()

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Describes the arrays that this payload itself sends for a leaf.

    They do not include what the next payload of the chain sends (`carried`).
    For example top_k sends the indices of the values it selects, and passes on
    the values.

    Args:
      leaf: Shape of the leaf that this payload encodes.
    """
    return ()


@dataclasses.dataclass(frozen=True)
class Dense(Payload):
  """Sends every value as a float.

  Wire: 4 bytes a value for float32, 2 bytes for bfloat16 and float16.

  Attributes:
    dtype: Type of the floats, one of `FLOATS`.
  """

  role: ClassVar[str] = "quantiser"
  dtype: str = limited("float32", choices=FLOATS)

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Describes the array of values."""
    item_bytes = 4 if self.dtype == "float32" else 2
    return (Wire("values", leaf.stacked_shape, item_bytes),)


def row_width(leaf: Leaf) -> int:
  """Returns the length of a leaf's last axis; 1 for a scalar."""
  return leaf.shape[-1] if leaf.shape else 1


def group_shape(leaf: Leaf, scale: str, block_size: int) -> tuple[int, int]:
  """Returns how the values of one layer are divided into groups.

  All values of a group share a scale. All groups have the same length, so the
  last one is padded with zeros. Blocks are as short as their number allows,
  which pads by less than one value for each block. A layer of 300 values in
  blocks of at most 128 needs 3 blocks: blocks of 100 need no padding, while
  blocks of 128 would have to be padded by 84 values.

  Args:
    leaf: Shape of the leaf.
    scale: Kind of the groups: "tensor" (the whole layer), "row" (its last axis)
      or "block".
    block_size: Largest number of values in a block.

  Returns:
    Number of groups, and number of values in each.
  """
  if scale == "tensor":
    return 1, leaf.size
  if scale == "row":
    width = row_width(leaf)
    return leaf.size // width, width
  groups = -(-leaf.size // block_size)
  return groups, -(-leaf.size // groups)


def _coded(
  leaf: Leaf, groups: tuple[int, int], bits: int, num_scales: int = 1
) -> tuple[Wire, Wire]:
  """Describes the codes and scales of groups (`group_shape`) of values."""
  count, width = groups
  code_bytes = -(-width * bits // 8)
  return (
    Wire("codes", (leaf.num_layers, count, code_bytes), 1),
    Wire("scales", (leaf.num_layers, count, num_scales), SCALE_BYTES),
  )


@dataclasses.dataclass(frozen=True)
class Int(Payload):
  """Sends values rounded to few bits, packed, with scales for each group.

  Wire: `bits` bits a value, and for each group 2 bytes (4 bytes at 2 bits with
  rounding to the nearest, which sends two magnitudes). A layer of 128 x 344
  values at 4 bits in blocks of 128 is 22,016 bytes of codes and 688 of scales.

  Attributes:
    bits: Bits of a code: 8, 4, 2 or 1.
    scale: Values that share a scale: "block", "row" (last axis) or "tensor"
      (one layer).
    block_size: Largest number of values in a block.
    rounding: "nearest" or "stochastic" (unbiased).
  """

  role: ClassVar[str] = "quantiser"
  bits: int = limited(4, choices=BITS)
  scale: str = limited("block", choices=SCALES)
  block_size: int = limited(128, at_least=1)
  rounding: str = limited("nearest", choices=ROUNDINGS)

  @property
  def num_scales(self) -> int:
    """Number of scales of a group."""
    return 2 if self.bits == 2 and self.rounding == "nearest" else 1

  def slices(self, leaf: Leaf, count: int) -> Leaf:
    """Cuts a leaf between rows where the values of a row share a scale."""
    if self.scale != "row":
      return super().slices(leaf, count)
    width = row_width(leaf)
    num_rows = leaf.num_layers * leaf.size // width
    return Leaf(count, (-(-num_rows // count), width))

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Describes the arrays of codes and scales."""
    groups = group_shape(leaf, self.scale, self.block_size)
    return _coded(leaf, groups, self.bits, self.num_scales)


@dataclasses.dataclass(frozen=True)
class E3M0(Payload):
  """Sends a sign and a power of two in 4 bits, and a scale for each block.

  Wire: 4 bits a value and 2 bytes a block.

  Attributes:
    block_size: Largest number of values in a block.
  """

  role: ClassVar[str] = "quantiser"
  block_size: int = limited(128, at_least=1)

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Describes the arrays of codes and scales."""
    return _coded(leaf, group_shape(leaf, "block", self.block_size), bits=4)
