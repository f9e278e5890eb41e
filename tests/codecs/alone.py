"""Runs a codec for one replica that exchanges with nobody."""

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.codecs.base import Reduced
from dilocox_jax.coroutines import as_function

KEY = jax.random.key(0)


def alone(codec, leaves, states=None, key=KEY):
  """Decoded leaves, new states, and the arrays of every message."""
  if states is None:
    states = codec.init([leaf.shape for leaf in leaves], key)
  encoder = codec.encoder
  sent = []

  def reduce(leaves):
    shapes = [leaf.shape for leaf in leaves]
    sent.append(encoder.encode(leaves))
    decoded = yield encoder.decode(sent[-1], shapes)
    return Reduced(decoded, decoded)

  run = as_function(codec.run)
  (_, own), states = run(list(leaves), states, key, reduce)
  return own, states, sent


def through(codec, values, key=KEY):
  """One leaf encoded and decoded in float64, and the arrays of a message."""

  def run(leaf):
    [found], _, sent = alone(codec, [leaf], key=key)
    return found, sent[0]

  found, arrays = jax.jit(run)(jnp.asarray(values, jnp.float32))
  return np.asarray(found, np.float64), arrays


def gaussian(shape, seed=0):
  """Values of N(0, 1) that fp32 has exactly, in float64."""
  values = np.random.default_rng(seed).normal(size=shape)
  return values.astype(np.float32).astype(np.float64)
