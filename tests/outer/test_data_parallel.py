import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import optimizers
from tests.oracles import least_squares
from tests.outer.problem import (
  assert_close,
  batches_of,
  begin,
  nesterov,
  outer_tree,
  run_steps,
  step_programs,
  walk,
)

EXACT = 1e-12  # float64; sums of a few hundred terms near 1
PROBLEM = least_squares.make_problem(7, 3, 18, 4, 2, 3)
WARM = 6


def warm_started(on):
  """Steps of all replicas or the first, then rounds of all of them."""
  inner = optax.sgd(0.05, momentum=0.9)
  programs = step_programs(inner, 3 if on == "all" else 1)
  problem = jax.tree.map(jnp.asarray, PROBLEM)
  shared = programs.init(problem[0])
  batches = batches_of(problem, 0, WARM)
  if on == "first":
    batches = jax.tree.map(lambda leaf: leaf[:1], batches)
  shared, _ = programs.steps(shared, batches)
  rest = (problem[0], *batches_of(problem, WARM, 18))
  rounds, _ = begin(rest, methods.dilocox(4), inner, nesterov())
  state = rounds.init(shared.params, shared.optimizer)
  *_, (_, state, _) = walk(rounds, state, rest, 12)
  return outer_tree(rounds, rounds.flush(state)[0])


@pytest.mark.parametrize("on", ["all", "first"])
def test_rounds_go_on_from_a_warm_start_as_in_the_numpy_twin(on, x64):
  _, inputs, targets = PROBLEM
  warm, inner = least_squares.warm_start(
    *PROBLEM, inner=optimizers.Sgd(0.05, 0.9), num_steps=WARM, on=on
  )
  expected = least_squares.train(
    warm,
    inputs[:, WARM:],
    targets[:, WARM:],
    sync_interval=4,
    num_fragments=1,
    fragment_order="strided",
    overlap_steps=4,
    rule="continue",
    mixing_alpha=0.0,
    inner=inner,
    outer=optimizers.Sgd(0.7, 0.6, nesterov=True),
    num_steps=12,
  )
  assert_close(warm_started(on), expected.theta, EXACT)


def test_every_replica_reports_its_own_loss_and_the_mean_gradient():
  _, inputs, targets = PROBLEM
  programs = step_programs(optax.sgd(0.0), 3)
  state = programs.init(jax.tree.map(jnp.asarray, PROBLEM[0]))
  _, seen = programs.steps(state, batches_of(PROBLEM, 0, 4))
  for step in range(4):
    each = [
      least_squares.loss_and_grad(PROBLEM[0], inputs[m, step], targets[m, step])
      for m in range(3)
    ]
    gradient = sum(least_squares.to_vector(g) for _, g in each) / 3
    norm = np.linalg.norm(gradient)
    np.testing.assert_allclose(seen.loss[:, step], [v for v, _ in each], 1e-5)
    np.testing.assert_allclose(seen.grad_norm[:, step], [norm] * 3, 1e-5)


def test_clipping_acts_on_the_mean_gradient():
  clipped = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
  state, _ = run_steps(PROBLEM, clipped, num_steps=1)
  gradients = [
    least_squares.loss_and_grad(PROBLEM[0], PROBLEM[1][m, 0], PROBLEM[2][m, 0])
    for m in range(3)
  ]
  mean = sum(least_squares.to_vector(g) for _, g in gradients) / 3
  moved = jax.tree.map(lambda a, b: b - a, PROBLEM[0], state.params)
  expected = -1e-3 * mean / np.linalg.norm(mean)
  np.testing.assert_allclose(
    least_squares.to_vector(moved), expected, atol=1e-6
  )


def test_steps_may_be_dispatched_in_any_portions(x64):
  optimizer = nesterov(0.05, 0.9)
  whole, _ = run_steps(PROBLEM, optimizer, num_steps=7)
  programs = step_programs(optimizer, 3)
  state = programs.init(jax.tree.map(jnp.asarray, PROBLEM[0]))
  for start, stop in ((0, 3), (3, 4), (4, 7)):
    state, _ = programs.steps(state, batches_of(PROBLEM, start, stop))
  assert_close(state, whole, EXACT)
