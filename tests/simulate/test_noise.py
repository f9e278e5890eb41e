"""Jitter with mean 1, the same for everyone who asks in the same order."""

import json

import numpy as np

from dilocox_jax.simulate.noise import Noise
from dilocox_jax.simulate.sites import Jitter


def test_without_jitter_nothing_varies():
  noise = Noise(Jitter(), 3)
  np.testing.assert_array_equal(noise.steps(7), [7, 7, 7])
  np.testing.assert_array_equal(noise.transfers(4), np.ones((4, 3)))


def test_factors_have_mean_one_and_the_sigma_that_was_asked_for():
  drawn = Noise(Jitter(0.0, 0.5), 4).transfers(50_000)
  assert abs(drawn.mean() - 1) < 0.01
  assert abs(np.log(drawn).std() - 0.5) < 0.01
  steps = Noise(Jitter(0.5, 0.0), 10_000).steps(20)
  assert abs(steps.mean() - 20) < 0.1
  assert abs(steps.var() - 20 * (np.exp(0.25) - 1)) < 0.5


def test_steps_and_transfers_do_not_disturb_each_other():
  one, other = (Noise(Jitter(0.3, 0.3, seed=5), 2) for _ in range(2))
  one.steps(3)
  np.testing.assert_array_equal(one.transfers(2), other.transfers(2))
  assert not np.array_equal(
    one.transfers(2), Noise(Jitter(0.3, 0.3, seed=6), 2).transfers(2)
  )


def test_it_goes_on_from_where_it_was():
  noise = Noise(Jitter(0.3, 0.3), 2)
  noise.steps(3)
  noise.transfers(1)
  kept = json.loads(json.dumps(noise.get_state()))
  expected = noise.steps(4), noise.transfers(2)
  again = Noise(Jitter(0.3, 0.3), 2)
  again.set_state(kept)
  np.testing.assert_array_equal(again.steps(4), expected[0])
  np.testing.assert_array_equal(again.transfers(2), expected[1])
