import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.outer.programs import mean_of
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  assert_equal,
  batches_of,
  begin,
  nesterov,
  step_programs,
  walk,
)

PROBLEM = make_problem(8, 3, 40, 4, 2, 3)
INNER = optax.sgd(0.05, momentum=0.9)
METHODS = {
  "diloco": methods.diloco(4),
  "continue": methods.delayed(4, 2, 6, "continue"),
  "eager": methods.eager(4),
}


def start():
  return jax.tree.map(jnp.asarray, PROBLEM[0])


@pytest.mark.parametrize("name", METHODS)
def test_replicas_start_alike_and_with_nothing_in_flight(name):
  programs, state = begin(PROBLEM, METHODS[name], INNER, nesterov())
  copies = jax.tree.map(lambda x: np.broadcast_to(x, (3, *x.shape)), start())
  assert_equal(state.replica.params, copies)
  # A mean of three equal numbers may be off by a rounding.
  assert_close(programs.outer_params(state), start(), 1e-6)
  for leaf in jax.tree.leaves((state.outer.in_flight, state.outer.optimizer)):
    assert not np.any(leaf)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_abstract_states_describe_real_ones(name, layout):
  programs, state = begin(PROBLEM, METHODS[name], INNER, nesterov(), layout)
  described = programs.abstract(start(), INNER.init(start()))
  assert jax.tree.structure(described) == jax.tree.structure(state)

  def same(claim, leaf):
    assert (claim.shape, claim.dtype) == (leaf.shape, leaf.dtype)
    assert leaf.sharding.is_equivalent_to(claim.sharding, leaf.ndim)

  jax.tree.map(same, described, state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_abstract_shared_states_describe_real_ones(layout):
  programs = step_programs(INNER, 3, layout)
  state, described = programs.init(start()), programs.abstract(start())

  def same(claim, leaf):
    assert (claim.shape, claim.dtype) == (leaf.shape, leaf.dtype)
    assert leaf.sharding.is_equivalent_to(claim.sharding, leaf.ndim)

  jax.tree.map(same, described, state)


def test_ten_rounds_are_two_programs():
  method = methods.dilocox(4)
  programs, state = begin(PROBLEM, method, INNER, nesterov())
  built = []
  real = programs.compiled
  object.__setattr__(
    programs, "compiled", lambda *how: built.append(real(*how)) or built[-1]
  )
  for _ in walk(programs, state, PROBLEM, 40):
    pass
  assert len(built) == 10
  assert len(set(map(id, built))) == 2
  assert all(program._cache_size() == 1 for program in built)


def test_the_parameters_that_a_run_starts_from_stay_the_callers():
  params = start()
  programs, _ = begin(PROBLEM, methods.diloco(4), INNER, nesterov())
  state = programs.init(params, INNER.init(params))
  next(walk(programs, state, PROBLEM, 4))
  assert_equal(params, start())
  steps = step_programs(INNER, 3)
  steps.steps(steps.init(params), batches_of(PROBLEM, 0, 4))
  assert_equal(params, start())


def test_personal_outer_parameters_are_evaluated_at_their_mean():
  programs, state = begin(PROBLEM, methods.eager(4), INNER, nesterov())
  *_, (_, state, _) = walk(programs, state, PROBLEM, 8)
  each = [
    jax.tree.map(lambda leaf, m=m: leaf[m], state.outer.params)
    for m in range(3)
  ]
  assert not np.array_equal(each[0]["embed"], each[1]["embed"])
  mean = jax.tree.map(lambda *x: sum(x) / 3, *each)
  assert_close(programs.outer_params(state), mean, 1e-6)
  assert_close(mean_of(state.outer.params), mean, 1e-6)
