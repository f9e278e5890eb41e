"""Messages of a replica in plain numpy: their mean, and what is held back."""

from typing import NamedTuple

import numpy as np
import pytest

from dilocox_jax.optimizers import learning_rate_schedule
from dilocox_jax.reference.codecs import Float32, Signs
from dilocox_jax.reference.messages import Messages
from dilocox_jax.reference.optimizers import warmup_cosine

LIKE = {"w": np.zeros(4, np.float32)}
DELTA = {"w": np.array([1, -2, 3, 0], np.float32)}


class Result(NamedTuple):
  """What `Mailbox.exchange` says of a message."""

  is_own_listed: bool = True
  is_superseded: bool = False
  left_out: dict = {}


def test_the_mean_has_the_weights_of_the_manifest():
  messages = Messages(Float32(), LIKE)
  arrays, is_finite = messages.encode(DELTA)
  twice = [2 * array for array in arrays]
  mean = messages.mean([("oslo", 3.0, arrays), ("rome", 1.0, twice)])
  assert is_finite
  np.testing.assert_allclose(mean["w"], 1.25 * DELTA["w"])
  assert not messages.mean([])["w"].any()
  assert not messages.mean([("oslo", 0.0, arrays)])["w"].any()


@pytest.mark.parametrize(
  ("result", "expected"),
  [
    # All values have the size 1.5 when they are received.
    (Result(), [-0.5, -0.5, 1.5, -1.5]),
    (Result(is_own_listed=False), [1, -2, 3, 0]),
    (Result(is_superseded=True), [0, 0, 0, 0]),
    (Result(is_own_listed=False, left_out={"oslo": "too large"}), [0] * 4),
    (Result(left_out={"rome": "too large"}), [-0.5, -0.5, 1.5, -1.5]),
  ],
)
def test_what_a_message_has_lost_is_sent_with_the_next_one(result, expected):
  messages = Messages(Signs(), LIKE, feedback=0.5)
  messages.encode(DELTA)
  messages.settle(result, "oslo")
  held_back = np.array(expected, np.float32) / 2
  np.testing.assert_array_equal(messages.residual["w"], held_back)
  messages.encode(DELTA)
  np.testing.assert_array_equal(
    messages._corrected["w"], DELTA["w"] + held_back
  )


def test_values_that_are_not_finite_are_zeros_and_leave_nothing():
  messages = Messages(Float32(), LIKE, feedback=1.0)
  arrays, is_finite = messages.encode(
    {"w": np.array([1, np.nan, 0, 0], np.float32)}
  )
  assert not is_finite and not arrays[0].any()
  messages.settle(Result(is_own_listed=False), "oslo")
  assert not messages.residual["w"].any()


@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_the_learning_rate_is_that_of_the_fast_code(warmup_steps):
  values = {
    "warmup_steps": warmup_steps,
    "total_steps": 20,
    "final_fraction": 0.1,
  }
  ours = warmup_cosine(3e-3, **values)
  fast = learning_rate_schedule("cosine", 3e-3, **values)
  for step in range(20):
    assert ours(step) == pytest.approx(
      np.asarray(fast(step)).item(), rel=1e-5, abs=1e-9
    )
