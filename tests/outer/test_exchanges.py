"""Exchanges behind inner steps, and those that the host carries."""

import dataclasses
import threading
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.meeting.store import Store
from dilocox_jax.outer.lone_exchange import CarriedExchange, ExchangeThread
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.window import exchange_behind_steps
from dilocox_jax.plan.collective import PARTS
from dilocox_jax.plan.schedule import methods
from tests.meeting import apart
from tests.oracles.least_squares import make_problem
from tests.outer.problem import assert_equal, begin, nesterov, walk

OWN = np.random.default_rng(0).normal(size=[6, 4]).astype(np.float32)


class Progress(NamedTuple):
  step: Any


def run(num_turns, ends, num_steps: Any = 8):
  """Notes when an exchange of some turns sends and receives."""
  events = []

  def exchange_paused(state, own, weight):
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
    aggregator=aggregator, exchange_paused=exchange_paused
  )
  state: Any = types.SimpleNamespace(params=None)
  found = exchange_behind_steps(
    outer, run_steps, Progress(jnp.int32(3)), state, jnp.float32(0), num_steps
  )
  return events, found


def test_the_second_message_waits_for_the_first_and_for_its_steps():
  events, (progress, result) = run(2, (PARTS * 3 // 4, PARTS))
  assert events == [
    *("send 0", "6 steps", "receive 0"),
    *("send 1", "2 steps", "receive 1"),
  ]
  assert (progress.step, result) == ((3 * 2 + 6) * 2 + 2, 2)
  assert run(1, None)[0] == ["send 0", "8 steps", "receive 0"]
  text = str(jax.make_jaxpr(lambda: run(1, None)[1])())
  assert text.count("optimization_barrier") == 2


@pytest.mark.parametrize("ends", [None, (PARTS // 2, PARTS)])
def test_turns_that_nobody_told_of_come_after_the_steps(ends):
  events, (_, result) = run(3, ends)
  assert events[-2:] == ["send 2", "receive 2"]
  assert result == 3


def test_a_turn_that_does_not_come_is_said_in_one_line():
  with pytest.raises(ValueError, match="of 2 turns, .* ends after 1") as raised:
    run(1, (PARTS // 2, PARTS))
  assert "\n" not in str(raised.value)


def test_an_exchange_that_fails_in_the_thread_ends_the_round():
  problem = make_problem(8, 3, 8, 4, 2, 3)
  given = problem, methods.dilocox(4), optax.sgd(0.05), nesterov(), "mesh"
  programs, state = begin(*given)
  programs = dataclasses.replace(programs, thread=ExchangeThread())
  (_, state, _), *_ = walk(programs, state, problem, 4)

  def fail(*_):
    raise RuntimeError("Gloo: connection closed by peer")

  object.__setattr__(programs, "_exchange", fail)
  with pytest.raises(RuntimeError, match="closed by peer"):
    list(walk(programs, state, problem, 8, start=4))


class Played:
  """Lists the messages that the test wants, with their weights."""

  def __init__(self, weights, is_counted=True, keeps=False):
    self.weights, self.is_counted, self.keeps = weights, is_counted, keeps
    self.sent = []

  def exchange(self, kind, shared):
    return self

  def send(self, arrays, is_finite, shared):
    self.sent.append(is_finite)
    # The other replica sends what this one would, times -1.
    rows = [np.stack([array, -array]) for array in arrays]
    arrived = [row[-len(self.weights) :] for row in rows]
    return arrived, np.float32(self.weights), np.asarray(self.is_counted)


def exchanged(played, own=OWN, codec="float32", feedback=0.0):
  aggregator = exchange(codec, feedback=feedback, number=0)
  outer = OuterStep(
    methods.dilocox(4), optax.sgd(1.0), aggregator._replace(carrier=played)
  )
  state = outer.init({"w": jnp.zeros([6, 4])})
  kept = jax.tree.map(jnp.asarray, state.exchange)
  if kept.residual is not None:
    kept = kept._replace(residual={"w": kept.residual["w"][None]})
  carried = CarriedExchange(outer, Replicas(1))
  return carried(kept, state._replace(exchange=None), {"w": own[None]})


def test_the_mean_has_the_weights_of_the_messages():
  result, _ = exchanged(Played([1.5, 0.5]))
  np.testing.assert_allclose(result.mean["w"], OWN / 2, rtol=1e-6)
  np.testing.assert_allclose(result.own["w"][0], OWN)


@pytest.mark.parametrize(
  ("codec", "turns"), [("int(bits=4)", 1), ("low_rank(rank=2)+int(bits=4)", 2)]
)
def test_what_came_late_stays_in_the_residual(codec, turns):
  played = Played([1.0], is_counted=False, keeps=True)
  result, kept = exchanged(played, codec=codec, feedback=1.0)
  assert played.sent == [True] * turns
  np.testing.assert_allclose(kept.residual["w"][0], OWN, rtol=1e-6)
  assert np.any(np.asarray(result.mean["w"]))
  assert not np.any(np.asarray(result.sent["w"]))
  # The residual brings it; the replica's parameters give it up.
  np.testing.assert_allclose(result.own["w"][0], OWN)


def test_what_came_late_stays_in_the_parameters_without_feedback():
  result, _ = exchanged(Played([1.0], is_counted=False))
  assert not np.any(np.asarray(result.own["w"]))
  np.testing.assert_allclose(result.mean["w"], -OWN)


def test_a_replica_that_is_not_finite_says_so_and_gets_the_mean():
  played = Played([0.0], is_counted=False)
  result, _ = exchanged(played, own=np.full_like(OWN, np.nan))
  assert played.sent == [False]
  np.testing.assert_array_equal(result.mean["w"], np.zeros([6, 4]))


def part(store, name, number, rules, stop, flush, come=None):
  """Trains a replica up to a round; returns its first step and parameters."""
  method, settings = apart.METHODS[name]
  carried = dx.mailbox(
    store, name=f"r{number}", secret=apart.SECRET, rules=rules, **settings
  )
  rounds = apart.rounds_of(method, carried, 1)
  params = apart.first_params()
  state = dx.join_rounds(rounds, params, apart.INNER.init(params))
  step = first = int(state.step)
  if come:
    come()
  while step < stop * apart.H:
    # One may join in the middle of a round, and runs to its end.
    end = (step // apart.H + 1) * apart.H
    points = apart.batches(2, step, end)
    points = jax.tree.map(lambda leaf: leaf[number : number + 1], points)
    state, *_ = rounds.run(state, points)
    step = end
  if flush:
    state, _ = rounds.flush(state)
  return first, jax.tree.map(np.asarray, rounds.outer_params(state))


@pytest.mark.parametrize("name", apart.METHODS)
def test_a_newcomer_follows_and_takes_part(name):
  """The others' snapshots and manifests bring a replica that comes later."""
  store, stop = Store("memory:///"), 8
  rules = dataclasses.replace(apart.rules(1), snapshot_every=3, grace_s=2.0)
  # The first trains by itself, and stops as if it was killed.
  part(store, name, 0, rules, 4, False)
  assert store.sizes("snapshot")
  both = threading.Barrier(2, timeout=60).wait
  # Both come: one again, the other for the first time.
  found = apart.in_threads(
    lambda number: part(store, name, number, rules, stop, True, both), 2
  )
  assert all(0 < first <= 5 * apart.H for first, _ in found)
  assert_equal(found[0][1], found[1][1])
  senders = {path.rpartition("/")[2] for path in store.sizes("event")}
  assert senders == {"r0", "r1"}
