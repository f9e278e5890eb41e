"""A codec outside the package: the sign of large values, and zero.

After `register()` it also stands in chains such as "low_rank+ternary".
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from dilocox_jax.checks import limited
from dilocox_jax.codecs.base import Encoder, grouped, ungrouped
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Payload, Wire, group_shape
from dilocox_jax.plan.wire.payload_names import PayloadKind, register_codec

CODES_PER_BYTE = 5  # 3^5 = 243 fit into a byte.
POWERS = tuple(3**place for place in range(CODES_PER_BYTE))
# The inverse of a larger number could become zero on a device.
SMALLEST, LARGEST = float(jnp.finfo(jnp.float32).tiny), 2.0**124


@dataclasses.dataclass(frozen=True)
class Ternary(Payload):
  """Sends -1, 0 or 1 for each value, and a scale for each block.

  Wire: a byte for 5 values, and 2 bytes a block.

  Attributes:
    block_size: Largest number of values in a block.
    threshold: Smallest size that is not sent as zero, as a share of the mean
      size of the block.
  """

  role: ClassVar[str] = "quantiser"
  block_size: int = limited(128, at_least=1)
  threshold: float = limited(0.7, at_least=0, at_most=1)

  def own_wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Describes the arrays of codes and scales."""
    groups, width = group_shape(leaf, "block", self.block_size)
    return (
      Wire("codes", (leaf.num_layers, groups, -(-width // CODES_PER_BYTE)), 1),
      Wire("scales", (leaf.num_layers, groups, 1), 2),
    )


def encoder(payload: Ternary, leaf: Leaf) -> Encoder:
  """Encodes values as their sign, or as zero if they are small.

  Source: Li and Liu, 2016, "Ternary weight networks", arXiv 1605.04711.
  """
  groups, width = group_shape(leaf, "block", payload.block_size)
  num_bytes = -(-width // CODES_PER_BYTE)
  powers = jnp.asarray(POWERS, jnp.uint8)[:, None]

  def encode(values, key):
    del key
    blocks = grouped(values, groups, width)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    largest = jnp.minimum(largest, LARGEST)
    is_usable = largest > SMALLEST
    ratio = jnp.where(is_usable, blocks / jnp.where(is_usable, largest, 1), 0)
    size = jnp.abs(ratio)
    least = payload.threshold * jnp.mean(size, axis=-1, keepdims=True)
    is_sent = (size >= least) & (size > 0)
    count = jnp.sum(is_sent, axis=-1, keepdims=True, dtype=jnp.int32)
    total = jnp.sum(jnp.where(is_sent, size, 0), axis=-1, keepdims=True)
    scale = total / jnp.maximum(count, 1).astype(jnp.float32) * largest
    digits = jnp.where(is_sent, jnp.sign(ratio), 0).astype(jnp.int32) + 1
    missing = num_bytes * CODES_PER_BYTE - width
    digits = jnp.pad(digits.astype(jnp.uint8), ((0, 0), (0, 0), (0, missing)))
    rows = digits.reshape(*digits.shape[:-1], CODES_PER_BYTE, num_bytes)
    codes = jnp.sum(rows * powers[None, None], axis=-2, dtype=jnp.uint8)
    return codes, scale.astype(jnp.bfloat16)

  def decode(arrays):
    codes, scales = arrays
    rows = codes[..., None, :] // powers[None, None] % jnp.uint8(3)
    digits = rows.reshape(*codes.shape[:-1], -1)[..., :width]
    signs = digits.astype(jnp.float32) - 1
    return ungrouped(signs * scales.astype(jnp.float32), leaf)

  return Encoder(encode, decode)


def register() -> None:
  """Makes "ternary" a name for `codec.name`."""
  register_codec("ternary", PayloadKind(Ternary, encoder))
