"""Payloads as values: floats, and codes of a few bits.

A codec is built from its payload, so that predicted bytes and sent bytes
cannot differ. The payloads here send every value and end a chain; those that
send fewer values are in `reduction`, and chains in `wire`.
"""

import dataclasses
import math
from typing import ClassVar

from dilocox_jax.checks import one_of
from dilocox_jax.plan.wire.leaf import Leaf

FLOATS = ("float32", "bfloat16", "float16")
BITS = (8, 4, 2, 1)
SCALES = ("block", "row", "tensor")
ROUNDINGS = ("nearest", "stochastic")
SCALE_BYTES = 2  # bfloat16: fp16 would underflow on small pseudo-gradients.


@dataclasses.dataclass(frozen=True)
class Wire:
  """One array on the wire.

  Attributes:
    name: What it holds.
    shape: Its shape; the first axis is the layer.
    item_bytes: Size of an element (bytes).
  """

  name: str
  shape: tuple[int, ...]
  item_bytes: int

  @property
  def num_bytes(self) -> int:
    """Size of the whole array (bytes)."""
    return math.prod(self.shape) * self.item_bytes


class Payload:
  """What a codec sends.

  Attributes:
    is_projection: Whether its parts may be averaged before decoding.
  """

  is_projection: ClassVar[bool] = False

  def carried(self, leaf: Leaf) -> tuple[Leaf, ...]:
    """Dense arrays left for the next payload of a chain, in order."""
    del leaf
    return ()

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Arrays that this payload sends itself."""
    del leaf
    return ()

  def at(self, path: str) -> "Payload":
    """The payload of one leaf; most treat all alike."""
    del path
    return self


def share(name: str, value: float) -> None:
  """Raises ValueError unless an attribute is a share, above 0."""
  if not 0 < value <= 1:
    raise ValueError(f"{name}={value} must be above 0 and at most 1")


@dataclasses.dataclass(frozen=True)
class Dense(Payload):
  """Every value as a float.

  Wire: item size a value.

  Attributes:
    dtype: One of `FLOATS`.
  """

  dtype: str = "float32"

  def __post_init__(self):
    one_of("dtype", self.dtype, FLOATS)

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """The values."""
    item_bytes = 4 if self.dtype == "float32" else 2
    return (Wire("values", leaf.stacked_shape, item_bytes),)


def row_width(leaf: Leaf) -> int:
  """Values along the last axis; 1 for a scalar."""
  return leaf.shape[-1] if leaf.shape else 1


def group_shape(leaf: Leaf, scale: str, block_size: int) -> tuple[int, int]:
  """How a layer's values are grouped: (groups, values in each).

  Blocks are made equally long, so the last one is padded by less than a
  value a block rather than by up to a whole block.
  """
  if scale == "tensor":
    return 1, leaf.size
  if scale == "row":
    width = row_width(leaf)
    return leaf.size // width, width
  groups = -(-leaf.size // block_size)
  return groups, -(-leaf.size // groups)


def _coded(leaf: Leaf, groups: int, width: int, bits: int) -> Wire:
  return Wire("codes", (leaf.num_layers, groups, -(-width * bits // 8)), 1)


@dataclasses.dataclass(frozen=True)
class Int(Payload):
  """Values rounded to few bits, packed, with scales a group.

  Wire: bits a value, and for each group 2 bytes (4 bytes at 2 bits, which
  sends two magnitudes).

  Attributes:
    bits: 8, 4, 2 or 1.
    scale: What shares a scale: "block", "row" (last axis) or "tensor" (one
      layer).
    block_size: Values a block at most (count).
    rounding: "nearest" or "stochastic" (unbiased).
  """

  bits: int = 4
  scale: str = "block"
  block_size: int = 128
  rounding: str = "nearest"

  def __post_init__(self):
    one_of("bits", self.bits, BITS)
    one_of("scale", self.scale, SCALES)
    one_of("rounding", self.rounding, ROUNDINGS)
    if self.block_size < 1:
      raise ValueError(f"block_size={self.block_size} must be at least 1")

  @property
  def num_scales(self) -> int:
    """Scales a group."""
    return 2 if self.bits == 2 and self.rounding == "nearest" else 1

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Codes and scales."""
    groups, width = group_shape(leaf, self.scale, self.block_size)
    scales = (leaf.num_layers, groups, self.num_scales)
    return (
      _coded(leaf, groups, width, self.bits),
      Wire("scales", scales, SCALE_BYTES),
    )


@dataclasses.dataclass(frozen=True)
class E3M0(Payload):
  """Sign and a power of two, 4 bits, one scale a block.

  Wire: 4 bits a value and 2 bytes a block.

  Attributes:
    block_size: Values a block at most (count).
  """

  block_size: int = 128

  def __post_init__(self):
    if self.block_size < 1:
      raise ValueError(f"block_size={self.block_size} must be at least 1")

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Codes and scales."""
    groups, width = group_shape(leaf, "block", self.block_size)
    return (
      _coded(leaf, groups, width, 4),
      Wire("scales", (leaf.num_layers, groups, 1), SCALE_BYTES),
    )
