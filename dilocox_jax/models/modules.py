"""The modules of the decoder, in Flax.

`models.transformer` makes pure functions of them. Letters in names: B batch, L
length, T = B * L tokens, D model, N heads, K head width, F feed-forward, V
vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dilocox_jax.models.attention import (
  Cache,
  attend,
  extended,
  rotate,
  segment_positions,
)
from dilocox_jax.models.fused_attention import Attention, Segments
from dilocox_jax.plan.model.shapes import ModelShape

INIT_SCALE = 0.02
_ACTIVATIONS = {
  "swiglu": jax.nn.silu,  # Of the gate.
  "gelu": jax.nn.gelu,
  "relu": jax.nn.relu,
}


class Norm(nnx.Module):
  """Root-mean-square norm, or layer norm; see `ModelShape.norm`."""

  def __init__(self, width: int, shape: ModelShape):
    self.epsilon = shape.norm_epsilon
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
    zeros = jnp.zeros((width,), jnp.float32)
    self.bias = nnx.Param(zeros) if shape.norm == "layer" else None

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the normed rows, in the dtype of the argument."""
    # Squares of bf16 values lose too much when summed in bf16.
    wide = x.astype(np.promote_types(np.float32, x.dtype))
    if self.bias is not None:
      wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    y = wide * jax.lax.rsqrt(mean_square + self.epsilon)
    y = y * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    if self.bias is not None:
      y = y + self.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))
    return y.astype(x.dtype)


def _linear(
  fan_in: int,
  fan_out: int,
  scale: float,
  dtype: Any,
  rngs: nnx.Rngs,
  bias: bool = False,
) -> nnx.Linear:
  return nnx.Linear(
    fan_in,
    fan_out,
    use_bias=bias,
    dtype=dtype,
    param_dtype=jnp.float32,
    kernel_init=nnx.initializers.normal(scale),
    rngs=rngs,
  )


def _residual_scale(shape: ModelShape) -> float:
  # Each layer adds two terms to the stream. With this scale the variance of
  # their sum does not depend on depth: 12 layers add 24 terms, each with 1/24
  # of the variance (Radford et al. 2019, GPT-2, section 2.3).
  return INIT_SCALE / (2 * shape.num_layers) ** 0.5


class _Attention(nnx.Module):
  """Causal self-attention after a norm."""

  def __init__(
    self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs, mix: Attention
  ):
    heads = shape.num_heads * shape.head_width
    self.shape, self.mix, d = shape, mix, shape.model_dim
    self.norm = Norm(d, shape)
    bias = shape.has_bias("query")
    self.query = _linear(d, heads, INIT_SCALE, dtype, rngs, bias)
    shared = shape.kv_heads * shape.head_width
    self.key = _linear(d, shared, INIT_SCALE, dtype, rngs, bias)
    self.value = _linear(d, shared, INIT_SCALE, dtype, rngs, bias)
    if shape.qk_norm:
      self.query_norm = Norm(shape.head_width, shape)
      self.key_norm = Norm(shape.head_width, shape)
    scale, bias = _residual_scale(shape), shape.has_bias("output")
    self.output = _linear(heads, d, scale, dtype, rngs, bias)

  def __call__(
    self,
    x_TxD: Float[Array, "T D"],
    length: int,
    cache: Cache | None = None,
    start: int | Int[Array, ""] = 0,
    segments: Segments = None,
  ) -> tuple[Float[Array, "T D"], Cache]:
    y_TxD = self.norm(x_TxD)
    query, key, value = (
      project(y_TxD).reshape(-1, length, heads, self.shape.head_width)
      for project, heads in (
        (self.query, self.shape.num_heads),
        (self.key, self.shape.kv_heads),
        (self.value, self.shape.kv_heads),
      )
    )
    if self.shape.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    if self.shape.positions == "rope":
      base = self.shape.rope_base
      places = None if segments is None else segment_positions(segments)
      query, key = (rotate(x, base, start, places) for x in (query, key))
    new = {"key": key, "value": value}
    # The fused kernels read whole sequences, and a cache is read in parts.
    if cache is None:
      mixed = self.mix(query, key, value, segments)
    else:
      new = extended(cache, new, start)
      mixed = attend(query, new["key"], new["value"], segments, start)
    return self.output(mixed.reshape(x_TxD.shape[0], -1)), new


