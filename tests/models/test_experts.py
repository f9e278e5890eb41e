import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models.experts import route
from dilocox_jax.models.loss import next_token_loss
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.presets import nano

SCORES = jnp.asarray([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])


def softmax(scores):
  weights = np.exp(np.asarray(scores))
  return weights / weights.sum(-1, keepdims=True)


def test_the_highest_experts_keep_their_softmax():
  expected = softmax(SCORES) * [[1, 1, 0], [0, 1, 1]]
  np.testing.assert_allclose(route(SCORES, 2, 0.0), expected, rtol=1e-6)


def test_the_gradient_is_that_of_the_loss_and_the_balance_loss_together():
  def both(scores):
    shares = jax.nn.softmax(scores, axis=-1)
    busy = jnp.asarray([0.5, 0.5, 0.0])  # Token 0 goes to 0, token 1 to 1.
    balance = 3 * jnp.sum(busy * jnp.mean(shares, axis=0))
    return shares[0, 0] + shares[1, 1] ** 2 + 0.7 * balance

  def ours(scores):
    shares = route(scores, 1, 0.7)
    return shares[0, 0] + shares[1, 1] ** 2

  np.testing.assert_allclose(
    jax.grad(ours)(SCORES), jax.grad(both)(SCORES), rtol=1e-5, atol=1e-7
  )


@pytest.mark.parametrize(
  "activation", [pytest.param("swiglu", marks=pytest.mark.slow), "gelu"]
)
def test_one_expert_is_the_dense_layer(activation):
  dense = dataclasses.replace(nano, activation=activation)
  one = dataclasses.replace(dense, num_experts=1)
  params = jax.jit(build_model(one).init)(jax.random.key(0))
  mlp = {k: v for k, v in params["blocks"]["mlp"].items() if k != "router"}
  without = params | {"blocks": params["blocks"] | {"mlp": mlp}}
  batch = jax.random.randint(jax.random.key(1), (2, 9), 0, 256, np.int32)
  loss = lambda shape, p: jax.value_and_grad(  # noqa: E731
    lambda p: next_token_loss(build_model(shape), p, batch)
  )(p)
  value, gradient = loss(one, params)
  expected, of_dense = loss(dense, without)
  assert value == expected
  assert not jnp.any(gradient["blocks"]["mlp"].pop("router")["kernel"])
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8),
    gradient,
    of_dense,
  )


def test_experts_compute_what_dense_layers_of_their_own_would():
  shape = dataclasses.replace(nano, num_experts=3, experts_per_token=2)
  model, f = build_model(shape), nano.ff_dim
  params = jax.jit(model.init)(jax.random.key(0))
  layer = jax.tree.map(lambda leaf: 5 * leaf[0], params["blocks"])
  zeros = jax.tree.map(jnp.zeros_like, layer["attention"])
  x = jax.random.normal(jax.random.key(1), (4, nano.model_dim))
  added = model.block(layer | {"attention": zeros}, x, 4) - x
  mlp = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), layer["mlp"])
  y = np.asarray(x, np.float64)
  y = y / np.sqrt(np.mean(y * y, -1, keepdims=True) + 1e-6)
  y = y * mlp["norm"]["scale"]
  expected = np.zeros(x.shape)
  for token, row in enumerate(y):
    shares = softmax(row @ mlp["router"]["kernel"])
    for expert in np.argsort(shares)[-2:]:
      columns = slice(expert * f, (expert + 1) * f)
      gate = row @ mlp["gate"]["kernel"][:, columns]
      up = row @ mlp["up"]["kernel"][:, columns]
      hidden = gate / (1 + np.exp(-gate)) * up
      expected[token] += shares[expert] * (
        hidden @ mlp["down"]["kernel"][columns]
      )
  np.testing.assert_allclose(added, expected, rtol=1e-4, atol=1e-5)
