"""Causal attention that never holds the weights [L, L] of a long sequence.

The function `models.attention.attend` computes the same up to rounding, but
holds all weights at once. The functions here need less memory:

* "cudnn" is NVIDIA's kernel. It takes bfloat16 values, and reads a sequence as
  one document.
* "splash" is the Pallas kernel for TPUs that comes with JAX. It takes lengths
  that are multiples of 128.
* "blockwise" is written in JAX and runs on every device. It computes the
  weights of a block of queries at a time, and again in the backward pass.

Letters in names: B batch, L length, N heads, G heads of keys and values, K head
width, C queries of a block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dilocox_jax.checks import require
from dilocox_jax.distributed.local_map import is_automatic, map_over_devices
from dilocox_jax.models.attention import attend
from dilocox_jax.plan.choices import SPLASH_LENGTH, check_splash_length
from dilocox_jax.plan.model.division import TENSOR_AXIS

# (query [B, L, N, K], key [B, L, G, K], value, segments [B, L] or None) -> [B,
# L, N, K].
Attention = Callable[..., Array]
# Number of each token's document (`models.attention`).
Segments = Int[Array, "B L"] | None

# Largest number of queries in a block of "blockwise". Larger blocks need more
# memory for their weights, and smaller ones more iterations of a loop.
_BLOCK = 256
# Block sizes of "splash". The largest one that divides L is used.
_SPLASH_BLOCKS = (512, 256, SPLASH_LENGTH)


def named_attention(name: str) -> Attention:
  """Returns the attention function for a name.

  Args:
    name: "plain" (`models.attention.attend`), "blockwise", "cudnn" or "splash".
      "splash" falls back to "blockwise" if the length is not a multiple of 128.
  """
  functions: dict[str, Attention] = {
    "plain": attend,
    "blockwise": blockwise_attention,
    "cudnn": cudnn_attention,
    "splash": _splash_or_blockwise,
  }
  return functions[name]


def divided_by_heads(attention: Attention) -> Attention:
  """Lets each tensor shard compute the attention of its own heads.

  A tensor shard is one of the devices along the mesh axis "tensor". JAX's
  partitioner cannot divide the kernels of "splash" and "cudnn" itself.

  Args:
    attention: Function that computes the attention of all heads that it gets.

  Returns:
    A function like `attention`, mapped over the tensor shards. The numbers of
    query heads and of key heads must be multiples of the number of shards. If
    JAX does not partition the axis "tensor", the function calls `attention`
    directly.
  """

  def divided(
    query: Array, key: Array, value: Array, segments: Segments = None
  ) -> Array:
    if not is_automatic(TENSOR_AXIS):
      return attention(query, key, value, segments)
    by_heads = PartitionSpec(None, None, TENSOR_AXIS)
    mapped = map_over_devices(
      attention,
      in_specs=(by_heads, by_heads, by_heads, PartitionSpec()),
      out_specs=by_heads,
      axes=(TENSOR_AXIS,),
    )
    return mapped(query, key, value, segments)

  return divided


def _splash_or_blockwise(
  query: Array, key: Array, value: Array, segments: Segments = None
) -> Array:
  """Calls "splash" if the length is a multiple of 128, else "blockwise"."""
  if query.shape[1] % SPLASH_LENGTH == 0:
    return splash_attention(query, key, value, segments)
  return blockwise_attention(query, key, value, segments)


@jax.custom_vjp
def blockwise_attention(
  query_BxLxNxK: Float[Array, "B L N K"],
  key_BxLxGxK: Float[Array, "B L G K"],
  value_BxLxGxK: Float[Array, "B L G K"],
  segments_BxL: Segments = None,
) -> Float[Array, "B L N K"]:
  """Computes causal attention for a block of queries at a time.

  Every block of C queries is multiplied with all L keys, so about half of the
  products are masked. The weights in memory are [B, N, C, L]. The backward pass
  computes them again.

  Source: Rabe and Staats 2021, arXiv 2112.05682: attention that holds only a
  part of the weights.
  Differs: keys are not divided into blocks, so no running maximum is needed.

  Args:
    query_BxLxNxK: Queries.
    key_BxLxGxK: Keys.
    value_BxLxGxK: Values.
    segments_BxL: Number of each token's document. A token reads only its own
      document. None: a sequence is one document.

  Returns:
    Weighted means of the values, [B, L, N, K].
  """
  starts, block_attention = _blocks(query_BxLxNxK, segments_BxL)

  def attend_block(start: Array) -> Array:
    attend_from = block_attention(start)
    return attend_from(query_BxLxNxK, key_BxLxGxK, value_BxLxGxK)

  mixed_ixBxCxNxK = jax.lax.map(attend_block, starts)
  return jnp.moveaxis(mixed_ixBxCxNxK, 0, 1).reshape(query_BxLxNxK.shape)


def _blocks(
  query: Array, segments: Segments
) -> tuple[Array, Callable[[Array], Callable[..., Array]]]:
  """Divides L queries into the fewest equal blocks of at most `_BLOCK`.

  Returns the first position of each block, and a function from the first
  position of a block to a function (all queries, keys, values) -> attention of
  the block's queries.
  """
  length = query.shape[1]
  size = min(_BLOCK, length)
  while length % size:
    size -= 1

  def block_attention(start: Array) -> Callable[..., Array]:
    def block_of(x: Array) -> Array:
      return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

    block_segments = None if segments is None else block_of(segments)

    # This function takes only the arrays by which the backward pass
    # differentiates.
    def attend_block(query: Array, key: Array, value: Array) -> Array:
      return attend(
        block_of(query),
        key,
        value,
        segments_BxL=block_segments,
        start=start,
        key_segments_BxS=segments,
      )

    return attend_block

  return jnp.arange(0, length, size, dtype=jnp.int32), block_attention


def _blockwise_forward(
  query: Array, key: Array, value: Array, segments: Segments = None
) -> tuple[Array, tuple[Array, Array, Array, Segments]]:
  """Returns the attention, and the arguments for the backward pass."""
  mixed = blockwise_attention(query, key, value, segments)
  return mixed, (query, key, value, segments)


def _blockwise_backward(
  residuals: tuple[Array, Array, Array, Segments], gradient: Array
) -> tuple[Any, ...]:
  """Returns the gradients of queries, keys, values and segments.

  Gradients are summed over the blocks in fp32 or wider.
  """
  query, key, value, segments = residuals
  factors = (query, key, value)
  starts, block_attention = _blocks(query, segments)
  size = gradient.shape[1] // starts.size

  def add_block(
    totals: tuple[Array, ...], start: Array
  ) -> tuple[tuple[Array, ...], None]:
    _, pullback = jax.vjp(block_attention(start), *factors)
    block_gradient = jax.lax.dynamic_slice_in_dim(gradient, start, size, axis=1)
    # In bfloat16, a sum over many blocks would lose the last contributions.
    totals = jax.tree.map(
      lambda total, new: total + new.astype(total.dtype),
      totals,
      pullback(block_gradient),
    )
    return totals, None

  zeros = tuple(
    jnp.zeros(x.shape, np.promote_types(np.float32, x.dtype)) for x in factors
  )
  totals, _ = jax.lax.scan(add_block, zeros, starts)
  gradients = [
    total.astype(x.dtype) for total, x in zip(totals, factors, strict=True)
  ]
  if segments is None:
    return (*gradients, None)
  # JAX wants float0 zeros as the gradient of integers.
  return (*gradients, np.zeros(segments.shape, jax.dtypes.float0))


blockwise_attention.defvjp(_blockwise_forward, _blockwise_backward)


def cudnn_attention(
  query_BxLxNxK: Float[Array, "B L N K"],
  key_BxLxGxK: Float[Array, "B L G K"],
  value_BxLxGxK: Float[Array, "B L G K"],
  segments_BxL: Segments = None,
) -> Float[Array, "B L N K"]:
  """Computes causal attention with NVIDIA's cuDNN.

  Arguments and result are those of `blockwise_attention`, but `segments_BxL`
  must be None: each sequence is one document.

  Raises:
    ValueError: If there are segments, or the dtype is not bfloat16.
  """
  require(
    segments_BxL is None,
    "model.attention=cudnn reads a sequence as one document: take "
    "model.attention=blockwise, or data.document_masks=False",
  )
  require(
    query_BxLxNxK.dtype == jnp.bfloat16,
    f"model.attention=cudnn computes in bfloat16, not {query_BxLxNxK.dtype}: "
    "take model.compute_dtype=bfloat16 or model.attention=blockwise",
  )
  return jax.nn.dot_product_attention(
    query_BxLxNxK,
    key_BxLxGxK,
    value_BxLxGxK,
    is_causal=True,
    implementation="cudnn",
  )


def splash_attention(
  query_BxLxNxK: Float[Array, "B L N K"],
  key_BxLxGxK: Float[Array, "B L G K"],
  value_BxLxGxK: Float[Array, "B L G K"],
  segments_BxL: Segments = None,
  interpret: bool = False,
) -> Float[Array, "B L N K"]:
  """Computes causal attention with the Pallas kernel for TPUs.

  Arguments and result are those of `blockwise_attention`. With `interpret`, the
  kernel runs step by step in JAX, on any device.

  Raises:
    ValueError: If the length is not a multiple of 128.
  """
  # Pallas is imported here because that takes half a second.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  _, length, num_heads, width = query_BxLxNxK.shape
  check_splash_length(length)
  block = next(size for size in _SPLASH_BLOCKS if length % size == 0)
  # All eight sizes are equal: of queries and of keys, in all three kernels.
  equal_sizes: Any = (block,) * 8
  sizes = splash.BlockSizes(*equal_sizes)
  masks = [splash.CausalMask((length, length))] * num_heads
  # The kernel mixes dtypes and ranks, which the rest of the program must not.
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    kernel: Any = splash.make_splash_mha_single_device(
      splash.MultiHeadMask(masks), block_sizes=sizes, interpret=interpret
    )

    def attend_sequence(
      query_LxNxK: Array, key_LxGxK: Array, value_LxGxK: Array, segments_L: Any
    ) -> Array:
      ids = None
      if segments_L is not None:
        ids = splash.SegmentIds(segments_L, segments_L)
      mixed_NxLxK = kernel(
        jnp.swapaxes(query_LxNxK, 0, 1),
        jnp.swapaxes(key_LxGxK, 0, 1),
        jnp.swapaxes(value_LxGxK, 0, 1),
        segment_ids=ids,
      )
      return jnp.swapaxes(mixed_NxLxK, 0, 1)

    # The kernel does not divide the products by sqrt(K), so the queries are.
    return jax.vmap(attend_sequence)(
      query_BxLxNxK * width**-0.5, key_BxLxGxK, value_BxLxGxK, segments_BxL
    )
