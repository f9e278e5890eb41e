"""Exchanges outside of a window's program, and of who is left out of it."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.aggregators.mailbox_mean import MailboxMean
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.mailbox_protocol.replica_processes import OneProcess
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference.fingerprint import BLOCK_VALUES
from dilocox_jax.rounds.exchange_thread import InThread
from dilocox_jax.rounds.mailbox_runtime import Due, MailboxRuntime
from tests.mailbox import apart
from tests.oracles.least_squares import make_problem
from tests.outer.problem import SGD, assert_equal, begin, nesterov, walk
from tests.tiers import slow

OWN = np.random.default_rng(0).normal(size=[6, 4]).astype(np.float32)


def test_an_exchange_that_fails_in_the_thread_ends_the_round():
  problem = make_problem(8, 3, 8, 4, 2, 3)
  programs, state = begin(problem, methods.dilocox(4), SGD, nesterov(), "mesh")
  programs = dataclasses.replace(programs, make_runtime=InThread)
  (_, state, _), *_ = walk(programs, state, problem, 4)

  def fail(*_):
    raise RuntimeError("Gloo: connection closed by peer")

  vars(programs.runtime)["_exchange"] = fail
  with pytest.raises(RuntimeError, match="closed by peer"):
    list(walk(programs, state, problem, 8, start=4))


class Played:
  """Lists the messages that the test wants, with their weights."""

  def __init__(self, weights, is_counted=True, keeps=False, drops_all=False):
    self.weights = weights
    self.is_counted = is_counted
    self.keeps = keeps
    self.drops_all = drops_all
    self.sent = []
    self.processes = OneProcess()

  def signs(self):
    return np.ones(BLOCK_VALUES, np.float32)

  def exchange(self, kind, num_steps, shared):
    return self

  def send(self, arrays, is_finite, shared, tables):
    del shared, tables
    self.sent.append(is_finite)
    # The other replica sends what this one would, times -1.
    rows = [np.stack([array, -array]) for array in arrays]
    arrived = [row[-len(self.weights) :] for row in rows]
    return arrived, np.float32(self.weights), np.asarray(self.is_counted)


LATE = {"is_counted": False}
KEPT = {**LATE, "keeps": True}
NONE = np.zeros_like(OWN)


# Of one exchange: what the messages weigh, what is measured and how it is sent;
# what the mean, the replica's own part and its residual are, and the turns.
@pytest.mark.parametrize(
  ("played", "measured", "codec", "mean", "own", "residual", "turns"),
  [
    (([1.5, 0.5], {}), OWN, "float32", OWN / 2, OWN, None, [True]),
    # What came late stays in the parameters, or in the residual.
    (([1.0], LATE), OWN, "float32", -OWN, NONE, None, [True]),
    (([1.0], KEPT), OWN, "int(bits=4)", None, OWN, OWN, [True]),
    (
      *(([1.0], KEPT), OWN, "low_rank(rank=2)+int(bits=4)"),
      *(None, OWN, OWN, [True, True]),
    ),
    # What an earlier life has sent must not stay anywhere.
    (
      ([1.0], {"keeps": True, "drops_all": True}),
      *(OWN, "int(bits=4)", None, OWN, NONE, [True]),
    ),
    # A replica that is not finite says so and gets the mean.
    (([0.0], LATE), np.nan * OWN, "float32", NONE, NONE, None, [False]),
  ],
)
def test_the_host_carries_messages_that_count_or_come_late(
  played, measured, codec, mean, own, residual, turns
):
  weights, options = played
  client = Played(weights, **options)
  feedback = float(residual is not None)
  aggregator = exchange(codec, feedback=feedback, collective=MailboxMean())
  outer = OuterStep(methods.dilocox(4), SGD, aggregator)
  state = outer.init({"w": jnp.zeros([6, 4])})
  kept = jax.tree.map(jnp.asarray, state.exchange)
  if feedback:
    kept = kept._replace(residual={"w": kept.residual["w"][None]})
  state = state._replace(exchange=kept)
  runtime = MailboxRuntime(outer, Replicas(1), client)  # pyright: ignore
  due = Due(
    fragment=0,
    num_steps=4,
    state=state,
    values={"w": jnp.asarray(measured[None])},
    fragments=(state,),
  )
  # The trainer dispatches exchanges of a replica of several processes so.
  with jax.transfer_guard("disallow"):
    result, kept = runtime._exchange(due)
  assert client.sent == turns
  np.testing.assert_allclose(result.own["w"][0], own, rtol=1e-6)
  if residual is not None:
    np.testing.assert_allclose(kept.residual["w"][0], residual, rtol=1e-6)
    assert np.any(np.asarray(result.mean["w"]))
    if not client.drops_all:
      assert not np.any(np.asarray(result.sent["w"]))
  else:
    np.testing.assert_allclose(result.mean["w"], mean, rtol=1e-6)


@pytest.mark.parametrize("wrong", [-100.0, np.nan])
def test_who_is_left_out_for_its_values_keeps_nothing_of_them(wrong):
  made = dx.norm_filter(dx.exchange("int(bits=4)", keep_unsent=True), 5.0)
  rounds = apart.rounds_of(methods.diloco(4), made, 3)
  params = apart.first_params()
  points = apart.batches(3, 0, 4)
  points["head"][1, 3] *= wrong  # In the last step of one replica.
  state, _, (drift,) = rounds.run(
    rounds.init(params, apart.INNER.init(params)), points
  )
  assert np.asarray(drift.is_left_out).tolist() == [False, True, False]
  other, own, _ = np.asarray(state.replica.params["head"])
  assert_equal(own, rounds.outer_params(state)["head"])
  assert np.isfinite(own).all() and np.any(own != other)


def part(store, name, number, rules, stop, flush, come=lambda: None):
  """Trains a replica up to a round; returns its first step and parameters."""
  method, settings = apart.METHODS[name]
  carried = dx.mailbox(
    store, name=f"r{number}", secret=apart.SECRET, rules=rules, **settings
  )
  rounds = apart.rounds_of(method, carried, 1)
  params = apart.first_params()
  state = dx.join_rounds(rounds, params, apart.INNER.init(params))
  step = first = int(state.step)
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


@pytest.mark.parametrize(
  "name", ["diloco", "overlap_loco", *slow("dilocox", "streaming_diloco")]
)
def test_a_newcomer_follows_and_takes_part(name):
  """The others' snapshots and manifests bring a replica that comes later."""
  store = Store("memory:///")
  stop = 10
  rules = dataclasses.replace(apart.rules(1), snapshot_every=3, grace_s=2.0)
  # The first trains by itself, and stops as if it was killed.
  part(store, name, 0, rules, 8, False)
  assert len(store.sizes("snapshot")) > 3  # Not that of the first state alone.
  both = threading.Barrier(2, timeout=60).wait
  # Both come: one again, the other for the first time.
  found = apart.in_threads(
    lambda number: part(store, name, number, rules, stop, True, both), 2
  )
  assert all(0 < first <= 9 * apart.H for first, _ in found)
  assert_equal(found[0][1], found[1][1])
  senders = {path.rpartition("/")[2] for path in store.sizes("event")}
  assert senders == {"r0", "r1"}


