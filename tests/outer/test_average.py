"""The average of the outer parameters equals its plain numpy definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.outer.average import averaged
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference.optimizers import polynomial_average
from dilocox_jax.trees import leaves_by_path
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  EXACT,
  assert_close,
  assert_equal,
  begin,
  nesterov,
  walk,
)

METHODS = {
  "diloco": (methods.diloco(4), "stacked"),
  "eager": (methods.eager(4), "mesh"),
  "sliced": (methods.overlap_loco(6, 3), "stacked"),
}


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_newer_parameters_weigh_more(power, x64):
  def walked(optimizer):
    rng = np.random.default_rng(0)
    params = {"a": jnp.asarray(rng.normal(size=4)), "b": jnp.asarray(2.0)}
    state: Any = optimizer.init(params)
    iterates = []
    for _ in range(7):
      gradient = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params
      )
      update, state = optimizer.update(gradient, state, params)
      params = optax.apply_updates(params, update)
      iterates.append(params)
    return iterates, state

  iterates, state = walked(averaged(nesterov(), power))
  assert_equal(iterates, walked(nesterov())[0])
  assert_close(state.average, polynomial_average(iterates, power), EXACT)


def fragments_of(programs, params):
  cuts = programs.cuts
  return [
    leaves_by_path(cuts.take(params, cuts.groups[p], cuts.place(p)))
    for p in range(cuts.count)
  ]


@pytest.mark.parametrize("name", METHODS)
def test_rounds_average_what_each_fragment_was(name, x64):
  method, layout = METHODS[name]
  num_steps = 6 * method.schedule.sync_interval
  problem = make_problem(0, 2, num_steps, 4, 2, 3)
  runs = [
    begin(problem, method, optax.sgd(0.05), outer, layout)
    for outer in (averaged(nesterov(), 2.5), nesterov())
  ]
  programs, plain = (programs for programs, _ in runs)
  walks = [walk(each, state, problem, num_steps) for each, state in runs]
  assert_equal(programs.outer_params(runs[0][1]), problem[0])
  newest = [fragments_of(plain, jax.tree.map(jnp.asarray, problem[0]))]
  state: Any = None
  for (_, state, _), (_, other, _) in zip(*walks, strict=True):
    assert_equal(
      [fragment.params for fragment in state.fragments],
      [fragment.params for fragment in other.fragments],
    )
    held = jax.tree.map(jnp.array, plain.outer_params(other))
    newest.append(fragments_of(plain, held))
  kept = fragments_of(programs, programs.outer_params(state))
  for number, found in enumerate(kept):
    seen = [jax.device_get(each[number]) for each in newest]
    moved = [
      new
      for old, new in zip(seen, seen[1:], strict=False)
      if any(np.any(new[path] != old[path]) for path in new)
    ]
    assert moved or number  # A slice may have nothing but padding.
    if moved:
      assert_close(found, polynomial_average(moved, 2.5), EXACT)


def test_an_average_needs_the_parameters_and_no_wrapper():
  optimizer = averaged(nesterov(), 1.0)
  params = {"x": jnp.ones(2)}
  with pytest.raises(ValueError, match="update\\(grads, state, params\\)"):
    optimizer.update(params, optimizer.init(params))
  with pytest.raises(ValueError, match="power=-1 must not be negative"):
    averaged(nesterov(), -1)
  outer = optax.chain(optax.clip(1.0), averaged(optax.sgd(1.0), 1))
  with pytest.raises(ValueError, match="make it the outermost one, dilocox"):
    dx.diloco(optax.sgd(0.1), outer).init(params)
