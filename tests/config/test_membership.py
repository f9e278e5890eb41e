"""Absences and pace, as a config states them."""

import pytest

from dilocox_jax.config import from_mapping


def plan(**section):
  config = from_mapping({"membership": section})
  return config.membership.plan(config.sync.named, 2, config.seed)


def test_a_config_says_who_is_away_and_how_fast_each_is():
  found = plan(absences="1:3-5;0:8", inner_steps="30,15")
  assert found.absences == ((1, 3, 5), (0, 8, 8))
  assert found.inner_steps == (30, 15)


def test_a_mistake_names_its_section():
  with pytest.raises(ValueError, match="^membership.*absences"):
    plan(absences="7")
