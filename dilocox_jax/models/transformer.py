"""The decoder that every run trains.

Only this file uses Flax. The rest of the project sees a `Model`: pure functions
over a plain nested dict of arrays, which can be stacked, averaged, sharded and
compressed like any other tree. Blocks are stacked along a leading layer axis
and scanned, so the program does not grow with depth. A pipeline cuts the model
between embedding, blocks and logits, so each of them is a function.

Letters in names: B batch, L length, T = B * L tokens, D model, N heads, K head
width, F feed-forward, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dilocox_jax.checks import require
from dilocox_jax.models.attention import Cache, attend, extended, rotate
from dilocox_jax.models.experts import route
from dilocox_jax.models.segments import segment_positions
from dilocox_jax.plan.model.shapes import ModelShape

Params = dict[str, Any]
# (path of the kernel in its block, x [T, I], kernel [I, O]) -> x @ kernel.
Multiply = Callable[[str, Array, Array], Array]
# Number of each token's document (`models.segments`).
Segments = Int[Array, "B L"] | None

INIT_SCALE = 0.02
_ACTIVATIONS = {
  "swiglu": jax.nn.silu,  # Of the gate.
  "gelu": jax.nn.gelu,
  "relu": jax.nn.relu,
}


class Model(NamedTuple):
  """A decoder as pure functions.

  `apply` is `embed`, then `block` for every layer, then `logits`.

  Attributes:
    shape: Sizes of the model.
    init: (key) -> parameters, a nested dict of fp32 arrays with the paths and
      shapes of `plan.model.shapes.parameter_shapes`.
    apply: (parameters, int32 tokens [B, L], segments=None) -> logits [B, L, V]
      in fp32, or in float64 for a float64 model. Segments [B, L] keep packed
      documents apart (`models.segments`).
    embed: (parameters, tokens [B, L]) -> stream [T, D]. It does not read the
      parameters of blocks.
    block: (one layer's slice of `params["blocks"]`, stream [T, D], L,
      multiply=None, segments=None) -> stream [T, D]. If `multiply` is given,
      every product with a kernel goes through it.
    logits: (parameters, stream [T, D]) -> logits [T, V]. It does not read the
      parameters of blocks.
    decode: (parameters, tokens [B, L], cache, position of the first token) ->
      (logits [B, L, V], cache). The leaves of the cache are [num_layers, B, S,
      kv heads, K]; it holds what earlier calls read. None if the model cannot.
  """

  shape: ModelShape
  init: Callable[[Array], Params]
  apply: Callable[..., Array]
  embed: Callable[[Params, Array], Array]
  block: Callable[..., Array]
  logits: Callable[[Params, Array], Array]
  decode: Callable[..., tuple[Array, Cache]] | None = None


class _Norm(nnx.Module):
  """Root-mean-square norm, or layer norm; see `ModelShape.norm`."""

  def __init__(self, width: int, shape: ModelShape):
    self.epsilon = shape.norm_epsilon
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
    zeros = jnp.zeros((width,), jnp.float32)
    self.bias = nnx.Param(zeros) if shape.norm == "layer" else None

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
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

  def __init__(self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs):
    heads = shape.num_heads * shape.head_width
    self.shape, d = shape, shape.model_dim
    self.norm = _Norm(d, shape)
    bias = shape.has_bias("query")
    self.query = _linear(d, heads, INIT_SCALE, dtype, rngs, bias)
    shared = shape.kv_heads * shape.head_width
    self.key = _linear(d, shared, INIT_SCALE, dtype, rngs, bias)
    self.value = _linear(d, shared, INIT_SCALE, dtype, rngs, bias)
    if shape.qk_norm:
      self.query_norm = _Norm(shape.head_width, shape)
      self.key_norm = _Norm(shape.head_width, shape)
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
    if cache is not None:
      new = extended(cache, new, start)
      key, value = new["key"], new["value"]
    # Grouped queries: neighbouring query heads share a key and a value head.
    # With 8 heads and 2 key-value heads the group is 4, and repeating gives
    # [0, 0, 0, 0, 1, 1, 1, 1].
    group = self.shape.num_heads // self.shape.kv_heads
    if group > 1:
      key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    mixed = attend(query, key, value, start, segments)
    return self.output(mixed.reshape(x_TxD.shape[0], -1)), new


class _Mlp(nnx.Module):
  """Feed-forward after a norm, with a gate if it is SwiGLU, or experts.

  Experts are one wide MLP whose hidden values are multiplied by their shares.
  So all experts compute all tokens, and their kernels are matrices like any
  other for pipelines, codecs and optimizers.
  """

  def __init__(self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs):
    d, f = shape.model_dim, shape.ff_dim
    self.gated = shape.activation == "swiglu"
    self.activation = _ACTIVATIONS[shape.activation]
    self.shape = shape
    self.norm = _Norm(d, shape)
    bias = shape.has_bias("up")
    scale = _residual_scale(shape)
    if shape.num_experts:
      f *= shape.num_experts
      self.router = _linear(d, shape.num_experts, INIT_SCALE, dtype, rngs)
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
    if self.shape.num_experts:
      per_token, weight = self.shape.experts_per_token, self.shape.balance_loss
      shares_TxE = route(self.router(y_TxD), per_token, weight)
      shares_TxF = jnp.repeat(shares_TxE, self.shape.ff_dim, axis=1)
      hidden_TxF = hidden_TxF * shares_TxF.astype(hidden_TxF.dtype)
    return self.down(hidden_TxF)


class _Block(nnx.Module):
  """One layer: attention and then the MLP, each added to the stream."""

  def __init__(self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs):
    self.attention = _Attention(shape, dtype, rngs)
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

  def scores(self, x_TxD: Float[Array, "T D"]) -> Float[Array, "T V"]:
    """Returns the logits of a model whose head is the token table."""
    return x_TxD @ self.embedding[...].astype(self.dtype).T


class _Decoder(nnx.Module):
  """All modules, in the order in which they draw their parameters.

  Changing the order would change the parameters that a seed gives.
  """

  def __init__(self, shape: ModelShape, dtype: Any, rngs: nnx.Rngs):
    self.embed = _Embed(shape, dtype, rngs)

    @nnx.split_rngs(splits=shape.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs: nnx.Rngs) -> _Block:
      return _Block(shape, dtype, rngs)

    self.blocks = stacked(rngs)
    self.final_norm = _Norm(shape.model_dim, shape)
    if not shape.tied_head:
      self.head = _linear(
        shape.model_dim, shape.vocab_size, INIT_SCALE, dtype, rngs
      )


def _pure(module: nnx.Module) -> Callable[[Params], Any]:
  """Returns the function from a module's leaves, a nested dict, to it."""
  graph, abstract_state = nnx.split(module)

  def bound(leaves: Params) -> Any:
    state = jax.tree.map(lambda leaf: leaf, abstract_state)
    nnx.replace_by_pure_dict(state, leaves)
    return nnx.merge(graph, state)

  return bound


