"""The average of the outer parameters equals its plain numpy definition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.outer.average import AverageState, averaged
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference.optimizers import polynomial_average
from dilocox_jax.trees import leaves_by_path
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  assert_equal,
  begin,
  nesterov,
  walk,
)

EXACT = 1e-12  # float64; sums of a few dozen terms near 1
POWERS = (0.0, 1.0, 2.5, 16.0)
INNER = optax.sgd(0.05)
METHODS = {
  "diloco": methods.diloco(4),
  "eager": methods.eager(4),
  "delay_over_two_rounds": methods.delayed(4, 3, 9, "continue"),
  "sliced": methods.delayed(6, 3, 2, "continue", fragment_order="sliced"),
}


def walked(optimizer, num_steps=7):
  """Updates, iterates and the last state on random gradients."""
  rng = np.random.default_rng(0)
  params = {"a": jnp.asarray(rng.normal(size=4)), "b": jnp.asarray(2.0)}
  state, updates, iterates = optimizer.init(params), [], []
  for _ in range(num_steps):
    gradient = jax.tree.map(
      lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params
    )
    update, state = optimizer.update(gradient, state, params)
    params = optax.apply_updates(params, update)
    updates.append(update)
    iterates.append(params)
  return updates, iterates, state


@pytest.mark.parametrize("power", POWERS)
def test_newer_parameters_weigh_more(power, x64):
  updates, iterates, state = walked(averaged(nesterov(), power))
  assert_equal(updates, walked(nesterov())[0])
  assert isinstance(state, AverageState)
  assert_close(state.average, polynomial_average(iterates, power), EXACT)


def test_three_updates_weigh_one_two_three():
  values = [{"x": np.array(x)} for x in (6.0, 60.0, 600.0)]
  assert polynomial_average(values, 1)["x"] == pytest.approx(1 + 20 + 300)


def by_name(tree):
  """The leaves as the reference page has them."""
  leaves = leaves_by_path(tree).items()
  return {path: np.asarray(leaf) for path, leaf in leaves}


def copied(tree):
  """A copy on the host; the next round reuses the memory of its state."""
  return jax.tree.map(np.array, tree)


def part_of(cuts, tree, fragment):
  tree = jax.tree.map(jnp.asarray, tree)
  return cuts.take(tree, cuts.groups[fragment], cuts.place(fragment))


def values_of_each_fragment(programs, states):
  """The trees in which a fragment has moved, fragment by fragment."""
  for fragment in range(programs.cuts.count):
    seen = [part_of(programs.cuts, tree, fragment) for tree in states]
    moved = [
      new
      for old, new in zip(seen, seen[1:], strict=False)
      if any(map(np.any, jax.tree.leaves(jax.tree.map(jnp.subtract, new, old))))
    ]
    if moved:  # A slice may have nothing but padding.
      yield fragment, moved


@pytest.mark.parametrize(
  ("name", "layout"),
  [(name, "stacked") for name in METHODS]
  + [("eager", "mesh"), ("sliced", "mesh")],
)
def test_rounds_average_what_each_fragment_was(name, layout, x64):
  method = METHODS[name]
  num_steps = 6 * method.schedule.sync_interval
  problem = make_problem(0, 2, num_steps, 4, 2, 3)
  given = problem, method, INNER, averaged(nesterov(), 2.5), layout
  programs, state = begin(*given)
  plain_programs, plain = begin(problem, method, INNER, nesterov(), layout)
  assert_equal(programs.outer_params(state), problem[0])
  newest = [copied(plain_programs.outer_params(plain))]
  plain_rounds = walk(plain_programs, plain, problem, num_steps)
  rounds = walk(programs, state, problem, num_steps)
  for (_, new, _), (_, plain, _) in zip(rounds, plain_rounds, strict=True):
    state = new
    assert_equal(
      [fragment.params for fragment in new.fragments],
      [fragment.params for fragment in plain.fragments],
    )
    newest.append(copied(plain_programs.outer_params(plain)))
  kept = programs.outer_params(state)
  moves = list(values_of_each_fragment(programs, newest))
  assert len(moves) >= min(2, method.schedule.num_fragments)
  for fragment, moved in moves:
    expected = polynomial_average([by_name(tree) for tree in moved], 2.5)
    own = part_of(programs.cuts, kept, fragment)
    assert_close(by_name(own), expected, EXACT)


def test_an_average_needs_the_parameters():
  optimizer = averaged(nesterov(), 1.0)
  params = {"x": jnp.ones(2)}
  state = optimizer.init(params)
  assert isinstance(state, AverageState)
  with pytest.raises(ValueError, match="update\\(grads, state, params\\)"):
    optimizer.update(params, state)
  with pytest.raises(ValueError, match="power=-1 must not be negative"):
    averaged(nesterov(), -1)


def test_an_average_inside_a_chain_is_refused():
  outer = optax.chain(optax.clip(1.0), averaged(optax.sgd(1.0), 1))
  tx = dx.diloco(optax.sgd(0.1), outer)
  with pytest.raises(ValueError, match="make it the outermost one, dilocox"):
    tx.init({"w": jnp.ones(3)})
  inside = averaged(optax.chain(optax.clip(1.0), optax.sgd(1.0)), 1)
  dx.diloco(optax.sgd(0.1), inside).init({"w": jnp.ones(3)})
