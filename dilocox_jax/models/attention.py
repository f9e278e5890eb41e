"""Rotary positions and causal attention, as pure functions without parameters.

A sequence may have several documents. A *segment* is the part of a sequence
that belongs to one document (`segment_ids`).

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

  Features i and i + K/2 are a pair, for i < K/2. Their angle is the position
  times base^(-2 i / K), or less for slow pairs if `factor` is above 1. So the
  dot product of a query and a key does not change if both move by the same
  number of positions.

  Example with K = 4 and base 10,000: features 0 and 2 are rotated by 1 radian
  per position, features 1 and 3 by 10,000^(-1/2) = 0.01 radian. At position 3
  the angles are 3 and 0.03.

  Source: Su et al. 2021, arXiv 2104.09864, equation 34.
  Differs: the two features of a pair are K/2 apart; in the paper they are
  neighbors.

  Args:
    x_BxLxNxK: Queries or keys.
    base: Base of the angles.
    start: Position of the first token; ignored if `positions_BxL` is given.
    positions_BxL: Position of each token. None: `start`, `start` + 1, ...
    factor: Divisor of the speed of slow pairs (`rotation_speeds`); 1: no pair
      is slowed.

  Returns:
    Rotated queries or keys, with the shape and dtype of the argument.
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
  """Returns the angle per position of each pair of features (radians), [K/2].

  Pair i has the speed base^(-2 i / K). With a factor above 1, pairs that turn
  less than once in 8,192 tokens have their speed divided by the factor, so that
  a model trained on 8,192 tokens can read longer sequences. Pairs that turn
  more than 4 times keep their speed. In between, the speed is a weighted mean
  of the two speeds, linear in the number of turns.

  Source: Grattafiori et al. 2024, arXiv 2407.21783, section 3.4.2, and the rope
  type "llama3" of `transformers`.

  Args:
    width: Width of a head, K.
    base: Base of the angles.
    factor: Divisor of the speed of slow pairs; 1: no pair is slowed.
    dtype: Type of the result.
  """
  exponents = jnp.arange(0, width, 2, dtype=dtype) / width
  speeds = base**-exponents
  if factor == 1:
    return speeds
  turns = STRETCHED_LENGTH * speeds / (2 * np.pi)
  # Weight of the unchanged speed: 0 up to 1 turn, 1 from 4 turns on.
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

  The weights [B, N, L, S] of all queries are in memory at once.

  Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1.

  Args:
    query_BxLxNxK: Queries.
    key_BxSxGxK: Keys from position 0 on. N / G neighboring query heads share a
      head of keys and values.
    value_BxSxGxK: Values.
    segments_BxL: Number of each query's segment: the part of its sequence that
      belongs to one document (`segment_ids`). A query reads only keys of its
      own segment. None: a sequence is one segment.
    start: Position of the first query among the keys.
    key_segments_BxS: Number of each key's segment. None: `segments_BxL`, which
      needs S = L.

  Returns:
    Weighted means of the values, in their dtype. The weights are computed in
    fp32 or wider.
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
  """Returns a cache with the keys and values of some positions replaced.

  Args:
    cache: Keys and values of S positions, [B, S, G, K] each.
    new: Keys and values of L positions, [B, L, G, K] each.
    start: Position in the cache at which the L new ones begin. `start` + L must
      not exceed S: JAX would not raise an error, but write at earlier
      positions.
  """
  return {
    name: jax.lax.dynamic_update_slice(cache[name], x, (0, start, 0, 0))
    for name, x in new.items()
  }


def segment_ids(
  tokens_BxL: Int[Array, "B L"], end_of_text: int
) -> Int[Array, "B L"]:
  """Returns the number of each token's segment.

  A segment is the part of a sequence that belongs to one document. Each token
  `end_of_text` begins a new segment. Example: if `end_of_text` is 0, the tokens
  [7, 8, 0, 5, 6, 0, 9] have the segments [0, 0, 1, 1, 1, 2, 2].
  """
  return jnp.cumsum(tokens_BxL == end_of_text, axis=1, dtype=jnp.int32)


def segment_positions(segments_BxL: Int[Array, "B L"]) -> Int[Array, "B L"]:
  """Returns the distance of each token from the first token of its segment.

  A segment is the part of a sequence that belongs to one document. Example:
  the segments [0, 0, 1, 1, 1] have the positions [0, 1, 0, 1, 2].
  """
  positions = jnp.arange(segments_BxL.shape[1], dtype=jnp.int32)[None]
  previous_BxL = jnp.pad(segments_BxL[:, :-1], ((0, 0), (1, 0)))
  starts = jnp.where(segments_BxL != previous_BxL, positions, 0)
  # The highest start so far is that of the token's own segment.
  return positions - jax.lax.cummax(starts, axis=1)


def wide_einsum(
  equation: str, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Returns `jnp.einsum(equation, x, y)` in fp32, or in fp64 for fp64 factors.

  Both factors must have the same dtype.
  """
  wide = np.promote_types(np.float32, x.dtype)
  if x.dtype == wide:
    return jnp.einsum(equation, x, y, preferred_element_type=wide)
  return _widened(equation, x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widened(equation: str, x: Array, y: Array) -> Array:
  """Computes the einsum of factors narrower than fp32 in fp32.

  JAX differentiates it by `_widened_backward`.
  """
  return jnp.einsum(equation, x, y, preferred_element_type=np.float32)


def _widened_forward(
  equation: str, x: Array, y: Array
) -> tuple[Array, tuple[Array, Array]]:
  """Returns the einsum, and the two factors for the backward pass."""
  return _widened(equation, x, y), (x, y)


def _widened_backward(
  equation: str, factors: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
  """Returns the gradients of the two factors, in their dtype."""
  # A product of fp32 and bfloat16 would be computed in fp32, at a fraction of
  # the speed.
  _, pullback = jax.vjp(functools.partial(jnp.einsum, equation), *factors)
  return pullback(gradient.astype(factors[0].dtype))


_widened.defvjp(_widened_forward, _widened_backward)
