"""The fingerprint of a shared state, by hand and for what it has to find."""

import hashlib

import numpy as np
import pytest

from dilocox_jax.reference import fingerprint as reference
from dilocox_jax.reference.fingerprint import (
  BLOCK_VALUES,
  FIRST_SUM,
  NORM,
  NUM_SUMS,
  UNIT,
  fingerprint,
  random_signs,
)


def estimated_distance(one, other, signs):
  """Distance of two arrays in their first block, from their fingerprints."""
  gaps = fingerprint(one, signs)[0] - fingerprint(other, signs)[0]
  return np.linalg.norm(gaps[FIRST_SUM:])


def test_two_values_by_hand():
  signs = np.array([1, -1], np.float32)
  (row,) = fingerprint(np.array([3, 4], np.float32), signs)
  assert row[UNIT] == 2**-24 and row[NORM] == 5
  assert row[FIRST_SUM:].tolist() == [3, -4, *[0] * (NUM_SUMS - 2)]


def test_value_i_belongs_to_sum_i_modulo_32():
  values = np.zeros(100, np.float32)
  values[[5, 5 + 32, 5 + 64]] = 1, 2, 4
  signs = np.ones(100, np.float32)
  signs[37] = -1
  (row,) = fingerprint(values.reshape(4, 25), signs)
  assert row[FIRST_SUM + 5] == 1 - 2 + 4
  assert np.count_nonzero(row[FIRST_SUM:]) == 1


def test_a_set_bit_of_the_stream_means_minus():
  signs = random_signs("run", 7)
  first = hashlib.shake_256(b"run 7").digest(1)[0]
  expected = [-1 if first >> bit & 1 else 1 for bit in range(8)]
  assert signs[:8].tolist() == expected
  assert signs.shape == (BLOCK_VALUES,) and signs.dtype == np.float32
  assert random_signs("run", 7, 13).tolist() == signs[:13].tolist()
  assert abs(signs.mean()) < 0.01
  for other in (random_signs("run", 8), random_signs("other", 7)):
    assert abs((signs * other).mean()) < 0.01


def test_each_block_has_a_row_and_none_is_filled_up():
  values = np.ones(BLOCK_VALUES + 3, np.float32)
  values[BLOCK_VALUES:] = 2
  whole, rest = fingerprint(values, random_signs("run", 0))
  assert whole[NORM] == 2**10 and rest[NORM] == np.float32(12**0.5)
  assert np.count_nonzero(rest[FIRST_SUM:]) == 3


@pytest.mark.parametrize(
  ("type_name", "unit"),
  [("float16", 2**-11), ("float32", 2**-24), ("float64", 2**-24)],
)
def test_rows_say_how_their_type_rounds(type_name, unit):
  (row,) = fingerprint(np.ones(3, type_name), random_signs("run", 0, 3))
  assert row[UNIT] == unit
  assert reference.rounding_unit("bfloat16") == 2**-8
  assert reference.rounding_unit("float8_e4m3fn") == 2**-3


def test_the_sums_tell_how_far_two_states_are_apart():
  rng = np.random.default_rng(0)
  one = rng.normal(size=100_000).astype(np.float32)
  other = one + rng.normal(size=one.size).astype(np.float32) / 1000
  estimates = [
    estimated_distance(one, other, random_signs("run", event))
    for event in range(20)
  ]
  # The estimate has 32 terms, so its deviation is 1 / sqrt(64) of the distance.
  distance = np.linalg.norm(one - other)
  assert np.mean(estimates) == pytest.approx(distance, rel=0.1)
  assert np.std(estimates) < 0.25 * distance
  # One value that differs is found exactly.
  other = one.copy()
  other[777] *= 256
  distance = abs(other[777] - one[777])
  signs = random_signs("run", 0)
  assert estimated_distance(one, other, signs) == pytest.approx(
    distance, rel=1e-3
  )
