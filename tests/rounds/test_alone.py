"""Code that needs the axis of the replicas is refused where there is none."""

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import dilocox_jax as dx
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.methods import RULES
from tests.mailbox import apart

AXIS = "replica"
H = 4


@jax.custom_vjp
def mean_with_rule(x):
  return jax.lax.pmean(x, AXIS)


mean_with_rule.defvjp(lambda x: (mean_with_rule(x), None), lambda _, g: (g,))

# Ways in which an inner step may ask for the other replicas.
USES = {
  "pmean": lambda x: jax.lax.pmean(x, AXIS),
  "several axes": lambda x: jax.lax.psum(x, (AXIS,)),
  "all_gather": lambda x: jax.lax.all_gather(x, AXIS).mean(axis=0),
  "ppermute": lambda x: jax.lax.ppermute(x, AXIS, [(0, 0)]),
  "index": lambda x: x * (1 + jax.lax.axis_index(AXIS)),
  "size": lambda x: x / jax.lax.axis_size(AXIS),
  "count": lambda x: x / jax.lax.psum(1, AXIS),
  "cond": lambda x: jax.lax.cond(
    x.sum() > 1e9, lambda y: jax.lax.pmean(y, AXIS), lambda y: y, x
  ),
  "scan": lambda x: jax.lax.scan(
    lambda c, _: (jax.lax.pmax(c, AXIS), None), x, None, 2
  )[0],
  "while": lambda x: jax.lax.while_loop(
    lambda c: jax.lax.pmax(c.sum(), AXIS) > 1e9, lambda c: c, x
  ),
  "jit": jax.jit(lambda x: jax.lax.pmean(x, AXIS)),
  "remat": jax.checkpoint(lambda x: jax.lax.pmean(x, AXIS)),
  "custom_vjp": mean_with_rule,
  "vmap": jax.vmap(lambda x: jax.lax.pmean(x, AXIS)),
}


def step_with(use):
  """The inner step of `apart`, whose update goes through a function."""

  def step(params, state, batch):
    new, state, metrics = apart.step(params, state, batch)
    return jax.tree.map(use, new), state, metrics

  return step


def rounds_alone(inner_step=apart.step, outer=None, rule="reset", wrap=None):
  exchange = dx.mailbox(
    Store("memory:///"),
    name="oslo",
    secret=apart.SECRET,
    rules=dx.MailboxRules(replicas=1),
  )
  return dx.make_rounds(
    dx.Method(dx.SyncSchedule(H), rule),
    inner_step,
    outer or optax.sgd(0.7),
    num_replicas=1,
    exchange=wrap(exchange) if wrap else exchange,
  )


def run(rounds, num_replicas=1):
  params = apart.first_params()
  state = rounds.init(params, apart.INNER.init(params))
  batches = apart.batches(num_replicas, 0, H)
  return rounds.run(state, batches)


@contextlib.contextmanager
def refused(what):
  """Expects one line."""
  with pytest.raises(ValueError, match=what) as error:
    yield
  assert "\n" not in str(error.value)
  assert "share no axis" in str(error.value)


@pytest.mark.parametrize("name", USES)
def test_an_inner_step_that_needs_the_others_is_refused_before_it_runs(name):
  calls = []

  def use(x):
    io_callback(lambda: calls.append(name), None)
    return USES[name](x)

  with refused("the inner step .* uses the axis 'replica'"):
    run(rounds_alone(step_with(use)))
  assert not calls


def test_one_runtime_of_several_replicas_allows_the_same_step():
  step = step_with(USES["pmean"])
  rounds = dx.make_rounds(
    methods.diloco(H), step, optax.sgd(0.7), num_replicas=2
  )
  state, *_ = run(rounds, 2)
  first, second = np.asarray(state.replica.params["head"])
  np.testing.assert_array_equal(first, second)


def test_an_axis_of_the_same_name_inside_the_step_is_the_steps_own():
  def use(x):
    return jax.vmap(lambda row: jax.lax.pmean(row, AXIS), axis_name=AXIS)(x)

  run(rounds_alone(step_with(use)))


def with_axis(optimizer):
  """An optimizer whose updates are a mean over the replicas."""

  def update(updates, state, params=None):
    updates, state = optimizer.update(updates, state, params)
    return jax.lax.pmean(updates, AXIS), state

  return optax.GradientTransformation(optimizer.init, update)


@pytest.fixture(name="rules")
def rules_fixture():
  before = dict(RULES)
  yield
  RULES.clear()
  RULES.update(before)


def mean_rule(method, axis_name):
  del method
  return dx.ApplyRule(
    rejoin=lambda inner, old, new, own: jax.lax.pmean(new, axis_name)
  )


def filtered(exchange):
  """The exchange of a mailbox whose norms are compared over the axis."""
  aggregator = dx.norm_filter(exchange.aggregator, 5.0)
  return dataclasses.replace(exchange, aggregator=aggregator)


def numbered(exchange):
  """The exchange of a mailbox that multiplies by the replica's number."""
  factor_of = lambda: jax.lax.axis_index(AXIS) + 1  # noqa: E731
  return apart.broken_in_a_store(exchange, factor_of)


def test_norms_in_a_store_are_compared_by_the_rules_of_the_mailbox():
  with pytest.raises(ValueError, match="MailboxRules"):
    rounds_alone(wrap=lambda exchange: dx.norm_filter(exchange, 5.0))


def test_an_outer_step_that_needs_the_others_is_refused_at_the_start(rules):
  dx.register_rule("mean", dx.RuleKind(mean_rule))
  cases: list[dict[str, Any]] = [
    {"outer": with_axis(optax.sgd(0.7))},
    {"rule": "mean"},
    {"wrap": filtered},
    {
      "wrap": lambda e: apart.broken_in_a_store(
        e, lambda: jax.lax.axis_index(AXIS) + 1
      )
    },
  ]
  for arguments in cases:
    rounds = rounds_alone(**arguments)
    params = apart.first_params()
    optimizer = apart.INNER.init(params)
    with (
      mock.patch.object(jax, "jit", side_effect=AssertionError),
      refused("the outer step .* uses the axis 'replica'"),
    ):
      dx.join_rounds(rounds, params, optimizer)


def test_a_rule_without_shared_parameters_is_refused(rules):
  rule = dx.ApplyRule(is_shared=False)
  dx.register_rule("apart", dx.RuleKind(lambda method, axis_name: rule))
  with pytest.raises(ValueError, match="rule='apart' gives each replica"):
    rounds_alone(rule="apart")


def test_a_name_that_is_not_defined_stays_the_error_that_it_is():
  def use(x):
    return x * replica  # noqa: F821 # pyright: ignore

  with pytest.raises(NameError, match="'replica' is not defined"):
    run(rounds_alone(step_with(use)))
