"""Every kind of decoder keeps what a decoder promises."""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models.attention import segment_ids, segment_positions
from dilocox_jax.models.loss import next_token_loss, token_loss
from dilocox_jax.models.modules import Norm
from dilocox_jax.models.sampling import empty_cache
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.choices import REMATS
from dilocox_jax.plan.model.presets import MODEL_PRESETS, nano
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.trees import leaves_by_path, path_name
from tests.oracles import transformer as oracle

# Layers fused differently round differently.
FUSION_TOLERANCE = 1e-6
LENGTH = 12


def shaped(**changes):
  return dataclasses.replace(nano, **changes)


SHAPES = {
  "gelu": shaped(activation="gelu"),
  "qwen": shaped(
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "biases": "qkv"},
    **{"qk_norm": True, "rope_base": 100.0, "norm_epsilon": 0.1},
  ),
  # A fast pair, one whose speed is between, and two slow ones.
  "llama3.1": shaped(head_dim=8, rope_base=2e5, rope_factor=8.0),
  "opt": shaped(
    **{"activation": "relu", "biases": "all", "norm": "layer"},
    **{"positions": "learned", "num_positions": LENGTH, "tied_head": True},
    norm_epsilon=0.5,
  ),
  "shared": shaped(
    **{"num_kv_heads": 1, "tied_head": True, "qk_norm": True, "norm": "layer"}
  ),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def tokens(*shape):
  return jax.random.randint(
    jax.random.key(1), shape, 0, nano.vocab_size, jnp.int32
  )


