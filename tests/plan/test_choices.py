import inspect
import json

import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.optimizers import learning_rate_schedule
from dilocox_jax.plan.choices import (
  LAYOUTS,
  OPTIMIZER_OPTIONS,
  SCHEDULES,
  Registry,
  check_lazy,
  loaded,
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_exists(layout):
  assert Replicas(2, layout).layout == layout


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_exists(name):
  schedule = learning_rate_schedule(
    name, 0.5, warmup_steps=2, total_steps=9, final_fraction=0.1
  )
  assert jnp.asarray(schedule(2)) == 0.5


@pytest.mark.parametrize("name", OPTIMIZER_OPTIONS)
def test_an_optimizer_has_the_options_that_a_config_may_set_and_no_other(name):
  build = getattr(optax, name, None) or getattr(optax.contrib, name)
  has = inspect.signature(build).parameters
  options = ("b1", "b2", "weight_decay", "momentum", "nesterov")
  # Muon calls its momentum beta. It leaves some leaves to AdamW, whose options
  # it takes too.
  has = {*has, *(["momentum"] if "beta" in has else [])}
  expected = {
    option for option in options if option in has or f"adam_{option}" in has
  }
  assert set(OPTIMIZER_OPTIONS[name]) == expected


def test_a_registry_refuses_a_name_that_is_taken_or_is_none():
  parts = Registry("part")
  parts.add("one", 1)
  with pytest.raises(ValueError, match="part 'one' is registered already"):
    parts.add("one", 2)
  with pytest.raises(ValueError, match="part 'a b': a name has letters"):
    parts.add("a b", 3)
  assert dict(parts) == {"one": 1}


def test_a_place_is_imported_when_it_is_used():
  assert loaded("json:dumps") is json.dumps
  assert loaded(json.dumps) is json.dumps
  for reference in ("json.dumps", None):
    with pytest.raises(ValueError, match="build=.* must be a function or its"):
      check_lazy("build", reference)
