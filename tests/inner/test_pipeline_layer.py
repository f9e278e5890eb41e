import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.inner.pipeline_layer import (
  replace_saved_arguments,
  split_layer,
)
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.choices import REMATS
from dilocox_jax.trees import leaves_by_path
from tests.inner.pipelines import SMALL
from tests.products import product_flops

# Sizes of which no two are equal, so that a shape says what it is.
SHAPE = dataclasses.replace(SMALL, model_dim=10, head_dim=6)
BATCH_SIZE, LENGTH = 7, 3
TOKENS = BATCH_SIZE * LENGTH


def drawn(dtype=jnp.float32):
  """A block, its parameters, the stream and a gradient of its output."""
  model = build_model(SHAPE, dtype=dtype)
  params = jax.eval_shape(model.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  leaves = jax.tree.map(
    lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape[1:]), x.dtype),
    params["blocks"],
  )
  x, gradient = (
    jnp.asarray(rng.normal(size=(TOKENS, SHAPE.model_dim)), dtype)
    for _ in range(2)
  )
  return model.block, leaves, x, gradient


def abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def taken_apart(block, leaves, x, remat):
  shapes = jax.tree.map(abstract, leaves)
  return split_layer(block, shapes, abstract(x), LENGTH, remat)


@pytest.mark.parametrize("remat", REMATS)
def test_the_steps_of_a_layer_make_its_gradient(remat):
  block, leaves, x, gradient = drawn()
  apart = taken_apart(block, leaves, x, remat)

  def steps(leaves, x, gradient):
    y, saved = apart.forward(leaves_by_path(leaves), x)
    x_gradient, gradients, pairs = apart.input_gradient(
      leaves_by_path(leaves), saved, gradient
    )
    assert jax.tree.map(abstract, saved) == apart.saved
    assert jax.tree.map(abstract, pairs) == apart.pairs
    return y, {**gradients, **apart.weight_gradients(pairs)}, x_gradient

  def whole(leaves, x, gradient):
    y, pullback = jax.vjp(lambda p, x: block(p, x, LENGTH), leaves, x)
    gradients, x_gradient = pullback(gradient)
    return y, leaves_by_path(gradients), x_gradient

  chex.assert_trees_all_close(
    jax.jit(steps)(leaves, x, gradient),
    jax.jit(whole)(leaves, x, gradient),
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("remat", REMATS)
def test_no_parameter_is_kept(remat, dtype):
  block, leaves, x, _ = drawn(dtype)
  saved = taken_apart(block, leaves, x, remat).saved
  weights = {leaf.shape for leaf in leaves_by_path(leaves).values()}
  assert saved
  assert not weights & {x.shape for x in saved}


def test_each_way_keeps_less_than_the_one_before():
  block, leaves, x, _ = drawn()
  sizes = [
    sum(array.size for array in taken_apart(block, leaves, x, remat).saved)
    for remat in REMATS
  ]
  assert sizes[0] > sizes[1] > sizes[2] == x.size


def test_products_that_read_the_same_keep_it_once():
  block, leaves, x, _ = drawn()
  pairs = taken_apart(block, leaves, x, "dots").pairs
  # What queries, keys and values are made of, what the two branches of the
  # MLP are, and one each for the ways out of attention and MLP.
  assert len(pairs["outputs"]) == 7
  assert len(pairs["inputs"]) == 4


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_each_product_runs_in_its_step_and_nowhere_else(remat):
  block, leaves, x, gradient = drawn()
  apart = taken_apart(block, leaves, x, remat)
  leaves = leaves_by_path(leaves)
  y, saved = jax.eval_shape(apart.forward, leaves, x)

  def flops(step, *args):
    return product_flops(jax.jit(step).lower(*args).compile().as_text())

  weights = sum(
    2 * TOKENS * leaf.size for p, leaf in leaves.items() if "kernel" in p
  )
  attention = 4 * TOKENS * LENGTH * SHAPE.num_heads * SHAPE.head_width
  assert flops(apart.forward, leaves, x) == weights + attention
  inputs = flops(apart.input_gradient, leaves, saved, y)
  assert inputs == weights + 2 * attention
  assert flops(apart.weight_gradients, apart.pairs) == weights


def test_weight_gradients_of_bfloat16_factors_are_sums_in_float32():
  block, leaves, x, _ = drawn(jnp.bfloat16)
  apart = taken_apart(block, leaves, x, "dots")
  ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), apart.pairs)
  gradients = apart.weight_gradients(ones)
  assert {x.dtype for x in gradients.values()} == {jnp.dtype("float32")}
  assert {float(x.max()) for x in gradients.values()} == {float(TOKENS)}


def test_blocks_that_multiply_in_other_ways_are_refused():
  leaves, x = {"kernel": jnp.ones((2, 2))}, jnp.ones((3, 2))

  def unknown(leaves, x, length, multiply):
    return multiply("weight", x, leaves["kernel"])

  def twice(leaves, x, length, multiply):
    x = multiply("kernel", x, leaves["kernel"])
    return multiply("kernel", x, leaves["kernel"])

  with pytest.raises(ValueError, match="'weight' is none of kernel"):
    taken_apart(unknown, leaves, x, "dots")
  with pytest.raises(ValueError, match="'kernel' is multiplied twice"):
    taken_apart(twice, leaves, x, "dots")


def test_the_installed_jax_keeps_arguments_apart_from_other_residuals():
  def f(a, b, c, d):
    return jnp.exp(a * b) + c + d

  arguments = tuple(map(jnp.float32, (2.0, 3.0, 5.0, 7.0)))
  _, pullback = jax.vjp(f, *arguments)
  before = replace_saved_arguments(pullback, [])
  # a and b are in the derivative, c and d are not.
  assert [bool(jax.tree.leaves(x)) for x in before] == [
    True,
    True,
    False,
    False,
  ]
  residuals, structure = jax.tree.flatten(pullback)
  assert [float(x) for x in residuals] == [pytest.approx(np.exp(6.0))]
  again = jax.tree.unflatten(structure, residuals)
  others = list(map(jnp.float32, (11.0, 13.0, 17.0, 19.0)))
  assert replace_saved_arguments(again, others) == []
  gradients = np.asarray(again(jnp.float32(1.0))) / np.exp(6.0)
  np.testing.assert_allclose(gradients[:2], [13.0, 11.0], rtol=1e-6)


class Missing:
  pass


class Tuple:
  args_res = (1, 2, 3, 4)


class OtherLength:
  def __init__(self):
    self.args_res = [1, 2]


@dataclasses.dataclass(frozen=True)
class Frozen:
  args_res: list


@pytest.mark.parametrize(
  "pullback", [Missing(), Tuple(), OtherLength(), Frozen([])]
)
def test_a_jax_that_keeps_arguments_in_another_way_is_refused(pullback):
  text = f"^JAX {jax.__version__} does not keep .*pinned in constraints/"
  with pytest.raises(RuntimeError, match=text):
    replace_saved_arguments(pullback, [])


def test_splitting_a_layer_notices_a_jax_without_the_attribute(monkeypatch):
  block, leaves, x, _ = drawn()
  vjp = jax.vjp

  def other_vjp(*args):
    y, pullback = vjp(*args)
    return y, jax.tree_util.Partial(pullback)

  monkeypatch.setattr(jax, "vjp", other_vjp)
  with pytest.raises(RuntimeError, match=f"JAX {jax.__version__}"):
    taken_apart(block, leaves, x, "dots")
