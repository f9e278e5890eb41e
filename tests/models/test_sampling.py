import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models.sampling import draw_token, generate
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.presets import nano

SHAPE = dataclasses.replace(
  nano, norm="layer", biases="all", positions="learned", num_positions=12
)


def drawn(model):
  params = jax.jit(model.init)(jax.random.key(0))
  return jax.tree.map(lambda x: 8 * x, params)  # Logits that differ.


def tokens(*shape):
  return jax.random.randint(jax.random.key(1), shape, 0, 256, np.int32)


def test_greedy_tokens_are_those_of_the_whole_text_read_again():
  model, text = build_model(SHAPE), tokens(2, 4)
  params = drawn(model)
  made = jax.jit(
    functools.partial(generate, model, num_tokens=8, temperature=0.0)
  )(params, text, key=jax.random.key(0))
  apply = jax.jit(model.apply)
  for _ in range(8):
    padded = jnp.pad(text, ((0, 0), (0, 12 - text.shape[1])))
    best = jnp.argmax(apply(params, padded)[:, text.shape[1] - 1], axis=-1)
    text = jnp.concatenate([text, best.astype(np.int32)[:, None]], axis=1)
  np.testing.assert_array_equal(made, text[:, 4:])
  one = generate(model, params, text[:, :4], 1, jax.random.key(0), top_p=1e-6)
  np.testing.assert_array_equal(one, text[:, 4:5])


LOGITS = jnp.log(jnp.asarray([0.2, 0.5, 0.3]))


def shares(temperature, top_p, num=4000):
  rows = jnp.tile(LOGITS, (num, 1))
  made = draw_token(rows, jax.random.key(0), temperature, top_p)
  return np.bincount(made, minlength=3) / num


@pytest.mark.parametrize(
  ("temperature", "top_p", "expected"),
  [
    (0.0, 1.0, [0, 1, 0]),
    (1.0, 1.0, [0.2, 0.5, 0.3]),
    (1.0, 0.6, [0, 0.625, 0.375]),
    (1.0, 0.4, [0, 1, 0]),
    (0.5, 1.0, [4 / 38, 25 / 38, 9 / 38]),
  ],
)
def test_tokens_are_drawn_as_often_as_they_should(temperature, top_p, expected):
  np.testing.assert_allclose(
    shares(temperature, top_p), expected, atol=0.03, rtol=0
  )


def test_what_cannot_be_sampled_is_one_line():
  model = build_model(SHAPE)
  with pytest.raises(ValueError, match="4 tokens and 9 more exceed the 12"):
    generate(model, {}, tokens(1, 4), 9, jax.random.key(0))
  with pytest.raises(ValueError, match="temperature=-1 must be at least 0"):
    draw_token(LOGITS[None], jax.random.key(0), -1)
  with pytest.raises(ValueError, match="top_p=0 must be above 0"):
    draw_token(LOGITS[None], jax.random.key(0), 1.0, 0)
  with pytest.raises(ValueError, match="no cache"):
    generate(
      model._replace(decode=None), {}, tokens(1, 4), 1, jax.random.key(0)
    )
