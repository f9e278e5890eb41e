"""`dx.mailbox` says in one line where it cannot be used."""

import jax.numpy as jnp
import pytest

import dilocox_jax as dx
from dilocox_jax.meeting.admission import DiffersError
from dilocox_jax.meeting.store import Store
from dilocox_jax.plan.schedule import methods
from tests.meeting import apart

METHOD = methods.diloco(4)


def exchange(store=None, **settings):
  store = store or Store("memory:///")
  return dx.mailbox(store, name="oslo", secret=apart.SECRET, **settings)


def test_a_program_has_one_replica():
  with pytest.raises(ValueError, match="num_replicas=2 must be 1"):
    apart.rounds_of(METHOD, exchange(), 2)


def test_outer_parameters_are_shared():
  with pytest.raises(ValueError, match="rule='eager'"):
    apart.rounds_of(methods.delayed(4, 1, 4, "eager"), exchange(), 1)


def test_a_transform_cannot_wait_for_a_store():
  aggregator = exchange()
  params = {"w": jnp.zeros(3)}
  state = aggregator.init(params)
  with pytest.raises(ValueError, match="give it to dilocox_jax.make_rounds"):
    aggregator.update(params, state)


@pytest.mark.parametrize(
  "method, settings, field",
  [
    (methods.diloco(8), {}, "config.method.schedule.sync_interval"),
    (METHOD, {"codec": "int(bits=4)"}, "config.exchange.codec"),
    (METHOD, {"config": {"learning_rate": 0.1}}, "config.learning_rate"),
  ],
)
def test_a_newcomer_that_differs_is_refused(method, settings, field):
  store = Store("memory:///")
  apart.rounds_of(METHOD, exchange(store), 1)
  with pytest.raises(DiffersError, match=f"^{field} is "):
    apart.rounds_of(method, exchange(store, **settings), 1)


def test_settings_are_checked():
  with pytest.raises(ValueError, match="set one"):
    exchange(feedback=1.0, keep_unsent=True)
  with pytest.raises(ValueError, match="weight=0 must"):
    exchange(weight=0)
  assert isinstance(exchange(), dx.Aggregator)
