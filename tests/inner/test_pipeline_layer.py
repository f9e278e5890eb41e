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
from dilocox_jax.inner.pipeline_stage import TickNumbers, get, put, when
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.choices import REMATS
from dilocox_jax.trees import leaves_by_path
from tests.inner.pipelines import SMALL
from tests.products import product_flops

# Sizes of which no two are equal, so that a shape says what it is.
SHAPE = dataclasses.replace(SMALL, model_dim=10, head_dim=6)
LENGTH, TOKENS = 3, 21


def abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def drawn(dtype=jnp.float32):
  """A block, its parameters, the stream and a gradient of its output."""
  model = build_model(SHAPE, dtype=dtype)
  params = jax.eval_shape(model.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  leaves = jax.tree.map(
    lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape[1:]), x.dtype),
    params["blocks"],
  )
  drawn = rng.normal(size=(2, TOKENS, SHAPE.model_dim))
  return model.block, leaves, *jnp.asarray(drawn, dtype)


def taken_apart(block, leaves, x, remat="dots"):
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

  found = jax.jit(steps)(leaves, x, gradient)
  expected = jax.jit(whole)(leaves, x, gradient)
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_parameter_is_kept_and_each_way_keeps_less(dtype):
  block, leaves, x, _ = drawn(dtype)
  ways = [taken_apart(block, leaves, x, remat) for remat in REMATS]
  weights = {leaf.shape for leaf in leaves_by_path(leaves).values()}
  assert not weights & {kept.shape for way in ways for kept in way.saved}
  sizes = [sum(kept.size for kept in way.saved) for way in ways]
  assert sizes[0] > sizes[1] > sizes[2] == x.size
  # What queries, keys and values are made of, what the two branches of the
  # MLP are, and one each for the ways out of attention and MLP.
  pairs = ways[1].pairs
  assert (len(pairs["inputs"]), len(pairs["outputs"])) == (4, 7)
  # Weight gradients of narrow factors are sums in single precision.
  ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), pairs)
  gradients = ways[1].weight_gradients(ones).values()
  assert {x.dtype for x in gradients} == {jnp.dtype("float32")}
  assert {float(x.max()) for x in gradients} == {float(TOKENS)}


def flops(step, *args, **options):
  text = jax.jit(step).lower(*args).compile().as_text()
  return product_flops(text, **options)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_each_product_runs_in_its_step_and_nowhere_else(remat):
  block, leaves, x, _ = drawn()
  apart = taken_apart(block, leaves, x, remat)
  leaves = leaves_by_path(leaves)
  y, saved = jax.eval_shape(apart.forward, leaves, x)
  sizes = [leaf.size for path, leaf in leaves.items() if "kernel" in path]
  weights = 2 * TOKENS * sum(sizes)
  attention = 4 * TOKENS * LENGTH * SHAPE.num_heads * SHAPE.head_width
  assert flops(apart.forward, leaves, x) == weights + attention
  inputs = flops(apart.input_gradient, leaves, saved, y)
  assert inputs == weights + 2 * attention
  assert flops(apart.weight_gradients, apart.pairs) == weights


def test_blocks_that_multiply_in_other_ways_are_refused():
  leaves, x = {"kernel": jnp.ones((2, 2))}, jnp.ones((3, 2))

  def unknown(leaves, x, length, multiply):
    return multiply("weight", x, leaves["kernel"])

  def twice(leaves, x, length, multiply):
    x = multiply("kernel", x, leaves["kernel"])
    return multiply("kernel", x, leaves["kernel"])

  with pytest.raises(ValueError, match="'weight' is none of kernel"):
    taken_apart(unknown, leaves, x)
  with pytest.raises(ValueError, match="'kernel' is multiplied twice"):
    taken_apart(twice, leaves, x)


def test_the_installed_jax_keeps_arguments_apart_from_other_residuals():
  def f(a, b, c, d):
    return jnp.exp(a * b) + c + d

  arguments = tuple(map(jnp.float32, (2.0, 3.0, 5.0, 7.0)))
  _, pullback = jax.vjp(f, *arguments)
  before = replace_saved_arguments(pullback, [])
  # a and b are in the derivative, c and d are not.
  is_kept = [bool(jax.tree.leaves(x)) for x in before]
  assert is_kept == [True, True, False, False]
  residuals, structure = jax.tree.flatten(pullback)
  assert [float(x) for x in residuals] == [pytest.approx(np.exp(6.0))]
  again = jax.tree.unflatten(structure, residuals)
  others = list(map(jnp.float32, (11.0, 13.0, 17.0, 19.0)))
  assert replace_saved_arguments(again, others) == []
  gradients = np.asarray(again(jnp.float32(1.0))) / np.exp(6.0)
  np.testing.assert_allclose(gradients[:2], [13.0, 11.0], rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Pullback:
  args_res: list | tuple


def test_a_jax_that_keeps_arguments_in_another_way_is_refused(monkeypatch):
  text = f"^JAX {jax.__version__} does not keep .*pinned in constraints/"
  for pullback in (object(), Pullback((1, 2, 3, 4)), Pullback([1, 2])):
    with pytest.raises(RuntimeError, match=text):
      replace_saved_arguments(pullback, [])
  with pytest.raises(RuntimeError, match=text):
    replace_saved_arguments(Pullback([1, 2, 3, 4]), [])
  block, leaves, x, _ = drawn()
  vjp = jax.vjp

  def other_vjp(*args):
    y, pullback = vjp(*args)
    return y, jax.tree_util.Partial(pullback)

  monkeypatch.setattr(jax, "vjp", other_vjp)
  with pytest.raises(RuntimeError, match=text):
    taken_apart(block, leaves, x)


def tick(number=0):
  return TickNumbers(*[jnp.int32(number)] * len(TickNumbers._fields))


@pytest.mark.parametrize("num_slots", [1, 2])
def test_an_action_runs_if_its_condition_holds_and_else_multiplies_nothing(
  num_slots,
):
  def run(condition, factors, kernel, at, total):
    def action(at, total):
      return total + get(factors, at.pair_slot) @ kernel

    return when(condition, "action", action, at, total)

  total = jnp.full((3, 4), 2.0)
  arguments = jnp.ones((num_slots, 3, 5)), jnp.ones((5, 4)), tick(), total
  for condition, expected in ((True, 7), (False, 2)):
    found = jax.jit(run)(jnp.bool_(condition), *arguments)
    assert np.all(found == expected)
  # The product needs nothing that the loop changes, and yet stays inside it.
  for rounds in (0, 1):
    found = flops(
      run, jnp.bool_(True), *arguments, rounds=lambda *_, n=rounds: n
    )
    assert found == rounds * 2 * 3 * 5 * 4


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_put_somewhere_is_there_and_nothing_else_changes(count):
  rng = np.random.default_rng(0)
  tree = {"a": rng.normal(size=(4, 3, 2)), "b": rng.normal(size=(4, 3, 2, 5))}
  tree = jax.tree.map(jnp.float32, tree)
  place = tuple(map(jnp.int32, (2, 1)[:count]))
  new = jax.tree.map(lambda x: -x[place], tree)
  changed = jax.jit(put)(tree, new, *place)
  for name in tree:
    expected = np.array(tree[name])
    expected[place] *= -1
    np.testing.assert_array_equal(changed[name], expected)
    np.testing.assert_array_equal(get(changed, *place)[name], new[name])
