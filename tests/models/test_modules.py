import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dilocox_jax.models.attention import attend
from dilocox_jax.models.modules import Decoder, Norm
from dilocox_jax.plan.model.presets import nano

LAYER = dataclasses.replace(nano, norm="layer", norm_epsilon=0.5)
RMS = dataclasses.replace(nano, norm_epsilon=0.5)
ROW = np.array([[1.0, 3.0, -2.0, 6.0]], np.float32)


@pytest.mark.parametrize("shape", [RMS, LAYER])
def test_a_norm_divides_by_the_root_of_the_mean_square(shape):
  norm = Norm(4, shape)
  norm.scale[...] = jnp.array([1.0, 2.0, 1.0, 1.0])
  wanted = ROW - (ROW.mean() if shape is LAYER else 0.0)
  wanted = wanted / np.sqrt((wanted**2).mean() + 0.5)
  wanted[0, 1] *= 2
  if norm.bias is not None:
    norm.bias[...] = jnp.full(4, 0.25)
    wanted = wanted + 0.25
  np.testing.assert_allclose(norm(jnp.asarray(ROW)), wanted, rtol=1e-5)
  assert (norm.bias is not None) == (shape is LAYER)


def test_a_norm_of_bfloat16_sums_in_float32():
  row = jnp.full((1, 4096), 1.0, jnp.bfloat16)
  normed = Norm(4096, nano)(row)
  assert normed.dtype == jnp.bfloat16
  np.testing.assert_allclose(normed.astype(jnp.float32), 1.0, rtol=0.01)


def test_a_seed_draws_the_same_embedding_whatever_comes_after_it():
  deep = dataclasses.replace(nano, num_layers=5, tied_head=True)
  tables = [
    Decoder(
      shape, jnp.float32, nnx.Rngs(jax.random.key(3)), attend
    ).embed.embedding
    for shape in (nano, deep)
  ]
  np.testing.assert_array_equal(tables[0][...], tables[1][...])
