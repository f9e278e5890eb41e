"""A replica that comes later, with all others' snapshots and manifests."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.meeting.store import Store
from tests.meeting import apart
from tests.outer.problem import assert_equal

ROUNDS = 8


def part(store, name, number, rules, stop, flush, come=None):
  """Trains a replica up to a round; returns its first step and parameters."""
  method, settings = apart.METHODS[name]
  exchange = dx.mailbox(
    store, name=f"r{number}", secret=apart.SECRET, rules=rules, **settings
  )
  rounds = apart.rounds_of(method, exchange, 1)
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
  store = Store("memory:///")
  rules = dataclasses.replace(apart.rules(1), snapshot_every=3, grace_s=2.0)
  # The first trains by itself, and stops as if it was killed.
  part(store, name, 0, rules, 4, False)
  assert store.sizes("snapshot")
  both = threading.Barrier(2, timeout=60).wait
  # Both come: one again, the other for the first time.
  found = apart.in_threads(
    lambda number: part(store, name, number, rules, ROUNDS, True, both),
    2,
  )
  for first, _ in found:
    assert 0 < first <= 5 * apart.H
  assert_equal(found[0][1], found[1][1])
  senders = {path.rpartition("/")[2] for path in store.sizes("event")}
  assert senders == {"r0", "r1"}
