from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.coroutines import as_function
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.mailbox_protocol.roster import RunMismatchError
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.plan.schedule import methods
from tests.mailbox import apart
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  assert_equal,
  batches_of,
  loss,
  nesterov,
  run_rounds,
)

METHOD = methods.delayed(6, 3, 2, "continue")
INNER = optax.sgd(0.05)
STEP = inner_step(accumulated_gradient(loss), INNER)


# Rounds of 3, 3, 6 and 6 steps.
GROWING = methods.streaming_diloco(
  6, 3, 2, first_interval=3, steps_per_doubling=6
)


@pytest.mark.parametrize("method", [METHOD, GROWING])
def test_rounds_without_a_config_are_those_of_the_trainer(method):
  problem = make_problem(0, 3, 18, 4, 2, 3)
  expected, losses, programs = run_rounds(
    problem, method, INNER, nesterov(), num_steps=18
  )
  rounds = dx.make_rounds(
    method, STEP, nesterov(), num_replicas=3, num_layers=4
  )
  params = jax.tree.map(jnp.asarray, problem[0])
  state = rounds.init(params, INNER.init(params))
  for start, stop in ((0, 6), (6, 11), (11, 18)):  # In whatever pieces.
    state, metrics, _ = rounds.run(state, batches_of(problem, start, stop))
    assert_equal(metrics.loss, losses[:, start:stop])
  state, _ = rounds.flush(state)
  assert_equal(rounds.outer_params(state), programs.outer_params(expected))


def two_turns(values, state, params):
  """The mean in two messages, and a count of exchanges beside one's own sum."""
  del params
  halves = yield jax.tree.map(lambda leaf: leaf / 2, values)
  first = yield jax.lax.pmean(halves, "replica")
  halves = yield halves
  second = yield jax.lax.pmean(halves, "replica")
  state = {"count": state["count"] + 1, "own": state["own"] + halves["w"].sum()}
  return jax.tree.map(jnp.add, first, second), values, state


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
def test_an_aggregator_of_ones_own_has_a_dict_of_axes_and_turns(layout):
  def step(params, state, batch):
    loss, gradient = jax.value_and_grad(lambda p: jnp.sum(p["w"] * batch))(
      params
    )
    updates, state = INNER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, (loss, loss)

  def trained(exchange):
    rounds = dx.make_rounds(
      *(methods.dilocox(2), step, optax.sgd(1.0)),
      num_replicas=2,
      layout=layout,
      exchange=exchange,
    )
    params = {"w": jnp.zeros(3)}
    state = rounds.init(params, INNER.init(params))
    for _ in range(2):
      state, *_ = rounds.run(state, jnp.arange(12.0).reshape(2, 2, 3))
    (fragment,) = state.fragments
    (flushed, _) = rounds.flush(state)
    return rounds.outer_params(flushed), fragment.exchange

  own = dx.Aggregator(
    lambda params: {"count": jnp.int32(0), "own": jnp.zeros(())},
    as_function(two_turns),
    axes={"count": None, "own": 0},
  )
  found, kept = trained(own)
  assert_close(found, trained("float32")[0], 1e-6)
  assert kept["count"].shape == () and kept["own"].shape == (2,)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda x, y: (x[:2], y), r"leaf '0' .* of \(2, 6\) instead of \(3, 6\)"),
    (lambda x, y: (x, y[:, :5]), r"'1' .* of \(3, 5\) instead of \(3, 6\)"),
    (lambda x, y: (x[:, 0, 0, 0], y), r"'0' .* of \(3,\) instead of \(3, n\)"),
    (lambda x, y: (), "no leaf"),
  ],
)
def test_steps_want_a_batch_for_every_replica(change, message):
  problem = make_problem(0, 3, 12, 4, 2, 3)
  rounds = dx.make_rounds(
    METHOD, STEP, nesterov(), num_replicas=3, num_layers=4
  )
  params = jax.tree.map(jnp.asarray, problem[0])
  state = rounds.init(params, INNER.init(params))
  with pytest.raises(ValueError, match=message):
    rounds.run(state, change(*batches_of(problem, 0, 6)))


