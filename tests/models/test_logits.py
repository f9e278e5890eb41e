"""The loss of tokens, and tokens that are drawn."""

import dataclasses
import functools
import inspect
import itertools
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models import sampling
from dilocox_jax.models.loss import (
  chunked_token_loss,
  next_token_loss,
  token_loss,
  token_scores,
  token_scores_of_columns,
)
from dilocox_jax.models.sampling import NO_TOKEN, draw_token, generate
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.presets import nano
from tests.tiers import slow

MODEL = build_model(nano)


def tokens(*shape):
  return jax.random.randint(jax.random.key(1), shape, 0, 256, jnp.int32)


def fixed_logits(logits_BxLxV):
  """A model that says the same whatever it reads."""
  return MODEL._replace(apply=lambda params, tokens_BxL: logits_BxLxV)


def test_the_loss_is_a_mean_over_all_predicted_tokens():
  logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
  batch = jnp.array([[0, 1, 2, 3], [4, 3, 2, 1]], jnp.int32)
  nats = []
  squares = []
  for b, i in itertools.product(range(2), range(3)):
    p = np.exp(logits[b, i], dtype=np.float64)
    nats.append(-np.log(p[batch[b, i + 1]] / p.sum()))
    squares.append(np.log(p.sum()) ** 2)
  for z_loss in (0.0, 0.1):
    loss = next_token_loss(fixed_logits(logits), {}, batch, z_loss)
    expected = np.mean(nats) + z_loss * np.mean(squares)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    targets = batch[:, 1:].reshape(-1)
    assert token_loss(logits.reshape(6, 5), targets, z_loss) == loss


