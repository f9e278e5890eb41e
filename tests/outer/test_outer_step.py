"""The contract of an outer step, held by every rule and optimizer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.mean import (
  mean_of_finite_replicas,
)
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.optimizers import standard_promotion
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.plan.schedule import methods
from dilocox_jax.pytypes import Aggregator
from tests.outer.problem import assert_close, assert_equal, nesterov

ROUNDING = 1e-6  # fp32, a few operations on values near 1
NUM_REPLICAS = 3
RULES = {
  "synchronous": methods.diloco(4),
  "reset": methods.delayed(4, 1, 2, "reset"),
  "continue": methods.delayed(4, 1, 2, "continue"),
  "mix": methods.streaming_diloco(4, 1, 2, 0.5),
  "eager": methods.eager(4),
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
SENT = 0.25  # Exact in binary, as are the values: nothing is rounded.


def lossy():
  """Sends a quarter of every value."""
  plain = mean_of_finite_replicas()

  def average(values, state, params):
    del params
    sent = jax.tree.map(lambda x: SENT * x, values)
    mean, state = plain.update(sent, state)
    return mean, sent, state

  return Aggregator(plain.init, average)


def step_of(rule, optimizer=None, aggregator=None, keep_unsent=False):
  aggregator = aggregator or mean_of_finite_replicas()
  return OuterStep(
    RULES[rule],
    standard_promotion(optimizer or nesterov()),
    aggregator._replace(keep_unsent=keep_unsent),
  )


def start(dtype=jnp.float32):
  return {"w": jnp.linspace(-1, 1, 6, dtype=dtype).reshape(3, 2)}


def begin(outer, params, num_replicas=NUM_REPLICAS):
  """The first state, and the replicas' parameters [M, ...]."""
  copies = jax.tree.map(lambda x: jnp.stack([x] * num_replicas), params)
  state = outer.init(params)
  if not outer.is_shared:
    state = jax.vmap(outer.init)(copies)
  return state, copies


def scattered(params, seed=0):
  """Parameters that every replica has moved in a direction of its own."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: x + jnp.asarray(rng.normal(size=x.shape), x.dtype), params
  )


def synced(outer, state, inner, later=0.0):
  """Measures, exchanges, goes on for a while and applies: (state, inner)."""

  def one(state, inner):
    own = outer.measure(state, (), inner)
    result, kept = outer.exchange(state, own)
    inner = jax.tree.map(lambda x: x + later, inner)
    state = state._replace(exchange=kept)
    return outer.apply(state, inner, result, own)

  count = len(jax.tree.leaves(inner)[0])
  axes: FragmentState = outer.axes
  return jax.jit(Replicas(count).map(one, (axes, 0), (axes, 0)))(state, inner)


@pytest.mark.parametrize("name", RULES)
def test_a_fresh_state_without_progress_stays(name):
  outer = step_of(name)
  given = begin(outer, start())
  assert_equal(synced(outer, *given), given)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", RULES)
def test_dtypes_are_kept(name, dtype):
  outer = step_of(name, OPTIMIZERS["adamw"])
  given = begin(outer, start(dtype))
  found = jax.eval_shape(lambda *x: synced(outer, *x), *given)
  chex.assert_trees_all_equal_shapes_and_dtypes(found, given)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_on_the_mean(name):
  outer, params = step_of("reset", OPTIMIZERS[name]), start()
  state, copies = begin(outer, params)
  memory = outer.optimizer.init(params)
  for seed in range(3):
    inner = scattered(copies, seed)
    gradient = jax.tree.map(lambda o, w: o - w.mean(axis=0), params, inner)
    updates, memory = outer.optimizer.update(gradient, memory, params)
    params = optax.apply_updates(params, updates)
    state, copies = synced(outer, state, inner)
  assert_close((state.params, state.optimizer), (params, memory), ROUNDING)


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_replicas_does_not_matter(name):
  outer = step_of(name)
  state, copies = begin(outer, start())
  inner, order = scattered(copies), np.asarray([2, 0, 1])
  permute = lambda tree: jax.tree.map(lambda leaf: leaf[order], tree)  # noqa: E731
  once, moved = synced(outer, state, inner)
  again, moved_again = synced(outer, state, permute(inner))
  assert_close(moved_again, permute(moved), ROUNDING)
  expected = once.params if outer.is_shared else permute(once.params)
  assert_close(again.params, expected, ROUNDING)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", RULES)
def test_a_broken_replica_does_not_break_the_others(name, bad):
  outer, others = step_of(name), jnp.asarray([0, 2])
  state, copies = begin(outer, start())
  inner = scattered(copies)
  broken = {"w": inner["w"].at[1, 0].set(bad)}
  after, moved = synced(outer, state, broken)
  assert np.all(np.isfinite(moved["w"][others]))
  if outer.is_shared:
    state, _ = begin(outer, start(), 2)
    expected, _ = synced(outer, state, {"w": inner["w"][others]})
    assert_close(after.params, expected.params, ROUNDING)


def meet(rule, aggregator, keep_unsent, later):
  """What is measured, measured again after an apply, and the parameters."""
  outer = step_of(rule, optax.sgd(0.5), aggregator, keep_unsent)
  state = outer.init({"w": jnp.zeros(2)})
  inner = {"w": jnp.arange(2.0 * NUM_REPLICAS).reshape(NUM_REPLICAS, 2) - 1}
  after, moved = synced(outer, state, inner, later)
  again = jax.vmap(lambda w: outer.measure(after, (), w))(moved)
  return -inner["w"], again["w"], after.params["w"]


@pytest.mark.parametrize("rule", ["synchronous", "continue"])
def test_progress_that_was_not_sent_is_measured_again_or_lost(rule):
  later = 8.0 if rule == "continue" else 0.0
  own, again, params = meet(rule, lossy(), True, later)
  # Progress made since the send has the other sign of a pseudo-gradient.
  np.testing.assert_array_equal(again, own - SENT * own - later)
  _, lost, expected = meet(rule, lossy(), False, 0.0)
  np.testing.assert_array_equal(lost, jnp.zeros_like(lost))
  np.testing.assert_array_equal(params, expected)


@pytest.mark.parametrize("rule", ["synchronous", "continue"])
def test_where_everything_is_sent_keeping_the_unsent_changes_no_bit(rule):
  plain, kept = (
    meet(rule, mean_of_finite_replicas(), keeps, 0.3) for keeps in (False, True)
  )
  assert_equal(plain, kept)
