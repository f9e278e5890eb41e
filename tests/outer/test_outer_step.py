"""What takes an outer step: optimizers, their average, and how far apart
replicas are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.optimizers import standard_promotion
from dilocox_jax.outer.average import averaged
from dilocox_jax.outer.drift import disagreement, drift_axes, measure_drift
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import optimizers
from dilocox_jax.reference.optimizers import polynomial_average
from dilocox_jax.trees import leaves_by_path
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  EXACT,
  SGD,
  assert_close,
  assert_equal,
  begin,
  nesterov,
  oracle,
  outer_tree,
  stacked,
  walk,
)


@pytest.mark.parametrize("method", [methods.diloco(4), methods.eager(4)])
def test_any_optimizer_may_step_on_the_mean(method, x64):
  problem = make_problem(0, 2, 24, 4, 2, 3)
  rate = lambda count: 0.1 / (1 + count)  # noqa: E731
  adamw = standard_promotion(optax.adamw(rate, weight_decay=0.1))
  programs, state = begin(problem, method, SGD, adamw)
  *_, (_, state, _) = walk(programs, state, problem, 24)
  outer = optimizers.AdamW(rate, weight_decay=0.1)
  expected = oracle(problem, method, 24, outer=outer, flush=False)
  assert_close(outer_tree(programs, state), stacked(expected.theta), EXACT)


@pytest.mark.parametrize(
  ("method", "layout", "power", "first"),
  [
    (methods.diloco(4), "stacked", 0.0, 0),
    (methods.eager(4), "mesh", 1.0, 0),
    # No fragment has arrived in the first round.
    (methods.dilocox(4), "stacked", 2.5, 1),
  ],
)
def test_what_is_kept_is_the_average_of_all_rounds(
  method, layout, power, first, x64
):
  problem = make_problem(0, 2, 24, 4, 2, 3)
  given = problem, method, SGD, averaged(nesterov(), power), layout
  programs, state = begin(*given)
  assert_equal(programs.outer_params(state), problem[0])
  *_, (_, state, _) = walk(programs, state, problem, 24)
  thetas = oracle(problem, method, 24, flush=False).snapshots[first:]
  # Training goes on from the newest parameters.
  assert_close(outer_tree(programs, state), stacked(thetas[-1]), EXACT)
  each = zip(*thetas, strict=True) if method.rule == "eager" else [thetas]
  averages = [
    polynomial_average([leaves_by_path(theta) for theta in own], power)
    for own in each
  ]
  expected = jax.tree.map(lambda *x: np.mean(x, axis=0), *averages)
  found = leaves_by_path(programs.outer_params(state))
  assert_close(found, expected, EXACT)


def test_an_average_needs_the_parameters_and_no_wrapper():
  optimizer = averaged(nesterov(), 1.0)
  params = {"x": jnp.ones(2)}
  with pytest.raises(ValueError, match="update\\(grads, state, params\\)"):
    optimizer.update(params, optimizer.init(params))
  outer = optax.chain(optax.clip(1.0), averaged(optax.sgd(1.0), 1))
  with pytest.raises(ValueError, match="make it the outermost one, dilocox"):
    dx.diloco(optax.sgd(0.1), outer).init(params)


@pytest.mark.parametrize(
  ("wrap", "arguments", "message"),
  [
    (averaged, (optax.sgd(1.0), -1.0), "power=-1.0 must be at least 0"),
    (averaged, (1.0, optax.sgd(1.0)), "power=.* must be a number"),
    (averaged, (0.7, 1.0), "optimizer=0.7 must be an optax transf"),
    (dx.schedule_free, (0.7,), "optimizer=0.7 must be an optax transf"),
  ],
)
def test_what_cannot_be_averaged_is_refused(wrap, arguments, message):
  with pytest.raises(ValueError, match=message):
    wrap(*arguments)


def measured(own, layout="stacked"):
  """The drift of pseudo-gradients [M, n], and what it says."""
  rows = {"w": own[:, 1:], "b": own[:, 0]}
  mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), rows)

  def one(mean, own):
    return measure_drift(ExchangeResult(mean, own, own))

  over = Replicas(len(own), layout).map(
    one, (None, 0), drift_axes(is_shared=True)
  )
  drift = jax.jit(over)(mean, rows)
  return disagreement(
    drift.own_squared, drift.apart_squared, drift.mean_squared
  )


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
@pytest.mark.parametrize("num_replicas", [2, 5])
def test_drift_is_that_of_all_pairs_weighted_by_their_norms(
  num_replicas, layout, x64
):
  rng = np.random.default_rng(num_replicas)
  sizes = np.arange(1, num_replicas + 1)[:, None]
  own = rng.normal(size=[num_replicas, 7]) * sizes
  dots = own @ own.T
  norms = np.linalg.norm(own, axis=1)
  weights = np.outer(norms, norms)
  off = ~np.eye(num_replicas, dtype=bool)
  apart = np.square(own - own.mean(axis=0)).sum(axis=1)
  assert measured(own, layout=layout) == pytest.approx(
    (
      dots[off].sum() / weights[off].sum(),
      np.sqrt(apart.mean()),
      np.linalg.norm(own.mean(axis=0)),
    )
  )


@pytest.mark.parametrize(
  ("own", "seen"),
  [
    ([[0.5, 0.5], [0.5, 0.5]], (1.0, 0.0, 0.5**0.5)),
    ([[2.0, 0.0], [-2.0, 0.0]], (-1.0, 2.0, 0.0)),
    ([[3.0, 4.0]], (None, 0.0, 5.0)),
    ([[3.0, 4.0], [0.0, 0.0]], (None, 2.5, 2.5)),
  ],
)
def test_drift_of_a_few_replicas_by_hand(own, seen):
  cosine, *rest = measured(np.asarray(own, np.float32))
  assert cosine == (seen[0] and pytest.approx(seen[0]))
  assert rest == pytest.approx(seen[1:])


def test_squared_norms_are_those_of_any_precision():
  halves = {
    "a": jnp.full(4, 256, jnp.float16),  # fp16 ends at 65504.
    "b": jnp.bfloat16(-3.0),
  }
  result = ExchangeResult(halves, halves, halves)
  assert float(measure_drift(result).own_squared) == 4 * 65536 + 9
