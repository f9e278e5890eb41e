import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.exchange.mean import mean_of_finite_replicas
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.outer.programs import RoundPrograms
from dilocox_jax.plan.schedule import methods
from dilocox_jax.pytypes import Aggregator
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  assert_equal,
  begin,
  loss,
  nesterov,
  outer_transform,
  walk,
)

EXACT = 1e-12  # float64; sums of a few hundred terms near 1
PROBLEM = make_problem(6, 3, 24, 4, 2, 3)
SGD = optax.sgd(0.05)


def last_state(method, outer, num_steps):
  programs, state = begin(PROBLEM, method, SGD, outer)
  *_, (_, state, _) = walk(programs, state, PROBLEM, num_steps)
  return programs, state


def test_a_flush_after_everything_has_arrived_changes_nothing():
  programs, state = last_state(methods.diloco(4), nesterov(), 8)
  assert_equal(programs.flush(state, 8), (state, []))


@pytest.mark.parametrize(
  ("method", "num_steps"),
  [
    (methods.delayed(4, 1, 6, "continue"), 14),
    (methods.delayed(4, 2, 3, "continue"), 11),
    (methods.dilocox(4), 12),
  ],
  ids=["far", "fragments", "whole_round"],
)
def test_a_flush_of_continue_ends_at_the_replicas_mean(method, num_steps, x64):
  """With outer SGD lr 1 their mean is what all of them have reached."""
  programs, state = last_state(method, optax.sgd(1.0), num_steps)
  mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), state.replica.params)
  spread = jax.tree.map(lambda a, b: a - b[None], state.replica.params, mean)
  assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(spread)) > 1e-3
  flushed, _ = programs.flush(state, num_steps)
  assert_close(flushed.outer.params, mean, EXACT)


@pytest.mark.parametrize(
  "method",
  [
    methods.dilocox(4, "reset"),
    methods.streaming_diloco(4, 2, 1),
    methods.eager(4),
  ],
  ids=["reset", "mix", "eager"],
)
def test_replicas_go_on_from_the_flushed_outer_parameters(method):
  programs, state = last_state(method, nesterov(), 10)
  flushed, _ = programs.flush(state, 10)
  outer = flushed.outer.params
  if method.rule != "eager":
    outer = jax.tree.map(lambda x: np.broadcast_to(x, (3, *x.shape)), outer)
  assert_equal(flushed.replica.params, outer)
  assert_equal(flushed.replica.optimizer, state.replica.optimizer)


def counting_mean():
  """The mean, and how often each fragment has been exchanged."""
  mean = mean_of_finite_replicas()

  def average(values, state, params):
    total, sent, _ = mean.average(values, None, params)
    return total, sent, state + 1

  return Aggregator(lambda params: jnp.int32(0), average)


@pytest.mark.parametrize(
  ("method", "num_steps"),
  [
    (methods.diloco(4), 8),
    (methods.diloco(4), 10),
    (methods.dilocox(4), 8),
    (methods.delayed(4, 3, 9, "continue"), 13),
    (methods.streaming_diloco(4, 3, 1), 7),
    (methods.eager(4, 2), 10),
  ],
)
def test_a_flush_exchanges_as_often_as_the_plan_counts(method, num_steps):
  outer = outer_transform(method, 4, nesterov(), counting_mean())
  step = inner_step(accumulated_gradient(loss), SGD)
  programs = RoundPrograms(outer, step, Replicas(3))
  params = jax.tree.map(jnp.asarray, PROBLEM[0])
  state = programs.init(params, SGD.init(params))
  state, drifts = programs.flush(state, num_steps)
  applied = [w.applied for w in method.schedule.flush_windows(num_steps)]
  fragments = [event.fragment for event in applied if event]
  exchanges = state.outer.exchange
  counts = [exchanges.first[0]]
  if exchanges.layers is not None:
    counts += list(exchanges.layers[0])
  expected = [fragments.count(p) for p in range(method.schedule.num_fragments)]
  assert counts == expected
  assert [drift.own_squared.shape for drift in drifts] == [(3, 1)] * sum(
    expected
  )


def test_a_flush_leaves_the_state_for_more_rounds():
  method = methods.dilocox(4)
  programs, state = last_state(method, nesterov(), 8)
  _, same = last_state(method, nesterov(), 8)
  programs.flush(state, 8)
  one = list(walk(programs, state, PROBLEM, 12, start=8))[-1][1]
  two = list(walk(programs, same, PROBLEM, 12, start=8))[-1][1]
  assert_equal(one, two)
