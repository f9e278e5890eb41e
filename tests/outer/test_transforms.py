"""The contract of an outer transform, held by every rule and optimizer."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.optimizers import standard_promotion
from dilocox_jax.outer.programs import RoundPrograms, state_axes
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  assert_close,
  assert_equal,
  nesterov,
  outer_transform,
)

ROUNDING = 1e-6  # fp32, a few operations on values near 1
NUM_REPLICAS = 3
LAYERS = 4

RULES = {
  "synchronous": methods.delayed(4, 3, 0, "reset"),
  "reset": methods.delayed(4, 3, 2, "reset"),
  "continue": methods.delayed(4, 3, 2, "continue"),
  "continue_far": methods.delayed(4, 3, 6, "continue"),
  "mix": methods.streaming_diloco(4, 3, 2, 0.5),
  "eager": methods.eager(4, 3),
}
OPTIMIZERS = {
  "sgd": optax.sgd(0.5),
  "nesterov": nesterov(),
  "adam": optax.adam(0.1),
  "adamw": optax.adamw(0.1, weight_decay=0.1),
  "clipped": optax.chain(
    optax.clip_by_global_norm(0.1), optax.adam(lambda count: 1 / (1 + count))
  ),
}


@pytest.fixture(params=["with_jit", "without_jit"])
def variant(request):
  """The variants of chex, for tests that are functions."""
  fake = request.param == "without_jit"
  with chex.fake_jit() if fake else contextlib.nullcontext():
    yield


def start(dtype=jnp.float32):
  params = make_problem(5, 1, 1, LAYERS, 2, 3)[0]
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), params)


def begin(outer: OuterTransform, params, num_replicas=NUM_REPLICAS):
  """The first outer state, and the replicas' parameters [M, ...]."""

  def inner_step(*args):
    raise AssertionError("an outer transform needs no inner step")

  replicas = Replicas(num_replicas)
  state = RoundPrograms(outer, inner_step, replicas).init(params, ())
  return state.outer, state.replica.params


def scattered(params, num_replicas=NUM_REPLICAS, seed=0):
  """Parameters that every replica has moved in a direction of its own."""
  rng = np.random.default_rng(seed)

  def scatter(leaf):
    moves = rng.normal(size=(num_replicas, *leaf.shape))
    return leaf[None] + jnp.asarray(moves, leaf.dtype)

  return jax.tree.map(scatter, params)


def sync(outer: OuterTransform, num_replicas=NUM_REPLICAS, is_first=False):
  """Measures, sends, exchanges and applies: (state, inner, fragment)."""

  def one(state, inner, number):
    fragment, slot = 0 if is_first else number, jnp.int32(0)
    fresh = outer.measure(state, inner, fragment, None)
    state = outer.send(state, fragment, slot, fresh)
    own = outer.in_flight(state, fragment, slot) if outer.depth else fresh
    state, arrival = outer.exchange(state, fragment, own)
    state, inner, _ = outer.apply(state, inner, fragment, arrival, fresh)
    return state, inner

  axes = state_axes(outer).outer
  over = Replicas(num_replicas).map(one, (axes, 0, None), (axes, 0))
  return jax.jit(over)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_fresh_state_without_progress_stays(name, is_first, variant):
  outer = outer_transform(RULES[name], LAYERS, nesterov())
  state, inner = begin(outer, start())
  after, moved = sync(outer, is_first=is_first)(state, inner, jnp.int32(2))
  assert_equal(after, state)
  assert_equal(moved, inner)


@pytest.mark.parametrize("name", ["adam", "clipped"])
def test_no_progress_moves_no_optimizer_without_decay(name, variant):
  optimizer = standard_promotion(OPTIMIZERS[name])
  outer = outer_transform(RULES["continue"], LAYERS, optimizer)
  state, inner = begin(outer, start())
  after, moved = sync(outer)(state, inner, jnp.int32(1))
  assert_equal(after.params, state.params)
  assert_equal(moved, inner)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", RULES)
def test_dtypes_are_kept(name, dtype):
  optimizer = standard_promotion(OPTIMIZERS["adamw"])
  outer = outer_transform(RULES[name], LAYERS, optimizer)
  state, inner = begin(outer, start(dtype))
  after, moved = jax.eval_shape(sync(outer), state, inner, jnp.int32(1))
  chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
  chex.assert_trees_all_equal_shapes_and_dtypes(moved, inner)
  assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(moved))


