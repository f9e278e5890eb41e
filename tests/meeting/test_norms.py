import math

import ml_dtypes
import numpy as np
import pytest

from dilocox_jax.meeting.norms import norm_of, too_large


def test_the_norm_is_that_of_all_floats_together():
  arrays = [np.array([3], np.float32), np.array([[4]], ml_dtypes.bfloat16)]
  assert norm_of([*arrays, np.array([100])]) == pytest.approx(5)
  assert norm_of([]) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_norm_of_what_is_not_finite_is_not_finite(value):
  assert not math.isfinite(norm_of([np.array([1, value], np.float32)]))


def left_out(norms, accepted=(), ratio=8.0):
  named = {str(number): norm for number, norm in enumerate(norms)}
  return set(map(int, too_large(named, accepted, ratio)))


@pytest.mark.parametrize("factor", [10, 1e3, 1e12, np.nan, np.inf])
@pytest.mark.parametrize("accepted", [(), (1.0, 1.1, 0.9)])
def test_one_wrong_message_of_three_is_left_out(factor, accepted):
  assert left_out([1.0, 1.1, factor * 1.0], accepted) == {2}
  assert left_out([1.0, factor * 1.0], accepted) == {1}


def test_a_lone_message_is_compared_with_those_before():
  assert left_out([9.0], [1.0, 1.0]) == {0}
  assert left_out([9.0]) == set()
  assert left_out([np.nan]) == {0}


def test_a_change_of_all_at_once_does_not_stop_the_run():
  assert left_out([50.0, 60.0, 55.0], [1.0] * 20) == set()


def test_only_the_last_norms_count():
  assert left_out([9.0], [1.0] * 100 + [5.0] * 20) == set()


def test_the_reason_has_the_numbers():
  reasons = too_large({"oslo": 1e6, "rome": 1.0}, [1.0], 8)
  assert reasons == {"oslo": "its norm 1e+06 is over 8 times the usual 1"}


def test_messages_of_zeros_are_accepted():
  assert left_out([0.0, 0.0], [0.0]) == set()
