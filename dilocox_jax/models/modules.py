"""The modules of the decoder, in Flax.

`models.transformer` makes pure functions of these modules. The argument `dtype`
is the compute dtype, e.g. `jnp.bfloat16`; parameters are created in fp32.

Letters in names: B batch, L length, T = B * L tokens, D model, N heads, K head
width, F feed-forward, V vocabulary.
"""

import functools
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

# Standard deviation of the first values of kernels and tables, as in GPT
# (Radford et al. 2018, recalled).
INIT_SCALE = 0.02
_ACTIVATIONS = {
  "swiglu": jax.nn.silu,  # The activation of the gate.
  "gelu": jax.nn.gelu,
  "relu": jax.nn.relu,
}


class Norm(nnx.Module):
  """An RMS norm or a layer norm of rows, as `ModelShape.norm` says."""

  def __init__(self, width: int, shape: ModelShape):
    """Makes scales of 1, and for a layer norm biases of 0, [width]."""
    self.epsilon = shape.norm_epsilon
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
    if shape.norm == "layer":
      self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
    else:
      self.bias = None

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the normalized rows, in the dtype of the argument."""
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
  """Builds a linear layer whose fp32 kernel is drawn from N(0, scale^2)."""
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
  """Returns the standard deviation of the last kernels of attention and MLP.

  The products of these kernels are added to the residual stream, two in each
  layer. With this standard deviation, the variance of the sum does not depend
  on the depth: 12 layers add 24 terms, each with 1/24 of the variance.

  Source: Radford et al. 2019, GPT-2, section 2.3.
  """
  return INIT_SCALE / (2 * shape.num_layers) ** 0.5


class _Attention(nnx.Module):
  """The attention of one layer: a norm, and causal self-attention."""

  def __init__(
    self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs, mix: Attention
  ):
    """Makes the norms, and draws the kernels of the four projections.

    `mix` is the attention of whole sequences (`models.fused_attention`).
    """
    self.shape = shape
    self.mix = mix
    model_dim = shape.model_dim
    query_width = shape.num_heads * shape.head_width
    key_width = shape.kv_heads * shape.head_width
    self.norm = Norm(model_dim, shape)
    has_bias = shape.has_bias("query")
    self.query = _linear(
      model_dim, query_width, INIT_SCALE, dtype=dtype, rngs=rngs, bias=has_bias
    )
    self.key = _linear(
      model_dim, key_width, INIT_SCALE, dtype=dtype, rngs=rngs, bias=has_bias
    )
    self.value = _linear(
      model_dim, key_width, INIT_SCALE, dtype=dtype, rngs=rngs, bias=has_bias
    )
    if shape.qk_norm:
      self.query_norm = Norm(shape.head_width, shape)
      self.key_norm = Norm(shape.head_width, shape)
    self.output = _linear(
      query_width,
      model_dim,
      _residual_scale(shape),
      dtype=dtype,
      rngs=rngs,
      bias=shape.has_bias("output"),
    )

  def __call__(
    self,
    x_TxD: Float[Array, "T D"],
    length: int,
    cache: Cache | None = None,
    start: int | Int[Array, ""] = 0,
    segments: Segments = None,
  ) -> tuple[Float[Array, "T D"], Cache]:
    """Returns what is added to the residual stream, and the keys and values.

    Args:
      x_TxD: The residual stream of B sequences.
      length: Length of each sequence, L.
      cache: Keys and values of earlier positions, with room for these tokens.
        The returned keys and values are those of the cache and of these tokens.
        None: the tokens are whole sequences, and only their keys and values are
        returned.
      start: Position of the first token.
      segments: Number of each token's segment, its document in the sequence,
        [B, L] (`models.attention`). None: a sequence is one document. With a
        `cache` it must be None.
    """
    y_TxD = self.norm(x_TxD)

    def project(linear: nnx.Linear, num_heads: int) -> Array:
      return linear(y_TxD).reshape(-1, length, num_heads, self.shape.head_width)

    query = project(self.query, self.shape.num_heads)
    key = project(self.key, self.shape.kv_heads)
    value = project(self.value, self.shape.kv_heads)
    if self.shape.qk_norm:
      query = self.query_norm(query)
      key = self.key_norm(key)
    if self.shape.positions == "rope":
      rotated = functools.partial(
        rotate,
        base=self.shape.rope_base,
        start=start,
        positions_BxL=None if segments is None else segment_positions(segments),
        factor=self.shape.rope_factor,
      )
      query = rotated(query)
      key = rotated(key)
    keys_and_values = {"key": key, "value": value}
    if cache is None:
      mixed = self.mix(query, key, value, segments)
    else:
      # The fused kernels need the queries of whole sequences, and these are
      # queries of new positions only.
      keys_and_values = extended(cache, keys_and_values, start)
      mixed = attend(
        query,
        keys_and_values["key"],
        keys_and_values["value"],
        segments_BxL=segments,
        start=start,
      )
    output_TxD = self.output(mixed.reshape(x_TxD.shape[0], -1))
    return output_TxD, keys_and_values


class _Mlp(nnx.Module):
  """The feed-forward part of one layer: a norm and an MLP, gated for SwiGLU."""

  def __init__(self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs):
    """Makes the norm, and draws the kernels of the MLP."""
    model_dim = shape.model_dim
    ff_dim = shape.ff_dim
    self.gated = shape.activation == "swiglu"
    self.activation = _ACTIVATIONS[shape.activation]
    self.norm = Norm(model_dim, shape)
    has_bias = shape.has_bias("up")
    if self.gated:
      self.gate = _linear(
        model_dim, ff_dim, INIT_SCALE, dtype=dtype, rngs=rngs, bias=has_bias
      )
    self.up = _linear(
      model_dim, ff_dim, INIT_SCALE, dtype=dtype, rngs=rngs, bias=has_bias
    )
    self.down = _linear(
      ff_dim,
      model_dim,
      _residual_scale(shape),
      dtype=dtype,
      rngs=rngs,
      bias=has_bias,
    )

  def __call__(self, x_TxD: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Returns the term that the MLP adds to the residual stream, [T, D]."""
    y_TxD = self.norm(x_TxD)
    hidden_TxF = self.up(y_TxD)
    if self.gated:
      hidden_TxF = self.activation(self.gate(y_TxD)) * hidden_TxF
    else:
      hidden_TxF = self.activation(hidden_TxF)
    return self.down(hidden_TxF)


