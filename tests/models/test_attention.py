"""Rotary positions: the speeds of the rotations."""

import numpy as np
import pytest

from dilocox_jax.models.attention import rotation_speeds
from tests.oracles.transformer import stretched


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
def test_slow_rotations_are_slower_as_in_llama_3_1(factor):
  width = 128
  base = 500_000.0
  speeds = rotation_speeds(width, base, factor, np.dtype("float32"))
  plain = base ** -(np.arange(0, width, 2) / width)
  expected = [stretched(speed, factor) for speed in plain]
  np.testing.assert_allclose(speeds, expected, rtol=1e-5)
  # Wave lengths of 2,048 and 8,192 tokens are the limits.
  is_kept = 2 * np.pi / plain < 2048
  is_slow = 2 * np.pi / plain > 8192
  assert is_kept.sum() == 29
  assert is_slow.sum() == 29
  np.testing.assert_allclose(speeds[is_kept], plain[is_kept], rtol=1e-5)
  np.testing.assert_allclose(
    speeds[is_slow], plain[is_slow] / factor, rtol=1e-5
  )
