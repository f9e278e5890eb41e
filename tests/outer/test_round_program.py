import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.exchange.mean import mean_of_finite_replicas
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.outer import round_program
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.window_groups import window_groups
from dilocox_jax.pytypes import Aggregator
from tests.oracles import least_squares
from tests.outer.problem import (
  assert_equal,
  begin,
  loss,
  nesterov,
  outer_transform,
  walk,
)

PROBLEM = least_squares.make_problem(4, 3, 24, 4, 2, 3)


def counting_mean():
  """The mean, with a state that every exchange changes, as a codec's does."""
  mean = mean_of_finite_replicas()

  def average(values, state, params):
    total, sent, _ = mean.average(values, None, params)
    return total, sent, state + jax.tree.leaves(total)[0].reshape(-1)[0]

  return Aggregator(lambda params: jnp.zeros(()), average)


def jaxpr_of_a_round(method, round_index):
  """One replica's round as equations."""
  params, inputs, targets = jax.tree.map(jnp.asarray, PROBLEM)
  interval = method.schedule.sync_interval
  outer = outer_transform(method, 4, nesterov(), counting_mean())
  inner = optax.sgd(0.05)
  step = inner_step(accumulated_gradient(loss), inner)
  replica = round_program.ReplicaState(params, inner.init(params))
  state = round_program.RoundState(outer.init(params), replica)
  windows = method.schedule.round_windows(round_index)
  shapes, tables = window_groups(method.schedule, windows)

  def program(state, batches, tables):
    return round_program.run_round(outer, step, shapes, state, batches, tables)

  trace = jax.make_jaxpr(program, axis_env=[(REPLICA_AXIS, 3)])
  batches = inputs[0, :interval], targets[0, :interval]
  return trace(state, batches, tables).jaxpr


def holds(equation, name):
  """Whether an equation is, or has inside, a primitive of this name."""
  if equation.primitive.name.startswith(name):
    return True
  return any(
    holds(inner, name)
    for jaxpr in jaxprs_in_params(equation.params)
    for inner in jaxpr.eqns
  )


def ancestors(jaxpr):
  """For every equation, the numbers of those that its inputs come from."""
  made_by, before = {}, []
  for number, equation in enumerate(jaxpr.eqns):
    sources = set()
    for variable in equation.invars:
      if not hasattr(variable, "val") and variable in made_by:
        source = made_by[variable]
        sources |= {source} | before[source]
    before.append(sources)
    made_by |= dict.fromkeys(equation.outvars, number)
  return before


def waits(jaxpr, later, earlier):
  """Whether anything called `later` needs anything called `earlier`."""
  before, found = ancestors(jaxpr), {later: [], earlier: []}
  for name, numbers in found.items():
    numbers += [n for n, e in enumerate(jaxpr.eqns) if holds(e, name)]
    assert numbers, f"no {name}"
  return any(
    e in before[n] or e == n for n in found[later] for e in found[earlier]
  )


@pytest.mark.parametrize("rule", ["continue", "reset"])
def test_the_exchange_of_a_delayed_round_and_its_steps_may_run_at_once(rule):
  jaxpr = jaxpr_of_a_round(methods.dilocox(4, rule), 3)
  assert not waits(jaxpr, "psum", "while")
  assert not waits(jaxpr, "while", "psum")


def test_eager_updates_hide_their_exchange_too():
  jaxpr = jaxpr_of_a_round(methods.eager(4), 3)
  assert not waits(jaxpr, "psum", "while")
  assert not waits(jaxpr, "while", "psum")


def test_every_scanned_fragment_may_travel_while_steps_run():
  jaxpr = jaxpr_of_a_round(methods.delayed(4, 4, 4, "continue"), 3)
  scans = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  assert len(scans) == 1
  (body,) = jaxprs_in_params(scans[0].params)
  assert not waits(body, "psum", "while")
  assert not waits(body, "while", "psum")


def test_diloco_waits_for_the_steps():
  jaxpr = jaxpr_of_a_round(methods.diloco(4), 3)
  assert waits(jaxpr, "psum", "while")


@pytest.mark.parametrize(
  "method",
  [methods.dilocox(4), methods.delayed(4, 1, 6, "continue")],
  ids=["dilocox", "delayed"],
)
def test_outer_parameters_rest_until_the_first_apply(method):
  optimizer = optax.chain(optax.trace(0.9), optax.scale_by_schedule(jnp.cos))
  programs, first = begin(PROBLEM, method, optax.sgd(0.05), optimizer)
  start = jax.device_get(first)
  arrival = method.schedule.sync_interval + method.schedule.overlap_steps
  for step, state, _ in walk(programs, first, PROBLEM, 12):
    rests = step < arrival
    is_same = [
      np.array_equal(a, b)
      for a, b in zip(
        jax.tree.leaves((state.outer.params, state.outer.optimizer)),
        jax.tree.leaves((start.outer.params, start.outer.optimizer)),
        strict=True,
      )
    ]
    assert all(is_same) if rests else not any(is_same)
    moved = jax.tree.map(
      lambda a, b: not np.array_equal(a, b),
      state.replica.params,
      start.replica.params,
    )
    assert all(jax.tree.leaves(moved))


def test_a_round_reports_every_step_in_its_place():
  programs, state = begin(
    PROBLEM, methods.streaming_diloco(4, 2, 1), optax.sgd(0.0), nesterov()
  )
  params, inputs, targets = PROBLEM
  _, _, seen = next(walk(programs, state, PROBLEM, 4))
  for m in range(3):
    for step in range(4):
      value, gradients = least_squares.loss_and_grad(
        params, inputs[m, step], targets[m, step]
      )
      norm = np.linalg.norm(least_squares.to_vector(gradients))
      np.testing.assert_allclose(seen.loss[m, step], value, rtol=1e-5)
      np.testing.assert_allclose(seen.grad_norm[m, step], norm, rtol=1e-5)


def test_inner_optimizer_state_survives_an_apply():
  inner = optax.sgd(0.05, momentum=0.9)
  programs, state = begin(PROBLEM, methods.diloco(4), inner, nesterov())
  free_programs, free = begin(PROBLEM, methods.diloco(5), inner, nesterov())
  (_, state, _), (_, free, _) = (
    next(walk(programs, state, PROBLEM, 4)),
    next(walk(free_programs, free, PROBLEM, 4)),
  )
  assert_equal(state.replica.optimizer, free.replica.optimizer)
