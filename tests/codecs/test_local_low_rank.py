import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.low_rank import LocalLowRank
from tests.codecs.alone import gaussian, through
from tests.oracles import codecs as oracle

SHAPE = 3, 14, 24


@pytest.mark.parametrize("passes", [1, 3])
def test_factors_are_those_of_the_plain_twin(passes):
  values = gaussian(SHAPE)
  found, _ = through(LocalLowRank(4, passes), values)
  start = jax.random.normal(jax.random.key(0), (24, 4), jnp.float32)
  for layer, matrix in enumerate(values):
    expected = oracle.low_rank(matrix, np.asarray(start, np.float64), passes)
    np.testing.assert_allclose(found[layer], expected, atol=3e-5)


def test_a_layer_does_not_feel_the_others():
  values = gaussian(SHAPE)
  whole, _ = through(LocalLowRank(4), values)
  alone, _ = through(LocalLowRank(4), values[1:2])
  np.testing.assert_allclose(whole[1], alone[0], atol=1e-5)
