import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.inner.step import accumulated_gradient, inner_step

EXACT = 1e-12  # float64; a mean of means differs in its last digit only


def loss(params, batch):
  inputs, targets = batch["inputs"], batch["targets"]
  errors = inputs @ params["w"] + params["b"] - targets
  return jnp.mean(jnp.square(errors) + jnp.abs(errors))


def problem():
  rng = np.random.default_rng(0)
  params = {"w": rng.normal(size=[3]), "b": rng.normal(size=[])}
  batch = {
    "inputs": rng.normal(size=[12, 3]),
    "targets": rng.normal(size=[12]),
  }
  return jax.tree.map(jnp.asarray, (params, batch))


def assert_close(actual, expected, tolerance=EXACT):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=0),
    actual,
    expected,
  )


@pytest.mark.parametrize("accumulate_steps", [1, 2, 6, 12])
def test_micro_batches_give_the_loss_and_gradient_of_the_batch(
  accumulate_steps, x64
):
  params, batch = problem()
  expected = jax.value_and_grad(loss)(params, batch)
  gradient = jax.jit(accumulated_gradient(loss, accumulate_steps))
  actual = gradient(params, batch)
  assert actual[0].dtype == jnp.float64
  assert_close(actual, expected)


def test_each_example_is_in_exactly_one_micro_batch():
  def kept(params, batch):
    # Non-linear in the batch: it depends on who shares a micro-batch.
    return params * jnp.square(jnp.sum(batch))

  batch = jnp.asarray([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
  value, gradient = accumulated_gradient(kept, 3)(jnp.float32(1.0), batch)
  mean = ((1 + 2) ** 2 + (3 + 4) ** 2 + (5 + 6) ** 2) / 3
  np.testing.assert_allclose([value, gradient], [mean, mean], rtol=1e-6)


def clipped():
  return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))


def test_a_step_reports_the_norm_before_clipping():
  params, batch = problem()
  _, gradients = jax.value_and_grad(loss)(params, batch)
  norm = np.sqrt(np.sum(gradients["w"] ** 2) + gradients["b"] ** 2)
  assert norm > 1
  optimizer = clipped()
  step = jax.jit(inner_step(accumulated_gradient(loss), optimizer))
  moved, _, (_, reported) = step(params, optimizer.init(params), batch)
  np.testing.assert_allclose(reported, norm, rtol=1e-5)
  distance = optax.tree.norm(jax.tree.map(jnp.subtract, moved, params))
  np.testing.assert_allclose(distance, 0.1, rtol=1e-5)


def test_a_step_is_one_call_of_the_optimizer(x64):
  params, batch = problem()
  optimizer = optax.sgd(0.3, momentum=0.9)
  step = jax.jit(inner_step(accumulated_gradient(loss, 4), optimizer))
  expected, trace = params, jax.tree.map(jnp.zeros_like, params)
  actual, state = params, optimizer.init(params)
  for _ in range(3):
    value, gradients = jax.value_and_grad(loss)(expected, batch)
    trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, gradients)
    expected = jax.tree.map(lambda w, t: w - 0.3 * t, expected, trace)
    actual, state, (seen, _) = step(actual, state, batch)
    assert_close(seen, value)  # Of the parameters before the step.
  assert_close(actual, expected)
