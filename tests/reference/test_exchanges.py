"""Numbers worked out by hand, for a codec that rounds to whole numbers.

tests/aggregators holds the fast exchanges to these on values drawn at random.
"""

import numpy as np
import pytest

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


def test_shares_add_up_to_the_mean_and_one_that_is_not_finite_has_none():
  rng = np.random.default_rng(0)
  trees = [{"x": rng.normal(size=[2, 5])} for _ in range(3)]
  trees[1]["x"][0, 3] = np.inf  # It owns a slice and passes its mean on.
  mean, shares = Scattered(whole).average(trees)
  assert shares[1] is trees[1]
  assert np.array_equal(mean["x"], np.round(mean["x"]))
  lost = np.zeros(12)
  lost[4:8] = 1  # The slice of the one that is not finite: its debt is lost.
  total = (shares[0]["x"] + shares[2]["x"]).ravel()
  kept = lost[:10] == 0
  np.testing.assert_allclose(total[kept], 2 * mean["x"].ravel()[kept])


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


def test_a_replica_that_is_not_finite_owes_nothing():
  exchange = ErrorFeedback(Lossy(whole))
  average(exchange, 0.4, 0.2)
  mean, sent = average(exchange, np.nan, 0.9)
  assert mean == 1.0 and np.isnan(sent[0])
  np.testing.assert_allclose(owed(exchange), [0.0, 0.1], atol=1e-12)


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
  exchange, matrix = SharedFactors(1), np.outer([1.0, 2.0], [3.0, 4.0])
  exchange.average([{"w": np.zeros([2, 2])}])
  assert not exchange.right["w"].any()
  mean, _ = exchange.average([{"w": matrix}])
  np.testing.assert_allclose(mean["w"], matrix, rtol=0, atol=1e-14)
