"""Optimizers by name, and the learning rates of inner ones."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.optimizers import (
  block_matrices,
  inner_optimizer,
  learning_rate_schedule,
  named_optimizer,
)
from dilocox_jax.reference import optimizers as oracle
from dilocox_jax.trees import leaves_by_path, path_name


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
      updates, state = optimizer.update(gradients, state, params, value=1.0)
      params = optax.apply_updates(params, updates)
    return params

  return steps({"a": jnp.asarray([1.0, -2.0, 0.5]), "b": jnp.float32(3.0)})


FULL = {"b1": 0.8, "weight_decay": 0.3, "momentum": 0.6, "nesterov": True}


@pytest.mark.parametrize(
  ("name", "given", "options"),
  [
    ("adamw", {"b1": 0.8, "b2": 0.9, "weight_decay": 0.3}, None),
    ("lion", {"b1": 0.8}, None),
    ("rmsprop", {}, None),
    # Options that it lacks are left out, and momentum 0 is its default.
    ("sgd", FULL, {"momentum": 0.6, "nesterov": True}),
    *((name, {"momentum": 0.0}, {}) for name in ("lars", "madgrad", "sgd")),
  ],
)
def test_an_optimizer_by_name_is_that_of_optax(name, given, options):
  build: Any = getattr(optax, name, getattr(optax.contrib, name, None))
  direct = build(0.1, **(given if options is None else options))
  with jax.numpy_dtype_promotion("standard"):
    expected = trained(optax.with_extra_args_support(direct))
  # Outside of it, strict promotion is in force.
  actual = trained(named_optimizer(name, 0.1, **given))
  jax.tree.map(np.testing.assert_array_equal, actual, expected)
  with pytest.raises(ValueError, match="promotion"):
    jnp.multiply(jnp.float32(1), jnp.int32(2))


@pytest.mark.parametrize(
  ("name", "rate", "needed", "message"),
  [
    # The last two are names of optax that step nothing: a function, a module.
    ("adamv", 0.1, (), "optimizer='adamv' is not an optimizer of optax"),
    ("clip_by_global_norm", 0.1, (), "is not an optimizer of optax"),
    ("losses", 0.1, (), "optimizer='losses' is not an optimizer of optax"),
    ("lars", 0.1, ("b1",), "b1 would be ignored, as optimizer=lars"),
    ("sm3", optax.constant_schedule(0.1), (), "'sm3' cannot be built"),
  ],
)
def test_what_cannot_be_built_is_refused(name, rate, needed, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    named_optimizer(name, rate, needed, b1=0.8)


def test_what_an_optimizer_has_under_its_own_name_is_not_missing():
  named_optimizer("lars", 0.1, ("momentum",), momentum=0.8)
  named_optimizer("muon", 0.1, ("momentum",), beta=0.8)


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
    (
      {
        "embed_tokens": (9, 3),
        "MultiHeadAttention_0": {"query": (3, 3)},
        "tokenEmbedding": (9, 3),
        "lm_head": (3, 9),
      },
      {"MultiHeadAttention_0/query": (0, 1)},
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
  with pytest.raises(ValueError, match="finds no matrix in the parameters"):
    block_matrices({"bias": jnp.zeros(3), "conv": jnp.zeros((3, 3, 1))})
  assert block_matrices({"embed": jnp.zeros((9, 3))}) == {"embed": None}


PEAK = 2.0
LAST = 0.2
MIDDLE = 1.1
QUARTER = 0.2 + 1.8 * (1 + np.sqrt(0.5)) / 2  # Of a cosine.


@pytest.mark.parametrize(
  ("name", "warmup", "rates"),
  [
    *(
      (name, 10, {0: 0.0, 1: 0.2, 5: 1.0, 10: PEAK})
      for name in ("constant", "cosine", "wsd")
    ),
    *((name, 0, {0: PEAK}) for name in ("constant", "cosine", "wsd")),
    ("constant", 10, {11: PEAK, 60: PEAK, 110: PEAK}),
    *(
      (name, warmup, {110: LAST, 500: LAST})
      for name in ("cosine", "wsd")
      for warmup in (0, 10, 100)
    ),
    ("cosine", 10, {35: QUARTER, 60: MIDDLE}),
    # A fifth of 110 steps is 22.
    ("wsd", 10, {50: PEAK, 88: PEAK, 99: MIDDLE}),
    # A decay that leaves no stable part begins after the warm-up.
    ("wsd", 100, {99: 1.98, 100: PEAK, 105: MIDDLE}),
  ],
)
def test_a_rate_rises_to_its_peak_and_falls_until_the_end(name, warmup, rates):
  schedule = learning_rate_schedule(
    name, PEAK, warmup_steps=warmup, total_steps=110, final_fraction=0.1
  )
  with jax.numpy_dtype_promotion("standard"):
    found = [number(schedule(step)) for step in rates]
  # Schedules compute in fp32.
  np.testing.assert_allclose(found, [*rates.values()], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  ("clip_norm", "options", "taken"),
  [
    # Gradients are clipped by the norm of all leaves, 5.
    (1.0, {}, 0.2),
    *((clip_norm, {}, 1) for clip_norm in (0.0, 5.5)),
    (0.0, {"momentum": 0.5, "nesterov": True}, 1.5),
    (0.0, {"b1": 0.5, "weight_decay": 1.0}, 1),
  ],
)
def test_a_step_is_clipped_and_has_its_options(clip_norm, options, taken):
  gradients = {"a": jnp.float32(3.0), "b": jnp.asarray([0.0, -4.0])}
  schedule = optax.constant_schedule(1.0)
  sgd = inner_optimizer("sgd", schedule, clip_norm=clip_norm, **options)
  params = jax.tree.map(jnp.zeros_like, gradients)
  updates: Any = sgd.update(gradients, sgd.init(params), params)[0]
  np.testing.assert_allclose(updates["a"], -3 * taken, rtol=1e-6)
  np.testing.assert_allclose(updates["b"], [0, 4 * taken], rtol=1e-6)


def test_muon_takes_the_steps_of_its_plain_twin():
  rng = np.random.default_rng(0)
  shapes = {
    "blocks": {"up": (2, 3, 9), "down": (2, 9, 3), "norm": (2, 3)},
    "embed": (11, 3),
    "head": (3, 11),
  }
  params = jax.tree.map(
    lambda shape: rng.normal(size=shape),
    shapes,
    is_leaf=lambda node: isinstance(node, tuple),
  )
  rate = learning_rate_schedule(
    "cosine", 0.3, warmup_steps=2, total_steps=6, final_fraction=0.1
  )
  options: dict[str, Any] = {"b1": 0.8, "b2": 0.9, "weight_decay": 0.05}
  muon = inner_optimizer("muon", rate, clip_norm=0.0, momentum=0.9, **options)
  twin = oracle.Muon(
    lambda count: number(rate(count)),
    ("blocks/up", "blocks/down"),
    oracle.AdamW(lambda count: number(rate(count)), nesterov=True, **options),
    momentum=0.9,
    weight_decay=0.05,
  )
  wanted = leaves_by_path(params)
  params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
  state = muon.init(params)
  for _ in range(6):
    grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)
    with jax.numpy_dtype_promotion("standard"):
      wanted = twin.step(wanted, leaves_by_path(grads))
    grads = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), grads)
    updates, state = muon.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  for path, leaf in leaves_by_path(params).items():
    np.testing.assert_allclose(leaf, wanted[path], atol=1e-4, err_msg=path)


@pytest.mark.parametrize("momentum, kept", [(0.0, 0.95), (0.5, 0.5)])
def test_the_momentum_of_muon_is_its_own_unless_it_is_given(momentum, kept):
  rate = optax.constant_schedule(0.1)
  muon = inner_optimizer("muon", rate, clip_norm=0.0, momentum=momentum)
  params = {"blocks": {"up": jnp.ones((2, 3, 3))}}
  state = muon.init(params)
  for scale in (1.0, 0.0):
    gradients = jax.tree.map(lambda leaf, s=scale: s * leaf, params)
    _, state = muon.update(gradients, state, params)
  # Two steps, and the second gradient is 0: kept times what the first left.
  traces = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 3, 3)]
  np.testing.assert_allclose(traces[0], (1 - kept) * kept, rtol=1e-5)


def test_products_of_an_update_state_their_precision():
  """On a TPU the default would be one product of bfloat16 values."""
  params = {"blocks": {"kernel": jnp.ones((2, 4, 3))}}
  muon = inner_optimizer("muon", lambda _: jnp.float32(0.1), clip_norm=0.0)
  program = jax.jit(lambda p: muon.update(p, muon.init(p), p))
  text = program.lower(params).as_text()
  lines = [line for line in text.splitlines() if "dot_general" in line]
  assert lines and all("precision = [HIGH, HIGH]" in line for line in lines)
