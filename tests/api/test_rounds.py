import jax
import jax.numpy as jnp
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_equal,
  batches_of,
  loss,
  nesterov,
  run_rounds,
)

METHOD = methods.delayed(6, 3, 2, "continue")
INNER = optax.sgd(0.05)
STEP = inner_step(accumulated_gradient(loss), INNER)


def test_rounds_without_a_config_are_those_of_the_trainer():
  problem = make_problem(0, 3, 18, 4, 2, 3)
  expected, losses, programs = run_rounds(
    problem, METHOD, INNER, nesterov(), num_steps=18
  )
  rounds = dx.make_rounds(
    METHOD, STEP, nesterov(), num_replicas=3, num_layers=4
  )
  params = jax.tree.map(jnp.asarray, problem[0])
  state = rounds.init(params, INNER.init(params))
  for number in range(3):
    batches = batches_of(problem, 6 * number, 6 * number + 6)
    batches = jax.tree.map(jnp.asarray, batches)
    state, metrics = rounds.run(state, batches, number)
  state = rounds.finish(state, 18)
  assert_equal(metrics.loss, losses[:, 12:])
  assert_equal(rounds.outer_params(state), programs.outer_params(expected))


@pytest.mark.parametrize(
  ("method", "message"),
  [
    (methods.allreduce(), "has no rounds: take dilocox_jax.allreduce"),
    (METHOD, "give num_layers, or take dilocox_jax.step_transform"),
  ],
)
def test_what_has_no_rounds_is_refused(method, message):
  with pytest.raises(ValueError, match=message):
    dx.make_rounds(method, STEP, nesterov(), num_replicas=3)
