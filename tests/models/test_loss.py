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
from dilocox_jax.plan.model.presets import nano, tiny

MODEL = build_model(nano)


def tokens(*shape):
  return jax.random.randint(jax.random.key(1), shape, 0, 256, jnp.int32)


def fixed_logits(logits_BxLxV):
  """A model that says the same whatever it reads."""
  return MODEL._replace(apply=lambda params, tokens_BxL: logits_BxLxV)


def test_an_untrained_model_knows_nothing():
  model = build_model(tiny)
  loss = jax.jit(
    lambda key: next_token_loss(model, model.init(key), tokens(4, 33))
  )(jax.random.key(0))
  assert loss.dtype == jnp.float32
  assert float(loss) == pytest.approx(math.log(256), abs=0.05)


def test_the_loss_is_a_mean_over_all_predicted_tokens():
  logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
  batch = jnp.array([[0, 1, 2, 3], [4, 3, 2, 1]], jnp.int32)
  nats, squares = [], []
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


@pytest.mark.parametrize("chunk_tokens", [5, 8, 100])
def test_a_loss_in_chunks_is_the_loss_at_once(chunk_tokens):
  params = MODEL.init(jax.random.key(0))

  def loss(chunk_tokens):
    sizes = {"z_loss": 0.1, "chunk_tokens": chunk_tokens}
    return jax.jit(
      jax.value_and_grad(
        lambda p: next_token_loss(MODEL, p, tokens(2, 13), **sizes)
      )
    )(params)

  chex.assert_trees_all_close(loss(chunk_tokens), loss(0), atol=1e-6)
  seen = []

  def logits(x_CxD):
    seen.append(len(x_CxD))
    return x_CxD

  x_TxD, targets = jnp.eye(24, dtype=jnp.float32), jnp.arange(24) % 3
  found = chunked_token_loss(logits, x_TxD, targets, 0.0, chunk_tokens)
  assert min(seen) == min(chunk_tokens, 24)  # Chunks are all that stands.
  assert float(found) == pytest.approx(float(token_loss(x_TxD, targets)))
