import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.inner.activation_codec import ACTIVATION_CODECS, AS_COMPUTED
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.plan.choices import BOUNDARIES


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_boundary_errs_as_far_as_its_bits_and_keeps_what_is_not_finite(
  name, dtype
):
  codec = ACTIVATION_CODECS[name]
  scales = np.float32(10) ** np.arange(-12, 13, 4)[:, None]
  x = scales * np.random.default_rng(0).normal(size=(7, 64)).astype(np.float32)
  x[0] = 0
  x = jnp.asarray(x, dtype)
  sent = codec.encode(x)
  decoded = codec.decode(sent, x.dtype)
  assert (decoded.dtype, decoded.shape) == (x.dtype, x.shape)
  size = x.dtype.itemsize
  bits = {"none": 64 * size, "bfloat16": 128, "int8": 64 + 4}
  assert sum(array.nbytes for array in sent) == 7 * bits[name]
  x, found = (np.asarray(a, np.float64) for a in (x, decoded))
  largest = np.max(np.abs(x), axis=1, keepdims=True)
  rounding = 2.0**-8 * (size == 2)  # Of what is decoded to bfloat16.
  bound = {
    "none": 0 * x,
    "bfloat16": 2.0**-8 * np.abs(x),
    "int8": (1 / 254 + 1e-6 + rounding) * largest,
  }
  assert np.all(np.abs(found - x) <= bound[name])
  for bad in (np.nan, np.inf, -np.inf):
    one = codec.encode(jnp.ones((3, 4), dtype).at[1, 2].set(bad))
    decoded = np.asarray(codec.decode(one, jnp.dtype(dtype)), np.float32)
    assert not np.isfinite(decoded[1, 2])
    assert np.all(np.isfinite(decoded[[0, 2]]))


def test_int8_uses_all_its_levels():
  levels, scale = ACTIVATION_CODECS["int8"].encode(
    jnp.linspace(-1, 1, 2001)[None]
  )
  assert len(np.unique(levels)) == 255
  assert float(scale[0, 0]) == pytest.approx(1 / 127)
  assert ACTIVATION_CODECS["none"] is AS_COMPUTED
