"""Every method and rule equals its plain numpy twin in float64."""

import jax
import numpy as np
import optax
import pytest

from dilocox_jax.plan import methods
from tests.oracles import allreduce as allreduce_oracle
from tests.oracles import optimizers, sync
from tests.oracles.least_squares import make_problem
from tests.outer.problem import nesterov, run_rounds, run_steps

EXACT = 1e-12  # float64; sums of a few hundred terms near 1
INNER_RATE = 0.05
ROUNDS = 20

CASES = {
  "diloco": methods.diloco(4),
  "open_diloco": methods.open_diloco(5),
  "streaming_diloco": methods.streaming_diloco(6, 3, 1, 0.5),
  "eager": methods.eager(4),
  "dilocox_continue": methods.dilocox(4, "continue"),
  "dilocox_reset": methods.dilocox(4, "reset"),
  "streaming_sequential": methods.streaming_diloco(
    7, 3, 5, 0.3, "sequential"
  ),
  "streaming_waits": methods.streaming_diloco(6, 3, 0, 0.0),
  "several_in_flight": methods.delayed(6, 3, 5, "continue"),
  "uneven_phases": methods.delayed(7, 4, 4, "continue"),
  "delay_over_a_round": methods.delayed(4, 1, 6, "continue"),
  "delay_of_three_rounds": methods.delayed(3, 2, 9, "continue"),
  "delay_over_two_rounds": methods.delayed(4, 3, 9, "continue"),
  "late_reset": methods.delayed(5, 2, 3, "reset"),
  "eager_fragments": methods.eager(6, 3),
}


def oracle(problem, method, num_steps, outer):
  schedule = method.schedule
  waits = schedule.overlap_steps == 0 and method.rule != "mix"
  return sync.simulate(
    *problem,
    sync_interval=schedule.sync_interval,
    num_fragments=schedule.num_fragments,
    fragment_order=method.fragment_order,
    overlap_steps=schedule.overlap_steps,
    rule="synchronous" if waits else method.rule,
    mixing_alpha=method.mixing_alpha,
    inner=optimizers.Sgd(INNER_RATE),
    outer=outer,
    num_steps=num_steps,
  )


@pytest.mark.parametrize("extra_steps", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_numpy_twin(name, extra_steps, x64):
  method = CASES[name]
  num_steps = ROUNDS * method.schedule.sync_interval + extra_steps
  problem = make_problem(0, 3, num_steps, 4, 2, 3)
  state, losses, _ = run_rounds(
    problem,
    method,
    optax.sgd(INNER_RATE),
    nesterov(),
    num_steps=num_steps,
  )
  expected = oracle(
    problem, method, num_steps, optimizers.Sgd(0.7, 0.6, nesterov=True)
  )
  np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
  theta = expected.theta
  if method.rule == "eager":
    theta = jax.tree.map(lambda *x: np.stack(x), *theta)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=EXACT, atol=EXACT)  # noqa: E731
  jax.tree.map(close, state.outer.params, theta)


def test_allreduce_equals_the_numpy_twin(x64):
  problem = make_problem(1, 3, ROUNDS, 4, 2, 3)
  state, _ = run_steps(problem, nesterov(0.05, 0.9), num_steps=ROUNDS)
  expected = allreduce_oracle.simulate(
    *problem,
    inner=optimizers.Sgd(0.05, 0.9, nesterov=True),
    num_steps=ROUNDS,
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=EXACT, atol=EXACT)  # noqa: E731
  jax.tree.map(close, state.params, expected.theta)
