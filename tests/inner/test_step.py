import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.inner.step import accumulated_gradient, inner_step


def loss(params, batch):
  inputs, targets = batch["inputs"], batch["targets"]
  errors = inputs @ params["w"] + params["b"] - targets
  # Not linear in the rows: it depends on who shares a micro-batch.
  return jnp.mean(jnp.square(errors) + jnp.abs(errors)) + jnp.mean(errors) ** 2


def problem():
  rng = np.random.default_rng(0)
  params = {"w": rng.normal(size=[3]), "b": rng.normal(size=[])}
  batch = {"inputs": rng.normal(size=[12, 3]), "targets": rng.normal(size=[12])}
  return jax.tree.map(jnp.asarray, (params, batch))


def assert_close(actual, expected):
  # float64; a mean of means differs in its last digit only.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), actual, expected
  )


@pytest.mark.parametrize("accumulate_steps", [1, 2, 6])
def test_gradients_of_micro_batches_are_averaged(accumulate_steps, x64):
  params, batch = problem()
  found = jax.jit(accumulated_gradient(loss, accumulate_steps))(params, batch)
  assert found[0].dtype == jnp.float64
  parts = [
    jax.value_and_grad(loss)(params, jax.tree.map(lambda x, n=n: x[n], batch))
    for n in np.split(np.arange(12), accumulate_steps)
  ]
  assert_close(found, jax.tree.map(lambda *x: sum(x) / len(x), *parts))


def test_a_step_is_one_call_of_the_optimizer(x64):
  params, batch = problem()
  optimizer = optax.sgd(0.3, momentum=0.9)
  step = jax.jit(inner_step(accumulated_gradient(loss), optimizer))
  expected, trace = params, jax.tree.map(jnp.zeros_like, params)
  actual, state = params, optimizer.init(params)
  for _ in range(3):
    value, gradients = jax.value_and_grad(loss)(expected, batch)
    trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, gradients)
    expected = jax.tree.map(lambda w, t: w - 0.3 * t, expected, trace)
    actual, state, (seen, _) = step(actual, state, batch)
    assert_close(seen, value)  # Of the parameters before the step.
  assert_close(actual, expected)


def test_a_step_reports_the_norm_before_clipping():
  params, batch = problem()
  gradients = jax.grad(loss)(params, batch)
  norm = np.sqrt(np.sum(gradients["w"] ** 2) + gradients["b"] ** 2)
  assert norm > 1
  optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
  step = jax.jit(inner_step(accumulated_gradient(loss), optimizer))
  moved, _, (_, reported) = step(params, optimizer.init(params), batch)
  np.testing.assert_allclose(reported, norm, rtol=1e-5)
  distance = optax.tree.norm(jax.tree.map(jnp.subtract, moved, params))
  np.testing.assert_allclose(distance, 0.1, rtol=1e-5)
