"""Generates text: a model draws the tokens after a prompt one by one.

A cache holds the keys and values of all earlier positions in every layer. So a
new token costs the computation of one position only.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dilocox_jax.checks import of_type, require, within_limits
from dilocox_jax.models.attention import Cache
from dilocox_jax.models.transformer import Model, Params

# Stands for a token where the logits are not usable, as after a divergence.
NO_TOKEN = -1


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
    model: Model whose `decode` is not None.
    params: Parameters of the model.
    prompt_BxL: Token ids of B texts with L tokens each, at least one token.
    num_tokens: Number of tokens to draw for each text, 0 or more.
    key: Random key; the same key gives the same tokens.
    temperature: Divisor of the logits before the softmax, 0 or more; 0 always
      takes the likeliest token.
    top_p: Draw only among the likeliest tokens that together have this
      probability (`draw_token`), from 0 to 1; 1: among all tokens.

  Returns:
    The new tokens [B, num_tokens], int32. If the model's logits are NaN, a
    token is `NO_TOKEN` (-1), and the later tokens of this text are meaningless.

  Raises:
    ValueError: One line, if the model cannot decode or has too few positions,
      if the prompt is no array of integers [B, L] or is empty, if it has ids
      outside the vocabulary, or if a number is outside its limits. Under
      `jax.jit` the ids are not checked.
  """
  decode = model.decode
  if decode is None:
    raise ValueError("this model has no cache to sample with")
  _check_limits(temperature, top_p)
  num_tokens = of_type("num_tokens", num_tokens, int)
  within_limits("num_tokens", num_tokens, at_least=0)
  _check_prompt(prompt_BxL, model.shape.vocab_size)
  batch, length = prompt_BxL.shape
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
  logits_BxLxV, cache = decode(params, prompt_BxL, cache, 0)
  keys = jax.random.split(key, num_tokens)
  first_B = draw_token(logits_BxLxV[:, -1], keys[0], temperature, top_p)

  def step(carry: tuple[Array, Cache], position_and_key: tuple[Array, Array]):
    token_B, cache = carry
    position, key = position_and_key
    logits_Bx1xV, cache = decode(params, token_B[:, None], cache, position)
    token_B = draw_token(logits_Bx1xV[:, -1], key, temperature, top_p)
    return (token_B, cache), token_B

  positions = jnp.arange(length, length + num_tokens - 1, dtype=np.int32)
  _, later_TxB = jax.lax.scan(step, (first_B, cache), (positions, keys[1:]))
  return jnp.concatenate([first_B[:, None], later_TxB.T], axis=1)


def _check_prompt(prompt: Any, vocab_size: int) -> None:
  """Raises ValueError unless a prompt is token ids [B, L] of a vocabulary.

  The ids themselves are not checked while JAX traces the caller.
  """
  require(
    isinstance(prompt, jax.Array | np.ndarray) and prompt.ndim == 2,
    "the prompt must be an array of token ids [texts, tokens]",
  )
  require(prompt.shape[0] > 0, "the prompt has no texts: give one or more")
  require(
    prompt.shape[1] > 0, "the prompt is empty: there is nothing to continue"
  )
  require(
    np.issubdtype(prompt.dtype, np.integer),
    f"the prompt has {prompt.dtype}, and token ids are integers",
  )
  if not isinstance(prompt, jax.core.Tracer):
    lowest, highest = int(prompt.min()), int(prompt.max())
    require(
      lowest >= 0 and highest < vocab_size,
      f"tokens of the prompt go from {lowest} to {highest}, but "
      f"model.vocab_size={vocab_size} allows 0 to {vocab_size - 1}",
    )


