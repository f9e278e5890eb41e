"""Every method has every property, with programs that are made once.

The reference of all of them is the plain numpy of `dilocox_jax.reference`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.aggregators.exchange import exchange, mean_of_finite_replicas
from dilocox_jax.distributed import host_memory
from dilocox_jax.outer.step_state import outer_params
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import optimizers
from dilocox_jax.reference.exchanges import ErrorFeedback, Lossy
from dilocox_jax.rounds.exchange_thread import InThread
from tests.oracles import least_squares
from tests.oracles.codecs import BY_BITS, in_blocks
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  EXACT,
  ROUNDED,
  SGD,
  assert_close,
  assert_equal,
  assert_rounded_alike,
  batches_of,
  begin,
  nesterov,
  one_step,
  oracle,
  outer_tree,
  run_steps,
  stacked,
  transform,
  walk,
)
from tests.tiers import slow

SINGLE = 1e-6  # float32, with sums of a few hundred terms near 1
delayed = functools.partial(methods.delayed, rule="continue")
CASES = {
  "diloco": methods.diloco(4),
  "open_diloco": methods.open_diloco(5),
  "streaming_diloco": methods.streaming_diloco(6, 3, 1, 0.3),
  "eager": methods.eager(4),
  "dilocox_continue": methods.dilocox(4, "continue"),
  "dilocox_reset": methods.dilocox(4, "reset"),
  "overlap_loco": methods.overlap_loco(6, 3),
  "streaming_sequential": methods.streaming_diloco(7, 3, 5, 0.3, "sequential"),
  "streaming_waits": methods.streaming_diloco(6, 3, 0, 0.0),
  "several_in_flight": delayed(6, 3, 5),
  "uneven_phases": delayed(7, 4, 4),
  "delay_over_a_round": delayed(4, 1, 6),
  "delay_of_three_rounds": delayed(3, 2, 9),
  "delay_over_two_rounds": delayed(4, 3, 9),
  "late_reset": methods.delayed(5, 2, 3, "reset"),
  "interleaved_fragments": delayed(6, 3, 2, fragment_order="interleaved"),
  "eager_fragments": methods.eager(6, 3),
  # Rounds of 2, 2, 4, 8 and 8 steps.
  "growing": methods.diloco(8, 2, 4),
  "growing_dilocox": methods.dilocox(8, "continue", 2, 4),
  "growing_eager": methods.eager(8, 1, 2, 4),
  # Rounds of 3, 3, 6 and 12 steps; a result is 1, 2 or 4 steps late.
  "growing_streaming": methods.streaming_diloco(
    12, 3, 4, 0.3, first_interval=3, steps_per_doubling=6
  ),
  "growing_overlap_loco": methods.overlap_loco(
    12, 3, first_interval=3, steps_per_doubling=6
  ),
}
# Most rounds end inside a portion, and some runs inside a round.
STEPS = 25
PORTION = 5
PROBLEM = make_problem(0, 3, STEPS + PORTION, 4, 2, 3)
OWN_EXCHANGES = {
  "int4, feedback": lambda: exchange("int(bits=4)", feedback=1.0),
  "mask, int8": lambda: exchange("random_mask(fraction=0.5)+int(bits=8)"),
  "rank 1": lambda: exchange("low_rank(rank=1)"),
}


def slow_but(*quick):
  return [*quick, *slow(*sorted(CASES.keys() - quick))]


def counting_mean():
  """The mean; its state is how often a fragment was exchanged."""
  mean = mean_of_finite_replicas()

  def average(values, state, params):
    total, sent, *_ = mean.average(values, None, params)
    return total, sent, state + 1

  return Aggregator(lambda params: jnp.int32(0), average)


@functools.cache
def programs_of(name, layout="stacked", aggregator=""):
  made = OWN_EXCHANGES.get(aggregator, counting_mean)()
  given = PROBLEM, CASES[name], SGD, nesterov(), layout
  return begin(*given, aggregator=made)[0]


def first_state(programs, problem=PROBLEM):
  params = jax.tree.map(jnp.asarray, problem[0])
  return programs.init(params, SGD.init(params))


def trained(programs, state, num_steps):
  """The state after portions of steps, and all losses."""
  losses = []
  start = int(state.step)
  for passed in walk(programs, state, PROBLEM, num_steps, start, PORTION):
    _, state, metrics = passed
    losses.append(jax.device_get(metrics.loss))
  return state, np.concatenate(losses, axis=1)


@functools.cache
def twin(name, flush=True):
  return oracle(PROBLEM, CASES[name], STEPS, flush=flush)


def assert_is_the_reference(
  name, programs, state, losses, flushed, tolerance=EXACT
):
  """Losses, all replicas and the outer parameters, flushed and not."""
  for found, flush in ((state, False), (flushed, True)):
    expected = twin(name, flush)
    theta = stacked(expected.theta)
    params = stacked(expected.params)
    assert_close(outer_tree(programs, found), theta, tolerance)
    assert_close(found.replica.params, params, tolerance)
  np.testing.assert_allclose(losses, twin(name).losses, rtol=1e-5)


def counts(state):
  """How many of each fragment are in flight, and were exchanged."""
  return (
    [len(each.in_flight) for each in state.fragments],
    [int(np.max(each.exchange)) for each in state.fragments],
  )


def applied(schedule, windows):
  fragments = [w.applied.fragment for w in windows if w.applied]
  return [fragments.count(p) for p in range(schedule.num_fragments)]


QUICK_ROUNDS = slow_but(
  *("diloco", "open_diloco", "streaming_diloco", "eager", "eager_fragments"),
  *("dilocox_continue", "dilocox_reset", "overlap_loco", "several_in_flight"),
  *("delay_of_three_rounds", "late_reset", "growing", "growing_dilocox"),
  *("growing_eager", "growing_streaming", "growing_overlap_loco"),
)


@pytest.mark.parametrize("name", QUICK_ROUNDS)
def test_rounds_equal_the_reference(name, x64):
  """In any portions; a flush leaves the state."""
  programs = programs_of(name)
  schedule = CASES[name].schedule
  state, losses = trained(programs, first_state(programs), STEPS)
  held = jax.device_get(state)
  flushed, drifts = programs.flush(state)
  assert_is_the_reference(name, programs, held, losses, flushed)
  done = applied(schedule, schedule.windows(0, STEPS))
  due = applied(schedule, schedule.flush_windows(STEPS))
  assert counts(held) == (schedule.num_in_flight(STEPS), done)
  total = [sum(pair) for pair in zip(done, due, strict=True)]
  assert counts(flushed) == ([0] * len(due), total)
  assert [drift.own_squared.shape for drift in drifts] == [(3,)] * sum(due)
  assert_equal(flushed.replica.optimizer, held.replica.optimizer)
  assert_equal(jax.device_get(state), held)


@pytest.mark.parametrize("name", slow_but("streaming_diloco", "eager"))
def test_what_waits_in_host_memory_changes_no_bit(name, x64):
  programs = programs_of(name)
  ends = []
  host = dataclasses.replace(programs, outer_memory=host_memory.HOST)
  for each in (programs, host):
    ends.append(trained(each, first_state(each), STEPS))
  moved = jax.tree.leaves(ends[1][0].fragments)
  assert {x.sharding.memory_kind for x in moved} == {host_memory.HOST}
  assert_equal(*ends)


def test_single_precision_errs_by_its_own_rounding():
  name = "delay_over_a_round"
  programs = begin(PROBLEM, CASES[name], SGD, nesterov())[0]
  state, losses = trained(programs, first_state(programs), STEPS)
  given = name, programs, state, losses, programs.flush(state)[0]
  assert_is_the_reference(*given, tolerance=10 * SINGLE)


@pytest.fixture
def x64_in_threads():
  """Enables float64 in all threads; `x64` does so in the test's own."""
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


