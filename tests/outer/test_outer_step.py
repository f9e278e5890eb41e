"""The contract of an outer step, held by every rule; the rules by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.exchange import mean_of_finite_replicas
from dilocox_jax.distributed.replicas import REPLICA_AXIS, Replicas
from dilocox_jax.optimizers import standard_promotion
from dilocox_jax.outer import rules
from dilocox_jax.outer.drift import axes_of, disagreement, measure_drift
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.rules import ExchangeResult, apply_rule
from dilocox_jax.plan.schedule import methods
from dilocox_jax.trees import Aggregator
from tests.outer.problem import assert_close, assert_equal, nesterov

ROUNDING = 1e-6  # fp32, a few operations on values near 1
RULES = {
  "synchronous": methods.diloco(4),
  "reset": methods.delayed(4, 1, 2, "reset"),
  "continue": methods.delayed(4, 1, 2, "continue"),
  "mix": methods.streaming_diloco(4, 1, 2, 0.25),
  "eager": methods.eager(4),
}
OPTIMIZERS = {
  "sgd": optax.sgd(0.5),
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


def begin(outer, dtype=jnp.float32, num_replicas=3):
  """The first state, and the replicas' parameters [M, ...]."""
  params = {"w": jnp.linspace(-1, 1, 6, dtype=dtype).reshape(3, 2)}
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
    return outer.apply(state._replace(exchange=kept), inner, result, own)

  axes = (outer.axes, 0)
  program = Replicas(len(inner["w"])).map(one, axes, axes)
  return jax.jit(program)(state, inner)


@pytest.mark.parametrize("name", RULES)
def test_nothing_moves_without_progress_and_dtypes_are_kept(name):
  outer = step_of(name)
  given = begin(outer)
  assert_equal(synced(outer, *given), given)
  outer = step_of(name, OPTIMIZERS["adamw"])
  given = begin(outer, jnp.bfloat16)
  found = jax.eval_shape(lambda *x: synced(outer, *x), *given)
  chex.assert_trees_all_equal_shapes_and_dtypes(found, given)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_on_the_mean(name):
  outer = step_of("reset", OPTIMIZERS[name])
  state, copies = begin(outer)
  params = state.params
  memory = outer.optimizer.init(params)
  for seed in range(3):
    inner = scattered(copies, seed)
    gradient = jax.tree.map(lambda o, w: o - w.mean(axis=0), params, inner)
    updates, memory = outer.optimizer.update(gradient, memory, params)
    params = optax.apply_updates(params, updates)
    state, copies = synced(outer, state, inner)
  assert_close((state.params, state.optimizer), (params, memory), ROUNDING)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", RULES)
def test_a_broken_replica_does_not_break_the_others(name, bad):
  outer, others = step_of(name), jnp.asarray([0, 2])
  state, copies = begin(outer)
  inner = scattered(copies)
  after, moved = synced(outer, state, {"w": inner["w"].at[1, 0].set(bad)})
  assert np.all(np.isfinite(moved["w"][others]))
  if outer.is_shared:
    state, _ = begin(outer, num_replicas=2)
    expected, _ = synced(outer, state, {"w": inner["w"][others]})
    assert_close(after.params, expected.params, ROUNDING)


def meet(rule, aggregator, keep_unsent, later):
  """What is measured, measured again after an apply, and the parameters."""
  outer = step_of(rule, optax.sgd(0.5), aggregator, keep_unsent)
  state = outer.init({"w": jnp.zeros(2)})
  inner = {"w": jnp.arange(6.0).reshape(3, 2) - 1}
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
  plain = mean_of_finite_replicas()
  assert_equal(meet(rule, plain, False, 0.3), meet(rule, plain, True, 0.3))


# Numbers in eighths, so that fp32 is exact.
INNER, OLD, NEW, OWN, MEAN, FRESH = map(
  jnp.float32, (5.0, 3.0, 2.5, -0.75, 0.125, 16.0)
)
LATER = OLD - INNER


