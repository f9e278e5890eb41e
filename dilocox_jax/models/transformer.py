"""The decoder of this project, as pure functions.

A `Model` has functions of a nested dict of parameters. They run the Flax
modules of `models.modules`. The leaves of all layers are stacked along a
leading layer axis, over which a scan runs.

Letters in names: B batch, L length, T = B * L tokens, D model, N heads, K head
width, F feed-forward, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dilocox_jax.models.adapters import Multiply, split_layer
from dilocox_jax.models.attention import Cache, wide_einsum
from dilocox_jax.models.fused_attention import (
  divided_by_heads,
  named_attention,
)
from dilocox_jax.models.modules import Decoder, Segments
from dilocox_jax.plan.model.shapes import ModelShape

Params = dict[str, Any]


class Model(NamedTuple):
  """A decoder as pure functions.

  `apply` is `embed`, then `block` for every layer, then `logits`. The stream is
  the residual stream: one row of D values for each of the T = B * L tokens.
  `segments` [B, L] has the number of each token's document in its sequence;
  None: a sequence is one document.

  Attributes:
    shape: Sizes of the model.
    init: (key) -> parameters, a nested dict of fp32 arrays with the paths and
      shapes of `ModelShape.parameter_shapes`.
    apply: (parameters, int32 tokens [B, L], segments=None) -> logits [B, L, V]
      in fp32, or in float64 for a float64 model.
    embed: (parameters, tokens [B, L], segments=None) -> stream [T, D]. Reads no
      parameters of blocks. The table may have only some rows of the vocabulary
      (`inner.vocabulary`); tokens then count from its first row.
    block: (one layer's slice of `params["blocks"]`, stream [T, D], L,
      segments=None) -> stream [T, D]. In a pipeline, leaves with two axes or
      more are passed in the dtype of the stream.
    logits: (parameters, stream [T, D]) -> logits [T, V], or only those of this
      device's part of the vocabulary if devices divide it. Reads no parameters
      of blocks.
    decode: (parameters, tokens [B, L], cache, position of the first token) ->
      (logits [B, L, V], cache). The cache holds the keys and values of earlier
      calls, and has room for S positions: leaves [num_layers, B, S, kv heads,
      K]. None: the model cannot decode.
    stream: (parameters, tokens [B, L], segments=None) -> stream [T, D] after
      the last layer, the argument of `logits`. None: the loss needs all logits
      at once.
  """

  shape: ModelShape
  init: Callable[[Array], Params]
  apply: Callable[..., Array]
  embed: Callable[[Params, Array], Array]
  block: Callable[..., Array]
  logits: Callable[[Params, Array], Array]
  decode: Callable[..., tuple[Array, Cache]] | None = None
  stream: Callable[..., Array] | None = None


def bound_module(module: nnx.Module) -> Callable[[Params], Any]:
  """Returns a function (nested dict of leaves) -> module with these leaves.

  Args:
    module: A module with the structure of the result. Its leaves may be only
      shapes and types.
  """
  graph, abstract_state = nnx.split(module)

  def bound(leaves: Params) -> Any:
    state = jax.tree.map(lambda leaf: leaf, abstract_state)
    nnx.replace_by_pure_dict(state, leaves)
    return nnx.merge(graph, state)

  return bound


def _divert(module: nnx.Module, multiply: Multiply) -> None:
  """Changes a module so that `multiply` computes its linear layers' products.

  Args:
    module: The module.
    multiply: Function (path of the kernel, x, kernel) -> product.
  """

  def dot_general(
    path: str, x: Array, kernel: Array, *args: Any, **kwargs: Any
  ) -> Array:
    del args, kwargs  # The dimensions to contract, and the precision.
    return multiply(path, x, kernel)

  for path, layer in nnx.iter_modules(module):
    if isinstance(layer, nnx.Linear):
      kernel_path = "/".join(str(key) for key in (*path, "kernel"))
      layer.dot_general = functools.partial(dot_general, kernel_path)


def _head_kernel(params: Params, shape: ModelShape) -> Array:
  """Returns the kernel [D, V] of the head; a tied head is the embedding."""
  if shape.tied_head:
    return params["embed"]["embedding"].T
  return params["head"]["kernel"]


def remat_wrapper(
  name: str, prevent_cse: bool = False
) -> Callable[[Callable], Callable]:
  """Returns a wrapper that decides what a layer saves for its backward pass.

  Args:
    name: "none" saves all values that JAX's backward pass reads. "dots" saves
      the results of products; the backward computes elementwise operations and
      fused attention again. "full" saves only the layer's input.
    prevent_cse: Whether to keep XLA from merging the forward with its
      repetition in the backward pass. Needed if both may be in one computation,
      as for layers that are not in a loop.

  Returns:
    (function of a layer, or a whole loss) -> the function under
    `jax.checkpoint`; with "none" the function itself.
  """
  checkpoint = functools.partial(jax.checkpoint, prevent_cse=prevent_cse)
  saves_products = jax.checkpoint_policies.dots_saveable
  wrappers: dict[str, Callable[[Callable], Callable]] = {
    "none": lambda call: call,
    "dots": functools.partial(checkpoint, policy=saves_products),
    "full": checkpoint,
  }
  return wrappers[name]


def build_model(
  shape: ModelShape,
  *,
  dtype: Any = jnp.float32,
  unroll: int = 1,
  attention: str = "plain",
  remat: str = "none",
) -> Model:
  """Builds the functions of a model. It allocates no arrays.

  Args:
    shape: Sizes of the model.
    dtype: Compute dtype: float32, bfloat16, or float64 if JAX has it enabled
      and the parameters are cast to it. With bfloat16 the statistics of norms,
      the softmax and the logits are still in fp32.
    unroll: Layers per iteration of the scan over layers; 0: all. 1 compiles
      fastest, 0 runs fastest on CPU.
    attention: "plain", "blockwise", "cudnn" or "splash"
      (`models.fused_attention`).
    remat: What a layer saves for its backward pass in `apply` and `stream`:
      "none", "dots" or "full" (`remat_wrapper`).
  """
  mix = divided_by_heads(named_attention(attention))
  # With several layers in an iteration of the scan, XLA may merge the forward
  # of a layer with the forward that the backward computes again.
  wrap = remat_wrapper(remat, prevent_cse=unroll != 1)

  def module(key: Array) -> Decoder:
    return Decoder(shape, dtype, nnx.Rngs(key), mix)

  def init(key: Array) -> Params:
    return nnx.to_pure_dict(nnx.state(module(key), nnx.Param))

  # These functions put parameters into modules whose structure is known. The
  # leaves of `abstract.blocks` are those of all layers, stacked. `one_block`
  # gets the leaves of one layer.
  abstract = nnx.eval_shape(lambda: module(jax.random.key(0)))
  table = bound_module(abstract.embed)
  one_block = bound_module(abstract.blocks)
  final_norm = bound_module(abstract.final_norm)

  def embed(
    params: Params, tokens_BxL: Array, segments: Segments = None
  ) -> Array:
    return table(params["embed"])(tokens_BxL, segments=segments)

  def block(
    layer: Params, x_TxD: Array, length: int, segments: Segments = None
  ) -> Array:
    # If the layer has adapters, `multiply` adds their part to each product.
    layer, multiply = split_layer(layer)
    bound = one_block(layer)
    if multiply is not None:
      _divert(bound, multiply)
    x_TxD, _ = bound(x_TxD, length, segments=segments)
    return x_TxD

  def logits(params: Params, x_TxD: Array) -> Array:
    x_TxD = final_norm(params["final_norm"])(x_TxD)
    head = _head_kernel(params, shape)
    return wide_einsum("td,dv->tv", x_TxD, head.astype(dtype))

  def stream(
    params: Params, tokens_BxL: Array, segments: Segments = None
  ) -> Array:
    length = tokens_BxL.shape[1]

    def layer(x_TxD: Array, leaves: Params) -> tuple[Array, None]:
      run = wrap(lambda leaves, x: block(leaves, x, length, segments=segments))
      return run(leaves, x_TxD), None

    # The stream is [T, D] everywhere outside attention. With [B, L, D] a weight
    # gradient would contract two dimensions, which is over twice as slow on
    # CPU.
    x_TxD, _ = jax.lax.scan(
      layer,
      embed(params, tokens_BxL, segments),
      params["blocks"],
      unroll=unroll or shape.num_layers,
    )
    return x_TxD

  def apply(
    params: Params, tokens_BxL: Array, segments: Segments = None
  ) -> Array:
    x_TxD = stream(params, tokens_BxL, segments)
    return logits(params, x_TxD).reshape(*tokens_BxL.shape, -1)

  def decode(
    params: Params, tokens_BxL: Array, cache: Cache, start: int | Array
  ) -> tuple[Array, Cache]:
    length = tokens_BxL.shape[1]

    def layer(
      x_TxD: Array, leaves_and_cache: tuple[Params, Cache]
    ) -> tuple[Array, Cache]:
      leaves, cache = leaves_and_cache
      return one_block(leaves)(x_TxD, length, cache, start=start)

    x_TxD, cache = jax.lax.scan(
      layer,
      table(params["embed"])(tokens_BxL, start),
      (params["blocks"], cache),
    )
    return logits(params, x_TxD).reshape(*tokens_BxL.shape, -1), cache

  return Model(
    shape=shape,
    init=init,
    apply=apply,
    embed=embed,
    block=block,
    logits=logits,
    decode=decode,
    stream=stream,
  )
