import dataclasses
import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models.loss import next_token_loss
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.presets import MODEL_PRESETS, nano
from dilocox_jax.plan.model.shapes import parameter_count, parameter_shapes

# Layers fused differently round differently.
FUSION_TOLERANCE = 1e-6
# bf16 keeps 8 bits; the stream passes some ten roundings. 0.004 is measured for
# logits, and 0.007 for gradients.
BFLOAT16_TOLERANCE = 0.01

OPTIONS = [
  dataclasses.replace(nano, activation=activation, qk_norm=qk, head_dim=head)
  for activation, qk, head in itertools.product(
    ("swiglu", "gelu"), (False, True), (0, 6)
  )
] + [
  # Qwen's options, OPT's, and those of a shared key and value head.
  dataclasses.replace(nano, biases="qkv", rope_base=1e6, norm_epsilon=1e-5),
  dataclasses.replace(
    nano,
    activation="relu",
    biases="all",
    norm="layer",
    positions="learned",
    num_positions=12,
    tied_head=True,
  ),
  dataclasses.replace(
    nano,
    num_heads=4,
    num_kv_heads=2,
    tied_head=True,
    num_experts=3,
    experts_per_token=2,
  ),
]


# Some options of each kind, of which the fast tier has every second.
KINDS = [
  pytest.param(shape, marks=[pytest.mark.slow] if number % 2 else [])
  for number, shape in enumerate([*OPTIONS[::5], *OPTIONS[-3:]])
]


def tokens(*shape, seed=1):
  return jax.random.randint(
    jax.random.key(seed), shape, 0, nano.vocab_size, jnp.int32
  )


def drawn(model):
  return jax.jit(model.init)(jax.random.key(0))


