"""An exchange and a drift correction from outside, through every door."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.aggregators.traffic import exchange_operations
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.collectives import COLLECTIVES
from dilocox_jax.plan.schedule.methods import RULES
from dilocox_jax.trees import leaves_by_path, nested
from tests.extensions import exchanges
from tests.mailbox import apart
from tests.oracles import least_squares
from tests.outer.problem import (
  INNER_RATE,
  SGD,
  assert_close,
  begin,
  nesterov,
  outer_params_by_transform,
  outer_tree,
  walk,
)
from tests.tiers import slow

H = 4
STEPS = 3 * H
SINGLE = 1e-5


@pytest.fixture(autouse=True)
def registered():
  """Both by their names, and afterwards only what was there before."""
  before = dict(COLLECTIVES), dict(RULES)
  exchanges.register()
  yield
  registries: tuple[Any, ...] = COLLECTIVES, RULES
  for registry, kept in zip(registries, before, strict=True):
    registry.clear()
    registry.update(kept)


def problem_of(num_replicas):
  problem = least_squares.make_problem(3, num_replicas, STEPS, 4, 2, 3)
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), problem)


def by_rounds(problem, method, layout, exchange=None):
  programs, state = begin(problem, method, SGD, nesterov(), layout, exchange)
  for _, after, _ in walk(programs, state, problem, STEPS):
    state = after
  return outer_tree(programs, state)


def by_transform(problem, method, exchange=None):
  return outer_params_by_transform(
    problem, method, SGD, STEPS, aggregator=exchange
  )


@pytest.mark.parametrize("codec", ["float32", "int(bits=4)"])
def test_gossip_gives_the_same_through_every_door(codec):
  problem = problem_of(4)
  method = dx.Method(dx.SyncSchedule(H))
  feedback = float(codec != "float32")
  exchange = dx.exchange(codec, feedback=feedback, collective="gossip")
  stacked = by_rounds(problem, method, "stacked", exchange)
  assert_close(by_rounds(problem, method, "mesh", exchange), stacked, SINGLE)
  assert_close(by_transform(problem, method, exchange), stacked, SINGLE)
  head = np.asarray(stacked["head"])
  np.testing.assert_allclose(head[0], head[1], atol=1e-5)
  np.testing.assert_allclose(head[2], head[3], atol=1e-5)
  assert np.abs(head[0] - head[2]).max() > 1e-3


def test_the_bytes_of_gossip_are_counted():
  [swap] = exchange_operations(Int(4), {"w": (30, 20)}, 4, "gossip")
  assert swap.sent_bytes(4) == dx.encoded_bytes(Int(4), ((1, 30, 20),))


def scaffold_twin(problem):
  """SCAFFOLD with plain loops: gradients plus c - c_m, in float64."""
  params, inputs, targets = problem
  count = len(inputs)
  outer = leaves_by_path(params)
  velocity = {name: np.zeros_like(leaf) for name, leaf in outer.items()}
  own = [{name: 0 * leaf for name, leaf in outer.items()} for _ in inputs]
  mean = {name: 0 * leaf for name, leaf in outer.items()}
  for start in range(0, STEPS, H):
    moved = []
    for m in range(count):
      w = dict(outer)
      for step in range(start, start + H):
        _, gradient = least_squares.loss_and_grad(
          nested(w), inputs[m, step], targets[m, step]
        )
        gradient = leaves_by_path(gradient)
        for name in w:
          corrected = gradient[name] - own[m][name] + mean[name]
          w[name] = w[name] - INNER_RATE * corrected
      moved.append({name: outer[name] - w[name] for name in outer})
    for m in range(count):
      for name in outer:
        of_step = moved[m][name] / (H * INNER_RATE)
        own[m][name] = own[m][name] - mean[name] + of_step
    for name in outer:
      mean[name] = sum(one[name] for one in own) / count
      delta = sum(one[name] for one in moved) / count
      velocity[name] = 0.6 * velocity[name] + delta
      outer[name] = outer[name] - 0.7 * (delta + 0.6 * velocity[name])
  return nested(outer)


def test_scaffold_equals_plain_loops_through_every_door():
  problem = problem_of(3)
  method = dx.Method(dx.SyncSchedule(H), "scaffold")
  plain = dx.Method(dx.SyncSchedule(H))
  expected = scaffold_twin(problem)
  for layout in ("stacked", "mesh"):
    assert_close(by_rounds(problem, method, layout), expected, 1e-4)
  each = by_transform(problem, method)
  assert_close(jax.tree.map(lambda leaf: leaf[0], each), expected, 1e-4)
  other = by_rounds(problem, plain, "stacked")
  assert np.abs(np.asarray(other["head"]) - expected["head"]).max() > 1e-3


@pytest.mark.parametrize("delay", [2, *slow(H, H + 2)])
def test_scaffold_with_a_delay_and_fragments_is_the_same_in_all_doors(delay):
  problem = problem_of(3)
  method = dx.Method(dx.SyncSchedule(H, 2, delay), "scaffold")
  stacked = by_rounds(problem, method, "stacked")
  assert_close(by_rounds(problem, method, "mesh"), stacked, SINGLE)
  each = by_transform(problem, method)
  assert_close(jax.tree.map(lambda leaf: leaf[0], each), stacked, SINGLE)


def test_scaffold_by_a_mailbox_is_that_of_one_runtime():
  method = dx.Method(dx.SyncSchedule(apart.H), "scaffold")
  exchange = dx.exchange(collective="all_gather")
  together = apart.trained(apart.rounds_of(method, exchange, 2), slice(0, 2))
  store = Store("memory:///")

  def alone(number):
    exchange = dx.mailbox(
      store,
      name=f"r{number}",
      secret=apart.SECRET,
      rules=apart.rules(2),
    )
    rounds = apart.rounds_of(method, exchange, 1)
    return apart.trained(rounds, slice(number, number + 1))

  results = apart.in_threads(alone, 2, store)
  for number in range(2):
    losses, outer = results[number]
    np.testing.assert_allclose(losses[0], together[0][number], rtol=1e-5)
    assert_close(outer, together[1], SINGLE)


def test_a_replica_that_was_left_out_keeps_its_correction():
  """Its values were not finite, so they say nothing about its drift."""
  problem = problem_of(2)
  method = dx.Method(dx.SyncSchedule(H), "scaffold")
  programs, state = begin(problem, method, optax.sgd(INNER_RATE), nesterov())
  state, *_ = programs.run(
    state, (problem[1][:, :H], np.full_like(problem[2][:, :H], np.nan))
  )
  for leaf in jax.tree.leaves(state.replica.correction):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_a_filter_tells_no_progress_from_a_replica_that_was_left_out():
  method = dx.Method(dx.SyncSchedule(H), "scaffold")
  aggregator = dx.norm_filter(dx.exchange(), 5.0)
  outer = OuterStep(method, optax.sgd(1.0), aggregator)

  def corrected(pseudo_gradient):
    state = outer.init(jnp.zeros(()))
    result, _ = outer.exchange(state, pseudo_gradient)
    return outer.correct(jnp.zeros(()), result)

  # The mean of the first two is 0.5. The last one is too large.
  found = jax.vmap(corrected, axis_name=outer.axis_name)(
    jnp.asarray([0.0, 1.0, 100.0])
  )
  np.testing.assert_allclose(found, [-0.5 / H, 0.5 / H, 0.0], rtol=1e-6)
