import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.config.recipes import changed_options
from dilocox_jax.config.sections import InnerConfig
from dilocox_jax.optimizers import (
  block_matrices,
  inner_optimizer,
  learning_rate_schedule,
  named_optimizer,
  standard_promotion,
)
from dilocox_jax.plan.choices import SCHEDULES
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


PEAK = 2.0
FINAL = 0.1


def rates(name, steps, **changes):
  settings = {"warmup_steps": 10, "total_steps": 110, "final_fraction": FINAL}
  schedule = learning_rate_schedule(name, PEAK, **(settings | changes))
  with jax.numpy_dtype_promotion("standard"):
    return [number(schedule(step)) for step in steps]


def assert_rates(actual, expected):
  # Schedules compute in fp32.
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_warm_up_rises_in_a_line_to_the_peak(name):
  assert_rates(rates(name, [0, 1, 5, 10]), [0.0, 0.2, 1.0, PEAK])
  assert_rates(rates("constant", [11, 60, 110]), [PEAK] * 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_a_warm_up_the_first_step_is_at_the_peak(name):
  assert_rates(rates(name, [0], warmup_steps=0), [PEAK])


@pytest.mark.parametrize("name", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup_steps", [0, 10, 100])
def test_the_decay_is_complete_when_the_run_ends(name, warmup_steps):
  changed = rates(name, [110, 500], warmup_steps=warmup_steps)
  assert_rates(changed, [PEAK * FINAL] * 2)


def test_a_cosine_is_half_way_down_in_the_middle():
  middle = PEAK * (1 + FINAL) / 2
  quarter = PEAK * (FINAL + (1 - FINAL) * (1 + np.sqrt(0.5)) / 2)
  assert_rates(rates("cosine", [35, 60]), [quarter, middle])


def test_wsd_is_stable_and_falls_in_a_line_in_its_last_part():
  # A fifth of 110 steps is 22.
  seen = rates("wsd", [50, 88, 99, 110])
  assert_rates(seen, [PEAK, PEAK, PEAK * (1 + FINAL) / 2, PEAK * FINAL])


def test_a_decay_that_leaves_no_stable_part_begins_after_the_warm_up():
  seen = rates("wsd", [99, 100, 105, 110], warmup_steps=100)
  assert_rates(seen, [1.98, PEAK, PEAK * (1 + FINAL) / 2, PEAK * FINAL])


def moved(clip_norm, gradients, name="sgd", **options):
  """What one step at rate 1 takes from zero parameters."""
  schedule = optax.constant_schedule(1.0)
  optimizer = inner_optimizer(name, schedule, clip_norm=clip_norm, **options)
  params = jax.tree.map(jnp.zeros_like, gradients)
  updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  return jax.tree.map(jnp.negative, updates)


def test_gradients_are_clipped_by_the_norm_of_all_leaves():
  gradients = {"a": jnp.float32(3.0), "b": jnp.asarray([0.0, -4.0])}
  clipped = moved(1.0, gradients)
  np.testing.assert_allclose(clipped["a"], 0.6, rtol=1e-6)
  np.testing.assert_allclose(clipped["b"], [0.0, -0.8], rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 5.5])
def test_short_gradients_and_a_limit_of_zero_leave_them_alone(clip_norm):
  gradients = {"a": jnp.float32(3.0), "b": jnp.asarray([0.0, -4.0])}
  jax.tree.map(
    np.testing.assert_array_equal, moved(clip_norm, gradients), gradients
  )


def test_options_reach_the_optimizer_and_the_rest_is_left_out():
  assert float(moved(0.0, jnp.float32(2.0), momentum=0.5, nesterov=True)) == 3
  assert float(moved(0.0, jnp.float32(2.0), b1=0.5, weight_decay=1.0)) == 2


def test_what_muon_leaves_to_adamw_has_the_options_of_adamw():
  options = {"b1": 0.8, "b2": 0.5, "weight_decay": 0.1}
  rate = optax.constant_schedule(0.1)
  muon = inner_optimizer("muon", rate, clip_norm=0.0, **options)
  adamw = optax.adamw(rate, nesterov=True, **options)
  params = {"embedding": jnp.asarray([[3.0, -2.0], [0.5, 1.0]])}
  states = [optimizer.init(params) for optimizer in (muon, adamw)]
  for scale in (1.0, -0.3, 2.0):
    gradients = {"embedding": scale * jnp.asarray([[1.0, 4.0], [-2.0, 0.1]])}
    found, states[0] = muon.update(gradients, states[0], params)
    with jax.numpy_dtype_promotion("standard"):
      wanted, states[1] = adamw.update(gradients, states[1], params)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted
    )


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


def test_the_schedule_counts_the_steps_of_the_optimizer():
  schedule = learning_rate_schedule(
    "constant", 1.0, warmup_steps=2, total_steps=9, final_fraction=0.0
  )
  optimizer = inner_optimizer("sgd", schedule, clip_norm=0.5)
  params = jnp.float32(0.0)
  state = optimizer.init(params)
  seen = []
  for _ in range(4):
    updates, state = optimizer.update(jnp.float32(8.0), state, params)
    seen.append(number(updates))
  np.testing.assert_allclose(seen, [0.0, -0.25, -0.5, -0.5], rtol=1e-6)


def test_products_of_an_update_state_their_precision():
  """On a TPU the default would be one product of bfloat16 values."""
  params = {"blocks": {"kernel": jnp.ones((2, 4, 3))}}
  muon = inner_optimizer("muon", lambda _: jnp.float32(0.1), clip_norm=0.0)
  program = jax.jit(lambda p: muon.update(p, muon.init(p), p))
  text = program.lower(params).as_text()
  lines = [line for line in text.splitlines() if "dot_general" in line]
  assert lines and all("precision = [HIGH, HIGH]" in line for line in lines)