def lively(params, seed=2):
  """Adds noise to every leaf, so that no norm's scale stays one."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: x + jnp.float32(0.3 * rng.normal(size=x.shape)), params
  )


def by_path(params):
  return {
    "/".join(key.key for key in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


@pytest.mark.parametrize("shape", [*OPTIONS, *MODEL_PRESETS.values()])
def test_parameters_are_the_leaves_that_the_plan_lists(shape):
  params = jax.eval_shape(build_model(shape).init, jax.random.key(0))
  leaves = by_path(params)
  assert {p: x.shape for p, x in leaves.items()} == parameter_shapes(shape)
  assert {x.dtype for x in leaves.values()} == {jnp.dtype("float32")}
  assert sum(x.size for x in leaves.values()) == parameter_count(shape)


def test_every_layer_draws_its_own_values_and_outputs_start_smaller():
  deep = dataclasses.replace(nano, num_layers=8, model_dim=64, biases="all")
  leaves = by_path(drawn(build_model(deep)))
  for path, leaf in leaves.items():
    if path.endswith("scale"):
      assert jnp.all(leaf == 1)
      continue
    if path.endswith("bias"):
      assert not jnp.any(leaf)
      continue
    residual = path.endswith(("output/kernel", "down/kernel"))
    expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
    assert jnp.std(leaf) == pytest.approx(expected, rel=0.05)
    if path.startswith("blocks/"):
      assert len(np.unique(leaf)) > 0.99 * leaf.size


@pytest.mark.parametrize("shape", [*OPTIONS[::5], *OPTIONS[-3:]])
def test_a_token_changes_nothing_before_it(shape):
  model = build_model(shape)
  params = lively(drawn(model))
  before = tokens(2, 9)
  after = before.at[:, 5].set((before[:, 5] + 1) % nano.vocab_size)
  apply = jax.jit(model.apply)
  logits = [apply(params, t) for t in (before, after)]
  assert jnp.array_equal(logits[0][:, :5], logits[1][:, :5])
  assert jnp.all(jnp.any(logits[0][:, 5:] != logits[1][:, 5:], axis=-1))


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
@pytest.mark.parametrize("shape", KINDS)
def test_no_logit_has_a_gradient_to_a_later_token(shape, attention):
  # The balance loss compares all tokens of a batch, so it is left out.
  model = build_model(
    dataclasses.replace(shape, balance_loss=0.0), attention=attention
  )
  params = lively(drawn(model))

  def logits(x_TxD, position):
    for number in range(shape.num_layers):
      layer = jax.tree.map(lambda x, n=number: x[n], params["blocks"])
      x_TxD = model.block(layer, x_TxD, 9)
    return jnp.sum(jnp.sin(model.logits(params, x_TxD)[position]))

  gradient = jax.jit(jax.grad(logits), static_argnums=1)
  stream = model.embed(params, tokens(1, 9))
  for position in (0, 5, 8):
    is_read = jnp.any(gradient(stream, position) != 0, axis=-1)
    np.testing.assert_array_equal(is_read, np.arange(9) <= position)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_shared_keys_are_those_of_every_head_repeated(num_groups):
  every = dataclasses.replace(nano, num_heads=4)
  shared = dataclasses.replace(every, num_kv_heads=num_groups)
  params = lively(drawn(build_model(shared)))

  def repeated(path, leaf):
    if not {"key", "value"} & {key.key for key in path}:
      return leaf
    heads = leaf.reshape(*leaf.shape[:-1], num_groups, shared.head_width)
    return jnp.repeat(heads, 4 // num_groups, axis=-2).reshape(
      *leaf.shape[:-1], -1
    )

  alike = jax.tree_util.tree_map_with_path(repeated, params)
  found = jax.jit(build_model(shared).apply)(params, tokens(2, 9))
  wanted = jax.jit(build_model(every).apply)(alike, tokens(2, 9))
  # Rounding follows the largest terms of a sum, also where they cancel.
  largest = float(jnp.max(jnp.abs(wanted)))
  assert largest > 1
  np.testing.assert_allclose(
    found, wanted, rtol=0, atol=FUSION_TOLERANCE * largest
  )


@pytest.mark.parametrize("unroll", [0, 3])
def test_unrolled_layers_compute_what_scanned_ones_do(unroll):
  shape = dataclasses.replace(nano, num_layers=4)
  batch = tokens(2, 9)
  params = lively(drawn(build_model(shape)))

  def loss_and_gradient(unroll):
    model = build_model(shape, unroll=unroll)
    loss = jax.value_and_grad(lambda p: next_token_loss(model, p, batch))
    return jax.jit(loss)(params)

  chex.assert_trees_all_close(
    loss_and_gradient(unroll),
    loss_and_gradient(1),
    rtol=1e-4,
    atol=FUSION_TOLERANCE,
  )


@pytest.mark.parametrize(
  "shape",
  [
    KINDS[0],
    *(pytest.param(*k.values, marks=pytest.mark.slow) for k in KINDS[1:]),
  ],
)
def test_bfloat16_computes_nearly_the_same_from_the_same_parameters(shape):
  params = drawn(build_model(shape))
  batch = tokens(2, 9)
  exact = jax.jit(build_model(shape).apply)(params, batch)
  model = build_model(shape, dtype=jnp.bfloat16)
  chex.assert_trees_all_equal(drawn(model), params)
  rounded = jax.jit(model.apply)(params, batch)
  assert rounded.dtype == jnp.float32
  assert 0 < relative_error(rounded, exact) < BFLOAT16_TOLERANCE

  def gradient(model):
    return jax.jit(jax.grad(lambda p: next_token_loss(model, p, batch)))(params)

  error = relative_error(gradient(model), gradient(build_model(shape)))
  assert 0 < error < BFLOAT16_TOLERANCE


def relative_error(found, wanted):
  """The norm of the difference of two trees over the norm of the second."""

  def norm(tree):
    return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))

  return norm(jax.tree.map(jnp.subtract, found, wanted)) / norm(wanted)


def test_the_program_does_not_grow_with_depth():
  def operations(num_layers, unroll):
    shape = dataclasses.replace(nano, num_layers=num_layers)
    model = build_model(shape, unroll=unroll)
    params = jax.eval_shape(model.init, jax.random.key(0))
    gradient = jax.grad(lambda p, t: next_token_loss(model, p, t))
    return len(
      jax.jit(gradient).lower(params, tokens(2, 9)).as_text().split("\n")
    )

  assert operations(2, unroll=1) == operations(8, unroll=1)
  assert operations(2, unroll=0) < operations(8, unroll=0)


def test_a_token_outside_the_vocabulary_is_not_a_number():
  model = build_model(nano)
  params = drawn(model)
  batch = tokens(2, 9).at[0, 4].set(nano.vocab_size)
  logits = jax.jit(model.apply)(params, batch)
  assert jnp.all(jnp.isnan(logits[0, 4:]))
  assert jnp.all(jnp.isfinite(logits[1]))


def test_a_position_outside_the_table_is_not_a_number():
  model = build_model(OPTIONS[-2])
  apply = jax.jit(model.apply)
  assert jnp.all(jnp.isfinite(apply(drawn(model), tokens(2, 12))))
  assert jnp.all(jnp.isnan(apply(drawn(model), tokens(2, 13))[:, 12]))


def test_stacked_replicas_equal_replicas_one_by_one():
  model = build_model(nano)
  params = jax.jit(jax.vmap(model.init))(jax.random.split(jax.random.key(0), 3))
  batch = tokens(3, 2, 9)
  gradient = jax.jit(
    jax.value_and_grad(lambda p, t: next_token_loss(model, p, t))
  )

  @functools.partial(jax.vmap, axis_name="replica")
  def averaged(params, batch):
    loss, gradients = gradient(params, batch)
    return jax.lax.pmean(loss, "replica"), gradients

  loss, gradients = jax.jit(averaged)(params, batch)
  apart = [
    gradient(jax.tree.map(lambda x, m=m: x[m], params), batch[m])
    for m in range(3)
  ]
  mean = jnp.mean(jnp.stack([loss for loss, _ in apart]))
  chex.assert_trees_all_close(loss, jnp.full(3, mean), rtol=1e-6)
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *[g for _, g in apart])
  chex.assert_trees_all_close(gradients, stacked, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [OPTIONS[3], *OPTIONS[-2:]])
def test_every_kernel_of_a_block_is_multiplied_through_the_hook(shape):
  model = build_model(shape)
  params = lively(drawn(model))
  layer = jax.tree.map(lambda x: x[1], params["blocks"])
  kernels = {p: x for p, x in by_path(layer).items() if p.endswith("kernel")}
  x = jax.random.normal(jax.random.key(0), (6, shape.model_dim))
  seen = []

  def multiply(path, x, kernel):
    assert jnp.array_equal(kernel, kernels[path])
    seen.append(path)
    return x @ kernel

  diverted = model.block(layer, x, 3, multiply)
  chex.assert_trees_all_equal(diverted, model.block(layer, x, 3))
  assert sorted(seen) == sorted(kernels)
  doubled = model.block(layer, x, 3, lambda p, x, kernel: 2 * x @ kernel)
  assert not jnp.allclose(doubled, diverted, atol=0.1)


@pytest.mark.parametrize("shape", [OPTIONS[0], *OPTIONS[-2:]])
def test_embedding_and_logits_read_no_block(shape):
  model = build_model(shape)
  params = lively(drawn(model))
  rest = {name: x for name, x in params.items() if name != "blocks"}
  x = model.embed(rest, tokens(2, 5))
  for number in range(shape.num_layers):
    layer = jax.tree.map(lambda x, n=number: x[n], params["blocks"])
    x = model.block(layer, x, 5)
  logits = model.logits(rest, x)
  assert logits.shape == (10, shape.vocab_size)
  chex.assert_trees_all_close(
    logits.reshape(2, 5, -1),
    model.apply(params, tokens(2, 5)),
    rtol=1e-4,
    atol=FUSION_TOLERANCE,
  )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", [OPTIONS[3], *OPTIONS[-2:]])
def test_a_float64_model_computes_in_float64_throughout(shape):
  params = lively(drawn(build_model(shape)))
  params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
  model = build_model(shape, dtype=jnp.float64)
  batch = tokens(2, 9)
  loss = lambda p: next_token_loss(model, p, batch, z_loss=0.1)  # noqa: E731
  program = str(jax.make_jaxpr(jax.grad(loss))(params))
  assert "f64[" in program
  assert "f32[" not in program
  logits = jax.eval_shape(model.apply, params, batch)
  assert logits.dtype == jnp.float64


def test_other_dtypes_and_negative_unrolls_are_refused():
  with pytest.raises(ValueError, match="float16.* must be float32, bfl"):
    build_model(nano, dtype=jnp.float16)
  with pytest.raises(ValueError, match="unroll=-1 must be 0"):
    build_model(nano, unroll=-1)