@pytest.mark.parametrize("name", RULES)
def test_another_fragment_needs_no_new_program(name):
  outer = outer_transform(RULES[name], LAYERS, nesterov())
  params = start()
  state, _ = begin(outer, params)
  inner = Replicas(NUM_REPLICAS).place(scattered(params), 0)
  program = sync(outer)
  for number in (1, 2, 2):
    state, inner = program(state, inner, jnp.int32(number))
  assert program._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def fragment_of(outer, params, number):
  return outer.partition.take(params, jnp.int32(number) if number else 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_on_its_fragment_as_if_alone(name, variant):
  optimizer = standard_promotion(OPTIMIZERS[name])
  outer = outer_transform(RULES["reset"], LAYERS, optimizer)
  params = start()
  state, _ = begin(outer, params)
  part = fragment_of(outer, params, 2)
  memory = optimizer.init(part)
  program = sync(outer)
  for seed in range(3):
    inner = scattered(state.params, seed=seed)
    mean = jax.tree.map(
      lambda o, w: jnp.mean(o[None] - w, axis=0), state.params, inner
    )
    gradient = fragment_of(outer, mean, 2)
    updates, memory = optimizer.update(gradient, memory, part)
    part = optax.apply_updates(part, updates)
    state, _ = program(state, inner, jnp.int32(2))
  assert_close(fragment_of(outer, state.params, 2), part, ROUNDING)
  assert_close(state.optimizer.get(jnp.int32(2)), memory, ROUNDING)


@pytest.mark.parametrize("name", ["synchronous", "continue", "mix", "eager"])
def test_an_apply_touches_its_own_fragment_alone(name, variant):
  optimizer = standard_promotion(OPTIMIZERS["adamw"])
  outer = outer_transform(RULES[name], LAYERS, optimizer)
  params = start()
  state, _ = begin(outer, params)
  inner = scattered(params)
  # A first apply elsewhere leaves momentum and counts that could be lost.
  state, inner = sync(outer, is_first=True)(state, inner, jnp.int32(0))
  after, moved = sync(outer)(state, inner, jnp.int32(1))
  axis = state_axes(outer).outer.params

  def of(tree, number, mapped=axis):
    take = lambda x: fragment_of(outer, x, number)  # noqa: E731
    return take(tree) if mapped is None else jax.vmap(take)(tree)

  for number in (0, 2):
    assert_equal(of(after.params, number), of(state.params, number))
    assert_equal(of(moved, number, 0), of(inner, number, 0))
  assert_equal(after.optimizer.first, state.optimizer.first)
  counts = optax.tree_utils.tree_get(after.optimizer.layers, "count")
  before = optax.tree_utils.tree_get(after.optimizer.first, "count")
  np.testing.assert_array_equal(before, jnp.ones_like(before))
  np.testing.assert_array_equal(counts[..., 0], jnp.ones_like(before))
  np.testing.assert_array_equal(counts[..., 1], jnp.zeros_like(before))
  for tree in (of(after.params, 1), of(moved, 1, 0)):
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))
  moved_outer, before = of(after.params, 1), of(state.params, 1)
  assert not np.array_equal(moved_outer["blocks"]["w"], before["blocks"]["w"])


@pytest.mark.parametrize("name", RULES)
def test_measuring_and_sending_leave_the_outer_parameters(name, variant):
  outer = outer_transform(RULES[name], LAYERS, nesterov())
  params = start()
  state = outer.init(params)
  inner = jax.tree.map(lambda leaf: leaf + 1, params)
  own = outer.measure(state, inner, jnp.int32(1), None)
  after = outer.send(state, jnp.int32(1), jnp.int32(0), own)
  assert_equal((after.params, after.optimizer), (state.params, state.optimizer))
  if after.in_flight and state.in_flight:
    sent = outer.in_flight(after, jnp.int32(1), jnp.int32(0))
    assert_equal(sent, own)
    assert_equal(after.in_flight.first, state.in_flight.first)


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_replicas_does_not_matter(name, variant):
  outer = outer_transform(RULES[name], LAYERS, nesterov())
  params = start()
  state, _ = begin(outer, params)
  inner = scattered(params)
  order = np.asarray([2, 0, 1])
  permute = lambda tree: jax.tree.map(lambda leaf: leaf[order], tree)  # noqa: E731
  program = sync(outer)
  once, moved = program(state, inner, jnp.int32(1))
  again, moved_again = program(state, permute(inner), jnp.int32(1))
  assert_close(moved_again, permute(moved), ROUNDING)
  expected = once.params
  if outer.rule.is_per_replica:
    expected = permute(expected)
  assert_close(again.params, expected, ROUNDING)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", RULES)
def test_a_broken_replica_does_not_break_the_others(name, bad, variant):
  outer = outer_transform(RULES[name], LAYERS, nesterov())
  params = start()
  state, _ = begin(outer, params)
  inner = scattered(params)
  broken = {**inner, "embed": inner["embed"].at[1, 0].set(bad)}
  after, moved = sync(outer, is_first=True)(state, broken, jnp.int32(0))
  for leaf in jax.tree.leaves((moved, after.in_flight)):
    assert np.all(np.isfinite(leaf[jnp.asarray([0, 2])]))
  if outer.rule.is_per_replica:
    return
  others = jax.tree.map(lambda leaf: leaf[jnp.asarray([0, 2])], inner)
  state, _ = begin(outer, params, 2)
  expected, _ = sync(outer, 2, is_first=True)(state, others, jnp.int32(0))
  assert_close(after.params, expected.params, ROUNDING)