class _Mlp(nnx.Module):
  """Feed-forward after a norm, with a gate if it is SwiGLU."""

  def __init__(self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs):
    d, f = shape.model_dim, shape.ff_dim
    self.gated = shape.activation == "swiglu"
    self.activation = _ACTIVATIONS[shape.activation]
    self.norm = Norm(d, shape)
    bias = shape.has_bias("up")
    scale = _residual_scale(shape)
    if self.gated:
      self.gate = _linear(d, f, INIT_SCALE, dtype, rngs, bias)
    self.up = _linear(d, f, INIT_SCALE, dtype, rngs, bias)
    self.down = _linear(f, d, scale, dtype, rngs, bias)

  def __call__(self, x_TxD: Float[Array, "T D"]) -> Float[Array, "T D"]:
    y_TxD = self.norm(x_TxD)
    hidden_TxF = self.up(y_TxD)
    if self.gated:
      hidden_TxF = self.activation(self.gate(y_TxD)) * hidden_TxF
    else:
      hidden_TxF = self.activation(hidden_TxF)
    return self.down(hidden_TxF)


class _Block(nnx.Module):
  """One layer: attention and then the MLP, each added to the stream."""

  def __init__(
    self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs, mix: Attention
  ):
    self.attention = _Attention(shape, dtype, rngs, mix)
    self.mlp = _Mlp(shape, dtype, rngs)

  def __call__(
    self,
    x_TxD: Float[Array, "T D"],
    length: int,
    cache: Cache | None = None,
    start: int | Int[Array, ""] = 0,
    segments: Segments = None,
  ) -> tuple[Float[Array, "T D"], Cache]:
    added, cache = self.attention(x_TxD, length, cache, start, segments)
    x_TxD = x_TxD + added
    return x_TxD + self.mlp(x_TxD), cache


class _Embed(nnx.Module):
  """The token table, and the table of learned positions if there is one."""

  def __init__(self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs):
    table = (shape.vocab_size, shape.model_dim)
    normal = nnx.initializers.normal(INIT_SCALE)
    self.embedding = nnx.Param(normal(rngs.params(), table, jnp.float32))
    table = (shape.num_positions, shape.model_dim)
    self.positions = (
      nnx.Param(normal(rngs.params(), table, jnp.float32))
      if shape.positions == "learned"
      else None
    )
    self.dtype = dtype

  def __call__(
    self,
    tokens_BxL: Int[Array, "B L"],
    start: int | Int[Array, ""] = 0,
    segments: Segments = None,
  ) -> Float[Array, "T D"]:
    # "fill" gives NaN for a token outside the vocabulary, and NaN stops the
    # run. The default would clamp the token and train on another one.
    tokens_T = tokens_BxL.reshape(-1)
    rows = jnp.take(self.embedding[...], tokens_T, axis=0, mode="fill")
    if self.positions is not None:
      # A position outside the table is NaN, too.
      at = jnp.arange(tokens_BxL.shape[1], dtype=np.int32) + start
      if segments is not None:
        at = segment_positions(segments).reshape(-1)
      added = jnp.take(self.positions[...], at, axis=0, mode="fill")
      rows = rows + jnp.tile(added, (tokens_T.size // at.size, 1))
    return rows.astype(self.dtype)


class Decoder(nnx.Module):
  """All modules, in the order in which they draw their parameters.

  Changing the order would change the parameters that a seed gives.
  """

  def __init__(
    self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs, mix: Attention
  ):
    self.embed = _Embed(shape, dtype, rngs)

    @nnx.split_rngs(splits=shape.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs: nnx.Rngs) -> _Block:
      return _Block(shape, dtype, rngs, mix)

    self.blocks = stacked(rngs)
    self.final_norm = Norm(shape.model_dim, shape)
    if not shape.tied_head:
      self.head = _linear(
        shape.model_dim, shape.vocab_size, INIT_SCALE, dtype, rngs
      )