def _divert(module: nnx.Module, multiply: Multiply) -> None:
  """Makes a module's linear layers call `multiply` for their products.

  A pipeline needs this: it splits the gradient of each product in two.
  """

  def dot_general(path: str, x: Array, kernel: Array, *_, **__) -> Array:
    return multiply(path, x, kernel)

  for path, layer in nnx.iter_modules(module):
    if isinstance(layer, nnx.Linear):
      name = "/".join(map(str, (*path, "kernel")))
      layer.dot_general = functools.partial(dot_general, name)


def build_model(
  shape: ModelShape, *, dtype: Any = jnp.float32, unroll: int = 1
) -> Model:
  """Builds the model's functions; allocates nothing.

  Args:
    shape: Sizes of the model.
    dtype: Compute dtype: float32, bfloat16, or float64 if JAX has it enabled
      and the parameters are cast to it. `init` draws parameters in fp32. With
      bfloat16 the statistics of norms, softmax and logits are fp32 too.
    unroll: Layers per iteration of the scan over layers; 0 means all. 1
      compiles fastest, 0 runs fastest on CPU.

  Returns:
    A `Model`. Its functions are pure and may be jitted, differentiated,
    vmapped and used inside `shard_map`.

  Raises:
    ValueError: If the dtype is none of these, or `unroll` is negative.
  """
  require(
    jnp.dtype(dtype).name in ("float32", "bfloat16", "float64"),
    f"dtype={dtype} must be float32, bfloat16 or float64",
  )
  require(unroll >= 0, f"unroll={unroll} must be 0 (all layers) or more")

  def module(key: Array) -> _Decoder:
    return _Decoder(shape, dtype, nnx.Rngs(key))

  def init(key: Array) -> Params:
    return nnx.to_pure_dict(nnx.state(module(key), nnx.Param))

  abstract = nnx.eval_shape(lambda: module(jax.random.key(0)))
  table, one_block = _pure(abstract.embed), _pure(abstract.blocks)
  final_norm = _pure(abstract.final_norm)
  head = None if shape.tied_head else _pure(abstract.head)

  def embed(
    params: Params, tokens_BxL: Array, segments: Segments = None
  ) -> Array:
    return table(params["embed"])(tokens_BxL, segments=segments)

  def block(
    layer: Params,
    x_TxD: Array,
    length: int,
    multiply: Multiply | None = None,
    segments: Segments = None,
  ) -> Array:
    bound = one_block(layer)
    if multiply is not None:
      _divert(bound, multiply)
    return bound(x_TxD, length, segments=segments)[0]

  def logits(params: Params, x_TxD: Array) -> Array:
    x_TxD = final_norm(params["final_norm"])(x_TxD)
    if head is None:
      logits_TxV = table(params["embed"]).scores(x_TxD)
    else:
      logits_TxV = head(params["head"])(x_TxD)
    return logits_TxV.astype(np.promote_types(np.float32, dtype))

  def apply(
    params: Params, tokens_BxL: Array, segments: Segments = None
  ) -> Array:
    length = tokens_BxL.shape[1]

    def layer(x_TxD: Array, leaves: Params):
      return block(leaves, x_TxD, length, segments=segments), None

    # The stream is [T, D] everywhere outside attention. With [B, L, D] a weight
    # gradient would contract two dimensions, which is over twice as slow on
    # CPU.
    x_TxD, _ = jax.lax.scan(
      layer,
      embed(params, tokens_BxL, segments),
      params["blocks"],
      unroll=unroll or shape.num_layers,
    )
    return logits(params, x_TxD).reshape(*tokens_BxL.shape, -1)

  def decode(
    params: Params, tokens_BxL: Array, cache: Cache, start: int | Array
  ) -> tuple[Array, Cache]:
    def layer(x_TxD: Array, of_layer: tuple[Params, Cache]):
      leaves, cache = of_layer
      return one_block(leaves)(x_TxD, tokens_BxL.shape[1], cache, start)

    x_TxD, cache = jax.lax.scan(
      layer,
      table(params["embed"])(tokens_BxL, start),
      (params["blocks"], cache),
    )
    return logits(params, x_TxD).reshape(*tokens_BxL.shape, -1), cache

  return Model(shape, init, apply, embed, block, logits, decode)
