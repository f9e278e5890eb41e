"""Replicas that are away, or slow, train as their numpy twin in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.membership import Membership
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.reference import optimizers
from dilocox_jax.reference.exchanges import ErrorFeedback, Lossy
from tests.oracles.codecs import BY_BITS, in_blocks
from tests.oracles.least_squares import (
  arguments,
  fragment_names,
  joined,
  make_problem,
)
from tests.oracles.membership import train_apart
from tests.outer.problem import (
  assert_close,
  assert_equal,
  batches_of,
  begin,
  nesterov,
  outer_tree,
)

EXACT = 1e-12
ROUNDED = 1e-5  # fp32 codecs against float64 ones.
NUM_REPLICAS, ROUNDS = 3, 8
METHODS = {
  "diloco": methods.diloco(4),
  "streaming": methods.streaming_diloco(6, 3, 1, 0.5),
  "reset": methods.dilocox(4, "reset"),
  "continue": methods.dilocox(4, "continue"),
  "two in flight": methods.delayed(4, 1, 6, "continue"),
  "three rounds late": methods.delayed(3, 2, 9, "continue"),
  "late fragments": methods.delayed(6, 3, 5, "continue"),
}
FAST = ("diloco", "streaming", "two in flight")
# Replica 0, the usual donor, is away too; 1 is away twice; once 2 is alone.
ABSENCES = ((1, 2, 4), (0, 3, 3), (1, 6, 6), (0, 7, 7))


def rate(count):
  return 0.05 / (1 + 0.1 * count)


def inner_optimizer():
  return optax.sgd(lambda n: rate(jnp.asarray(n, float)), momentum=0.3)


def plan_of(method, num_steps, absences=ABSENCES, pace=()):
  membership = Membership(
    method.schedule, NUM_REPLICAS, absences, inner_steps=pace
  )
  return RunPlan(method, num_steps, membership=membership)


def paces(schedule):
  interval = schedule.sync_interval
  return (interval, interval // 2, interval - 1)


def twin(problem, method, num_steps, absences, pace, **changes):
  schedule = method.schedule
  names = fragment_names(
    problem[0], schedule.num_fragments, method.fragment_order
  )
  loss, params, batches = arguments(*problem, num_steps=num_steps)
  found = train_apart(
    loss,
    params,
    batches,
    away=[(m, r) for m, k, last in absences for r in range(k, last + 1)],
    inner_steps=pace or (schedule.sync_interval,) * NUM_REPLICAS,
    sync_interval=schedule.sync_interval,
    overlap_steps=schedule.overlap_steps,
    rule=method.rule,
    mixing_alpha=method.mixing_alpha,
    fragments=names,
    inner=optimizers.Sgd(rate, 0.3),
    outer=optimizers.Sgd(0.7, 0.6, nesterov=True),
    **changes,
  )
  return joined(found)


def trained(problem, plan, programs, state):
  """Yields state and losses of every round, then the flushed state."""
  for segment in plan.segments():
    batches = batches_of(problem, segment.start, segment.stop)
    state, metrics, _ = programs.run(
      state, batches, segment.windows, segment.attendance
    )
    yield state, metrics.loss
  state, _ = programs.flush(state, plan.flush_attendance())
  yield state, np.zeros([0])


CASES = [
  pytest.param(
    name,
    absences,
    is_uneven,
    layout,
    marks=[pytest.mark.slow] if is_slow else [],
    id=f"{name}, {absences and 'away '}{'uneven ' * is_uneven}{layout}",
  )
  for name, absences, is_uneven, layout, is_slow in (
    *((name, "away", True, "stacked", name not in FAST) for name in METHODS),
    *((name, "away", False, "stacked", True) for name in METHODS),
    *((name, "", True, "stacked", True) for name in METHODS),
    *((name, "away", True, "mesh", name != "continue") for name in METHODS),
  )
]


@pytest.mark.parametrize(("name", "absences", "is_uneven", "layout"), CASES)
def test_rounds_equal_the_numpy_twin(name, absences, is_uneven, layout, x64):
  method = METHODS[name]
  # The last round is cut short, and replica 0 is away in it.
  num_steps = ROUNDS * method.schedule.sync_interval - 1
  problem = make_problem(0, NUM_REPLICAS, num_steps, 4, 2, 3)
  absences = ABSENCES if absences else ()
  pace = paces(method.schedule) if is_uneven else ()
  plan = plan_of(method, num_steps, absences, pace)
  programs, state = begin(
    problem, method, inner_optimizer(), nesterov(), layout
  )
  unflushed = twin(problem, method, num_steps, absences, pace, flush=False)
  losses, rounds = [], trained(problem, plan, programs, state)
  for theta in [*unflushed.snapshots, unflushed.theta]:
    state, loss = next(rounds)
    assert_close(outer_tree(programs, state), theta, EXACT)
    losses.append(loss)
  attendance = plan.flush_attendance()
  assert attendance
  here = attendance.members  # Where the others stand does not matter.
  assert_close(
    chosen(state.replica.params, here),
    chosen(stacked(unflushed.params), here),
    EXACT,
  )
  found = np.concatenate(losses, axis=1)
  np.testing.assert_allclose(found, unflushed.losses, rtol=1e-5)
  flushed, _ = next(rounds)
  expected = twin(problem, method, num_steps, absences, pace)
  assert_close(outer_tree(programs, flushed), expected.theta, EXACT)
  assert_close(flushed.replica.params, stacked(expected.params), EXACT)


def stacked(trees):
  return jax.tree.map(lambda *x: np.stack(x), *trees)


def chosen(tree, replicas):
  return jax.tree.map(lambda leaf: np.asarray(leaf)[list(replicas)], tree)


@pytest.mark.parametrize(
  ("name", "decay", "keep_unsent"),
  [
    ("continue", 0.0, True),
    pytest.param("streaming", 0.9, False, marks=pytest.mark.slow),
    pytest.param("diloco", 1.0, False, marks=pytest.mark.slow),
    pytest.param("diloco", 0.0, True, marks=pytest.mark.slow),
    pytest.param("two in flight", 0.9, False, marks=pytest.mark.slow),
  ],
)
def test_lossy_rounds_equal_the_numpy_twin(name, decay, keep_unsent, x64):
  method = METHODS[name]
  num_steps = ROUNDS * method.schedule.sync_interval
  problem = make_problem(2, NUM_REPLICAS, num_steps, 4, 8, 3)
  pace = paces(method.schedule)
  aggregator = exchange(
    "int(bits=4)",
    feedback=decay,
    keep_unsent=keep_unsent,
    collective="all_gather",
  )
  programs, state = begin(
    problem,
    method,
    inner_optimizer(),
    nesterov(),
    aggregator=aggregator,
  )
  plan = plan_of(method, num_steps, pace=pace)
  *_, (state, _) = trained(problem, plan, programs, state)
  lossy = Lossy(in_blocks(BY_BITS[4]))
  expected = twin(
    problem,
    method,
    num_steps,
    ABSENCES,
    pace,
    exchange=ErrorFeedback(lossy, decay) if decay else lossy,
    keep_unsent=keep_unsent,
  )
  assert_close(outer_tree(programs, state), expected.theta, ROUNDED)


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
@pytest.mark.parametrize("name", ["diloco", "two in flight"])
def test_a_replica_more_begins_as_one_that_was_away(name, layout, x64):
  """Two replicas for two rounds, then three, then the first two again."""
  method, num_steps = METHODS[name], 24
  params, inputs, targets = make_problem(0, 3, num_steps, 4, 2, 3)
  whole = plan_of(method, num_steps, ((2, 0, 1), (2, 4, 9)))
  parts = {
    count: begin(
      (params, inputs[:count], targets[:count]),
      method,
      inner_optimizer(),
      nesterov(),
      layout,
    )
    for count in (2, 3)
  }
  state, before = parts[2][1], 2
  for segment in whole.segments():
    count = 3 if segment.start in (8, 12) else 2
    programs = parts[count][0]
    if count != before:
      state = programs.resized(on_one_device(state))
    before = count
    batches = batches_of((params, inputs, targets), segment.start, segment.stop)
    attendance = segment.attendance if count == 3 else None
    state, _, _ = programs.run(
      state,
      jax.tree.map(lambda leaf, n=count: leaf[:n], batches),
      segment.windows,
      attendance,
    )
  flushed, _ = parts[2][0].flush(state)
  pace = (method.schedule.sync_interval,) * 3
  absences = ((2, 0, 1), (2, 4, 9))
  problem = (params, inputs, targets)
  expected = twin(problem, method, num_steps, absences, pace)
  assert_close(outer_tree(parts[2][0], flushed), expected.theta, EXACT)


def on_one_device(state):
  return jax.tree.map(jnp.asarray, jax.device_get(state))


def test_a_membership_without_absences_changes_no_bit():
  method = METHODS["streaming"]
  num_steps = 3 * method.schedule.sync_interval
  problem = make_problem(0, NUM_REPLICAS, num_steps, 4, 2, 3)
  plan = plan_of(method, num_steps, ())
  ends = []
  for each in (plan, dataclasses.replace(plan, membership=None)):
    programs, state = begin(problem, method, inner_optimizer(), nesterov())
    *_, (state, _) = trained(problem, each, programs, state)
    ends.append(state)
  assert_equal(*ends)


def test_an_absent_replica_moves_nothing():
  """Its batches may hold anything, and its drift is not finite."""
  method = METHODS["diloco"]
  problem = make_problem(0, NUM_REPLICAS, 12, 4, 2, 3)
  plan = plan_of(method, 12, ((1, 1, 1),))
  wild = (problem[0], problem[1].copy(), problem[2].copy())
  wild[2][1, 4:8] = 1e6
  ends = []
  for each in (problem, wild):
    programs, state = begin(each, method, inner_optimizer(), nesterov())
    *_, (state, _) = trained(each, plan, programs, state)
    ends.append(state)
  assert_equal(*ends)
