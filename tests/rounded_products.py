"""Matrix products as accelerators compute them, on a CPU.

A TPU multiplies fp32 values in bfloat16 unless a product states its precision,
and recent NVIDIA GPUs multiply them in TF32. A CPU knows neither. So the
factors of every product are rounded before it is computed in fp32, as far as
the precision of the product allows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import dot_general_p

MANTISSA_BITS = {"tf32": 10, "bf16": 7}
_HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
_HIGH = (jax.lax.Precision.HIGH,) * 2


def round_products(kind: str) -> None:
  """Rounds the factors of all fp32 products from now on: "tf32" or "bf16"."""
  bits = MANTISSA_BITS[kind]
  exact = dot_general_p.bind

  def rounded(x):
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)

  def bind(x, y, *, precision, **params) -> Any:
    def product(x, y):
      return exact(x, y, precision=precision, **params)

    is_wide = x.dtype == y.dtype == jnp.float32
    if not is_wide or precision == _HIGHEST:
      return product(x, y)
    high_x = rounded(x)
    high_y = rounded(y)
    total = product(high_x, high_y)
    if kind == "bf16" and precision == _HIGH:
      # A TPU adds the products of what rounding left, except the smallest.
      total += product(high_x, rounded(y - high_y))
      total += product(rounded(x - high_x), high_y)
    return total

  dot_general_p.bind = bind
