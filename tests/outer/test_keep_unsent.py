"""Progress that a codec did not send stays with the replica that made it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.exchange.mean import mean_of_finite_replicas
from dilocox_jax.outer.partition import Partition
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.pytypes import Aggregator

NUM_REPLICAS = 3
SENT = 0.25  # Exact in binary, as are the values: nothing is rounded.

RULES = {
  "at_once": methods.diloco(4),
  "continue": methods.delayed(4, 1, 2, "continue"),
}


def lossy():
  """Sends a quarter of every value."""
  plain = mean_of_finite_replicas()

  def average(values, state, params):
    del params
    sent = jax.tree.map(lambda x: SENT * x, values)
    mean, state = plain.update(sent, state)
    return mean, sent, state

  return Aggregator(plain.init, average)


def transform(method, aggregator, keep_unsent):
  return OuterTransform(
    method,
    Partition(Fragments(1, 2)),
    optax.sgd(0.5),
    aggregator,
    keep_unsent,
  )


def meet(outer, later):
  """Measures, goes on for a while, applies, and measures again."""
  state = outer.init({"w": jnp.zeros(2)})

  def one(replica):
    start = {"w": replica}
    own = outer.measure(state, start, 0, None)
    exchanged, arrival = outer.exchange(state, 0, own)
    inner = {"w": replica + later}
    exchanged, inner, _ = outer.apply(exchanged, inner, 0, arrival, own)
    again = outer.measure(exchanged, inner, 0, None)
    return own["w"], arrival.sent["w"], again["w"], exchanged.params["w"]

  replicas = jnp.arange(2.0 * NUM_REPLICAS).reshape(NUM_REPLICAS, 2) - 1
  return jax.vmap(one, axis_name="replica")(replicas)


@pytest.mark.parametrize("name", RULES)
def test_what_was_not_sent_is_measured_again(name):
  later = 8.0 if name == "continue" else 0.0
  outer = transform(RULES[name], lossy(), True)
  own, sent, again, params = meet(outer, later)
  # Progress made since the send has the other sign of a pseudo-gradient.
  np.testing.assert_array_equal(again, own - sent - later)
  np.testing.assert_array_equal(sent, SENT * own)
  _, _, _, expected = meet(dataclasses.replace(outer, keep_unsent=False), 0.0)
  np.testing.assert_array_equal(params, expected)


@pytest.mark.parametrize("name", RULES)
def test_without_it_what_was_not_sent_is_lost(name):
  outer = transform(RULES[name], lossy(), False)
  _, _, again, _ = meet(outer, 0.0)
  np.testing.assert_array_equal(again, jnp.zeros_like(again))


@pytest.mark.parametrize("name", RULES)
def test_where_everything_is_sent_it_changes_no_bit(name):
  plain = transform(RULES[name], mean_of_finite_replicas(), False)
  kept = transform(RULES[name], mean_of_finite_replicas(), True)
  for one, other in zip(meet(plain, 0.3), meet(kept, 0.3), strict=True):
    np.testing.assert_array_equal(one, other)