class _Block(nnx.Module):
  """One layer: attention, then the MLP, each added to the residual stream."""

  def __init__(
    self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs, mix: Attention
  ):
    """Builds the attention and the MLP of the layer.

    `mix` is the attention of whole sequences (`models.fused_attention`).
    """
    self.attention = _Attention(shape, dtype, rngs=rngs, mix=mix)
    self.mlp = _Mlp(shape, dtype, rngs)

  def __call__(
    self,
    x_TxD: Float[Array, "T D"],
    length: int,
    cache: Cache | None = None,
    start: int | Int[Array, ""] = 0,
    segments: Segments = None,
  ) -> tuple[Float[Array, "T D"], Cache]:
    """Returns the new residual stream [T, D], and the keys and values.

    The arguments and the second result are those of `_Attention.__call__`.
    """
    attention_TxD, cache = self.attention(
      x_TxD, length, cache, start=start, segments=segments
    )
    x_TxD = x_TxD + attention_TxD
    return x_TxD + self.mlp(x_TxD), cache


class _Embed(nnx.Module):
  """The token table, and the table of learned positions if there is one."""

  def __init__(self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs):
    """Draws the values of the tables from a normal distribution."""
    normal = nnx.initializers.normal(INIT_SCALE)

    def table(num_rows: int) -> nnx.Param:
      size = (num_rows, shape.model_dim)
      return nnx.Param(normal(rngs.params(), size, jnp.float32))

    self.embedding = table(shape.vocab_size)
    if shape.positions == "learned":
      self.positions = table(shape.num_positions)
    else:
      self.positions = None
    self.dtype = dtype

  def __call__(
    self,
    tokens_BxL: Int[Array, "B L"],
    start: int | Int[Array, ""] = 0,
    segments: Segments = None,
  ) -> Float[Array, "T D"]:
    """Returns the residual stream before the first layer: a row for each token.

    The token table has a row for each token of the vocabulary. If there is a
    table of learned positions, the row of the token's position is added. A
    token outside the vocabulary, or a position beyond the end of its table,
    gives a row of NaN.

    Args:
      tokens_BxL: The tokens.
      start: Position of the first token; ignored if there are `segments`.
      segments: Number of each token's segment, its document in the sequence,
        [B, L]. Positions then count from the start of each segment. None: a
        sequence is one document.
    """
    # "fill" gives NaN for a token outside the vocabulary; NaN stops the run.
    # The defaults would clamp a token that is too large, and count a negative
    # one from the end of the table: the run would train on other tokens.
    tokens_T = tokens_BxL.reshape(-1)
    rows = (
      self.embedding[...]
      .at[tokens_T]
      .get(mode="fill", wrap_negative_indices=False)
    )
    if self.positions is not None:
      positions = jnp.arange(tokens_BxL.shape[1], dtype=np.int32) + start
      if segments is not None:
        positions = segment_positions(segments).reshape(-1)
      # A position beyond the table gives NaN, too.
      position_rows = jnp.take(
        self.positions[...], positions, axis=0, mode="fill"
      )
      # Without segments, all sequences have the same positions.
      num_repeats = tokens_T.size // positions.size
      rows = rows + jnp.tile(position_rows, (num_repeats, 1))
    return rows.astype(self.dtype)


class Decoder(nnx.Module):
  """The modules of the decoder: embedding, stacked blocks, last norm and head.

  `models.transformer` calls each of these modules; the class itself cannot be
  called. A tied head is the embedding, and has no module of its own.
  """

  def __init__(
    self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs, mix: Attention
  ):
    """Builds the modules, and draws all parameters.

    `mix` is the attention of whole sequences (`models.fused_attention`).
    """
    # Another order of these modules would give other parameters for a seed.
    self.embed = _Embed(shape, dtype, rngs)

    @nnx.split_rngs(splits=shape.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked_blocks(rngs: nnx.Rngs) -> _Block:
      return _Block(shape, dtype, rngs=rngs, mix=mix)

    self.blocks = stacked_blocks(rngs)
    self.final_norm = Norm(shape.model_dim, shape)
    if not shape.tied_head:
      self.head = _linear(
        shape.model_dim,
        shape.vocab_size,
        INIT_SCALE,
        dtype=dtype,
        rngs=rngs,
      )
