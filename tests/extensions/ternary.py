"""A codec outside the package: the sign of large values, and zero.

After `register()` it also stands in chains such as "low_rank+ternary".
"""

import dataclasses
import math

import jax.numpy as jnp

import dilocox_jax as dx

POWERS = (1, 3, 9, 27, 81)  # Five codes share a byte: 3^5 = 243.
# The inverse of a larger number could become zero on a device.
SMALLEST = float(jnp.finfo(jnp.float32).tiny)
LARGEST = 2.0**124


@dataclasses.dataclass(frozen=True)
class Ternary(dx.Quantizer):
  """Sends -1, 0 or 1 for each value, and a scale for each row.

  Wire: a byte for 5 values, and 2 bytes a row.
  Source: Li and Liu, 2016, "Ternary weight networks", arXiv 1605.04711.
  Differs: a scale for each row instead of one for a tensor.

  Attributes:
    row_size: Largest number of values in a row.
    threshold: Smallest size that is not sent as zero, as a share of the mean
      size of the row.
  """

  row_size: int = dx.limited(128, at_least=1)
  threshold: float = dx.limited(0.7, at_least=0, at_most=1)

  def width(self, shape):
    """Returns the number of values in a row; zeros fill the last row."""
    return min(self.row_size, math.prod(shape))

  def code(self, rows):
    """Returns codes [layers, rows, bytes] and scales [layers, rows, 1]."""
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    largest = jnp.minimum(largest, LARGEST)
    is_usable = largest > SMALLEST
    ratio = jnp.where(is_usable, rows / jnp.where(is_usable, largest, 1), 0)
    size = jnp.abs(ratio)
    least = self.threshold * jnp.mean(size, axis=-1, keepdims=True)
    is_sent = (size >= least) & (size > 0)
    count = jnp.sum(is_sent, axis=-1, keepdims=True, dtype=jnp.int32)
    total = jnp.sum(jnp.where(is_sent, size, 0), axis=-1, keepdims=True)
    scales = total / jnp.maximum(count, 1).astype(jnp.float32) * largest
    digits = jnp.where(is_sent, jnp.sign(ratio), 0).astype(jnp.int32) + 1
    return _packed(digits.astype(jnp.uint8)), scales.astype(jnp.bfloat16)

  def values(self, arrays, width):
    """Reverses `code`."""
    codes, scales = arrays
    digits = codes[..., None, :] // _powers() % jnp.uint8(3)
    digits = digits.reshape(*codes.shape[:-1], -1)[..., :width]
    return (digits.astype(jnp.float32) - 1) * scales.astype(jnp.float32)


def _packed(digits):
  """Returns digits 0 to 2 [layers, rows, width], five of them in a byte."""
  missing = -digits.shape[-1] % len(POWERS)
  digits = jnp.pad(digits, ((0, 0), (0, 0), (0, missing)))
  digits = digits.reshape(*digits.shape[:-1], len(POWERS), -1)
  return jnp.sum(digits * _powers(), axis=-2, dtype=jnp.uint8)


def _powers():
  """Returns 1, 3, 9, 27, 81 along the axis of the five digits of a byte."""
  return jnp.asarray(POWERS, jnp.uint8)[None, None, :, None]


def register() -> None:
  """Makes "ternary" a name for `exchange.codec`."""
  dx.register_codec("ternary", Ternary)
