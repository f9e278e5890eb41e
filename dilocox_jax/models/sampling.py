"""Continues a text with tokens that a model draws one after the other.

Keys and values of every layer are kept in a cache, so that a new token costs
one position and not the whole text again.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dilocox_jax.checks import require
from dilocox_jax.models.attention import Cache
from dilocox_jax.models.transformer import Model, Params


def generate(
  model: Model,
  params: Params,
  prompt_BxL: Int[Array, "B L"],
  num_tokens: int,
  key: Array,
  *,
  temperature: float | int = 1.0,
  top_p: float | int = 1.0,
) -> Int[Array, "B tokens"]:
  """Draws the tokens that follow a prompt.

  Args:
    model: Model that can decode.
    params: Its parameters.
    prompt_BxL: At least one token of each text.
    num_tokens: Number of tokens to draw.
    key: Random key; the same key gives the same tokens.
    temperature: Divides the logits; 0 takes the likeliest token.
    top_p: Share of the probability that is drawn from, see `draw_token`.

  Returns:
    The new tokens [B, num_tokens], int32.

  Raises:
    ValueError: If the model cannot decode, or has too few positions.
  """
  if (decode := model.decode) is None:
    raise ValueError("this model has no cache to sample with")
  batch, length = prompt_BxL.shape
  longest = model.shape.num_positions
  require(
    not longest or length + num_tokens <= longest,
    f"{length} tokens and {num_tokens} more exceed the {longest} learned "
    "positions of the model: ask for fewer",
  )
  dtype = jax.eval_shape(model.embed, params, prompt_BxL).dtype
  cache = empty_cache(model, batch, length + num_tokens, dtype)
  logits, cache = decode(params, prompt_BxL, cache, 0)
  keys = jax.random.split(key, num_tokens)
  token = draw_token(logits[:, -1], keys[0], temperature, top_p)

  def step(carry: tuple[Array, Cache], at: tuple[Array, Array]):
    token, cache = carry
    position, key = at
    logits, cache = decode(params, token[:, None], cache, position)
    token = draw_token(logits[:, -1], key, temperature, top_p)
    return (token, cache), token

  positions = jnp.arange(length, length + num_tokens - 1, dtype=np.int32)
  _, others = jax.lax.scan(step, (token, cache), (positions, keys[1:]))
  return jnp.concatenate([token[:, None], others.T], axis=1)


def empty_cache(
  model: Model, batch: int, length: int, dtype: np.dtype
) -> Cache:
  """Returns a cache of zeros for texts of a length.

  Args:
    model: The model; its shape gives the sizes of the cache.
    batch: Number of texts, B.
    length: Tokens of a text for which there is room, those drawn included.
    dtype: Type of keys and values.
  """
  sizes = model.shape
  one = (sizes.num_layers, batch, length, sizes.kv_heads, sizes.head_width)
  return {name: jnp.zeros(one, dtype) for name in ("key", "value")}


def draw_token(
  logits_BxV: Float[Array, "B V"],
  key: Array,
  temperature: float | int = 1.0,
  top_p: float | int = 1.0,
) -> Int[Array, " B"]:
  """Draws one token from each row of logits.

  Example: probabilities 0.5, 0.3 and 0.2 with top_p = 0.6 leave the first two
  tokens, since the first alone has less than 0.6.

  Source: Holtzman et al. 2019, arXiv 1904.09751, section 3.1 (top-p).

  Args:
    logits_BxV: Logits.
    key: Random key.
    temperature: Divides the logits; 0 takes the likeliest token.
    top_p: Tokens are drawn from the fewest that have this share together.
  """
  if temperature == 0:
    return jnp.argmax(logits_BxV, axis=-1).astype(np.int32)
  logits_BxV = logits_BxV / temperature
  ranked = -jnp.sort(-logits_BxV, axis=-1)
  shares = jax.nn.softmax(ranked, axis=-1)
  # A token stays if those before it have less than the share.
  stays = jnp.cumsum(shares, axis=-1) - shares < top_p
  lowest = jnp.min(jnp.where(stays, ranked, jnp.inf), axis=-1, keepdims=True)
  logits_BxV = jnp.where(logits_BxV >= lowest, logits_BxV, -jnp.inf)
  return jax.random.categorical(key, logits_BxV).astype(np.int32)
