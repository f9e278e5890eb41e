"""What travels between the stages of a replica.

Links inside a cluster are fast, but a pipeline crosses them in every tick, so
activations and their gradients may be sent in fewer bits than they were
computed in. That is lossy and therefore never the default. Encoding is a pair
of functions around the hop, so that the pipeline is the same with any of them.

Letters in names: T tokens, D model.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

Message = tuple[Array, ...]

_INT8_MAX = 127


class Boundary(NamedTuple):
  """How a value crosses from one stage to another.

  Attributes:
    encode: Value [T, D] to the arrays that are sent.
    decode: Those arrays and a dtype to the value [T, D] in that dtype.
  """

  encode: Callable[[Array], Message]
  decode: Callable[[Message, jnp.dtype], Array]


def _as_bfloat16(x_TxD: Float[Array, "T D"]) -> Message:
  """Rounds to 8 significant bits: |error| <= 2^-8 |x|, element by element."""
  return (x_TxD.astype(jnp.bfloat16),)


def _as_int8(x_TxD: Float[Array, "T D"]) -> Message:
  """Rounds to 255 levels a token: |error| <= max over its row of |x| / 254.

  A bound to which the rounding of the scale itself adds some 2^-24 of the
  maximum in fp32. Where one value of a row is not finite the scale is not, and
  so no value of the row, which stops a run as it should.
  """
  x_TxD = x_TxD.astype(jnp.float32)
  scale_Tx1 = jnp.max(jnp.abs(x_TxD), axis=-1, keepdims=True) / _INT8_MAX
  safe_Tx1 = jnp.where(scale_Tx1 > 0, scale_Tx1, 1)
  levels = jnp.clip(jnp.round(x_TxD / safe_Tx1), -_INT8_MAX, _INT8_MAX)
  return levels.astype(jnp.int8), scale_Tx1


def _from_int8(message: Message, dtype: jnp.dtype) -> Array:
  levels_TxD, scale_Tx1 = message
  return (levels_TxD.astype(jnp.float32) * scale_Tx1).astype(dtype)


# In the dtype in which the model computes.
AS_COMPUTED = Boundary(lambda x: (x,), lambda sent, dtype: sent[0])

BOUNDARIES = {
  "none": AS_COMPUTED,
  "bfloat16": Boundary(_as_bfloat16, lambda sent, dtype: sent[0].astype(dtype)),
  "int8": Boundary(_as_int8, _from_int8),
}
