import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.config.sections import InnerConfig
from dilocox_jax.config.unread import changed_options
from dilocox_jax.optimizers import (
  block_matrices,
  named_optimizer,
  standard_promotion,
)
from dilocox_jax.trees import path_name


def number(value: Any) -> float:
  """A scalar of optax, whose types allow for whole trees, as a float."""
  return float(value)


def trained(optimizer):
  """Parameters after a few steps on gradients that change."""

  @jax.jit
  def steps(params):
    state = optimizer.init(params)
    for _ in range(3):
      gradients = jax.tree.map(jnp.sin, params)
      updates, state = optimizer.update(gradients, state, params)
      params = optax.apply_updates(params, updates)
    return params

  return steps({"a": jnp.asarray([1.0, -2.0, 0.5]), "b": jnp.float32(3.0)})


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("adamw", {"b1": 0.8, "b2": 0.9, "weight_decay": 0.3}),
    ("sgd", {"momentum": 0.6, "nesterov": True}),
    ("lion", {"b1": 0.8}),
    ("rmsprop", {}),
  ],
)
def test_an_optimizer_by_name_is_that_of_optax(name, options):
  direct = getattr(optax, name)(0.1, **options)
  with jax.numpy_dtype_promotion("standard"):
    expected = trained(direct)
  # Outside of it, strict promotion is in force.
  actual = trained(named_optimizer(name, 0.1, **options))
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_options_that_an_optimizer_lacks_are_left_out():
  full = {"b1": 0.8, "weight_decay": 0.3, "momentum": 0.6, "nesterov": True}
  actual = trained(named_optimizer("sgd", 0.1, **full))
  expected = trained(optax.sgd(0.1, momentum=0.6, nesterov=True))
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_learning_rate_may_follow_a_schedule():
  halved = named_optimizer("sgd", lambda count: 0.5**count)
  params = jnp.float32(0.0)
  state = halved.init(params)
  seen = []
  for _ in range(3):
    updates, state = halved.update(jnp.float32(1.0), state, params)
    seen.append(number(updates))
  assert seen == [-1.0, -0.5, -0.25]


# The last two are names of optax that step nothing: a function and a module.
@pytest.mark.parametrize("name", ["adamv", "clip_by_global_norm", "losses"])
def test_an_unknown_optimizer_is_refused_by_name(name):
  message = f"optimizer={name!r} is not an optimizer of optax"
  with pytest.raises(ValueError, match=re.escape(message)):
    named_optimizer(name, 0.1)


def mixes_dtypes(seen):
  def update(updates, state, params=None, **extra):
    seen.append(extra)
    count = jnp.int32(2)
    return jax.tree.map(lambda u: u * count, updates), state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )


def test_an_optimizer_may_mix_dtypes_where_the_program_must_not():
  optimizer = standard_promotion(mixes_dtypes([]))
  params = jnp.float32(1.5)
  updates, _ = optimizer.update(params, optimizer.init(params), params)
  assert number(updates) == 3.0
  with pytest.raises(ValueError, match="promotion"):
    jnp.multiply(params, jnp.int32(2))


def test_extra_arguments_reach_those_who_take_them_and_no_others():
  seen = []
  params = jnp.float32(1.0)
  standard_promotion(mixes_dtypes(seen)).update(
    params, optax.EmptyState(), params, value=3
  )
  assert seen == [{"value": 3}]
  plain = standard_promotion(optax.scale(2.0))
  updates, _ = plain.update(params, plain.init(params), params, value=3)
  assert number(updates) == 2.0


def test_without_a_momentum_an_optimizer_has_its_own():
  with jax.numpy_dtype_promotion("standard"):
    expected = trained(optax.lars(0.1))
  actual = trained(named_optimizer("lars", 0.1, momentum=0.0))
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_changed_option_that_an_optimizer_lacks_is_refused():
  changed = changed_options(InnerConfig(optimizer="lars", b1=0.8))
  assert changed == ("b1",)
  with pytest.raises(
    ValueError, match="b1 would be ignored, as optimizer=lars"
  ):
    named_optimizer("lars", 0.1, changed, b1=0.8)
  changed = changed_options(InnerConfig(optimizer="lars", momentum=0.8))
  named_optimizer("lars", 0.1, changed, momentum=0.8)
  # Muon has its momentum under another name, and the config knows that.
  named_optimizer("muon", 0.1, changed, beta=0.8)


def test_an_optimizer_that_takes_no_schedule_is_refused():
  with pytest.raises(ValueError, match="optimizer='sm3' cannot be built"):
    named_optimizer("sm3", optax.constant_schedule(0.1))


@pytest.mark.parametrize(
  "params, chosen",
  [
    (
      {"blocks": {"w": (4, 3, 5), "norm": (4, 3)}, "embed": (9, 3)},
      {"blocks/w": (1, 2)},
    ),
    (
      {
        "blocks": {"0": {"q": (3, 2, 5), "w": (3, 5), "b": (5,)}},
        "head": (3, 9),
      },
      {"blocks/0/w": (0, 1)},
    ),
    (
      {
        "Dense_0": {"kernel": (3, 5), "bias": (5,)},
        "Conv_0": (3, 3, 1, 2),
        "Embed_0": (9, 3),
      },
      {"Dense_0/kernel": (0, 1)},
    ),
  ],
)
def test_muon_finds_the_matrices_of_a_tree_of_ones_own(params, chosen):
  is_shape = {"is_leaf": lambda node: isinstance(node, tuple)}
  params = jax.tree.map(jnp.zeros, params, **is_shape)
  found = jax.tree.leaves_with_path(
    block_matrices(params),
    is_leaf=lambda node: isinstance(node, optax.contrib.MuonDimensionNumbers),
  )
  assert {path_name(path): tuple(axes) for path, axes in found} == chosen


def test_muon_without_a_matrix_is_refused():
  with pytest.raises(ValueError, match="finds no matrix in the parameters"):
    block_matrices({"bias": jnp.zeros(3), "conv": jnp.zeros((3, 3, 1))})


@pytest.mark.parametrize("name", ["lars", "sm3", "madgrad", "sgd"])
def test_a_momentum_of_zero_is_the_optimizers_own(name):
  params = {"w": jnp.ones((2, 3))}
  states = [
    named_optimizer(name, 0.1, **given).init(params)
    for given in ({"momentum": 0.0}, {})
  ]
  assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