@pytest.mark.parametrize(
  ("method", "measured", "rejoined"),
  [
    (methods.diloco(), LATER, NEW),
    (methods.dilocox(rule="reset"), LATER, NEW),
    # It leaves out what is in flight, and takes its own part back.
    (methods.dilocox(rule="continue"), LATER - OWN, INNER + NEW - OLD + OWN),
    (methods.delayed(overlap_steps=40), LATER - OWN, INNER + NEW - OLD + OWN),
    # Nothing can be done between a send and an apply on the same step.
    (methods.delayed(overlap_steps=0), LATER, NEW),
    (
      methods.streaming_diloco(mixing_alpha=0.25),
      LATER,
      0.25 * INNER + 0.75 * NEW,
    ),
    (methods.eager(), LATER, NEW),
  ],
)
def test_every_method_has_its_rule(method, measured, rejoined):
  rule = apply_rule(method, REPLICA_AXIS)
  assert rule.measure(OLD, OWN, INNER) == measured
  assert rule.rejoin(INNER, OLD, NEW, OWN) == rejoined
  assert rule.is_shared == (method.rule != "eager")
  if rule.is_shared:
    assert rule.gradient(ExchangeResult(MEAN, OWN, OWN), FRESH) == MEAN


def test_eager_replaces_its_own_old_part_by_its_fresh_one():
  own = np.asarray([1.0, 3.0, 8.0, 4.0], np.float32)
  fresh = np.asarray([2.0, -1.0, 0.0, 4.0], np.float32)
  rule = rules.eager_rule(methods.eager(), REPLICA_AXIS)

  def gradient(old, new):
    return rule.gradient(ExchangeResult(own.mean(), old, old), new)

  seen = jax.vmap(gradient, axis_name=REPLICA_AXIS)(own, fresh)
  others = own.sum() - own
  np.testing.assert_array_equal(seen, (others + fresh) / 4)


def measured(own, mean=None, layout="stacked"):
  """The drift of pseudo-gradients [M, n], and what it says."""
  rows = {"w": own[:, 1:], "b": own[:, 0]}
  mean = own.mean(axis=0) if mean is None else mean
  of_all = {"w": mean[..., 1:], "b": mean[..., 0]}
  is_shared = mean.ndim == 1

  def one(mean, own):
    return measure_drift(ExchangeResult(mean, own, own))

  axes = (None if is_shared else 0, 0)
  over = Replicas(len(own), layout).map(one, axes, axes_of(is_shared))
  *sums, _ = jax.jit(over)(of_all, rows)
  return disagreement(*sums)


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_drift_is_that_of_all_pairs_weighted_by_their_norms(
  num_replicas, layout, x64
):
  rng = np.random.default_rng(num_replicas)
  own = (
    rng.normal(size=[num_replicas, 7]) * np.arange(1, num_replicas + 1)[:, None]
  )
  dots, norms = own @ own.T, np.linalg.norm(own, axis=1)
  weights = np.outer(norms, norms)
  off = ~np.eye(num_replicas, dtype=bool)
  seen = measured(own, layout=layout)
  assert seen.cosine == pytest.approx(dots[off].sum() / weights[off].sum())
  apart = np.square(own - own.mean(axis=0)).sum(axis=1)
  assert seen.disagreement == pytest.approx(np.sqrt(apart.mean()))
  norm = np.linalg.norm(own.mean(axis=0))
  assert seen.pseudo_gradient_norm == pytest.approx(norm)


@pytest.mark.parametrize(
  ("own", "mean", "cosine", "disagreement", "norm"),
  [
    ([[0.5, 0.5], [0.5, 0.5]], None, 1.0, 0.0, 0.5**0.5),
    ([[2.0, 0.0], [-2.0, 0.0]], None, -1.0, 2.0, 0.0),
    ([[3.0, 4.0]], None, None, 0.0, 5.0),
    ([[3.0, 4.0], [0.0, 0.0]], None, None, 2.5, 2.5),
    # Replicas with means of their own have no common cosine.
    ([[3.0, 0.0], [0.0, 1.0]], [[4.0, 0.0], [0.0, 2.0]], None, 1.0, 10**0.5),
  ],
)
def test_drift_of_a_few_replicas_by_hand(own, mean, cosine, disagreement, norm):
  as_array = lambda x: None if x is None else np.asarray(x, np.float32)  # noqa: E731
  seen = measured(as_array(own), as_array(mean))
  if cosine is None:
    assert seen.cosine is None
  else:
    assert seen.cosine == pytest.approx(cosine)
  assert seen.disagreement == pytest.approx(disagreement)
  assert seen.pseudo_gradient_norm == pytest.approx(norm)


def test_squared_norms_are_those_of_any_precision():
  halves = {
    "a": jnp.full(4, 256, jnp.float16),  # fp16 ends at 65504.
    "b": jnp.bfloat16(-3.0),
  }
  result = ExchangeResult(halves, halves, halves)
  assert float(measure_drift(result).own_squared) == 4 * 65536 + 9
