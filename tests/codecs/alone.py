"""Runs a codec for one replica that exchanges with nobody."""

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.codecs.base import Projection, Reduced, encoder_of, messages

KEY = jax.random.key(0)


def first_state(codec, shapes, key=KEY):
  """The states of all leaves at the start."""
  if isinstance(codec, Projection):
    return codec.init(shapes, key)
  return [()] * len(shapes)


def alone(codec, leaves, states=None, key=KEY):
  """Decoded leaves, new states, and the arrays of every message."""
  if states is None:
    states = first_state(codec, [leaf.shape for leaf in leaves])
  encoder, sent = encoder_of(codec), []
  run = messages(codec, list(leaves), states, key)
  yielded = next(run)
  while True:
    shapes = [leaf.shape for leaf in yielded]
    sent.append(encoder.encode(yielded, jax.random.fold_in(key, len(sent))))
    decoded = encoder.decode(sent[-1], shapes)
    try:
      yielded = run.send(Reduced(decoded, decoded))
    except StopIteration as stop:
      (_, own), states = stop.value
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
