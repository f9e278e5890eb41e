"""Rotary positions and causal attention, without parameters.

Both are pure functions of queries, keys and values, so tests need no model.

A sequence may have several documents. A *segment* is the part of a sequence
that belongs to one document. The token that ends a document is the first token
of the next segment, so that every document begins with that token.

Tests check two laws. Attention reads only the current and earlier positions.
The dot product of a rotated query and a rotated key depends only on the
distance between their positions.

Letters in names: B is the batch size, L the length, S the number of keys, N the
number of heads, G the number of heads of keys and values, and K the width of a
head.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dilocox_jax.plan.model.shapes import (
  KEPT_TURNS,
  STRETCHED_LENGTH,
  STRETCHED_TURNS,
)

ROPE_BASE = 10_000.0  # The base of the angles in the paper on RoPE (`rotate`).
# Rotated keys ("key") and values ("value") of one layer, [B, S, G, K] each.
Cache = dict[str, Array]


def rotate(
  x_BxLxNxK: Float[Array, "B L N K"],
  base: float = ROPE_BASE,
  start: int | Int[Array, ""] = 0,
  positions_BxL: Int[Array, "B L"] | None = None,
  factor: float = 1.0,
) -> Float[Array, "B L N K"]:
  """Rotates pairs of features by angles that grow with the position (RoPE).

  Feature i < K/2 is paired with i + K/2. The pair is rotated by the angle
  position * base^(-2 i / K). So the dot product of a query and a key depends
  only on the distance between their positions.

  Example with K = 4 and base 10,000: features 0 and 2 are rotated by 1 radian
  per position, features 1 and 3 by 10,000^(-1/2) = 0.01 radian. At position 3
  the angles are 3 and 0.03. A query at position 3 and a key at position 1
  differ by the angles 2 and 0.02. A query at position 12 and a key at position
  10 differ by the same angles.

  Source: Su et al. 2021, arXiv 2104.09864, equation 34.
  Differs: the two features of a pair are K/2 apart, while in the paper they are
  neighbors. The results are equal up to a permutation of the features, and this
  version needs no strided access.

  Args:
    x_BxLxNxK: Queries or keys [B, L, N, K]. The position is the index along L,
      counted from `start`.
    base: Base of the angles.
    start: Position of the first query or key. Not read if there are
      `positions_BxL`.
    positions_BxL: Position of each token. None: positions count from `start`.
    factor: Divisor of the speed of slow rotations (`rotation_speeds`); 1: none
      is slowed.

  Returns:
    Rotated queries or keys, with the shape and dtype of the argument. Angles
    are computed in fp32 or a wider type.
  """
  _, length, _, width = x_BxLxNxK.shape
  wide = np.promote_types(np.float32, x_BxLxNxK.dtype)
  speeds = rotation_speeds(width, base, factor, wide)
  positions = (jnp.arange(length, dtype=np.int32) + start).astype(wide)
  angles = jnp.outer(positions, speeds)[None, :, None, :]
  if positions_BxL is not None:
    wide_positions = positions_BxL.astype(wide)[:, :, None, None]
    angles = wide_positions * speeds[None, None, None, :]
  cos = jnp.cos(angles)
  sin = jnp.sin(angles)
  first, second = jnp.split(x_BxLxNxK.astype(wide), 2, axis=-1)
  rotated = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(rotated, axis=-1).astype(x_BxLxNxK.dtype)


def rotation_speeds(
  width: int, base: float, factor: float, dtype: np.dtype
) -> Float[Array, " P"]:
  """Returns the angle per position of each pair of features (radian), [K/2].

  Pair i has the speed base^(-2 i / K). A factor above 1 slows down the pairs
  that turn less than once in 8,192 tokens: their speed is divided by it. So a
  model that was trained on 8,192 tokens meets no new angles of these pairs in
  longer sequences. Pairs that turn more than 4 times keep their speed. In
  between, the speed is a weighted mean of both, and the weight is linear in the
  number of turns.

  Source: Grattafiori et al. 2024, arXiv 2407.21783, section 3.4.2, and the rope
  type "llama3" of `transformers`.

  Args:
    width: Width of a head, K.
    base: Base of the angles.
    factor: Divisor of the speed of slow pairs; 1 means that none is slowed.
    dtype: Type of the result.
  """
  exponents = jnp.arange(0, width, 2, dtype=dtype) / width
  speeds = base**-exponents
  if factor == 1:
    return speeds
  turns = STRETCHED_LENGTH * speeds / (2 * np.pi)
  kept = (turns - STRETCHED_TURNS) / (KEPT_TURNS - STRETCHED_TURNS)
  kept = jnp.clip(kept, 0, 1)
  return kept * speeds + (1 - kept) * speeds / factor


def attend(
  query_BxLxNxK: Float[Array, "B L N K"],
  key_BxSxGxK: Float[Array, "B S G K"],
  value_BxSxGxK: Float[Array, "B S G K"],
  segments_BxL: Int[Array, "B L"] | None = None,
  start: int | Int[Array, ""] = 0,
  key_segments_BxS: Int[Array, "B S"] | None = None,
) -> Float[Array, "B L N K"]:
  """Computes causal attention with the weights softmax(q k / sqrt(K)).

  The result at each position is a weighted average of the values at this
  position and before. The weights [B, N, L, S] are kept in memory.

  Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1.

  Args:
    query_BxLxNxK: Queries [B, L, N, K].
    key_BxSxGxK: Keys [B, S, G, K], from position 0 on. G divides N: N / G
      neighboring query heads share a head of keys and a head of values.
    value_BxSxGxK: Values [B, S, G, K].
    segments_BxL: Number of each query's segment (`segment_ids`). A token reads
      only its own segment. None: all tokens are one segment.
    start: Position of the first query; 0 if S = L.
    key_segments_BxS: Number of each key's segment. None: the same as
      `segments_BxL`, which needs S = L.

  Returns:
    Averages with the shape and dtype of the values. Weights are computed in
    fp32 or a wider type.
  """
  _, length, num_heads, width = query_BxLxNxK.shape
  key = key_BxSxGxK
  value = value_BxSxGxK
  num_key_heads = key.shape[2]
  if num_heads > num_key_heads:
    # 8 query heads read 2 heads of keys as [0, 0, 0, 0, 1, 1, 1, 1].
    key = jnp.repeat(key, num_heads // num_key_heads, axis=2)
    value = jnp.repeat(value, num_heads // num_key_heads, axis=2)
  wide = np.promote_types(np.float32, query_BxLxNxK.dtype)
  logits = wide_einsum("blnk,bmnk->bnlm", query_BxLxNxK * width**-0.5, key)
  # A query at position p reads keys 0 to p. So position 0 reads only itself.
  positions = jnp.arange(length, dtype=np.int32) + start
  keys = jnp.arange(key.shape[1], dtype=np.int32)
  is_read = (keys[None, :] <= positions[:, None])[None, None]
  if segments_BxL is not None:
    if key_segments_BxS is None:
      key_segments_BxS = segments_BxL
    is_same = segments_BxL[:, :, None] == key_segments_BxS[:, None, :]
    is_read = is_read & is_same[:, None]
  logits = jnp.where(is_read, logits, jnp.finfo(wide).min)
  highest = jnp.max(logits, axis=-1, keepdims=True)
  # The row's maximum is subtracted so that exp does not overflow. The maximum
  # cancels in the division by the sum, so it needs no gradient. The sum divides
  # the product with the values instead of the weights. This saves the backward
  # pass one pass over [L, S].
  weights = jnp.exp(logits - jax.lax.stop_gradient(highest))
  sums_BxLxN = jnp.sum(weights, axis=-1).transpose(0, 2, 1)
  mixed = wide_einsum("bnlm,bmnk->blnk", weights.astype(value.dtype), value)
  return (mixed / sums_BxLxN[..., None]).astype(value.dtype)


def extended(cache: Cache, new: Cache, start: int | Int[Array, ""]) -> Cache:
  """Writes the keys and values of new positions into a cache.

  Args:
    cache: Keys and values of S positions, [B, S, G, K] each.
    new: Keys and values of L positions, [B, L, G, K] each.
    start: First of the L positions.

  Returns:
    A cache of S positions, in which the L positions are replaced.
  """
  return {
    name: jax.lax.dynamic_update_slice(cache[name], x, (0, start, 0, 0))
    for name, x in new.items()
  }


def segment_ids(
  tokens_BxL: Int[Array, "B L"], end_of_text: int
) -> Int[Array, "B L"]:
  """Returns the number of each token's segment in its sequence, from 0.

  A segment is the part of a sequence that belongs to one document.
  Example: if token 0 ends a document, the tokens [7, 8, 0, 5, 6, 0, 9] have the
  segments [0, 0, 1, 1, 1, 2, 2].

  Args:
    tokens_BxL: Tokens that a model reads.
    end_of_text: Token that ends a document. It begins the next segment.
  """
  return jnp.cumsum(tokens_BxL == end_of_text, axis=1, dtype=jnp.int32)


def segment_positions(segments_BxL: Int[Array, "B L"]) -> Int[Array, "B L"]:
  """Returns the distance of each token from the first token of its segment.

  Example: the segments [0, 0, 1, 1, 1] have the positions [0, 1, 0, 1, 2].

  Args:
    segments_BxL: Number of each token's segment (`segment_ids`).
  """
  positions = jnp.arange(segments_BxL.shape[1], dtype=jnp.int32)[None]
  previous_BxL = jnp.pad(segments_BxL[:, :-1], ((0, 0), (1, 0)))
  starts = jnp.where(segments_BxL != previous_BxL, positions, 0)
  return positions - jax.lax.cummax(starts, axis=1)


def wide_einsum(
  equation: str, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Returns `jnp.einsum` of two arrays with a result in fp32 or wider.

  Devices add up products of bfloat16 values in fp32 anyway, so the result need
  not be rounded. The gradient of a factor is a product of the result's gradient
  and the other factor. For that product, the result's gradient is rounded to
  the dtype of the factors, because a product of fp32 and bfloat16 would be
  computed in fp32, at a fraction of the speed.

  Args:
    equation: Equation of the einsum.
    x: First factor.
    y: Second factor, with the dtype of the first.
  """
  wide = np.promote_types(np.float32, x.dtype)
  if x.dtype == wide:
    return jnp.einsum(equation, x, y, preferred_element_type=wide)
  return _widened(equation, x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widened(equation: str, x: Array, y: Array) -> Array:
  """Computes an einsum of bfloat16 factors in fp32 (`wide_einsum`).

  Args:
    equation: Equation of the einsum.
    x: First factor.
    y: Second factor.
  """
  return jnp.einsum(equation, x, y, preferred_element_type=np.float32)


def _widened_forward(
  equation: str, x: Array, y: Array
) -> tuple[Array, tuple[Array, Array]]:
  """Forward pass of `_widened`.

  Args:
    equation: Equation of the einsum.
    x: First factor.
    y: Second factor.

  Returns:
    The einsum, and the two factors, which the backward pass needs.
  """
  return _widened(equation, x, y), (x, y)


def _widened_backward(
  equation: str, factors: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
  """Backward pass of `_widened`.

  Args:
    equation: Equation of the einsum.
    factors: The two factors.
    gradient: Gradient of the result, in fp32. It is rounded to the type of the
      factors first.

  Returns:
    The gradients of the two factors.
  """
  _, pullback = jax.vjp(functools.partial(jnp.einsum, equation), *factors)
  return pullback(gradient.astype(factors[0].dtype))


_widened.defvjp(_widened_forward, _widened_backward)
