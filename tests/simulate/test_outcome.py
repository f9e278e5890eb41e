import numpy as np
import pytest

from dilocox_jax.simulate.outcome import Outcome


def outcome(**changes):
  fields = {
    "busy_until_s": np.array([9.0, 10.0]),
    "end_s": np.array([12.0, 10.0]),
    "compute_s": np.array([8.0, 4.0]),
    "codec_s": np.zeros(2),
    "exposed_s": np.array([1.0, 6.0]),
    "exchange_s": np.array([4.0, 5.0]),
    "num_steps": 10,
    "sent_bytes": 100,
  }
  return Outcome(**(fields | changes))


def test_a_run_lasts_until_its_last_replica_is_done():
  assert outcome().total_s == 12.0
  assert outcome().now_s == 10.0


def test_utilisation_is_the_share_of_the_run_spent_on_steps():
  assert outcome().utilisation == pytest.approx(6.0 / 12.0)
  nothing = np.zeros(2)
  assert outcome(end_s=nothing, compute_s=nothing).utilisation == 1.0


def test_what_was_not_waited_for_was_hidden():
  np.testing.assert_array_equal(outcome().hidden_s, [3.0, 0.0])
