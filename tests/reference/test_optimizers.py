import jax
import numpy as np
import optax
import optax.contrib
import pytest

from dilocox_jax.reference import optimizers


@pytest.mark.parametrize(
  ("ours", "theirs"),
  [
    (optimizers.Sgd(0.1), optax.sgd(0.1)),
    (optimizers.Sgd(0.1, 0.9), optax.sgd(0.1, 0.9)),
    (optimizers.Sgd(0.1, 0.9, True), optax.sgd(0.1, 0.9, nesterov=True)),
    (
      optimizers.AdamW(0.1, 0.8, 0.95, 1e-3, 0.2),
      optax.adamw(0.1, 0.8, 0.95, 1e-3, weight_decay=0.2),
    ),
    (
      optimizers.Sgd(lambda count: 0.1 / (count + 1)),
      optax.sgd(lambda count: 0.1 / (count + 1)),
    ),
    (
      optimizers.AdamW(lambda count: 0.1 / (count + 1)),
      optax.adamw(lambda count: 0.1 / (count + 1)),
    ),
    (
      optimizers.AdamW(0.1, 0.8, 0.95, nesterov=True),
      optax.adamw(0.1, 0.8, 0.95, nesterov=True),
    ),
    (
      optimizers.Muon(0.1, ["b"], optimizers.AdamW(0.1, nesterov=True), 0.9),
      optax.contrib.muon(
        0.1, beta=0.9, adam_weight_decay=1e-4, consistent_rms=0.2
      ),
    ),
  ],
)
def test_optimizers_compute_what_optax_computes(ours, theirs):
  rng = np.random.default_rng(0)
  params = {"a": rng.normal(size=[4]), "b": rng.normal(size=[2, 3])}
  # optax mixes its integer count with floats.
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    reference = jax.tree.map(jax.numpy.asarray, params)
    state = theirs.init(reference)
    for _ in range(6):
      grads = {name: rng.normal(size=params[name].shape) for name in params}
      params = ours.step(params, grads)
      updates, state = theirs.update(grads, state, reference)
      reference = optax.apply_updates(reference, updates)
      got = jax.tree.leaves(reference)
      for x, y in zip(jax.tree.leaves(params), got, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (2, 5, 5)])
def test_singular_values_end_near_one_and_directions_stay(shape):
  matrix = np.random.default_rng(0).normal(size=shape)
  left, before, right = np.linalg.svd(matrix, full_matrices=False)
  found = np.swapaxes(left, -2, -1) @ optimizers.orthogonal(matrix)
  found = found @ np.swapaxes(right, -2, -1)
  after = np.diagonal(found, axis1=-2, axis2=-1)
  assert np.all((0.68 < after) & (after < 1.21)), (before, after)
  np.testing.assert_allclose(found, found * np.eye(min(shape[-2:])), atol=1e-12)