def test_what_is_no_state_of_rounds_is_refused():
  rounds = dx.make_rounds(methods.diloco(4), STEP, nesterov(), num_replicas=2)
  returned: Any = ((), (), [])  # The whole tuple that `run` returns.
  message = "a tuple and no RoundState: pass"
  with pytest.raises(ValueError, match=message):
    rounds.run(returned, jnp.ones((2, 4)))
  with pytest.raises(ValueError, match=message):
    rounds.flush(returned)
  with pytest.raises(ValueError, match=message):
    rounds.outer_params(returned)
  with pytest.raises(ValueError, match="leaf 'w' of type float cannot be tr"):
    rounds.init({"w": 1.0}, ())


WRONG = r"must return \(params, optimizer state, \(loss, gradient norm\)\): "


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda p, s, values: (p, s, values[0]), WRONG),
    (lambda p, s, values: (p, s), WRONG),
    (
      lambda p, s, values: ({"w": p["w"].astype("bfloat16")}, s, values),
      r"params whose leaf 'w' is bfloat16\[7\]; it must be float32\[7\]",
    ),
    (lambda p, s, values: ({}, s, values), "leaf 'w' is missing; it must be"),
    (
      lambda p, s, values: (p, s + (values[0],), values),
      "optimizer state whose leaf '2' is .*; it must be left out",
    ),
    (
      lambda p, s, values: (p, s, (p["w"], values[1])),
      r"a loss of shape \(7,\); it must be a scalar",
    ),
  ],
)
def test_results_of_an_inner_step_that_do_not_fit_are_named(change, message):
  def step(params, state, batch):
    return change(params, state, (jnp.sum(params["w"] * batch), jnp.ones(())))

  rounds = dx.make_rounds(
    methods.diloco(4), step, optax.sgd(1.0), num_replicas=2
  )
  params = {"w": jnp.zeros(7)}
  state = rounds.init(params, INNER.init(params))
  with pytest.raises(ValueError, match=message) as raised:
    rounds.run(state, jnp.ones((2, 4, 7)))
  assert "\n" not in str(raised.value)


ALONE = {"num_replicas": 1, "method": methods.eager(4)}


@pytest.mark.parametrize(
  ("changes", "error", "message"),
  [
    ({"method": methods.allreduce()}, ValueError, "take dilocox_jax.allreduce"),
    ({"method": METHOD}, ValueError, "give num_layers, or take"),
    ({"method": "diloco"}, TypeError, "method='diloco' must be a Method"),
    ({"outer": 0.7}, TypeError, r"outer=0\.7 must be an optax"),
    ({"inner_step": INNER}, TypeError, "inner_step=.* must be a function"),
    ({"division": 3}, TypeError, "division=3 must be a dilocox_jax.Division"),
    ({"num_replicas": 2.0}, ValueError, "num_replicas=2.0 must be of type int"),
    ({"num_layers": 4.0}, ValueError, "num_layers=4.0 must be of type int"),
    ({"exchange": 3}, TypeError, "exchange=3 must be a dilocox_jax"),
    ({"exchange": "mailbox"}, ValueError, "num_replicas=2 must be 1"),
    (ALONE | {"exchange": "mailbox"}, ValueError, "rule='eager'"),
  ],
)
def test_rounds_that_cannot_be_made_are_refused(changes, error, message):
  given = {"method": methods.diloco(4), "outer": optax.sgd(1.0)}
  given |= {"num_replicas": 2, "inner_step": STEP} | changes
  if given.get("exchange") == "mailbox":
    given["exchange"] = mailbox()
  with pytest.raises(error, match=message):
    dx.make_rounds(**given)


def mailbox(store=None, **settings):
  store = store or Store("memory:///")
  return dx.mailbox(store, name="oslo", secret=apart.SECRET, **settings)


def test_a_transform_cannot_wait_for_a_store():
  with pytest.raises(ValueError, match="give it to dilocox_jax.make_rounds"):
    dx.diloco(INNER, exchange=mailbox())  # pyright: ignore


def test_a_newcomer_that_differs_is_refused():
  store = Store("memory:///")
  apart.rounds_of(methods.diloco(4), mailbox(store), 1)
  for field, interval, settings in (
    ("method.schedule.sync_interval", 8, {}),
    ("exchange.codec", 4, {"codec": "int(bits=4)"}),
    ("learning_rate", 4, {"config": {"learning_rate": 0.1}}),
  ):
    with pytest.raises(RunMismatchError, match=f"^config.{field} is "):
      apart.rounds_of(methods.diloco(interval), mailbox(store, **settings), 1)