def test_a_first_message_weighs_as_much_as_its_inner_steps():
  store = Store("memory:///")
  rules = dataclasses.replace(apart.rules(1), grace_s=0.2)

  def train(number, num_steps):
    method, settings = apart.METHODS["overlap_loco"]  # H = 4, two fragments.
    carried = dx.mailbox(
      store,
      name=f"r{number}",
      secret=apart.SECRET,
      step_weight=8.0,
      rules=rules,
      **settings,
    )
    rounds = apart.rounds_of(method, carried, 1)
    params = apart.first_params()
    state = dx.join_rounds(rounds, params, apart.INNER.init(params))
    step = int(state.step)
    points = apart.batches(1, step, step + num_steps)
    rounds.run(state, points)
    return step

  def weights():
    found = []
    for path in store.sizes("manifest"):
      data = store.get(path, 10**6)
      assert data is not None
      listed = json.loads(bytes(data))["is"]["listed"]
      found.append({name: weight for name, _, weight, _ in listed})
    return found

  # Fragments are sent after steps 2, 4, 6 and so on. So the first message
  # stands for two steps, and every later one for four.
  train(0, 10)
  numbers = [each["r0"] / 8 for each in weights()]
  assert numbers == [2, *[4] * (len(numbers) - 1)] and len(numbers) > 2
  assert train(1, 10) == 8  # Fragment 0 is sent two steps later.
  first, second, *_ = weights()[len(numbers) :]
  assert first["r1"] == 8 * 2 and second["r1"] == 8 * 4
