"""Exchanges that the host carries, with a carrier that the test plays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.feedback import Residual, carried_exchange
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.carried import CarriedExchange
from dilocox_jax.outer.lone_exchange import arrived_axes
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.schedule import methods

RNG = np.random.default_rng(0)
OWN = RNG.normal(size=[6, 4]).astype(np.float32)


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
  aggregator = carried_exchange(
    codec, Residual(feedback, "own", "float32"), number=0
  )
  outer = OuterStep(
    methods.dilocox(4), optax.sgd(1.0), aggregator._replace(carrier=played)
  )
  replicas = Replicas(1)
  state = outer.init({"w": jnp.zeros([6, 4])})
  kept = jax.tree.map(jnp.asarray, state.exchange)
  if kept.residual is not None:
    kept = kept._replace(residual={"w": kept.residual["w"][None]})
  exchange = CarriedExchange(outer, replicas, arrived_axes(outer))
  return exchange(kept, state._replace(exchange=None), {"w": own[None]})


def test_the_mean_has_the_weights_of_the_messages():
  result, _ = exchanged(Played([1.5, 0.5]))
  np.testing.assert_allclose(result.mean["w"], OWN / 2, rtol=1e-6)
  np.testing.assert_allclose(result.own["w"][0], OWN)


@pytest.mark.parametrize(
  "codec, turns", [("int(bits=4)", 1), ("low_rank(rank=2)+int(bits=4)", 2)]
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
  assert np.all(np.isfinite(np.asarray(result.mean["w"])))


def test_an_event_without_messages_changes_nothing():
  result, _ = exchanged(Played([0.0], is_counted=False), codec="int(bits=1)")
  np.testing.assert_array_equal(result.mean["w"], np.zeros([6, 4]))
