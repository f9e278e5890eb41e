"""What holds of a run's windows under every method."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.mean import (
  mean_of_finite_replicas,
)
from dilocox_jax.distributed import host_memory
from dilocox_jax.plan.schedule import methods
from dilocox_jax.pytypes import Aggregator
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  assert_equal,
  assert_rounded_alike,
  batches_of,
  begin,
  nesterov,
  outer_tree,
)
from tests.outer.test_against_oracles import INNER_RATE, oracle, stacked

EXACT = 1e-12  # float64; sums of a few hundred terms near 1
STEPS = 15
PROBLEM = make_problem(8, 3, 2 * STEPS, 4, 2, 3)
SGD = optax.sgd(INNER_RATE)
METHODS = {
  "diloco": methods.diloco(4),
  "reset": methods.dilocox(4, "reset"),
  "eager": methods.eager(4, 2),
  "mix": methods.streaming_diloco(6, 3, 1),
  "two in flight": methods.delayed(4, 2, 6, "continue"),
  "three in flight": methods.delayed(3, 1, 9, "continue"),
  "slices": methods.overlap_loco(6, 3),
}


def counting_mean():
  """The mean; its state is how often a fragment was exchanged."""
  mean = mean_of_finite_replicas()

  def average(values, state, params):
    total, sent, _ = mean.average(values, None, params)
    return total, sent, state + 1

  return Aggregator(lambda params: jnp.int32(0), average)


def rounds_of(method):
  programs, _ = begin(
    PROBLEM, method, SGD, nesterov(), aggregator=counting_mean()
  )
  return programs


def first_state(programs):
  params = jax.tree.map(jnp.asarray, PROBLEM[0])
  return programs.init(params, SGD.init(params))


def run(programs, state, *stops):
  """Runs to one step after the other; returns state, metrics and drifts."""
  seen, drifts, start = [], [], int(state.step)
  for stop in stops:
    batches = batches_of(PROBLEM, start, stop)
    state, metrics, found = programs.run(state, batches)
    seen.append(jax.device_get(metrics))
    drifts += jax.device_get(found)
    start = stop
  metrics = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *seen)
  return state, metrics, drifts


def counts(state):
  """How many of each fragment are in flight, and were exchanged."""
  return (
    [len(each.in_flight) for each in state.fragments],
    [int(np.max(each.exchange)) for each in state.fragments],
  )


def applied(schedule, windows):
  fragments = [w.applied.fragment for w in windows if w.applied]
  return [fragments.count(p) for p in range(schedule.num_fragments)]


@pytest.mark.parametrize("name", METHODS)
def test_any_portions_of_steps_are_the_run_and_its_flush(name, x64):
  """From host memory too, and it equals the numpy twin."""
  method = METHODS[name]
  schedule = method.schedule
  programs = rounds_of(method)
  whole = run(programs, first_state(programs), STEPS)
  kept = dataclasses.replace(programs, outer_memory=host_memory.HOST)
  state, *seen = run(kept, first_state(kept), 5, 10, STEPS)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.fragments)}
  assert kinds == {host_memory.HOST}
  assert_rounded_alike((state, *seen), whole)
  state, _, drifts = whole
  assert state.step == STEPS
  exchanged = applied(schedule, schedule.windows(0, STEPS))
  assert counts(state) == (schedule.num_in_flight(STEPS), exchanged)
  assert len(drifts) == sum(exchanged)
  flushed, _ = programs.flush(state)
  expected = oracle(PROBLEM, method, STEPS)
  found = outer_tree(programs, flushed), flushed.replica.params
  twin = stacked(expected.theta), stacked(expected.params)
  assert_close(found, twin, EXACT)


@pytest.mark.parametrize("name", METHODS)
def test_a_flush_exchanges_what_the_plan_says_and_leaves_the_state(name):
  method = METHODS[name]
  programs = rounds_of(method)
  state, *_ = run(programs, first_state(programs), STEPS)
  flushed, drifts = programs.flush(state)
  due = applied(method.schedule, method.schedule.flush_windows(STEPS))
  none, total = counts(flushed)
  assert none == [0] * len(due)
  assert total == [sum(x) for x in zip(counts(state)[1], due, strict=True)]
  assert [drift.own_squared.shape for drift in drifts] == [(3,)] * sum(due)
  assert_equal(flushed.replica.optimizer, state.replica.optimizer)
  outer = programs.adopted(flushed.replica.params, flushed.fragments)
  assert_equal(flushed.replica.params, outer)
  unflushed = run(programs, first_state(programs), STEPS, 2 * STEPS)
  assert_equal(run(programs, state, 2 * STEPS)[0], unflushed[0])


def test_a_flush_after_everything_has_arrived_changes_nothing():
  programs = rounds_of(METHODS["diloco"])
  state, *_ = run(programs, first_state(programs), 12)
  assert_equal(programs.flush(state), (state, []))


@pytest.mark.parametrize("name", ["diloco", "mix"])
def test_a_run_uses_its_states_memory_again_but_not_the_callers(name):
  params = jax.tree.map(jnp.asarray, PROBLEM[0])
  programs, before = rounds_of(METHODS[name]), jax.device_get(params)
  state = programs.init(params, SGD.init(params))
  run(programs, state, STEPS)
  old = jax.tree.leaves((state.replica, state.fragments[0].params))
  assert all(leaf.is_deleted() for leaf in old)
  assert_equal(params, before)


def test_batches_that_do_not_fit_are_refused_by_name():
  programs = rounds_of(METHODS["diloco"])
  inputs, targets = batches_of(PROBLEM, 0, 4)
  for bad in ({"a": inputs[:2]}, {"a": inputs, "b": targets[:, :3]}, {"a": 1}):
    bad = jax.tree.map(np.asarray, bad)
    with pytest.raises(ValueError, match="leaf '[ab]' .*every repl"):
      programs.run(first_state(programs), bad)


def programs_of(method, num_layers):
  """How many lines the program of every kind of window has."""
  params, inputs, targets = make_problem(0, 5, 1, num_layers, 2, 3)
  interval = method.schedule.sync_interval
  batches = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((5, interval, *x.shape[2:]), np.float32),
    (inputs, targets),
  )
  programs, _ = begin((params, inputs, targets), method, SGD, nesterov())
  found, start = {}, 5 * interval
  for window in method.schedule.windows(start, start + interval):
    in_flight = method.schedule.num_in_flight(start)
    start += window.num_steps
    state = programs.abstract(params, SGD.init(params), in_flight)
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
  programs = rounds_of(METHODS["two in flight"])
  windows = METHODS["two in flight"].schedule.windows(0, 2 * STEPS)
  kinds = {programs.kind(window) for window in windows}

  def num_compiled():
    compiled: list[Any] = list(map(programs.program, kinds))
    return sum(each._cache_size() for each in compiled)

  state, *_ = run(programs, first_state(programs), 4, 8, 12)
  some = num_compiled()
  run(programs, state, 16, 20, 24, 28)
  assert num_compiled() == some
