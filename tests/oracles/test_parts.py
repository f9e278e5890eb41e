"""The parts the oracles are made of, each against something else."""

import jax
import numpy as np
import optax
import pytest

from . import fragments, least_squares, optimizers

PROBLEM = least_squares.make_problem(
  seed=3, num_replicas=1, num_steps=1, num_layers=5, width=3, batch=8
)


def test_the_gradient_is_the_slope_of_the_loss():
  params, A, y = PROBLEM
  _, grad = least_squares.loss_and_grad(params, A[0, 0], y[0, 0])
  x = least_squares.to_vector(params)
  for i in range(len(x)):
    step = np.zeros_like(x)
    step[i] = 1e-3
    up = least_squares.from_vector(x + step, params)
    down = least_squares.from_vector(x - step, params)
    above, _ = least_squares.loss_and_grad(up, A[0, 0], y[0, 0])
    below, _ = least_squares.loss_and_grad(down, A[0, 0], y[0, 0])
    slope = (above - below) / 2e-3
    assert abs(slope - least_squares.to_vector(grad)[i]) < 1e-9


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


@pytest.mark.parametrize("order", ["sequential", "strided"])
def test_fragments_are_disjoint_and_cover_the_parameters(order):
  names = []
  for p in range(4):
    part = fragments.names_of(p, PROBLEM[0], 4, order)
    assert part
    names += part
  assert sorted(names) == sorted(fragments.split(PROBLEM[0]))


def test_strided_fragments_interleave_and_sequential_ones_do_not():
  strided = [fragments.layers_of(p, 5, 3, "strided") for p in (1, 2)]
  sequential = [fragments.layers_of(p, 5, 3, "sequential") for p in (1, 2)]
  assert strided == [[0, 2, 4], [1, 3]]
  assert sequential == [[0, 1, 2], [3, 4]]
