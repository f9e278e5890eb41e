"""An apply rule from outside the package does what the same one inside does."""

import dataclasses

import optax
import pytest

from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.methods import RULES, RuleKind, register_rule
from tests.extensions import runs
from tests.oracles import least_squares
from tests.outer.problem import assert_equal, nesterov, run_rounds

pytestmark = pytest.mark.usefixtures("halfway_registered")

PROBLEM = least_squares.make_problem(4, 3, 12, 4, 2, 3)


def test_a_run_is_that_of_the_packages_rule():
  mix = methods.delayed(4, 1, 2, "mix", 0.5)
  ours = dataclasses.replace(mix, rule="halfway")
  expected, found = (
    run_rounds(PROBLEM, method, optax.sgd(0.1), nesterov(), num_steps=8)[:2]
    for method in (mix, ours)
  )
  assert_equal(found, expected)


def test_a_config_names_it_and_is_simulated():
  sync = {"method": "delayed", "sync_interval": 4, "overlap_steps": 1}
  config = runs.config(sync=sync | {"rule": "halfway"})
  assert config.sync.named.rule == "halfway"
  assert runs.simulated(config).num_steps == 12
  with pytest.raises(ValueError, match="overlap_steps=4 must be below sync_in"):
    runs.config(sync=sync | {"rule": "halfway", "overlap_steps": 4})


def test_a_rule_that_nothing_builds_is_refused():
  before = dict(RULES)
  with pytest.raises(ValueError, match="rule 'new': build='rule' must be"):
    register_rule("new", RuleKind("rule"))
  with pytest.raises(ValueError, match="rule 'mix' is registered already"):
    register_rule("mix", RuleKind("a:b"))
  assert dict(RULES) == before
