import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer import rules
from dilocox_jax.outer.rules import ExchangeResult, apply_rule
from dilocox_jax.plan.schedule import methods


def leaves(value):
  """A tree whose leaves show the value, its double and its negative."""
  value = jnp.float32(value)
  return {"a": value, "b": [2 * value, -value]}


def assert_shows(tree, value):
  expected = {"a": value, "b": [2 * value, -value]}
  jax.tree.map(np.testing.assert_array_equal, tree, expected)


# Numbers in eighths, so that fp32 is exact.
INNER, OLD, NEW, OWN, MEAN, FRESH = 5.0, 3.0, 2.5, -0.75, 0.125, 16.0
RESET = rules.ApplyRule()
CONTINUE = rules.continue_rule(methods.delayed(), REPLICA_AXIS)
EAGER = rules.eager_rule(methods.eager(), REPLICA_AXIS)
ARRIVAL = ExchangeResult(leaves(MEAN), leaves(OWN), leaves(OWN))


def mixing(alpha):
  method = methods.streaming_diloco(mixing_alpha=alpha)
  return rules.mix_rule(method, REPLICA_AXIS)


def rejoined(rule):
  return rule.rejoin(leaves(INNER), leaves(OLD), leaves(NEW), leaves(OWN))


def test_a_result_may_leave_a_compiled_program():
  arrived = jax.jit(
    lambda: ExchangeResult(leaves(MEAN), leaves(OWN), leaves(OWN))
  )()
  jax.tree.map(np.testing.assert_array_equal, arrived, ARRIVAL)


@pytest.mark.parametrize("rule", [RESET, mixing(0.5), EAGER])
def test_most_rules_measure_from_the_outer_parameters(rule):
  measured = rule.measure(leaves(OLD), leaves(OWN), leaves(INNER))
  assert_shows(measured, OLD - INNER)


def test_continue_measures_what_was_not_sent_yet():
  # The replica stands where theta - U would be, plus its new progress.
  rule = CONTINUE
  reached = OLD - OWN
  assert_shows(rule.measure(leaves(OLD), leaves(OWN), leaves(reached)), 0.0)
  assert_shows(
    rule.measure(leaves(OLD), leaves(OWN), leaves(INNER)), OLD - OWN - INNER
  )


@pytest.mark.parametrize("rule", [RESET, CONTINUE, mixing(0.5)])
def test_shared_rules_hand_the_mean_to_the_optimizer(rule):
  assert rule.is_shared
  assert_shows(rule.gradient(ARRIVAL, leaves(FRESH)), MEAN)


def test_reset_goes_on_from_the_new_outer_parameters():
  assert_shows(rejoined(RESET), NEW)


def test_continue_adds_the_outer_move_and_takes_back_its_own_part():
  assert_shows(rejoined(CONTINUE), INNER + (NEW - OLD) + OWN)


def test_continue_alone_with_rate_one_goes_on_as_if_nothing_happened():
  # One replica: the outer move is minus its own pseudo-gradient.
  new = leaves(OLD - OWN)
  rule = CONTINUE
  after = rule.rejoin(leaves(INNER), leaves(OLD), new, leaves(OWN))
  assert_shows(after, INNER)


@pytest.mark.parametrize(
  ("alpha", "expected"),
  [(0.0, NEW), (0.25, 0.25 * INNER + 0.75 * NEW), (0.5, 3.75), (1.0, INNER)],
)
def test_mixing_weighs_the_local_value_by_alpha(alpha, expected):
  assert_shows(rejoined(mixing(alpha)), expected)


def test_eager_replaces_its_own_old_part_by_its_fresh_one():
  rule = EAGER
  assert not rule.is_shared
  own = np.asarray([1.0, 3.0, 8.0, 4.0], np.float32)
  fresh = np.asarray([2.0, -1.0, 0.0, 4.0], np.float32)
  mean = own.mean()

  def gradient(old, new):
    arrival = ExchangeResult(leaves(mean), old, old)
    return rule.gradient(arrival, new)

  stacked = jax.vmap(leaves)
  seen = jax.vmap(gradient, axis_name=REPLICA_AXIS)(
    stacked(own), stacked(fresh)
  )
  for replica in range(4):
    others = sum(own[k] for k in range(4) if k != replica)
    expected = (others + fresh[replica]) / 4
    assert_shows(jax.tree.map(lambda x, m=replica: x[m], seen), expected)


def test_eager_goes_on_from_its_own_outer_parameters():
  assert_shows(rejoined(EAGER), NEW)


@pytest.mark.parametrize(
  ("method", "expected"),
  [
    (methods.diloco(), RESET),
    (methods.dilocox(rule="reset"), RESET),
    (methods.dilocox(rule="continue"), CONTINUE),
    (methods.delayed(overlap_steps=40), CONTINUE),
    (methods.streaming_diloco(mixing_alpha=0.25), mixing(0.25)),
    (methods.eager(), EAGER),
    # Nothing can be done between a send and an apply on the same step.
    (methods.delayed(overlap_steps=0), RESET),
  ],
)
def test_every_method_has_its_rule(method, expected):
  rule = apply_rule(method, REPLICA_AXIS)
  assert rule.is_shared == expected.is_shared
  jax.tree.map(
    np.testing.assert_array_equal, rejoined(rule), rejoined(expected)
  )
  values = leaves(OLD), leaves(OWN), leaves(INNER)
  jax.tree.map(
    np.testing.assert_array_equal,
    rule.measure(*values),
    expected.measure(*values),
  )
