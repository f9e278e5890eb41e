"""An apply rule from outside gives the same result through every door."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.schedule.methods import RULES
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  begin,
  nesterov,
  outer_params_by_transform,
  outer_tree,
  transform,
  walk,
)
from tests.tiers import slow

INTERVAL = 4
ROUNDS = 3
REPLICAS = 2
STEPS = INTERVAL * ROUNDS
PROBLEM = jax.tree.map(
  lambda leaf: np.asarray(leaf, np.float32),
  make_problem(0, REPLICAS, STEPS, 4, 2, 3),
)
INNER = optax.sgd(0.05)


def newest_part(result, fresh):
  """The mean, in which the replica's own part is what it measured just now."""
  return jax.tree.map(
    lambda mean, new, old: mean + (new - old) / REPLICAS,
    result.mean,
    fresh,
    result.own,
  )


OUTSIDE = {
  "together": dx.ApplyRule(),
  "own_copies": dx.ApplyRule(is_shared=False),
  "own_newest": dx.ApplyRule(gradient=newest_part, is_shared=False),
  "first_send": dx.ApplyRule(
    gradient=newest_part, is_shared=False, applies_at_first_send=True
  ),
}


@pytest.fixture(autouse=True)
def registered():
  """The rules by their names, and afterwards only those of before."""
  before = dict(RULES)
  for name, rule in OUTSIDE.items():
    build = functools.partial(lambda rule, method, axis_name: rule, rule)
    dx.register_rule(name, dx.RuleKind(build, reads_alpha=False))
  yield
  RULES.clear()
  RULES.update(before)


def method_of(rule, overlap, num_fragments=1):
  return dx.Method(dx.SyncSchedule(INTERVAL, num_fragments, overlap), rule)


def by_rounds(method, layout):
  """The replicas' mean of the outer parameters, and the same after a flush."""
  programs, state = begin(PROBLEM, method, INNER, nesterov(), layout)
  for _, after, _ in walk(programs, state, PROBLEM, STEPS):
    state = after
  flushed, _ = programs.flush(state)
  return programs.outer_params(state), programs.outer_params(flushed)


def by_transform(method):
  """The replicas' mean of the outer parameters."""
  each = outer_params_by_transform(PROBLEM, method, INNER, STEPS)
  return jax.tree.map(lambda leaf: leaf.mean(axis=0), each)


@pytest.mark.parametrize(
  ("rule", "overlap"),
  [
    *(("own_copies", overlap) for overlap in (0, 2)),
    *(("own_newest", overlap) for overlap in (0, 4)),
    *slow(*(("own_copies", overlap) for overlap in (4, 6))),
    *slow(*(("own_newest", overlap) for overlap in (2, 8))),
    *slow(("first_send", 4)),
  ],
)
def test_a_rule_gives_the_same_in_three_doors(rule, overlap):
  method = method_of(rule, overlap, num_fragments=2)
  stacked, flushed = by_rounds(method, "stacked")
  mesh, mesh_flushed = by_rounds(method, "mesh")
  assert_close(mesh, stacked, 1e-6)
  assert_close(mesh_flushed, flushed, 1e-6)
  assert_close(by_transform(method), stacked, 1e-6)
  if rule == "own_copies":
    shared = by_rounds(method_of("together", overlap, 2), "stacked")
    assert_close((stacked, flushed), shared, 1e-6)


def test_copies_of_the_outer_parameters_are_each_replicas_own():
  programs, state = begin(
    PROBLEM, method_of("own_newest", 4), INNER, nesterov()
  )
  for _, after, _ in walk(programs, state, PROBLEM, STEPS):
    state = after
  first, second = outer_tree(programs, state)["head"]
  assert np.abs(first - second).max() > 1e-4


@pytest.mark.parametrize("overlap", [0, 2, 6, 8])
def test_to_apply_at_the_first_send_takes_a_delay_of_one_round(overlap):
  method = method_of("first_send", overlap)
  line = "needs tau = H: set overlap_steps=4 instead of"
  with pytest.raises(ValueError, match=line):
    begin(PROBLEM, method, INNER, nesterov())
  with pytest.raises(ValueError, match=line):
    transform(method, INNER)


def test_what_a_builder_returns_must_be_a_rule():
  dx.register_rule("nothing", dx.RuleKind(lambda method, axis_name: None))
  with pytest.raises(ValueError, match="return a dilocox_jax.ApplyRule, not a"):
    OuterStep(dx.Method(dx.SyncSchedule(4), "nothing"), INNER, exchange())


def test_an_alpha_of_numpy_does_not_widen_the_parameters():
  method = dx.Method(dx.SyncSchedule(4), "mix", np.float64(0.5))
  half = {"w": jnp.ones(2, jnp.bfloat16)}
  rule = OuterStep(method, INNER, exchange()).rule
  assert rule.rejoin(half, half, half, half)["w"].dtype == jnp.bfloat16
