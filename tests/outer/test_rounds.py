"""The programs of rounds and of data-parallel steps, and their states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer.window import (
  InnerProgress,
  ReplicaState,
  StepMetrics,
  WindowProgram,
)
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import optimizers
from tests.oracles import least_squares
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  EXACT,
  assert_close,
  assert_equal,
  batches_of,
  begin,
  nesterov,
  oracle,
  outer_tree,
  run_steps,
  step_programs,
  walk,
)

PROBLEM = make_problem(8, 3, 18, 4, 2, 3)
INNER = optax.sgd(0.05, momentum=0.9)
METHODS = {
  "diloco": methods.diloco(4),
  "continue": methods.delayed(4, 2, 6, "continue"),
  "eager": methods.eager(4),
}


def start():
  return jax.tree.map(jnp.asarray, PROBLEM[0])


def rounds_of(method, layout="stacked"):
  return begin(PROBLEM, method, INNER, nesterov(), layout)


def assert_described(described, state):
  def same(claim, leaf):
    assert (claim.shape, claim.dtype) == (leaf.shape, leaf.dtype)
    assert leaf.sharding.is_equivalent_to(claim.sharding, leaf.ndim)
    assert leaf.sharding.memory_kind == claim.sharding.memory_kind

  jax.tree.map(same, described, state)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_abstract_states_describe_real_ones(name, layout):
  programs, state = rounds_of(METHODS[name], layout)
  given = start(), INNER.init(start())
  assert_described(programs.abstract(*given), state)
  copies = jax.tree.map(lambda x: np.broadcast_to(x, (3, *x.shape)), start())
  assert_equal(state.replica.params, copies)
  assert_close(programs.outer_params(state), start(), 1e-6)
  assert not any(each.in_flight for each in state.fragments)
  step, state, _ = next(walk(programs, state, PROBLEM, 4))
  in_flight = METHODS[name].schedule.num_in_flight(step)
  assert_described(programs.abstract(*given, in_flight), state)
  object.__setattr__(programs, "outer_memory", host_memory.HOST)
  assert_described(programs.abstract(*given), programs.init(*given))
  shared = step_programs(INNER, 3, layout)
  assert_described(shared.abstract(start()), shared.init(start()))


def test_parameters_that_fragments_do_not_cover_are_refused():
  programs, _ = rounds_of(METHODS["continue"])
  params = jax.tree.map(lambda leaf: leaf[:3], start())
  with pytest.raises(ValueError, match="is not .4, ...."):
    programs.init(params, INNER.init(params))


def test_personal_outer_parameters_are_evaluated_at_their_mean():
  programs, state = rounds_of(METHODS["eager"])
  *_, (_, state, _) = walk(programs, state, PROBLEM, 8)
  own = outer_tree(programs, state)
  assert not np.array_equal(own["embed"][0], own["embed"][1])
  mean = jax.tree.map(lambda leaf: np.asarray(leaf).sum(axis=0) / 3, own)
  assert_close(programs.outer_params(state), mean, 1e-6)


def test_outer_optimizers_of_another_run_take_their_places():
  programs, state = rounds_of(METHODS["continue"])
  others = [
    jax.tree.map(lambda x: np.asarray(x) + 1, each.optimizer)
    for each in state.fragments
  ]
  taken = programs.with_outer_optimizers(state, others)
  assert_equal([each.optimizer for each in taken.fragments], others)


def test_a_run_uses_its_states_memory_again_but_not_the_callers():
  params, before = start(), jax.device_get(start())
  programs, _ = rounds_of(METHODS["continue"])
  state = programs.init(params, INNER.init(params))
  programs.run(state, batches_of(PROBLEM, 0, 12))
  old = jax.tree.leaves((state.replica, state.fragments[0].params))
  assert all(leaf.is_deleted() for leaf in old)
  assert_equal(params, before)


def test_batches_that_do_not_fit_are_refused_by_name():
  programs, state = rounds_of(METHODS["diloco"])
  inputs, targets = batches_of(PROBLEM, 0, 4)
  for bad in ({"a": inputs[:2]}, {"a": inputs, "b": targets[:, :3]}, {"a": 1}):
    bad = jax.tree.map(np.asarray, bad)
    with pytest.raises(ValueError, match="leaf '[ab]' .*every repl"):
      programs.run(state, bad)


def programs_of(method, num_layers):
  """How many lines the program of every kind of window has."""
  problem = params, inputs, targets = make_problem(0, 5, 1, num_layers, 2, 3)
  interval = method.schedule.sync_interval
  batches = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((5, interval, *x.shape[2:]), np.float32),
    (inputs, targets),
  )
  programs, _ = begin(problem, method, INNER, nesterov())
  found, step = {}, 5 * interval
  for window in method.schedule.windows(step, step + interval):
    in_flight = method.schedule.num_in_flight(step)
    step += window.num_steps
    state = programs.abstract(params, INNER.init(params), in_flight)
    text = programs.lowered(state, batches, window).as_text()
    found[programs.kind(window)] = text.count("\n")
  return found


@pytest.mark.parametrize(
  ("few", "many"),
  [
    (methods.dilocox(4), methods.dilocox(400)),
    (methods.streaming_diloco(12, 4, 1), methods.streaming_diloco(96, 7, 8)),
    (methods.overlap_loco(6, 3), methods.overlap_loco(64, 16)),
  ],
  ids=["dilocox", "streaming", "overlap_loco"],
)
def test_programs_depend_neither_on_steps_nor_on_the_number_of_fragments(
  few, many
):
  assert programs_of(few, 24) == programs_of(many, 24)


def test_later_rounds_need_no_new_programs():
  method = METHODS["continue"]
  programs, state = rounds_of(method)
  kinds = {programs.kind(window) for window in method.schedule.windows(0, 18)}

  def num_compiled():
    compiled: list[Any] = list(map(programs.program, kinds))
    return sum(each._cache_size() for each in compiled)

  some = 0
  for step, new, _ in walk(programs, state, PROBLEM, 16):
    if step == 12:
      some = num_compiled()
    state = new
  assert num_compiled() == some > 0


def jaxpr_of(method, has_links):
  """The equations of a steady window that applies, for one replica."""
  rounds, _ = rounds_of(method)
  window = next(w for w in method.schedule.windows(12, 20) if w.applied)
  kind, cuts = rounds.kind(window), rounds.cuts
  program = WindowProgram(
    rounds.outer, cuts, rounds.inner_step, kind, has_links
  )
  events = window.applied, window.sent
  places = [e and cuts.place(e.fragment) for e in events]
  parts = [
    e and cuts.take(start(), cuts.groups[e.fragment], place)
    for e, place in zip(events, places, strict=True)
  ]
  applied, sent = (part and rounds.outer.init(part) for part in parts)
  sent = None if window.is_same else sent
  due = parts[0] if method.schedule.depth else None
  zeros = jnp.zeros(window.num_steps)
  progress = InnerProgress(
    ReplicaState(start(), INNER.init(start())),
    jnp.int32(0),
    StepMetrics(zeros, zeros),
  )
  batches = jax.tree.map(lambda x: x[0], batches_of(PROBLEM, 0, 8))
  trace = jax.make_jaxpr(
    lambda progress, count: program.run(
      progress, batches, count, applied, due, sent, (places[0], places[1])
    ),
    axis_env=[(REPLICA_AXIS, 3)],
  )
  return trace(progress, jnp.int32(window.num_steps)).jaxpr


def holds(equation, name):
  """Whether an equation is, or has inside, a primitive of this name."""
  return equation.primitive.name.startswith(name) or any(
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
        sources |= {made_by[variable]} | before[made_by[variable]]
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
    methods.eager(4),
    methods.streaming_diloco(4, 3, 1),
    methods.overlap_loco(4, 2),
  ],
  ids=["continue", "eager", "streaming", "overlap_loco"],
)
def test_a_delayed_exchange_and_the_steps_may_run_at_once(method, has_links):
  jaxpr = jaxpr_of(method, has_links)
  assert not waits(jaxpr, "psum", "while")
  assert not waits(jaxpr, "while", "psum")
  if has_links:
    assert waits(jaxpr_of(methods.diloco(4), True), "psum", "while")


@pytest.mark.parametrize("kind", ["rounds", "data parallel"])
def test_every_step_is_reported_in_its_place(kind):
  params, inputs, targets = PROBLEM
  if kind == "rounds":
    method = methods.streaming_diloco(4, 2, 1)
    programs, state = begin(PROBLEM, method, optax.sgd(0.0), nesterov())
    _, seen, _ = programs.run(state, batches_of(PROBLEM, 0, 5))
  else:
    programs = step_programs(optax.sgd(0.0), 3)
    state = programs.init(start())
    _, seen = programs.steps(state, batches_of(PROBLEM, 0, 5))
  for step in range(5):
    losses, gradients = zip(
      *(
        least_squares.loss_and_grad(params, inputs[m, step], targets[m, step])
        for m in range(3)
      ),
      strict=True,
    )
    vectors = np.stack([least_squares.to_vector(each) for each in gradients])
    if kind == "data parallel":
      vectors = np.stack([vectors.mean(axis=0)] * 3)
    norms = np.linalg.norm(vectors, axis=1)
    np.testing.assert_allclose(seen.loss[:, step], losses, rtol=1e-5)
    np.testing.assert_allclose(seen.grad_norm[:, step], norms, rtol=1e-5)


def test_rounds_go_on_from_a_warm_start_as_in_the_numpy_twin(x64):
  problem = jax.tree.map(jnp.asarray, PROBLEM)
  programs = step_programs(INNER, 3)
  shared, batches = programs.init(problem[0]), batches_of(problem, 0, 6)
  shared, _ = programs.steps(shared, batches)
  rest = (problem[0], *batches_of(problem, 6, 18))
  rounds, _ = begin(rest, methods.dilocox(4), INNER, nesterov())
  state = rounds.init(shared.params, shared.optimizer)
  *_, (_, state, _) = walk(rounds, state, rest, 12)
  warm, inner = least_squares.warm_start(
    *PROBLEM, inner=optimizers.Sgd(0.05, 0.9), num_steps=6
  )
  rest = warm, PROBLEM[1][:, 6:], PROBLEM[2][:, 6:]
  expected = oracle(rest, methods.dilocox(4), 12, inner=inner)
  flushed, _ = rounds.flush(state)
  assert_close(outer_tree(rounds, flushed), expected.theta, EXACT)


def test_clipping_acts_on_the_mean_gradient():
  clipped = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
  state, _ = run_steps(PROBLEM, clipped, num_steps=1)
  mean = np.mean(
    [
      least_squares.to_vector(
        least_squares.loss_and_grad(
          PROBLEM[0], PROBLEM[1][m, 0], PROBLEM[2][m, 0]
        )[1]
      )
      for m in range(3)
    ],
    axis=0,
  )
  moved = jax.tree.map(lambda a, b: b - a, PROBLEM[0], state.params)
  expected = -1e-3 * mean / np.linalg.norm(mean)
  found = least_squares.to_vector(moved)
  np.testing.assert_allclose(found, expected, atol=1e-6)
