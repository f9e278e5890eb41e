"""Continues a text with tokens that a model draws one after the other.

Keys and values of every layer are kept in a cache, so that a new token costs
one position and not the whole text again.
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
      is empty or has tokens that the model lacks, or a number is outside its
      limits.
  """
  if (decode := model.decode) is None:
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


def _check_prompt(prompt: Any, vocab_size: int) -> None:
  """Raises ValueError unless a prompt is token ids [B, L] of a vocabulary.

  Args:
    prompt: The prompt. Inside a program that is traced its ids are not known,
      and whoever calls the program checks them.
    vocab_size: Number of different tokens.
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
  if temperature > 1:  # Here a difference could overflow, below 1 a quotient.
    scaled_BxV = logits_BxV / temperature - highest_Bx1 / temperature
  else:
    scaled_BxV = (logits_BxV - highest_Bx1) / temperature
  # The likeliest token has 0, also where a tiny temperature rounds to 0. What a
  # logit of -inf or one beside inf has does not depend on the temperature: a
  # huge one rounds to inf, and inf / inf is no number.
  is_out_BxV = (logits_BxV == -jnp.inf) | (highest_Bx1 == jnp.inf)
  scaled_BxV = jnp.where(is_out_BxV, -jnp.inf, scaled_BxV)
  scaled_BxV = jnp.where(logits_BxV == highest_Bx1, 0.0, scaled_BxV)
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
