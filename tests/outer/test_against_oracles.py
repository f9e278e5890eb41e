"""Every method and rule equals its plain numpy twin in float64."""

import jax
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import optimizers
from dilocox_jax.reference.exchanges import ErrorFeedback, Lossy
from tests.oracles import least_squares
from tests.oracles.codecs import BY_BITS, in_blocks
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  begin,
  nesterov,
  outer_tree,
  run_steps,
  walk,
)

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
  "streaming_sequential": methods.streaming_diloco(7, 3, 5, 0.3, "sequential"),
  "streaming_waits": methods.streaming_diloco(6, 3, 0, 0.0),
  "several_in_flight": methods.delayed(6, 3, 5, "continue"),
  "uneven_phases": methods.delayed(7, 4, 4, "continue"),
  "delay_over_a_round": methods.delayed(4, 1, 6, "continue"),
  "delay_of_three_rounds": methods.delayed(3, 2, 9, "continue"),
  "delay_over_two_rounds": methods.delayed(4, 3, 9, "continue"),
  "late_reset": methods.delayed(5, 2, 3, "reset"),
  "sliced_fragments": methods.delayed(
    6, 3, 2, "continue", fragment_order="sliced"
  ),
  "interleaved_fragments": methods.delayed(
    6, 3, 2, "continue", fragment_order="interleaved"
  ),
  "eager_fragments": methods.eager(6, 3),
}
# Cut rounds and the flushes after them are programs of their own, which take
# longer to compile than to run.
CUT_SHORT = {
  "diloco",
  "streaming_diloco",
  "eager",
  "dilocox_continue",
  "dilocox_reset",
  "delay_over_a_round",
}


def oracle(problem, method, num_steps, flush=True, **changes):
  schedule = method.schedule
  return least_squares.train(
    *problem,
    sync_interval=schedule.sync_interval,
    num_fragments=schedule.num_fragments,
    fragment_order=method.fragment_order,
    overlap_steps=schedule.overlap_steps,
    rule=method.rule,
    mixing_alpha=method.mixing_alpha,
    inner=optimizers.Sgd(INNER_RATE),
    outer=optimizers.Sgd(0.7, 0.6, nesterov=True),
    num_steps=num_steps,
    flush=flush,
    **changes,
  )


def stacked(thetas):
  """One tree with leaves [M, ...] where replicas have their own theta."""
  if isinstance(thetas, list):
    return jax.tree.map(lambda *x: np.stack(x), *thetas)
  return thetas


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_numpy_twin(name, x64):
  method = CASES[name]
  num_steps = ROUNDS * method.schedule.sync_interval
  problem = make_problem(0, 3, num_steps, 4, 2, 3)
  unflushed = oracle(problem, method, num_steps, flush=False)
  programs, state = begin(problem, method, optax.sgd(INNER_RATE), nesterov())
  losses = []
  rounds = walk(programs, state, problem, num_steps)
  for (_, state, seen), theta in zip(rounds, unflushed.snapshots, strict=True):
    assert_close(outer_tree(programs, state), stacked(theta), EXACT)
    losses.append(seen.loss)
  assert_close(state.replica.params, stacked(unflushed.params), EXACT)
  losses = np.concatenate(losses, axis=1)
  np.testing.assert_allclose(losses, unflushed.losses, rtol=1e-5)
  flushed, _ = programs.flush(state)
  theta = stacked(oracle(problem, method, num_steps).theta)
  assert_close(outer_tree(programs, flushed), theta, EXACT)


@pytest.mark.parametrize(
  "name",
  [
    name if name in CUT_SHORT else pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
  ],
)
def test_a_run_may_end_inside_a_round(name, x64):
  method = CASES[name]
  num_steps = 3 * method.schedule.sync_interval + 2
  problem = make_problem(0, 3, num_steps, 4, 2, 3)
  programs, state = begin(problem, method, optax.sgd(INNER_RATE), nesterov())
  *_, (_, state, _) = walk(programs, state, problem, num_steps)
  flushed, _ = programs.flush(state)
  expected = oracle(problem, method, num_steps)
  assert_close(outer_tree(programs, flushed), stacked(expected.theta), EXACT)
  assert_close(flushed.replica.params, stacked(expected.params), EXACT)


# How far fp32 codecs may lead from float64 ones in some tens of exchanges.
ROUNDED = 1e-5
# (method, decay of the error feedback, keep_unsent)
LOSSY = [
  ("diloco", 0.0, True),
  ("streaming_diloco", 0.9, False),
  ("eager", 0.9, False),
  ("dilocox_continue", 0.0, True),
]
LOSSY_SLOW = [
  ("diloco", 0.0, False),
  ("diloco", 0.9, False),
  ("dilocox_reset", 1.0, False),
  ("several_in_flight", 1.0, False),
]


@pytest.mark.parametrize(
  ("name", "decay", "keep_unsent"),
  LOSSY + [pytest.param(*case, marks=pytest.mark.slow) for case in LOSSY_SLOW],
)
def test_lossy_rounds_equal_the_numpy_twin(name, decay, keep_unsent, x64):
  method = CASES[name]
  num_steps = 4 * method.schedule.sync_interval
  problem = make_problem(2, 3, num_steps, 4, 8, 3)
  lossy = Lossy(in_blocks(BY_BITS[4]))
  aggregator = exchange(
    "int(bits=4)",
    feedback=decay,
    keep_unsent=keep_unsent,
    collective="all_gather",
  )
  programs, state = begin(
    problem,
    method,
    optax.sgd(INNER_RATE),
    nesterov(),
    aggregator=aggregator,
  )
  *_, (_, state, _) = walk(programs, state, problem, num_steps)
  changes = {
    "exchange": ErrorFeedback(lossy, decay) if decay else lossy,
    "keep_unsent": keep_unsent,
  }
  twin = oracle(problem, method, num_steps, flush=False, **changes)
  assert_close(outer_tree(programs, state), stacked(twin.theta), ROUNDED)
  assert_close(state.replica.params, stacked(twin.params), ROUNDED)
  flushed, _ = programs.flush(state)
  twin = oracle(problem, method, num_steps, **changes)
  assert_close(outer_tree(programs, flushed), stacked(twin.theta), ROUNDED)
  plain = oracle(problem, method, num_steps)
  difference = jax.tree.map(np.subtract, plain.params[0], twin.params[0])
  assert max(np.abs(x).max() for x in jax.tree.leaves(difference)) > 1e-2


def test_allreduce_equals_the_numpy_twin(x64):
  problem = make_problem(1, 3, ROUNDS, 4, 2, 3)
  state, _ = run_steps(problem, nesterov(0.05, 0.9), num_steps=ROUNDS)
  expected = least_squares.allreduce(
    *problem,
    inner=optimizers.Sgd(0.05, 0.9, nesterov=True),
    num_steps=ROUNDS,
  )
  assert_close(state.params, expected.theta, EXACT)
