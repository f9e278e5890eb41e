"""What may run at once in a window, and what its steps report."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer.window import (
  InnerProgress,
  ReplicaState,
  StepMetrics,
  WindowProgram,
)
from dilocox_jax.plan.schedule import methods
from tests.oracles import least_squares
from tests.outer.problem import batches_of, begin, nesterov

PROBLEM = least_squares.make_problem(4, 3, 24, 4, 2, 3)


def jaxpr_of(method, has_links):
  """The equations of a steady window that applies, for one replica."""
  inner = optax.sgd(0.05)
  rounds, _ = begin(PROBLEM, method, inner, nesterov())
  params = jax.tree.map(jnp.asarray, PROBLEM[0])
  window = next(w for w in method.schedule.windows(12, 20) if w.applied)
  kind, cuts = rounds.kind(window), rounds.cuts
  program = WindowProgram(
    rounds.outer, cuts, rounds.inner_step, kind, has_links
  )

  def state(event):
    """The state of an event's fragment, and what it has in flight."""
    if event is None:
      return None, None
    place = cuts.place(event.fragment)
    part = cuts.take(params, cuts.groups[event.fragment], place)
    return rounds.outer.init(part), part

  applied, due = state(window.applied)
  sent, _ = (None, None) if window.is_same else state(window.sent)
  due = due if method.schedule.depth else None
  zeros = jnp.zeros(window.num_steps)
  progress = InnerProgress(
    ReplicaState(params, inner.init(params)),
    jnp.int32(0),
    StepMetrics(zeros, zeros),
  )
  batches = jax.tree.map(lambda x: x[0], batches_of(PROBLEM, 0, 8))
  places = [
    event and cuts.place(event.fragment)
    for event in (window.applied, window.sent)
  ]
  trace = jax.make_jaxpr(
    lambda progress, count: program.run(
      progress, batches, count, applied, due, sent, (places[0], places[1])
    ),
    axis_env=[(REPLICA_AXIS, 3)],
  )
  return trace(progress, jnp.int32(window.num_steps)).jaxpr


def holds(equation, name):
  """Whether an equation is, or has inside, a primitive of this name."""
  if equation.primitive.name.startswith(name):
    return True
  return any(
    holds(inner, name)
    for jaxpr in jaxprs_in_params(equation.params)
    for inner in jaxpr.eqns
  )


def waits(jaxpr, later, earlier):
  """Whether anything called `later` needs anything called `earlier`."""
  made_by, before, found = {}, [], {later: [], earlier: []}
  for number, equation in enumerate(jaxpr.eqns):
    sources = set()
    for variable in equation.invars:
      if not hasattr(variable, "val") and variable in made_by:
        source = made_by[variable]
        sources |= {source} | before[source]
    before.append(sources)
    made_by |= dict.fromkeys(equation.outvars, number)
    for name in found:
      found[name] += [number] * holds(equation, name)
  assert all(found.values()), found
  return any(
    e in before[n] or e == n for n in found[later] for e in found[earlier]
  )


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize(
  "method",
  [
    methods.dilocox(4, "continue"),
    methods.dilocox(4, "reset"),
    methods.eager(4),
    methods.streaming_diloco(4, 3, 1),
    methods.overlap_loco(4, 2),
  ],
  ids=["continue", "reset", "eager", "streaming", "overlap_loco"],
)
def test_a_delayed_exchange_and_the_steps_may_run_at_once(method, has_links):
  jaxpr = jaxpr_of(method, has_links)
  assert not waits(jaxpr, "psum", "while")
  assert not waits(jaxpr, "while", "psum")


def test_without_a_delay_the_exchange_waits_for_the_steps():
  assert waits(jaxpr_of(methods.diloco(4), True), "psum", "while")


def test_every_step_is_reported_in_its_place():
  method = methods.streaming_diloco(4, 2, 1)
  programs, state = begin(PROBLEM, method, optax.sgd(0.0), nesterov())
  params, inputs, targets = PROBLEM
  _, seen, _ = programs.run(state, batches_of(PROBLEM, 0, 5))
  for m, step in np.ndindex(3, 5):
    value, gradients = least_squares.loss_and_grad(
      params, inputs[m, step], targets[m, step]
    )
    norm = np.linalg.norm(least_squares.to_vector(gradients))
    np.testing.assert_allclose(seen.loss[m, step], value, rtol=1e-5)
    np.testing.assert_allclose(seen.grad_norm[m, step], norm, rtol=1e-5)
