"""How tokens look at each other, apart from any parameter.

Positions and attention are pure functions of queries, keys and values, so
their laws - the past alone, distances alone - are tested without a model.

Letters in names: B batch, L length, N heads, K head width.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

ROPE_BASE = 10_000.0


def rotate(x_BxLxNxK: Float[Array, "B L N K"]) -> Float[Array, "B L N K"]:
  """Turns pairs of features by angles that grow with the position.

  Feature i < K/2 is paired with i + K/2 and turned by
  position * ROPE_BASE^(-2 i / K), so that a product of a query and a key
  depends on the distance between them alone.

  Source: Su et al. 2021, arXiv 2104.09864, equation 34.
  Differs: pairs are halves apart instead of neighbours, which is the same up
  to a permutation of the features and needs no strided access.

  Args:
    x_BxLxNxK: Queries or keys; the position is the index along L.

  Returns:
    The same shape and dtype.
  """
  _, length, _, width = x_BxLxNxK.shape
  wide = np.promote_types(np.float32, x_BxLxNxK.dtype)
  exponents = jnp.arange(0, width, 2, dtype=wide) / width
  positions = jnp.arange(length, dtype=wide)
  angles = jnp.outer(positions, ROPE_BASE**-exponents)[None, :, None, :]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first, second = jnp.split(x_BxLxNxK.astype(wide), 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(turned, axis=-1).astype(x_BxLxNxK.dtype)


def attend(
  query_BxLxNxK: Float[Array, "B L N K"],
  key_BxLxNxK: Float[Array, "B L N K"],
  value_BxLxNxK: Float[Array, "B L N K"],
) -> Float[Array, "B L N K"]:
  """Mixes values of the present and the past, by softmax(q k / sqrt(K)).

  Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1.

  Args:
    query_BxLxNxK: Queries.
    key_BxLxNxK: Keys.
    value_BxLxNxK: Values.

  Returns:
    The same shape and dtype; weights are computed in fp32 at least.
  """
  _, length, _, width = query_BxLxNxK.shape
  wide = np.promote_types(np.float32, query_BxLxNxK.dtype)
  logits = jnp.einsum(
    "blnk,bmnk->bnlm",
    query_BxLxNxK * width**-0.5,
    key_BxLxNxK,
    preferred_element_type=wide,
  )
  past = jnp.tril(jnp.ones((length, length), bool))[None, None]
  logits = jnp.where(past, logits, jnp.finfo(wide).min)
  highest = jnp.max(logits, axis=-1, keepdims=True)
  # Dividing by the sum after the product with the values instead of before
  # spares the backward pass one sweep over [L, L].
  weights = jnp.exp(logits - jax.lax.stop_gradient(highest))
  sums_BxLxN = jnp.sum(weights, axis=-1).transpose(0, 2, 1)
  mixed = jnp.einsum(
    "bnlm,bmnk->blnk",
    weights.astype(value_BxLxNxK.dtype),
    value_BxLxNxK,
    preferred_element_type=wide,
  )
  return (mixed / sums_BxLxN[..., None]).astype(value_BxLxNxK.dtype)