def empty_cache(
  model: Model, batch: int, length: int, dtype: np.dtype
) -> Cache:
  """Returns a cache of zeros for the keys and values of all layers.

  Args:
    model: Model that will use the cache.
    batch: Number of texts, B.
    length: Tokens of a text, L: the prompt and all tokens to be drawn.
    dtype: Type of keys and values.

  Returns:
    Arrays "key" and "value", [layers, B, L, heads of keys, head width].
  """
  sizes = model.shape
  cache_shape = (
    sizes.num_layers,
    batch,
    length,
    sizes.kv_heads,
    sizes.head_width,
  )
  return {
    "key": jnp.zeros(cache_shape, dtype),
    "value": jnp.zeros(cache_shape, dtype),
  }


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
    logits_BxV: Logits of any float type. A token with -inf is never drawn.
    key: Random key.
    temperature: Divisor of the logits, 0 or more; 0 takes the likeliest token.
    top_p: Draw only among the smallest set of the likeliest tokens that has
      this probability together, from 0 to 1. The set has at least one token.
      Of two equal probabilities, that of the lower id comes first.

  Returns:
    The tokens [B], int32. A row with a NaN, or with only -inf, gives `NO_TOKEN`
    (-1).

  Raises:
    ValueError: One line, if `temperature` or `top_p` is outside its limits.
  """
  _check_limits(temperature, top_p)
  logits_BxV = logits_BxV.astype(np.promote_types(np.float32, logits_BxV.dtype))
  highest_Bx1 = jnp.max(logits_BxV, axis=-1, keepdims=True)
  # The comparison is false if a logit is NaN.
  has_token_B = (highest_Bx1 > -jnp.inf)[:, 0]
  if temperature == 0:
    tokens_B = jnp.argmax(logits_BxV, axis=-1)
  else:
    tokens_B = _drawn(logits_BxV, highest_Bx1, key, temperature, top_p)
  return jnp.where(has_token_B, tokens_B, NO_TOKEN).astype(np.int32)


def _check_limits(temperature: float | int, top_p: float | int) -> None:
  """Raises ValueError unless 0 <= temperature < inf and 0 <= top_p <= 1."""
  within_limits("temperature", temperature, at_least=0, below=math.inf)
  within_limits("top_p", top_p, at_least=0, at_most=1)


def _drawn(
  logits_BxV: Array,
  highest_Bx1: Array,
  key: Array,
  temperature: float | int,
  top_p: float | int,
) -> Array:
  """Draws a token from each row of logits, at a temperature above 0.

  `highest_Bx1` is the highest logit of each row.
  """
  # Above 1 the difference of two logits could overflow, so both are divided
  # first. Below 1 a quotient could overflow, so they are subtracted first.
  if temperature > 1:
    scaled_BxV = logits_BxV / temperature - highest_Bx1 / temperature
  else:
    scaled_BxV = (logits_BxV - highest_Bx1) / temperature
  # Two cases are set by hand, because the division may give NaN for them: 0 / 0
  # at a temperature rounded to 0, inf / inf at one rounded to inf. A token that
  # cannot be drawn gets -inf: a logit of -inf, or any logit below one of inf.
  # The likeliest token gets 0.
  is_out_BxV = (logits_BxV == -jnp.inf) | (highest_Bx1 == jnp.inf)
  scaled_BxV = jnp.where(is_out_BxV, -jnp.inf, scaled_BxV)
  scaled_BxV = jnp.where(logits_BxV == highest_Bx1, 0.0, scaled_BxV)
  # With top_p = 1 all tokens are candidates. The sum would not say so, because
  # rounded probabilities may add up to 1 before the last token.
  if top_p < 1:
    is_in_BxV = _has_top_share(scaled_BxV, top_p)
    scaled_BxV = jnp.where(is_in_BxV, scaled_BxV, -jnp.inf)
  return jax.random.categorical(key, scaled_BxV)


def _has_top_share(logits_BxV: Array, top_p: float | int) -> Array:
  """Returns whether each token is a candidate of top-p sampling, [B, V]."""
  order_BxV = jnp.argsort(-logits_BxV, axis=-1, stable=True)
  shares_BxV = jnp.take_along_axis(
    jax.nn.softmax(logits_BxV, axis=-1), order_BxV, axis=-1
  )
  # A token is a candidate if the likelier tokens have less than top_p together.
  before_BxV = jnp.cumsum(shares_BxV, axis=-1) - shares_BxV
  stays_BxV = (before_BxV < top_p).at[:, 0].set(True)
  rank_BxV = jnp.argsort(order_BxV, axis=-1)
  return jnp.take_along_axis(stays_BxV, rank_BxV, axis=-1)
