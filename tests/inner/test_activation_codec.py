import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.inner.activation_codec import (
  ACTIVATION_CODECS,
  AS_COMPUTED,
)
from dilocox_jax.plan.choices import BOUNDARIES

VALUES = hnp.arrays(
  np.float32,
  (4, 5),  # One shape, because JAX compiles for each.
  elements=st.floats(-(2.0**66), 2.0**66, width=32, allow_subnormal=False),
)


def crossed(name, x):
  codec = ACTIVATION_CODECS[name]
  return codec.decode(codec.encode(x), x.dtype)


@hypothesis.given(VALUES)
def test_bfloat16_is_off_by_a_part_in_256_of_each_value(x):
  # What is smaller than bfloat16's normal numbers may be flushed to zero.
  x = np.where(np.abs(x) < 1e-37, np.float32(0), x)
  decoded = np.asarray(crossed("bfloat16", jnp.asarray(x)))
  assert np.all(np.abs(decoded - x) <= 2.0**-8 * np.abs(x))


@hypothesis.given(VALUES)
def test_int8_is_off_by_a_part_in_254_of_the_largest_value_of_a_token(x):
  x = np.where(np.abs(x) < 1e-30, np.float32(0), x)
  decoded = np.asarray(crossed("int8", jnp.asarray(x)), np.float64)
  largest = np.max(np.abs(x.astype(np.float64)), axis=1, keepdims=True)
  assert np.all(np.abs(decoded - x) <= (1 / 254 + 1e-6) * largest)
  assert np.all(np.abs(decoded) <= (1 + 1e-6) * largest)


def test_int8_uses_all_its_levels():
  x = jnp.linspace(-1.0, 1.0, 2001)[None]
  (levels, scale) = ACTIVATION_CODECS["int8"].encode(x)
  assert len(np.unique(levels)) == 255
  assert float(scale[0, 0]) == pytest.approx(1 / 127)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", BOUNDARIES)
def test_what_is_not_finite_stays_so(name, bad):
  x = jnp.ones((3, 4)).at[1, 2].set(bad)
  decoded = np.asarray(crossed(name, x))
  assert not np.isfinite(decoded[1, 2])
  assert np.all(np.isfinite(decoded[[0, 2]]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_value_keeps_its_dtype_and_shape(name, dtype):
  decoded = crossed(name, jnp.ones((2, 6), dtype))
  assert (decoded.dtype, decoded.shape) == (dtype, (2, 6))


def test_fewer_bits_travel_than_were_computed():
  x = jnp.ones((2, 64))
  sent = {
    name: sum(array.nbytes for array in ACTIVATION_CODECS[name].encode(x))
    for name in BOUNDARIES
  }
  assert sent == {
    "none": x.nbytes,
    "bfloat16": x.nbytes // 2,
    "int8": x.nbytes // 4 + 2 * 4,
  }


def test_by_default_nothing_is_changed():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
  assert ACTIVATION_CODECS["none"] is AS_COMPUTED
  np.testing.assert_array_equal(crossed("none", x), x)


def test_only_names_of_the_list_have_a_codec():
  assert tuple(ACTIVATION_CODECS) == BOUNDARIES
