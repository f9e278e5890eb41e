import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.quantize import E3M0, Float, Int, pack, unpack
from tests.codecs.alone import gaussian, through
from tests.oracles import codecs as oracle

TO_SCALES = 1e-6  # fp32 against float64; the scales are bfloat16 in both.
WIDTH = 50
SHAPE = 2, 3, WIDTH
TWINS = {
  "int8": (Int(8, "row"), lambda x: oracle.nearest(x, 8)),
  "int4": (Int(4, "row"), lambda x: oracle.nearest(x, 4)),
  "int2": (Int(2, "row"), oracle.two_magnitudes),
  "int1": (Int(1, "row"), oracle.signs),
  "e3m0": (E3M0(WIDTH), oracle.powers_of_two),
}


@pytest.mark.parametrize("name", TWINS)
def test_codes_and_values_are_those_of_the_plain_twin(name):
  codec, twin = TWINS[name]
  values = gaussian(SHAPE)
  values[1, 2] *= 1e-5
  values[0, 1, ::2] = 0
  found, (packed, _) = through(codec, values)
  bits = getattr(codec, "bits", 4)
  codes = np.asarray(unpack(packed, bits, WIDTH))
  for layer in range(2):
    for row in range(3):
      expected_codes, expected = twin(values[layer, row])
      assert codes[layer, row].tolist() == expected_codes
      np.testing.assert_allclose(found[layer, row], expected, rtol=TO_SCALES)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("count", [1, 8, 13])
def test_packing_is_undone_by_unpacking(bits, count):
  rng = np.random.default_rng(count)
  codes = rng.integers(0, 2**bits, (2, 3, count)).astype(np.uint8)
  packed = pack(jnp.asarray(codes), bits)
  assert packed.shape == (2, 3, -(-count * bits // 8))
  assert np.array_equal(unpack(packed, bits, count), codes)


def mean_squared_error(codec):
  values = gaussian((1, SIZE), seed=4)
  found, _ = through(codec, values)
  return np.mean(np.square(found - values))


SIZE = 128 * 1000


@pytest.mark.parametrize(
  "codec, low, high",
  [
    (Float("float16"), 4.2e-8, 4.4e-8),
    (Int(8), 4.0e-5, 4.3e-5),
    # A step is no longer short against the bell: a little below the bound.
    (Int(4), 0.0130, 0.0139),
    (Int(2, "tensor"), 0.123, 0.127),
    (Int(1, "tensor"), 0.360, 0.367),
    (E3M0(), 0.030, 0.040),
  ],
)
def test_errors_on_a_gaussian_are_those_the_docstrings_derive(codec, low, high):
  assert low < mean_squared_error(codec) < high


@pytest.mark.parametrize("bits", [8, 4])
def test_every_value_is_within_half_a_step(bits):
  values = gaussian((1, 40, 60))
  found, (_, scales) = through(Int(bits, "row"), values)
  step = np.asarray(scales, np.float64).reshape(1, 40, 1)
  error = np.abs(found - values) / step
  assert 0.49 < np.max(error) <= 0.5 + 1e-4


def test_e3m0_errs_by_a_third_or_by_half_its_smallest_level():
  values = gaussian((1, 4000))
  found, (_, scales) = through(E3M0(4000), values)
  smallest = float(scales[0, 0, 0]) * 2.0**-7
  error = np.abs(found - values)
  bound = np.maximum(np.abs(values) / 3, smallest)
  # 2^-8: the largest may be beyond a scale that was rounded down.
  assert np.all(error <= bound * (1 + 2.0**-8))
  assert (
    np.max(error[error > smallest] / np.abs(values[error > smallest])) > 0.33
  )


def test_fp16_saturates_instead_of_overflowing():
  found, _ = through(Float("float16"), np.array([[1e6, -1e6, 2.0]]))
  assert found.tolist() == [[65504.0, -65504.0, 2.0]]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_zero_is_never_rounded_up_by_chance(bits):
  # Chances near 1 come once in some 100,000 at 8 bits.
  values = np.zeros((1, 2**21))
  values[0, 0] = 1.0
  codec = Int(bits, "tensor", rounding="stochastic")
  found, _ = through(codec, values)
  assert np.all(found[0, 1:] == 0)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_largest_value_is_right_on_average(bits):
  # Its scale is the one that bfloat16 rounds down furthest, from 1 + 2^-8.
  largest = (2 ** (bits - 1) - 1 if bits > 2 else 1.5) * (1 + 0.99 * 2**-8)
  values = np.full((1, 2**17), largest) * [[1, -1] * 2**16]
  codec = Int(bits, "tensor", rounding="stochastic")
  found, _ = through(codec, values)
  error = found / values - 1
  # Clipped, it would be too small by 2^-8.
  deviation = error.std() / np.sqrt(error.size)
  assert abs(error.mean()) < min(5 * deviation, 2**-10)
