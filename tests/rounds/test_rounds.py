"""The programs of rounds and of data-parallel steps, and their states."""

import dataclasses
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.distributed import host_memory
from dilocox_jax.plan.overlap import PARTS
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import optimizers
from dilocox_jax.rounds.window import exchange_behind_steps
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
from tests.tiers import slow

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


@pytest.mark.parametrize(
  ("name", "layout"),
  [("diloco", "mesh"), ("continue", "stacked"), ("eager", "mesh")],
)
def test_abstract_states_describe_real_ones(name, layout):
  programs, state = rounds_of(METHODS[name], layout)
  given = start(), INNER.init(start())
  assert_described(programs.states.abstract(*given), state)
  copies = jax.tree.map(lambda x: np.broadcast_to(x, (3, *x.shape)), start())
  assert_equal(state.replica.params, copies)
  assert_close(programs.outer_params(state), start(), 1e-6)
  assert not any(each.in_flight for each in state.fragments)
  step, state, _ = next(walk(programs, state, PROBLEM, 4))
  in_flight = METHODS[name].schedule.num_in_flight(step)
  assert_described(programs.states.abstract(*given, in_flight), state)
  programs = dataclasses.replace(programs, outer_memory=host_memory.HOST)
  assert_described(programs.states.abstract(*given), programs.init(*given))
  shared = step_programs(INNER, 3, layout)
  assert_described(shared.abstract(start()), shared.init(start()))


def test_a_run_uses_its_states_memory_again_but_not_the_callers():
  params = start()
  before = jax.device_get(start())
  programs, _ = rounds_of(METHODS["continue"])
  state = programs.init(params, INNER.init(params))
  programs.run(state, batches_of(PROBLEM, 0, 12))
  old = jax.tree.leaves((state.replica, state.fragments[0].params))
  assert all(leaf.is_deleted() for leaf in old)
  assert_equal(params, before)


def programs_of(method, num_layers):
  """How many lines the program of every kind of window has."""
  problem = params, inputs, targets = make_problem(0, 5, 1, num_layers, 2, 3)
  interval = method.schedule.sync_interval
  batches = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((5, interval, *x.shape[2:]), np.float32),
    (inputs, targets),
  )
  programs, _ = begin(problem, method, INNER, nesterov())
  found = {}
  step = 5 * interval
  for window in method.schedule.windows(step, step + interval):
    in_flight = method.schedule.num_in_flight(step)
    step += window.num_steps
    state = programs.states.abstract(params, INNER.init(params), in_flight)
    text = programs.lowered(state, batches, window).as_text()
    found[programs.kind(window)] = text.count("\n")
  return found


@pytest.mark.parametrize(
  ("few", "many"),
  [
    (methods.dilocox(4), methods.dilocox(400)),
    (methods.streaming_diloco(12, 4, 1), methods.streaming_diloco(96, 7, 8)),
    *slow((methods.overlap_loco(6, 3), methods.overlap_loco(64, 16))),
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
  windows = method.schedule.windows(0, 18)
  kinds = {programs.kind(part) for window in windows for part in window.parts}

  def num_compiled():
    compiled: list[Any] = list(map(programs.program, kinds))
    return sum(each._cache_size() for each in compiled)

  some = 0
  for step, new, _ in walk(programs, state, PROBLEM, 16):
    some = num_compiled() if step == 12 else some
    state = new
  programs.flush(state)
  assert num_compiled() == some > 0


class Progress(NamedTuple):
  step: Any


def run_turns(num_turns, ends):
  """Notes when an exchange of some turns sends and receives in 8 steps."""
  events = []

  def exchange_coroutine(state, own, weight):
    for turn in range(num_turns):
      own = yield own
      events.append(f"send {turn}")
      own = yield own + 1
      events.append(f"receive {turn}")
    return own

  def run_steps(progress, count):
    events.append(f"{count} steps")
    return Progress(progress.step * 2 + count)

  aggregator = types.SimpleNamespace(
    has_turns=True, stretch_ends=ends and (lambda params: ends)
  )
  outer: Any = types.SimpleNamespace(
    aggregator=aggregator, exchange_coroutine=exchange_coroutine
  )
  state: Any = types.SimpleNamespace(params=None)
  steps: Any = 8
  given = Progress(jnp.int32(3)), state, jnp.float32(0), steps
  return events, exchange_behind_steps(outer, run_steps, *given)


THREE = (PARTS * 3 // 4, PARTS)


@pytest.mark.parametrize(
  ("num_turns", "ends", "order", "steps"),
  [
    (1, None, "send 0, 8 steps, receive 0", 3 * 2 + 8),
    (
      *(2, THREE, "send 0, 6 steps, receive 0, send 1, 2 steps, receive 1"),
      (3 * 2 + 6) * 2 + 2,
    ),
    # Turns that nobody told of come after the steps.
    (2, None, "send 0, 8 steps, receive 0, send 1, receive 1", 3 * 2 + 8),
  ],
)
def test_a_message_waits_for_the_one_before_and_for_its_steps(
  num_turns, ends, order, steps
):
  events, (progress, result) = run_turns(num_turns, ends)
  assert ", ".join(events) == order
  assert (progress.step, result) == (steps, num_turns)
  text = str(jax.make_jaxpr(lambda: run_turns(num_turns, ends)[1])())
  assert text.count("optimization_barrier") == 2 * len(ends or [PARTS])


def run_round(problem, inner, num_steps):
  programs, state = begin(
    problem, methods.streaming_diloco(4, 2, 1), inner, nesterov()
  )
  return programs.run(state, batches_of(problem, 0, num_steps))[:2]


@pytest.mark.parametrize("run", [run_round, run_steps])
def test_every_step_is_reported_in_its_place(run):
  params, inputs, targets = PROBLEM
  _, seen = run(PROBLEM, optax.sgd(0.0), num_steps=5)
  for step in range(5):
    found = [
      least_squares.loss_and_grad(params, inputs[m, step], targets[m, step])
      for m in range(3)
    ]
    vectors = np.stack([least_squares.to_vector(each) for _, each in found])
    if run is run_steps:  # Each replica has the mean gradient.
      vectors = np.broadcast_to(vectors.mean(axis=0), vectors.shape)
    norms = np.linalg.norm(vectors, axis=1)
    losses = [loss for loss, _ in found]
    np.testing.assert_allclose(seen.loss[:, step], losses, rtol=1e-5)
    np.testing.assert_allclose(seen.grad_norm[:, step], norms, rtol=1e-5)


def test_rounds_go_on_from_a_warm_start_as_in_the_numpy_twin(x64):
  problem = jax.tree.map(jnp.asarray, PROBLEM)
  shared, _ = run_steps(problem, INNER, num_steps=6)
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
  plain, _ = run_steps(PROBLEM, optax.sgd(1.0), num_steps=1)
  one, other = (
    least_squares.to_vector(PROBLEM[0]) - least_squares.to_vector(each.params)
    for each in (state, plain)
  )
  assert np.linalg.norm(other) > 1e-2
  expected = 1e-3 * other / np.linalg.norm(other)
  np.testing.assert_allclose(one, expected, atol=1e-6)