@functools.cache
def drawn(name):
  """Parameters far from their start, so that every leaf counts."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(build_model(SHAPES[name]).init, jax.random.key(0))
  return jax.tree.map_with_path(
    lambda path, x: jnp.float32(
      0.4 * rng.normal(size=x.shape) + path_name(path).endswith("scale")
    ),
    shapes,
  )


@functools.cache
def logits_of(name):
  """Logits of all tokens, from the program that the tests of a model share."""
  return jax.jit(build_model(SHAPES[name]).apply)


def assert_close(found, wanted, tolerance=2e-6):
  """Rounding follows the largest terms of a sum, also where they cancel."""
  largest = float(jnp.max(jnp.abs(wanted)))
  np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("shape", [*SHAPES.values(), *MODEL_PRESETS.values()])
def test_parameters_are_the_leaves_that_the_plan_lists(shape):
  params = jax.eval_shape(build_model(shape).init, jax.random.key(0))
  leaves = leaves_by_path(params)
  assert {p: x.shape for p, x in leaves.items()} == shape.parameter_shapes
  assert {x.dtype for x in leaves.values()} == {jnp.dtype("float32")}
  assert sum(x.size for x in leaves.values()) == parameter_count(shape)


@every_shape
def test_the_loss_is_the_oracles(name):
  batch = tokens(2, LENGTH + 1)
  params = drawn(name)
  logits = logits_of(name)(params, batch[:, :-1])
  loss = token_loss(logits.reshape(2 * LENGTH, -1), batch[:, 1:].reshape(-1))
  doubles = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  expected = oracle.loss(doubles, np.asarray(batch), SHAPES[name])
  assert float(loss) == pytest.approx(expected, rel=1e-5)


@every_shape
def test_its_parts_and_its_cache_compute_what_the_whole_does(name):
  model = build_model(SHAPES[name])
  params = drawn(name)
  batch = tokens(2, 12)
  whole = logits_of(name)(params, batch)
  rest = {key: x for key, x in params.items() if key != "blocks"}
  assert model.decode is not None
  block = jax.jit(model.block, static_argnums=2)
  decode = jax.jit(model.decode)
  x = model.embed(rest, batch)
  for number in range(model.shape.num_layers):
    layer = jax.tree.map(lambda leaf, n=number: leaf[n], params["blocks"])
    x = block(layer, x, 12)
  assert_close(model.logits(rest, x).reshape(whole.shape), whole)
  cache = empty_cache(model, 2, 12, np.dtype("float32"))
  seen = []
  for start in (0, 6):  # One by one: tests/models/test_logits.py.
    logits, cache = decode(params, batch[:, start:][:, :6], cache, start)
    seen.append(logits)
  assert_close(jnp.concatenate(seen, axis=1), whole, 1e-5)


END = 3
# Documents of 5, 1, 5 and 1 tokens, of which only the first has no mark.
DOCUMENTS = [9, 8, 7, 8, 9], [END], [END, 4, 5, 6, 4], [END]
PACKED = jnp.asarray([sum(DOCUMENTS, [])], jnp.int32)


@pytest.mark.parametrize("name", ["qwen", "opt"])
def test_packed_documents_are_read_as_each_is_alone(name):
  model = build_model(SHAPES[name])
  params = drawn(name)
  ids = segment_ids(PACKED, END)
  assert ids.tolist() == [[0] * 5 + [1] + [2] * 5 + [3]]
  places = segment_positions(ids).tolist()
  assert places == [[*range(5), 0, *range(5), 0]]
  alone = [
    logits_of(name)(params, jnp.asarray([d], jnp.int32)) for d in DOCUMENTS
  ]
  alone = jnp.concatenate(alone, axis=1)
  assert_close(jax.jit(model.apply)(params, PACKED, ids), alone, 1e-5)
  following = jnp.asarray([[*PACKED[0].tolist(), 7]], jnp.int32)

  def loss(end=None):
    read = functools.partial(next_token_loss, model, end_of_text=end)
    return jax.jit(read)(params, following)

  shares = jax.nn.log_softmax(alone[0])
  wanted = -shares[jnp.arange(PACKED.size), following[0, 1:]].mean()
  np.testing.assert_allclose(loss(END), wanted, rtol=1e-5)
  assert abs(loss() - wanted) > 1e-3


@pytest.mark.parametrize("token", [nano.vocab_size, -1, -100])
def test_values_outside_the_tables_are_no_numbers(token):
  batch = tokens(2, 9).at[0, 4].set(token)
  logits = logits_of("gelu")(drawn("gelu"), batch)
  assert jnp.all(jnp.isnan(logits[0, 4:])) and jnp.all(jnp.isfinite(logits[1]))
  logits = logits_of("opt")(drawn("opt"), tokens(2, 13))
  assert jnp.all(jnp.isnan(logits[:, 12]))


def test_every_layer_draws_its_own_values_and_outputs_start_smaller():
  deep = shaped(num_layers=8, model_dim=64, biases="all")
  params = jax.jit(build_model(deep).init)(jax.random.key(0))
  for path, leaf in leaves_by_path(jax.device_get(params)).items():
    if path.endswith(("scale", "bias")):
      assert np.all(leaf == float(path.endswith("scale")))
      continue
    residual = path.endswith(("output/kernel", "down/kernel"))
    expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
    assert np.std(leaf) == pytest.approx(expected, rel=0.05)
    if path.startswith("blocks/"):
      assert len(np.unique(leaf)) > 0.99 * leaf.size
  # A seed draws the same embedding whatever comes after it.
  tables = [
    jax.jit(build_model(shape).init)(jax.random.key(3))["embed"]["embedding"]
    for shape in (nano, shaped(num_layers=5, tied_head=True))
  ]
  np.testing.assert_array_equal(*tables)


def test_how_layers_run_changes_nothing_but_what_they_keep():
  shape = shaped(num_layers=4)
  batch = tokens(2, 9)
  params = jax.jit(build_model(shape).init)(jax.random.key(0))
  found = []
  kept = []
  for unroll, remat in ((1, "none"), (3, "dots")):
    model = build_model(shape, unroll=unroll, remat=remat)
    loss = jax.value_and_grad(lambda p, m=model: next_token_loss(m, p, batch))
    found.append(jax.jit(loss)(params))
  chex.assert_trees_all_close(*found, rtol=1e-4, atol=FUSION_TOLERANCE)
  for remat in REMATS:
    stream: Any = build_model(shape, remat=remat).stream

    def residuals(params, stream=stream):
      run = lambda params: jnp.sum(stream(params, batch))  # noqa: E731
      return jax.tree.leaves(jax.vjp(run, params)[1])

    kept.append(sum(x.size for x in jax.eval_shape(residuals, params)))
  none, dots, full = kept
  assert none > 1.5 * dots > 1.5 * full


def test_bfloat16_computes_nearly_the_same_from_the_same_parameters():
  shape = SHAPES["qwen"]
  params = drawn("qwen")
  batch = tokens(2, 9)
  models = [build_model(shape, dtype=t) for t in (jnp.bfloat16, jnp.float32)]
  starts = [jax.make_jaxpr(each.init)(jax.random.key(0)) for each in models]
  assert str(starts[0]) == str(starts[1])

  def found(model):
    def loss(params):
      logits = model.apply(params, batch)
      rows = logits[:, :-1].reshape(16, -1)
      return token_loss(rows, batch[:, 1:].reshape(-1)), logits

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  for rounded, exact in zip(*map(found, models), strict=True):
    dtypes = {x.dtype for x in jax.tree.leaves(rounded)}
    assert dtypes == {jnp.dtype("float32")}
    rounded, exact = (
      jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
      for tree in (rounded, exact)
    )
    error = jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact)
    # bf16 keeps 8 bits; the stream passes some ten roundings.
    assert 0 < error < 0.03
  # The squares of a row are summed in single precision.
  normed = Norm(4096, nano)(jnp.full((1, 4096), 1.0, jnp.bfloat16))
  assert normed.dtype == jnp.bfloat16
  np.testing.assert_allclose(normed.astype(jnp.float32), 1.0, rtol=0.01)


def test_the_program_does_not_grow_with_depth():
  def operations(num_layers, unroll):
    model = build_model(shaped(num_layers=num_layers), unroll=unroll)
    params = jax.eval_shape(model.init, jax.random.key(0))
    gradient = jax.grad(lambda p, t: next_token_loss(model, p, t))
    text = jax.jit(gradient).lower(params, tokens(2, 9)).as_text()
    return len(text.split("\n"))

  assert operations(2, unroll=1) == operations(8, unroll=1)
  assert operations(2, unroll=0) < operations(3, unroll=0)