def assert_placed(programs, state):
  """Each replica's own values lie on its devices; shared ones are copies."""
  for axis, tree in (
    (0, state.replica),
    (programs.outer.axes.params, [f.params for f in state.fragments]),
  ):
    for leaf in jax.tree.leaves(tree):
      assert len(leaf.sharding.device_set) == 3
      assert leaf.sharding.is_fully_replicated == (axis is None)
      first, *others = [np.asarray(x.data) for x in leaf.addressable_shards]
      for other in others if axis is None else ():
        np.testing.assert_array_equal(other, first)


ON_DEVICES = ("diloco", "late_reset", "eager")


@pytest.mark.parametrize(
  ("name", "aggregator"),
  [
    *((name, "") for name in ON_DEVICES),
    ("dilocox_continue", "rank 1"),  # Two messages, one after the other.
    *slow(*((name, "") for name in sorted(CASES.keys() - ON_DEVICES))),
  ],
)
def test_devices_for_each_replica_and_a_thread_change_no_bit(
  name, aggregator, x64_in_threads
):
  programs = programs_of(name, "mesh", aggregator)
  found = []
  threaded = dataclasses.replace(programs, make_runtime=InThread)
  for each in (programs, threaded):
    state, losses = trained(each, first_state(each), STEPS)
    flushed, drifts = each.flush(state)
    found.append(jax.device_get((state, losses, flushed, drifts)))
    assert_placed(each, state)
  if not aggregator:
    assert_is_the_reference(name, programs, *found[0][:3])
  assert_rounded_alike(found[1], found[0])
  is_hidden = CASES[name].schedule.overlap_steps > 0
  waits = threaded.runtime.new_waits() or []
  exposed_s = sum(end_s - start_s for start_s, end_s in waits)
  assert (0 < exposed_s < 60) == is_hidden


