"""Numbers worked out by hand; scales are powers of two, so bfloat16 is exact.

tests/codecs holds the fast codecs to these on values drawn at random.
"""

import functools

import numpy as np
import pytest

from tests.oracles import codecs


def test_bfloat16_has_eight_significant_bits():
  assert codecs.bfloat16(1 + 2**-7) == 1 + 2**-7
  assert codecs.bfloat16(1 + 2**-8) == 1.0  # Half way: to the even one.
  assert codecs.bfloat16(-3 * (1 + 2**-9)) == -3.0
  assert codecs.bfloat16(0.0) == 0.0


@pytest.mark.parametrize(
  ("rounding", "values", "codes", "received"),
  [
    # 7 steps of 0.25 reach 1.75.
    (
      functools.partial(codecs.nearest, bits=4),
      [1.75, -1.75, 0.3, 0.6, 0.0],
      [15, 1, 9, 10, 8],
      [1.75, -1.75, 0.25, 0.5, 0.0],
    ),
    (
      functools.partial(codecs.nearest, bits=8),
      [127.0, -2.4, 0.0],
      [255, 126, 128],
      [127.0, -2.0, 0.0],
    ),
    # The mean size is 2: 1 and 1 lie below, 3 and 3 above.
    (codecs.two_magnitudes, [1, -1, 3, -3], [0, 2, 1, 3], [1, -1, 3, -3]),
    (codecs.two_magnitudes, [1, -2, 6, -3], [0, 2, 1, 2], [2, -2, 6, -2]),
    (codecs.signs, [1.0, -2.0, 3.0, 0.0], [0, 1, 0, 0], [1.5, -1.5, 1.5, 1.5]),
    # Levels 0, 1/64, ..., 1/2, 1.
    (
      codecs.powers_of_two,
      [1.0, -0.7, 0.02, 0.004, 0.4],
      [7, 14, 1, 0, 6],
      [1.0, -0.5, 1 / 64, 0.0, 0.5],
    ),
  ],
)
def test_codes_and_values_received(rounding, values, codes, received):
  found = rounding(values)
  assert found == (codes, received)
  leaf = np.array(values, np.float64)
  blocks = codecs.in_blocks(rounding)
  np.testing.assert_array_equal(blocks("x", leaf), received)


@pytest.mark.parametrize(
  "rounding",
  [
    functools.partial(codecs.nearest, bits=4),
    codecs.two_magnitudes,
    codecs.signs,
    codecs.powers_of_two,
  ],
)
def test_nothing_is_received_of_nothing(rounding):
  assert rounding([0.0, 0.0])[1] == [0.0, 0.0]


def test_the_largest_values_are_kept_and_of_equal_ones_the_first():
  values = [1.0, -3.0, 2.0, 3.0, -2.0]
  assert codecs.largest(values, 1) == ([1], [0.0, -3.0, 0.0, 0.0, 0.0])
  assert codecs.largest(values, 3) == ([1, 2, 3], [0.0, -3.0, 2.0, 3.0, 0.0])


def test_a_matrix_of_the_rank_is_received_whole():
  matrix = np.outer([1.0, 2.0, 2.0], [3.0, 4.0])
  start = np.array([[1.0], [0.0]])
  np.testing.assert_allclose(
    codecs.low_rank(matrix, start), matrix, rtol=0, atol=1e-14
  )


def test_power_iterations_turn_to_the_main_direction():
  # diag(4, 1) from (1, 1): the basis after n passes is (4^(2n - 1), 1).
  matrix, start = np.diag([4.0, 1.0]), np.ones([2, 1])
  for passes in (1, 2):
    left = np.array([[4.0 ** (2 * passes - 1)], [1.0]])
    left /= np.linalg.norm(left)
    found = codecs.low_rank(matrix, start, passes)
    np.testing.assert_allclose(found, left @ left.T @ matrix, atol=1e-14)


def test_groups_are_equally_long_and_the_last_is_filled_up():
  seen = []

  def received(values):
    seen.append(values)
    return [2 * x for x in values]

  layers = np.arange(1.0, 11.0).reshape(2, 5)
  found = codecs.in_groups(layers, 4, received)
  assert seen == [[1, 2, 3], [4, 5, 0], [6, 7, 8], [9, 10, 0]]
  np.testing.assert_array_equal(found, 2 * layers)
