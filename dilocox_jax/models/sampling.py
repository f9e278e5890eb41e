"""Continues a text with tokens that a model draws one after the other.

Keys and values of every layer are kept in a cache, so that a new token costs
one position and not the whole text again.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dilocox_jax.checks import require, within_limits
from dilocox_jax.models.attention import Cache
from dilocox_jax.models.transformer import Model, Params

NO_TOKEN = -1  # Where logits say nothing, as those of a model that diverged.


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
    num_tokens: Number of tokens to draw, 0 or more.
    key: Random key; the same key gives the same tokens.
    temperature: Divides the logits; 0 takes the likeliest token.
    top_p: Share of the probability that is drawn from, see `draw_token`.

  Returns:
    The new tokens [B, num_tokens], int32. From `NO_TOKEN` on, a row means
    nothing.

  Raises:
    ValueError: If the model cannot decode, or has too few positions, the prompt
      is empty, or a number is outside its limits.
  """
  if (decode := model.decode) is None:
    raise ValueError("this model has no cache to sample with")
  _check_limits(temperature, top_p)
  within_limits("num_tokens", num_tokens, at_least=0)
  batch, length = prompt_BxL.shape
  require(length > 0, "the prompt is empty: there is nothing to continue")
  longest = model.shape.num_positions
  require(
    not longest or length + num_tokens <= longest,
    f"{length} tokens and {num_tokens} more exceed the {longest} learned "
    "positions of the model: ask for fewer",
  )
  if num_tokens == 0:
    return jnp.zeros((batch, 0), np.int32)
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
    logits_BxV: Logits of any float type; -inf is a token that is never drawn.
    key: Random key.
    temperature: Divides the logits; 0 takes the likeliest token.
    top_p: Tokens are drawn from the fewest that have this share together, 0 to
      1. The likeliest token is always among them. Of equally likely tokens the
      first ones come first.

  Returns:
    The tokens, int32. A row has `NO_TOKEN` if one of its logits is NaN, or all
    are -inf.

  Raises:
    ValueError: If a number is outside its limits.
  """
  _check_limits(temperature, top_p)
  logits_BxV = logits_BxV.astype(np.promote_types(np.float32, logits_BxV.dtype))
  highest_Bx1 = jnp.max(logits_BxV, axis=-1, keepdims=True)
  has_token_B = (highest_Bx1 > -jnp.inf)[:, 0]  # It is not if a logit is NaN.
  if temperature == 0:
    tokens_B = jnp.argmax(logits_BxV, axis=-1)
  else:
    tokens_B = _drawn(logits_BxV, highest_Bx1, key, temperature, top_p)
  return jnp.where(has_token_B, tokens_B, NO_TOKEN).astype(np.int32)


def _check_limits(temperature: float | int, top_p: float | int) -> None:
  within_limits("temperature", temperature, at_least=0, below=math.inf)
  within_limits("top_p", top_p, at_least=0, at_most=1)


def _drawn(
  logits_BxV: Array,
  highest_Bx1: Array,
  key: Array,
  temperature: float | int,
  top_p: float | int,
) -> Array:
  """Draws tokens at a temperature above 0."""
  # The likeliest token has 0, also where a tiny temperature rounds to 0 or a
  # logit is infinite.
  scaled_BxV = jnp.where(
    logits_BxV == highest_Bx1, 0.0, (logits_BxV - highest_Bx1) / temperature
  )
  if top_p < 1:  # Sums of rounded shares may reach 1 before the last token.
    is_in_BxV = _has_top_share(scaled_BxV, top_p)
    scaled_BxV = jnp.where(is_in_BxV, scaled_BxV, -jnp.inf)
  return jax.random.categorical(key, scaled_BxV)


def _has_top_share(logits_BxV: Array, top_p: float | int) -> Array:
  """Returns which tokens are the fewest that have a share together."""
  order_BxV = jnp.argsort(-logits_BxV, axis=-1, stable=True)
  shares_BxV = jnp.take_along_axis(
    jax.nn.softmax(logits_BxV, axis=-1), order_BxV, axis=-1
  )
  # A token stays if those before it have less than the share.
  before_BxV = jnp.cumsum(shares_BxV, axis=-1) - shares_BxV
  stays_BxV = (before_BxV < top_p).at[:, 0].set(True)
  rank_BxV = jnp.argsort(order_BxV, axis=-1)
  return jnp.take_along_axis(stays_BxV, rank_BxV, axis=-1)
