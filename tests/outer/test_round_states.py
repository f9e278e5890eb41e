import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.distributed import host_memory
from dilocox_jax.outer.round_states import mean_of
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  assert_equal,
  begin,
  nesterov,
  outer_tree,
  rounds,
  step_programs,
  walk,
)

PROBLEM = make_problem(8, 3, 12, 4, 2, 3)
INNER = optax.sgd(0.05, momentum=0.9)
METHODS = {
  "diloco": methods.diloco(4),
  "continue": methods.delayed(4, 2, 6, "continue"),
  "eager": methods.eager(4),
}


def start():
  return jax.tree.map(jnp.asarray, PROBLEM[0])


def assert_described(described, state):
  def same(claim, leaf):
    assert (claim.shape, claim.dtype) == (leaf.shape, leaf.dtype)
    assert leaf.sharding.is_equivalent_to(claim.sharding, leaf.ndim)
    assert leaf.sharding.memory_kind == claim.sharding.memory_kind

  jax.tree.map(same, described, state)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_abstract_states_describe_real_ones(name, layout):
  programs, state = begin(PROBLEM, METHODS[name], INNER, nesterov(), layout)
  given = start(), INNER.init(start())
  assert_described(programs.abstract(*given), state)
  step, state, _ = next(walk(programs, state, PROBLEM, 4))
  in_flight = METHODS[name].schedule.num_in_flight(step)
  assert_described(programs.abstract(*given, in_flight), state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_abstract_states_say_what_lies_in_host_memory(layout):
  programs = rounds(METHODS["continue"], 4, 3, INNER, nesterov(), layout)
  object.__setattr__(programs, "outer_memory", host_memory.HOST)
  given = start(), INNER.init(start())
  assert_described(programs.abstract(*given), programs.init(*given))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_abstract_shared_states_describe_real_ones(layout):
  programs = step_programs(INNER, 3, layout)
  assert_described(programs.abstract(start()), programs.init(start()))


@pytest.mark.parametrize("name", METHODS)
def test_replicas_start_alike_and_with_nothing_in_flight(name):
  programs, state = begin(PROBLEM, METHODS[name], INNER, nesterov())
  copies = jax.tree.map(lambda x: np.broadcast_to(x, (3, *x.shape)), start())
  assert_equal(state.replica.params, copies)
  # A mean of three equal numbers may be off by a rounding.
  assert_close(programs.outer_params(state), start(), 1e-6)
  assert state.step == 0
  for fragment in state.fragments:
    assert not fragment.in_flight
    assert not any(map(np.any, jax.tree.leaves(fragment.optimizer)))


def test_parameters_that_fragments_do_not_cover_are_refused():
  programs = rounds(METHODS["continue"], 3, 3, INNER, nesterov())
  with pytest.raises(ValueError, match="is not .3, ...."):
    programs.init(start(), INNER.init(start()))


def test_personal_outer_parameters_are_evaluated_at_their_mean():
  programs, state = begin(PROBLEM, METHODS["eager"], INNER, nesterov())
  *_, (_, state, _) = walk(programs, state, PROBLEM, 8)
  own = outer_tree(programs, state)
  assert not np.array_equal(own["embed"][0], own["embed"][1])
  mean = jax.tree.map(lambda leaf: np.asarray(leaf).sum(axis=0) / 3, own)
  assert_close(programs.outer_params(state), mean, 1e-6)
  assert_close(mean_of(own), mean, 1e-6)


def test_outer_optimizers_of_another_run_take_their_places():
  programs, state = begin(PROBLEM, METHODS["continue"], INNER, nesterov())
  others = [
    jax.tree.map(lambda x: np.asarray(x) + 1, each.optimizer)
    for each in state.fragments
  ]
  taken = programs.with_outer_optimizers(state, others)
  assert_equal([each.optimizer for each in taken.fragments], others)
  _ = next(walk(programs, taken, PROBLEM, 4))