def drawn(model):
  """Parameters whose logits differ."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return jax.tree.map(
    lambda x: jnp.float32(0.2 * rng.normal(size=x.shape)), shapes
  )


@functools.cache
def loss(chunk_tokens):
  """The loss and its gradients."""
  sizes = {"z_loss": 0.1, "chunk_tokens": chunk_tokens}
  read = lambda p: next_token_loss(MODEL, p, tokens(2, 13), **sizes)  # noqa: E731
  return jax.jit(jax.value_and_grad(read))(drawn(MODEL))


@pytest.mark.parametrize("chunk_tokens", [5, 100, *slow(8)])
def test_a_loss_in_chunks_is_the_loss_at_once(chunk_tokens):
  chex.assert_trees_all_close(loss(chunk_tokens), loss(0), atol=1e-6)
  seen = []

  def logits(x_CxD):
    seen.append(len(x_CxD))
    return x_CxD

  x_TxD = jnp.eye(24, dtype=jnp.float32)
  targets = jnp.arange(24) % 3
  found = chunked_token_loss(logits, x_TxD, targets, 0.0, chunk_tokens)
  assert min(seen) == min(chunk_tokens, 24)  # Chunks are all that stands.
  assert float(found) == pytest.approx(float(token_loss(x_TxD, targets)))


def test_scores_that_devices_share_are_those_of_one_device():
  logits = jax.random.normal(jax.random.key(0), (6, 5))
  targets = jnp.array([0, 4, 2, 2, 1, 3], jnp.int32)
  expected = token_scores(logits, targets)
  chex.assert_trees_all_close(
    token_scores_of_columns(logits, targets), expected, atol=1e-6
  )


SHAPE = dataclasses.replace(
  nano, norm="layer", biases="all", positions="learned", num_positions=12
)


def test_greedy_tokens_are_those_of_the_whole_text_read_again():
  model = build_model(SHAPE)
  text = tokens(2, 4)
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
  one = functools.partial(generate, model, num_tokens=1, top_p=1e-6)
  found = jax.jit(one)(params, text[:, :4], key=jax.random.key(0))
  np.testing.assert_array_equal(found, text[:, 4:5])


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


def draw(logits, temperature=1.0, top_p=1.0, dtype=np.float32, num=1000):
  """The different tokens that are drawn from one row of logits."""
  rows = jnp.tile(jnp.asarray([logits], dtype), (num, 1))
  found = draw_token(rows, jax.random.key(0), temperature, top_p)
  return set(np.asarray(found).tolist())


# The tests check types of arguments, but nobody does so where users call it.
unchecked_generate: Any = inspect.unwrap(generate)
LIKELY = [1.0, 5.0, 3.0, 2.0]
INFINITE = float("inf")


@pytest.mark.parametrize("temperature", [0, 1e-3, 1e-20, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_a_temperature_near_0_takes_the_likeliest_token(temperature, dtype):
  assert draw(LIKELY, temperature, dtype=dtype) == {1}
  assert draw([-x for x in LIKELY], temperature, dtype=dtype) == {0}
  assert draw([6e4, -6e4, 0.0], temperature, dtype=dtype) == {0}


def test_a_huge_temperature_draws_all_tokens_alike():
  assert draw(LIKELY, 1e38) == {0, 1, 2, 3}
  assert draw(LIKELY, 1e300) == {0, 1, 2, 3}


def test_a_huge_temperature_divides_before_it_subtracts():
  """The second logit is 6 below the first, so its share is 0.0025."""
  assert draw([3e38, -3e38], 1e38, num=4000) == {0, 1}


@pytest.mark.parametrize("top_p", [0, 1e-45, 1e-9, 0.2])
def test_a_small_share_leaves_the_likeliest_token_alone(top_p):
  assert draw(LIKELY, 1.0, top_p) == {1}
  assert draw(LIKELY, 1e-38, top_p) == {1}


def test_equally_likely_tokens_are_cut_where_the_share_is_reached():
  assert draw([0.0] * 4, top_p=0.5) == {0, 1}
  assert draw([0.0] * 4, top_p=0.6) == {0, 1, 2}
  assert draw([0.0, 1.0, 1.0, 0.0], top_p=0.4) == {1, 2}


def test_a_share_of_1_cuts_no_token():
  """Rounded shares sum up to 1 before the last of 1000 tokens."""
  rows = 3 * jax.random.normal(jax.random.key(0), (1, 1000))
  assert not sampling._has_top_share(rows, 1.0).all()
  with mock.patch.object(sampling, "_has_top_share", side_effect=KeyError):
    draw_token(rows, jax.random.key(0), 1.0, 1.0)


@pytest.mark.parametrize("temperature", [0, 1e-38, 1.0, 1e38, 1e300])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_infinite_logits_decide_and_logits_that_are_no_numbers_give_no_token(
  temperature, top_p
):
  assert draw([-INFINITE, 0.0, -INFINITE], temperature, top_p) == {1}
  assert draw([0.0, INFINITE, -INFINITE], temperature, top_p) == {1}
  assert draw([0.0], temperature, top_p) == {0}  # A vocabulary of one token.
  assert draw([0.0, float("nan")], temperature, top_p) == {NO_TOKEN}
  assert draw([-INFINITE] * 2, temperature, top_p) == {NO_TOKEN}


@pytest.mark.parametrize(
  ("numbers", "line"),
  [
    ((-1.0, 1.0), "temperature=-1.0 must be at least 0"),
    ((float("nan"), 1.0), "temperature=nan must be at least 0"),
    ((INFINITE, 1.0), "temperature=inf must be at least 0 and below inf"),
    ((1.0, -0.1), "top_p=-0.1 must be at least 0 and at most 1"),
    ((1.0, 1.1), "top_p=1.1 must be at least 0 and at most 1"),
    ((1.0, float("nan")), "top_p=nan must be at least 0"),
  ],
)
def test_numbers_outside_their_limits_are_refused(numbers, line):
  model = build_model(SHAPE)
  key = jax.random.key(0)
  with pytest.raises(ValueError, match=line):
    draw_token(LOGITS[None], key, *numbers)
  temperature, top_p = numbers
  with pytest.raises(ValueError, match=line):
    generate(
      model, {}, tokens(1, 4), 1, key, temperature=temperature, top_p=top_p
    )


def test_no_tokens_are_none_and_an_empty_prompt_is_refused():
  model = build_model(SHAPE)
  key = jax.random.key(0)
  assert generate(model, drawn(model), tokens(2, 4), 0, key).shape == (2, 0)
  with pytest.raises(ValueError, match="num_tokens=-1 must be at least 0"):
    generate(model, {}, tokens(1, 4), -1, key)
  with pytest.raises(ValueError, match="num_tokens=2.0 must be of type int"):
    unchecked_generate(model, {}, tokens(1, 4), 2.0, key)


@pytest.mark.parametrize(
  ("prompt", "line"),
  [
    (np.zeros((1, 0), np.int32), "the prompt is empty"),
    (np.zeros((0, 3), np.int32), "the prompt has no texts"),
    (np.zeros(3, np.int32), "must be an array of token ids"),
    ([[1, 2]], "must be an array of token ids"),
    (np.zeros((1, 3)), "the prompt has float64"),
    (np.full((1, 3), -1), "go from -1 to -1, but model.vocab_size"),
    (np.full((1, 3), SHAPE.vocab_size), "but model.vocab_size"),
    (np.full((1, 3), 2**32), "go from 4294967296"),
  ],
)
def test_a_prompt_that_is_no_text_of_the_model_is_one_line(prompt, line):
  with pytest.raises(ValueError, match=line):
    unchecked_generate(build_model(SHAPE), {}, prompt, 1, jax.random.key(0))


def test_what_cannot_be_sampled_is_one_line():
  model = build_model(SHAPE)
  with pytest.raises(ValueError, match="4 tokens and 9 more exceed the 12"):
    generate(model, {}, tokens(1, 4), 9, jax.random.key(0))
  with pytest.raises(ValueError, match="no cache"):
    generate(
      model._replace(decode=None), {}, tokens(1, 4), 1, jax.random.key(0)
    )