@pytest.mark.parametrize(
  ("name", "aggregator"),
  [
    *((name, "") for name in ("diloco", "dilocox_reset", "dilocox_continue")),
    *((name, "") for name in ("delay_over_a_round", "streaming_diloco")),
    ("eager", ""),
    *(("diloco", name) for name in ("mask, int8", "rank 1")),
    *slow(("diloco", "int4, feedback")),
  ],
)
@pytest.mark.parametrize("bad_step", [8, STEPS], ids=["round", "flush"])
def test_a_replica_that_is_not_finite_is_left_out(
  name, aggregator, bad_step, x64
):
  """Its drift shows it in every exchange, in a round and in the flush."""
  params, inputs, targets = PROBLEM
  targets = targets.copy()
  targets[1, bad_step - 1] = np.nan
  problem = (params, inputs, targets)
  method = CASES[name]
  programs = programs_of(name, aggregator=aggregator)
  state = first_state(programs)
  seen = []
  for start in range(0, STEPS, PORTION):
    batches = batches_of(problem, start, start + PORTION)
    state, _, drifts = programs.run(state, batches)
    seen += drifts
  state, drifts = programs.flush(state)
  schedule = method.schedule
  windows = schedule.windows(0, STEPS) + schedule.flush_windows(STEPS)
  steps = [each.applied.send_step for each in windows if each.applied]
  assert bad_step in steps
  for step, drift in zip(steps, [*seen, *drifts], strict=True):
    finite = np.isfinite(drift.own_squared)
    assert np.isfinite(drift.mean_squared) and finite[[0, 2]].all()
    if step <= bad_step:
      assert finite[1] == (step < bad_step)
  for leaf in jax.tree.leaves([each.params for each in state.fragments]):
    # Under "eager" every replica has outer parameters of its own.
    assert np.isfinite(leaf[::2] if method.rule == "eager" else leaf).all()


@pytest.mark.parametrize(
  ("name", "decay", "keep_unsent"),
  [
    ("diloco", 0.0, True),
    ("streaming_diloco", 0.9, False),
    *slow(
      ("eager", 0.9, False),
      ("dilocox_continue", 0.0, True),
      ("dilocox_reset", 1.0, False),
      ("several_in_flight", 1.0, False),
    ),
  ],
)
def test_lossy_rounds_equal_the_reference(name, decay, keep_unsent, x64):
  method = CASES[name]
  num_steps = 4 * method.schedule.sync_interval
  problem = make_problem(2, 3, num_steps, 4, 8, 3)
  kept = {"feedback": decay, "keep_unsent": keep_unsent}
  made = exchange("int(bits=4)", collective="all_gather", **kept)
  programs, state = begin(problem, method, SGD, nesterov(), aggregator=made)
  *_, (_, state, _) = walk(programs, state, problem, num_steps)
  lossy = Lossy(in_blocks(BY_BITS[4]))
  changes = {
    "exchange": ErrorFeedback(lossy, decay) if decay else lossy,
    "keep_unsent": keep_unsent,
  }
  expected = oracle(problem, method, num_steps, flush=False, **changes)
  assert_close(outer_tree(programs, state), stacked(expected.theta), ROUNDED)
  assert_close(state.replica.params, stacked(expected.params), ROUNDED)
  flushed, _ = programs.flush(state)
  expected = oracle(problem, method, num_steps, **changes)
  assert_close(outer_tree(programs, flushed), stacked(expected.theta), ROUNDED)
  plain = oracle(problem, method, num_steps)
  difference = jax.tree.map(np.subtract, plain.params[0], expected.params[0])
  assert max(np.abs(x).max() for x in jax.tree.leaves(difference)) > 1e-2


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
def test_allreduce_equals_the_reference(layout, x64):
  num_steps = 20
  optimizer = nesterov(0.05, 0.9)
  state, _ = run_steps(PROBLEM, optimizer, num_steps=num_steps, layout=layout)
  inner = optimizers.Sgd(0.05, 0.9, nesterov=True)
  expected = least_squares.allreduce(*PROBLEM, inner=inner, num_steps=num_steps)
  assert_close(state.params, expected.theta, EXACT)


QUICK_STEPS = slow_but(
  *("streaming_diloco", "dilocox_continue", "delay_over_a_round", "eager"),
  *("overlap_loco", "growing", "growing_dilocox", "growing_eager"),
  *("growing_streaming", "growing_overlap_loco"),
)


@pytest.mark.parametrize("name", QUICK_STEPS)
def test_a_transform_of_steps_equals_the_reference(name, x64):
  method = CASES[name]
  tx = transform(CASES[name], SGD)
  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), PROBLEM[0])
  state = jax.vmap(tx.init)(params)
  program = jax.jit(jax.vmap(one_step(tx), axis_name="replica"))
  for step in range(STEPS):
    batch = PROBLEM[1][:, step], PROBLEM[2][:, step]
    params, state = program(params, state, batch)
  assert program._cache_size() == 1  # pyright: ignore
  expected = twin(name, flush=False)
  tolerance = 10 * EXACT  # An update is a difference of two parameters.
  assert_close(params, stacked(expected.params), tolerance)
  whole = jax.tree.map(lambda leaf: leaf[0], outer_params(state, params))
  theta = expected.theta[0] if method.rule == "eager" else expected.theta
  assert_close(whole, theta, tolerance)
