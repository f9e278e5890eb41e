"""Compresses activations and their gradients between two pipeline stages.

The links inside a cluster are fast, but a pipeline uses them in every tick. So
the values may be sent in fewer bits than they were computed in. This loses
accuracy and is therefore never the default. A codec is a pair of functions
around the hop, so the pipeline is the same program with any of them.

Letters in names: T tokens, D model.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

Message = tuple[Array, ...]

_INT8_MAX = 127


class ActivationCodec(NamedTuple):
  """Encodes a value for the hop from one stage to another.

  Attributes:
    encode: Function from a value [T, D] to the arrays that are sent.
    decode: Function from those arrays and a dtype to the value [T, D] in that
      dtype.
  """

  encode: Callable[[Array], Message]
  decode: Callable[[Message, jnp.dtype], Array]


def _as_bfloat16(x_TxD: Float[Array, "T D"]) -> Message:
  """Rounds to 8 significant bits: |error| <= 2^-8 |x| for each element."""
  return (x_TxD.astype(jnp.bfloat16),)


def _from_bfloat16(message: Message, dtype: jnp.dtype) -> Array:
  return message[0].astype(dtype)


def _as_int8(x_TxD: Float[Array, "T D"]) -> Message:
  """Rounds each token to 255 levels: |error| <= max(|row|) / 254.

  Example: a row [0.5, -1.0, 0.1] has the scale 1 / 127. It is sent as the
  levels [64, -127, 13] and read as [0.504, -1.0, 0.102].

  Rounding the scale to fp32 adds about 2^-24 of the row's maximum to that
  bound. If one value of a row is not finite, the scale is not finite either,
  and so the whole row is not. That stops the run, as it should.
  """
  x_TxD = x_TxD.astype(jnp.float32)
  scale_Tx1 = jnp.max(jnp.abs(x_TxD), axis=-1, keepdims=True) / _INT8_MAX
  # A row of zeros has the scale 0; dividing by it would give NaN.
  safe_Tx1 = jnp.where(scale_Tx1 > 0, scale_Tx1, 1)
  levels = jnp.clip(jnp.round(x_TxD / safe_Tx1), -_INT8_MAX, _INT8_MAX)
  return levels.astype(jnp.int8), scale_Tx1


def _from_int8(message: Message, dtype: jnp.dtype) -> Array:
  levels_TxD, scale_Tx1 = message
  return (levels_TxD.astype(jnp.float32) * scale_Tx1).astype(dtype)


# Sends values in the dtype in which the model computes.
AS_COMPUTED = ActivationCodec(lambda x: (x,), lambda sent, dtype: sent[0])

# The codec of every name in `plan.choices.BOUNDARIES`.
ACTIVATION_CODECS = {
  "none": AS_COMPUTED,  # Bytes of one token: D times the dtype's size.
  "bfloat16": ActivationCodec(_as_bfloat16, _from_bfloat16),  # 2 D bytes.
  "int8": ActivationCodec(_as_int8, _from_int8),  # D + 4 bytes.
}
