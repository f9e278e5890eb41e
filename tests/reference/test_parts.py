"""Exchanges by hand, and optimizers beside optax's.

tests/aggregators holds the fast exchanges to these on values drawn at random.
"""

import jax
import numpy as np
import optax
import optax.contrib
import pytest

from dilocox_jax.reference import optimizers
from dilocox_jax.reference.exchanges import (
  ErrorFeedback,
  Lossy,
  Mean,
  Scattered,
  SharedFactors,
)


def whole(name, leaf):
  del name
  return np.round(leaf)


def average(exchange, *values):
  """The mean, and what each replica sent, of one value a replica."""
  mean, sent = exchange.average([{"x": np.array([v])} for v in values])
  return mean["x"][0], [own["x"][0] for own in sent]


def owed(exchange):
  return [residual["x"][0] for residual in exchange.residuals]


def test_the_mean_is_over_those_that_are_finite():
  assert average(Mean(), 1.0, 5.0, 0.0)[0] == 2.0
  assert average(Mean(), 1.0, np.nan, 5.0)[0] == 3.0
  assert average(Mean(), np.inf, np.nan)[0] == 0.0


def test_a_lossy_mean_is_that_of_what_is_received():
  assert average(Lossy(whole), 0.4, 0.7) == (0.5, [0.0, 1.0])
  assert average(Lossy(whole, of_means=whole), 1.4, 2.7, 3.0) == (
    2.0,
    [1.0, 3.0, 3.0],
  )


def test_the_owner_of_a_slice_keeps_what_rounding_its_mean_lost():
  # Of one value, the first replica owns it, and the second an empty slice.
  exchange = Scattered(whole)
  mean, (first, second) = average(exchange, 0.4, 0.8)
  assert (mean, second) == (1.0, 1.0) and first == pytest.approx(1.0)
  owing = ErrorFeedback(exchange)
  average(owing, 0.4, 0.8)
  np.testing.assert_allclose(owed(owing), [-0.6, -0.2], atol=1e-12)
  # 0.4 - 0.6 is exact, 0.8 - 0.2 is received as 1: the mean is 0.4.
  mean, _ = average(owing, 0.4, 0.8)
  assert mean == 0.0
  np.testing.assert_allclose(owed(owing), [0.8, -0.4], atol=1e-12)


@pytest.mark.parametrize(
  ("against", "residuals"),
  # Sent are 0 and 1, their mean is 0.5.
  [("own", [0.4, -0.3]), ("mean", [-0.1, 0.2])],
)
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_what_is_owed_is_measured_as_asked_for(against, residuals, decay):
  exchange = ErrorFeedback(Lossy(whole), decay, against)
  assert average(exchange, 0.4, 0.7)[0] == 0.5
  expected = decay * np.array(residuals)
  np.testing.assert_allclose(owed(exchange), expected, atol=1e-15)


def test_shared_factors_find_a_mean_of_low_rank_whatever_the_replicas_have():
  rng = np.random.default_rng(0)
  thin = rng.normal(size=[2, 6, 2]) @ rng.normal(size=[2, 2, 5])
  noise = rng.normal(size=[2, 6, 5])
  vector = rng.normal(size=[3])
  trees = [
    {"stack": thin + noise, "v": vector},
    {"stack": thin - noise, "v": 3 * vector},
  ]
  exchange = SharedFactors(2)
  for _ in range(2):
    mean, sent = exchange.average(trees)
    np.testing.assert_allclose(mean["stack"], thin, rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean["v"], 2 * vector, rtol=0, atol=1e-15)
    each = [own["stack"] for own in sent]
    np.testing.assert_allclose(sum(each) / 2, thin, rtol=0, atol=1e-12)
    assert np.abs(each[0] - trees[0]["stack"]).max() > 0.1


def test_a_direction_that_was_lost_comes_back():
  exchange = SharedFactors(1)
  matrix = np.outer([1.0, 2.0], [3.0, 4.0])
  exchange.average([{"w": np.zeros([2, 2])}])
  assert not exchange.right["w"].any()
  mean, _ = exchange.average([{"w": matrix}])
  np.testing.assert_allclose(mean["w"], matrix, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
  ("ours", "theirs"),
  [
    (optimizers.Sgd(0.1), optax.sgd(0.1)),
    (optimizers.Sgd(0.1, 0.9), optax.sgd(0.1, 0.9)),
    (optimizers.Sgd(0.1, 0.9, True), optax.sgd(0.1, 0.9, nesterov=True)),
    (
      optimizers.AdamW(0.1, 0.8, 0.95, 1e-3, 0.2),
      optax.adamw(0.1, 0.8, 0.95, 1e-3, weight_decay=0.2),
    ),
    (
      optimizers.Sgd(lambda count: 0.1 / (count + 1)),
      optax.sgd(lambda count: 0.1 / (count + 1)),
    ),
    (
      optimizers.AdamW(lambda count: 0.1 / (count + 1)),
      optax.adamw(lambda count: 0.1 / (count + 1)),
    ),
    (
      optimizers.AdamW(0.1, 0.8, 0.95, nesterov=True),
      optax.adamw(0.1, 0.8, 0.95, nesterov=True),
    ),
    (
      optimizers.Muon(0.1, ["b"], optimizers.AdamW(0.1, nesterov=True), 0.9),
      optax.contrib.muon(
        0.1, beta=0.9, adam_weight_decay=1e-4, consistent_rms=0.2
      ),
    ),
  ],
)
def test_optimizers_compute_what_optax_computes(ours, theirs):
  rng = np.random.default_rng(0)
  params = {"a": rng.normal(size=[4]), "b": rng.normal(size=[2, 3])}
  # optax mixes its integer count with floats.
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    reference = jax.tree.map(jax.numpy.asarray, params)
    state = theirs.init(reference)
    for _ in range(6):
      grads = {name: rng.normal(size=params[name].shape) for name in params}
      params = ours.step(params, grads)
      updates, state = theirs.update(grads, state, reference)
      reference = optax.apply_updates(reference, updates)
      got = jax.tree.leaves(reference)
      for x, y in zip(jax.tree.leaves(params), got, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-14)
