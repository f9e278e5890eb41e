import dataclasses
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models.loss import (
  chunked_token_loss,
  next_token_loss,
  token_loss,
)
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.presets import MODEL_PRESETS, nano
from tests.oracles import transformer as oracle

# fp32 against float64, over two layers.
ROUNDING_TOLERANCE = 1e-5


def tokens(*shape, seed=1):
  return jax.random.randint(
    jax.random.key(seed), shape, 0, nano.vocab_size, jnp.int32
  )


def fixed_logits(logits_BxLxV):
  """A model that says the same whatever it reads."""
  return build_model(nano)._replace(
    apply=lambda params, tokens_BxL: logits_BxLxV
  )


OPT = {"activation": "relu", "biases": "all", "norm": "layer"}
OPT |= {"positions": "learned", "num_positions": 14}


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"qk_norm": True, "head_dim": 6},
    {"activation": "gelu", "head_dim": 6},
    {"biases": "qkv", "rope_base": 100.0, "norm_epsilon": 0.1},
    OPT | {"tied_head": True},
    OPT | {"qk_norm": True},
  ],
)
def test_the_loss_is_the_oracles(options):
  shape = dataclasses.replace(nano, **options)
  model = build_model(shape)
  # Values far from their start, so that every term of the model counts.
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: (x + rng.normal(size=x.shape) * 0.4).astype(np.float32),
    jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0))),
  )
  batch = tokens(2, 12)
  loss = jax.jit(lambda p: next_token_loss(model, p, batch))(params)
  doubles = jax.tree.map(lambda x: x.astype(np.float64), params)
  expected = oracle.loss(doubles, np.asarray(batch), shape)
  assert float(loss) == pytest.approx(expected, rel=ROUNDING_TOLERANCE)


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_an_untrained_model_knows_nothing(name):
  model = build_model(MODEL_PRESETS[name])
  loss = jax.jit(
    lambda key: next_token_loss(model, model.init(key), tokens(4, 33))
  )(jax.random.key(0))
  assert loss.dtype == jnp.float32
  assert float(loss) == pytest.approx(math.log(nano.vocab_size), abs=0.05)


def test_each_token_is_predicted_from_those_before_it():
  # Logits that are certain of the next token, and wrong about any other.
  batch = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], jnp.int32)
  certain = 100.0 * jax.nn.one_hot(batch[:, 1:], 10)
  assert float(next_token_loss(fixed_logits(certain), {}, batch)) < 1e-6


def test_the_loss_is_a_mean_over_all_predicted_tokens():
  logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
  batch = jnp.array([[0, 1, 2, 3], [4, 3, 2, 1]], jnp.int32)
  nats = []
  for b, i in itertools.product(range(2), range(3)):
    p = np.exp(logits[b, i], dtype=np.float64)
    nats.append(-np.log(p[batch[b, i + 1]] / p.sum()))
  loss = next_token_loss(fixed_logits(logits), {}, batch)
  assert float(loss) == pytest.approx(np.mean(nats), rel=1e-6)


def test_the_z_loss_weighs_the_squared_log_partition():
  # All logits equal to c: the partition is V exp(c), the target's share 1 / V.
  batch = jnp.zeros((1, 4), jnp.int32)
  model = fixed_logits(jnp.full((1, 3, 8), 2.0))
  plain = next_token_loss(model, {}, batch)
  weighted = next_token_loss(model, {}, batch, z_loss=0.1)
  expected = 0.1 * (math.log(8) + 2.0) ** 2
  assert float(weighted - plain) == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_tokens_is_that_of_their_logits():
  logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
  batch = jnp.array([[0, 1, 2, 3], [3, 3, 2, 1]], jnp.int32)
  whole = next_token_loss(fixed_logits(logits), {}, batch, z_loss=0.1)
  targets = batch[:, 1:].reshape(-1)
  assert token_loss(logits.reshape(6, 5), targets, z_loss=0.1) == whole
  assert token_loss(logits.reshape(6, 5), targets + 1, z_loss=0.1) != whole


@pytest.mark.parametrize("chunk_tokens", [5, 8, 100])
def test_a_loss_in_chunks_is_the_loss_at_once(chunk_tokens):
  model = build_model(nano)
  params = model.init(jax.random.key(0))

  def loss(chunk_tokens):
    return jax.jit(
      jax.value_and_grad(
        lambda p: next_token_loss(
          model, p, tokens(2, 13), z_loss=0.1, chunk_tokens=chunk_tokens
        )
      )
    )(params)

  chex.assert_trees_all_close(loss(chunk_tokens), loss(0), atol=1e-6)


def test_logits_of_a_chunk_are_all_that_stands():
  seen = []

  def logits(x_CxD):
    seen.append(x_CxD.shape)
    return x_CxD

  x_TxD, targets = jnp.eye(10, dtype=jnp.float32), jnp.arange(10) % 3
  loss = chunked_token_loss(logits, x_TxD, targets, chunk_tokens=4)
  assert (4, 10) in seen
  assert float(loss) == pytest.approx(float(token_loss(x_TxD, targets)))
