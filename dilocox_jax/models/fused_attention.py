"""Causal attention that never holds the weights [L, L] of a whole sequence.

`models.attention.attend` computes the same and holds them. It is the fastest on
a CPU, where sequences are short. Three ways serve accelerators:

* "cudnn" is NVIDIA's kernel. It takes bfloat16 values and one document a
  sequence.
* "splash" is the Pallas kernel for TPUs that comes with JAX. It takes lengths
  that are multiples of 128.
* "blockwise" is written in JAX and runs anywhere. It computes the weights of
  some queries at a time, once forward and once more backward.

Letters in names: B batch, L length, N heads, G heads of keys and values, K head
width, C queries of a block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dilocox_jax.checks import require
from dilocox_jax.models.attention import attend
from dilocox_jax.plan.choices import SPLASH_LENGTH, check_splash_length

# (query [B, L, N, K], key [B, L, G, K], value, segments [B, L] or None) -> [B,
# L, N, K].
Attention = Callable[..., Array]
# Number of each token's document (`models.attention`).
Segments = Int[Array, "B L"] | None

_BLOCK = 256  # Queries of "blockwise" whose weights are in memory together.
# Kernels take the largest that divides L.
_SPLASH_BLOCKS = (512, 256, SPLASH_LENGTH)


def named_attention(name: str) -> Attention:
  """Returns an attention by its name in `plan.choices.ATTENTIONS`."""
  return {
    "plain": attend,
    "blockwise": blockwise_attention,
    "cudnn": cudnn_attention,
    "splash": _splash_where_it_fits,
  }[name]


def _splash_where_it_fits(
  query: Array, key: Array, value: Array, segments=None
):
  """The last part of a held-out text may have any length."""
  fits = query.shape[1] % SPLASH_LENGTH == 0
  function = splash_attention if fits else blockwise_attention
  return function(query, key, value, segments)


@jax.custom_vjp
def blockwise_attention(
  query_BxLxNxK: Float[Array, "B L N K"],
  key_BxLxGxK: Float[Array, "B L G K"],
  value_BxLxGxK: Float[Array, "B L G K"],
  segments_BxL: Segments = None,
) -> Float[Array, "B L N K"]:
  """Computes causal attention for some queries at a time.

  Every block of C queries multiplies with all L keys, so half of the products
  are masked. The weights in memory are [B, N, C, L]. The backward pass computes
  them again, whatever a layer saves (`models.transformer`).

  Source: Rabe and Staats 2021, arXiv 2112.05682, for the memory.
  Differs: keys are not divided, so no running maximum is needed.

  Args:
    query_BxLxNxK: Queries.
    key_BxLxGxK: Keys.
    value_BxLxGxK: Values.
    segments_BxL: Documents of the tokens; a token reads only its own.
  """
  arguments = query_BxLxNxK, key_BxLxGxK, value_BxLxGxK, segments_BxL
  starts, of_block = _blocks(*arguments)
  mixed_ixBxCxNxK = jax.lax.map(
    lambda start: of_block(start)(*arguments[:3]), starts
  )
  return jnp.moveaxis(mixed_ixBxCxNxK, 0, 1).reshape(query_BxLxNxK.shape)


def _blocks(query: Array, key: Array, value: Array, segments: Segments):
  """Returns where blocks start, and (start) -> attention of that block.

  The latter is a function of all queries, keys and values.
  """
  del key, value
  length = query.shape[1]
  size = next(c for c in range(min(_BLOCK, length), 0, -1) if length % c == 0)

  def of_block(start: Array) -> Callable[..., Array]:
    def cut(x: Array) -> Array:
      return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

    of_queries = None if segments is None else cut(segments)
    return lambda query, key, value: attend(
      cut(query), key, value, of_queries, start, segments
    )

  return jnp.arange(0, length, size, dtype=jnp.int32), of_block


def _blockwise_forward(*arguments):
  return blockwise_attention(*arguments), arguments


def _blockwise_backward(arguments, gradient):
  starts, of_block = _blocks(*arguments)
  factors, segments = arguments[:3], arguments[3]
  size = gradient.shape[1] // starts.size

  def add_block(totals, start):
    _, pullback = jax.vjp(of_block(start), *factors)
    cut = jax.lax.dynamic_slice_in_dim(gradient, start, size, axis=1)
    # A sum over many blocks in bfloat16 would lose what the last ones add.
    return jax.tree.map(
      lambda total, new: total + new.astype(total.dtype), totals, pullback(cut)
    ), None

  zeros = tuple(
    jnp.zeros(x.shape, np.promote_types(np.float32, x.dtype)) for x in factors
  )
  totals, _ = jax.lax.scan(add_block, zeros, starts)
  narrow = (t.astype(x.dtype) for t, x in zip(totals, factors, strict=True))
  if segments is None:
    return (*narrow, None)
  # This is what JAX takes as the gradient of integers.
  return (*narrow, np.zeros(segments.shape, jax.dtypes.float0))


blockwise_attention.defvjp(_blockwise_forward, _blockwise_backward)


def cudnn_attention(
  query_BxLxNxK: Float[Array, "B L N K"],
  key_BxLxGxK: Float[Array, "B L G K"],
  value_BxLxGxK: Float[Array, "B L G K"],
  segments_BxL: Segments = None,
) -> Float[Array, "B L N K"]:
  """Computes causal attention with NVIDIA's cuDNN.

  Args:
    query_BxLxNxK: Queries in bfloat16.
    key_BxLxGxK: Keys in bfloat16.
    value_BxLxGxK: Values in bfloat16.
    segments_BxL: Must be None.

  Raises:
    ValueError: If there are segments or the dtype is another one.
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

  The kernel skips blocks of keys that no query of a block may read.

  Args:
    query_BxLxNxK: Queries.
    key_BxLxGxK: Keys.
    value_BxLxGxK: Values.
    segments_BxL: Documents of the tokens; a token reads only its own.
    interpret: Whether to run the kernel step by step in JAX, on any device.

  Raises:
    ValueError: If the length is not a multiple of 128.
  """
  # Pallas takes half a second to load, which runs without it need not spend.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  _, length, heads, width = query_BxLxNxK.shape
  check_splash_length(length)
  block = next(c for c in _SPLASH_BLOCKS if length % c == 0)
  blocks: Any = (block,) * 8  # Of queries and keys, in all three kernels.
  sizes = splash.BlockSizes(*blocks)
  masks = [splash.CausalMask((length, length))] * heads
  # The kernel mixes dtypes and ranks, which the rest of the program must not.
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    kernel: Any = splash.make_splash_mha_single_device(
      splash.MultiHeadMask(masks), block_sizes=sizes, interpret=interpret
    )

    def of_sequence(query, key, value, segments):
      ids = None if segments is None else splash.SegmentIds(segments, segments)
      heads_first = (jnp.swapaxes(x, 0, 1) for x in (query, key, value))
      return jnp.swapaxes(kernel(*heads_first, segment_ids=ids), 0, 1)

    return jax.vmap(of_sequence)(
      query_BxLxNxK * width**-0.5, key_BxLxGxK, value_BxLxGxK, segments_BxL
    )
