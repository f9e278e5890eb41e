import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.inner.step import accumulated_gradient


def loss(params, batch):
  inputs = batch["inputs"]
  targets = batch["targets"]
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
