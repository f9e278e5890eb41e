"""Replicas that are away, or slow, train as their numpy twin in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.membership import Membership
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.reference import optimizers
from dilocox_jax.reference.exchanges import Lossy
from tests.oracles import least_squares
from tests.oracles.codecs import BY_BITS, in_blocks
from tests.oracles.least_squares import make_problem
from tests.oracles.membership import train_apart
from tests.outer.problem import (
  EXACT,
  ROUNDED,
  assert_close,
  batches_of,
  begin,
  nesterov,
  outer_tree,
  settings_of,
  stacked,
)
from tests.tiers import slow

NUM_REPLICAS = 3
ROUNDS = 8
METHODS = {
  "diloco": methods.diloco(4),
  "streaming": methods.streaming_diloco(6, 3, 1, 0.5),
  "reset": methods.dilocox(4, "reset"),
  "continue": methods.dilocox(4, "continue"),
  "two in flight": methods.delayed(4, 1, 6, "continue"),
  "three rounds late": methods.delayed(3, 2, 9, "continue"),
  "late fragments": methods.delayed(6, 3, 5, "continue"),
}
# Replica 0, the usual source replica, is away too. Replica 1 is away twice.
# Replica 2 is alone once.
ABSENCES = ((1, 2, 4), (0, 3, 3), (1, 6, 6), (0, 7, 7))


def rate(count):
  return 0.05 / (1 + 0.1 * count)


INNER = optax.sgd(lambda n: rate(jnp.asarray(n, float)), momentum=0.3)


def plan_of(method, num_steps, absences=ABSENCES, pace=()):
  schedule = method.schedule
  membership = Membership(schedule, NUM_REPLICAS, absences, inner_steps=pace)
  return RunPlan(method, num_steps, membership=membership)


def paces(schedule):
  interval = schedule.sync_interval
  return (interval, interval // 2, interval - 1)


def twin(problem, method, num_steps, absences, pace, **changes):
  schedule = method.schedule
  names = least_squares.fragment_names(
    problem[0], schedule.num_fragments, method.fragment_order
  )
  found = train_apart(
    *least_squares.arguments(*problem, num_steps=num_steps),
    away=[(m, r) for m, k, last in absences for r in range(k, last + 1)],
    inner_steps=pace or (schedule.sync_interval,) * NUM_REPLICAS,
    fragments=names,
    inner=optimizers.Sgd(rate, 0.3),
    **settings_of(method),
    **changes,
  )
  return least_squares.joined(found)


def trained(problem, plan, programs, state):
  """Yields state and losses of every round, then the flushed state."""
  for segment in plan.segments():
    batches = batches_of(problem, segment.start, segment.stop)
    given = segment.windows, segment.participation
    state, metrics, _ = programs.run(state, batches, *given)
    yield state, metrics.loss
  yield programs.flush(state, plan.flush_participation())[0], None


CASES = [
  *((ABSENCES, True, "stacked", n) for n in ("diloco", "streaming")),
  (ABSENCES, True, "mesh", "continue"),
]
SLOW = [
  (ABSENCES, True, "mesh", "two in flight"),
  *((ABSENCES, True, "stacked", name) for name in METHODS),
  *(((), True, "stacked", n) for n in ("diloco", "late fragments")),
  *((ABSENCES, False, "stacked", n) for n in ("diloco", "reset")),
]


@pytest.mark.parametrize(
  ("absences", "is_uneven", "layout", "name"), CASES + slow(*SLOW)
)
def test_rounds_equal_the_numpy_twin(absences, is_uneven, layout, name, x64):
  method = METHODS[name]
  # The last round is cut short, and replica 0 is away in it.
  num_steps = ROUNDS * method.schedule.sync_interval - 1
  problem = make_problem(0, NUM_REPLICAS, num_steps, 4, 2, 3)
  pace = paces(method.schedule) if is_uneven else ()
  plan = plan_of(method, num_steps, absences, pace)
  programs, state = begin(problem, method, INNER, nesterov(), layout)
  given = problem, method, num_steps, absences, pace
  expected = twin(*given, flush=False)
  losses: list[Any] = []
  rounds = trained(problem, plan, programs, state)
  for theta in [*expected.snapshots, expected.theta]:
    state, loss = next(rounds)
    assert_close(outer_tree(programs, state), theta, EXACT)
    losses.append(loss)
  participation = plan.flush_participation()
  assert participation
  here = list(participation.members)  # Where the others stand does not matter.
  chosen = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf)[here])
  params = chosen(stacked(expected.params))
  assert_close(chosen(state.replica.params), params, EXACT)
  found = np.concatenate(losses, axis=1)
  np.testing.assert_allclose(found, expected.losses, rtol=1e-5)
  flushed, _ = next(rounds)
  expected = twin(*given)
  assert_close(outer_tree(programs, flushed), expected.theta, EXACT)
  assert_close(flushed.replica.params, stacked(expected.params), EXACT)


def test_what_a_weighted_replica_could_not_send_stays_with_it(x64):
  method = METHODS["continue"]
  num_steps = ROUNDS * method.schedule.sync_interval
  problem = make_problem(2, NUM_REPLICAS, num_steps, 4, 8, 3)
  pace = paces(method.schedule)
  made = exchange("int(bits=4)", keep_unsent=True, collective="all_gather")
  programs, state = begin(problem, method, INNER, nesterov(), aggregator=made)
  plan = plan_of(method, num_steps, pace=pace)
  *_, (state, _) = trained(problem, plan, programs, state)
  kept = {"exchange": Lossy(in_blocks(BY_BITS[4])), "keep_unsent": True}
  expected = twin(problem, method, num_steps, ABSENCES, pace, **kept)
  assert_close(outer_tree(programs, state), expected.theta, ROUNDED)
