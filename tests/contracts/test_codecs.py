"""What every codec promises, whatever it sends.

All properties of a codec are read from one call of one compiled program, since
compiling takes far longer than running.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.aggregators.sizes import message_bytes
from dilocox_jax.codecs.low_rank import LocalLowRank, LowRank
from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.plan.schedule.fragments import stacked_shape
from tests.codecs.alone import alone, gaussian

SHAPE = 2, 12, 22  # 264 values a layer: three blocks of 88
BLOCK = 100
COCKTAIL = TopK(0.2, 64, "bitmap", Int(4))
# Codecs, each with the share of the energy that it loses of values of N(0, 1),
# and the largest share of any input below (measured; sending nothing loses 1).
CODECS = {
  "float32": (Float(), 0.0, 0.0),
  "bfloat16": (Float("bfloat16"), 2.8e-6, 5.6e-6),
  "float16": (Float("float16"), 4.1e-8, 4.1e-8),
  "int8": (Int(8, "row"), 2.96e-5, 3.9e-5),
  "int4": (Int(4, block_size=BLOCK), 0.0169, 0.017),
  "int2": (Int(2, "tensor"), 0.136, 0.77),
  "int1": (Int(1, block_size=BLOCK), 0.361, 0.99),
  "e3m0": (E3M0(BLOCK), 0.0359, 0.037),
  "low_rank": (LowRank(3), 0.653, 0.67),
  "local_low_rank": (LocalLowRank(3, 2), 0.578, 0.59),
  "top_k": (TopK(0.1, BLOCK), 0.546, 0.9),
  "top_k_bitmap": (TopK(0.1, BLOCK, "bitmap"), 0.546, 0.9),
  "random_mask": (RandomMask(0.3), 0.7, 1.0),
  "dilocox": (LowRank(3, then=Int(4)), 0.655, 0.69),
  "cocktail_sgd": (RandomMask(0.5, then=COCKTAIL), 0.691, 1.0),
  "sparse_loco": (TopK(0.1, BLOCK, then=Int(2, "tensor")), 0.556, 0.9),
}
BAD = np.nan, np.inf, -np.inf


@functools.cache
def program_of(codec):
  """Decodes inputs [n, *SHAPE] one by one, all from the same state."""
  state = codec.init([SHAPE], jax.random.key(7))

  def one(value_and_key):
    value, key = value_and_key
    [found], after, sent = alone(codec, [value], state, key)
    return found, after, sent

  return jax.jit(lambda values, keys: jax.lax.map(one, (values, keys)))


def decoded(codec, inputs, seeds=None):
  """What comes back of inputs, in float64, and states and messages."""
  seeds = [0] * len(inputs) if seeds is None else seeds
  keys = jnp.stack([jax.random.key(seed) for seed in seeds])
  values = jnp.asarray(np.stack(inputs), jnp.float32)
  found, states, sent = program_of(codec)(values, keys)
  return np.asarray(found, np.float64), states, sent


def energy(values):
  return np.sum(np.square(values), axis=(-3, -2, -1))


def keeps_its_promises(codec, lost, most_lost, is_half=False):
  """Asserts what a codec promises.

  Args:
    codec: The codec.
    lost: The share of the energy that is lost of values of N(0, 1).
    most_lost: The largest share of the energy of an input that is lost.
    is_half: Whether only values that fp16 holds are sent.
  """
  plain = gaussian(SHAPE)
  is_matrix = hasattr(codec, "power_iterations")
  peak = np.where(plain == plain.max(), 1.0, 0.0)
  kinds = [plain, peak, np.maximum(plain, 0), np.ones(SHAPE), plain**5]
  scales = (1.0, 10.0) if is_half else (1.0, 1e-6, 1e4, 1e-30, 1e30)
  scaled = np.stack([s * kind for s in scales for kind in kinds])
  scaled = scaled.astype(np.float32).astype(np.float64)
  scaled = scaled.reshape(len(scales), len(kinds), *SHAPE)
  sparse = np.where(np.arange(SHAPE[-1]) % 2, plain, 0)
  huge = 6e4 if is_half else 1e30 if is_matrix else 1e38
  constants = [np.full(SHAPE, sign * huge) for sign in (1, -1)]
  damaged = [plain.copy() for _ in BAD]
  for values, bad in zip(damaged, BAD, strict=True):
    values[0, 3, 5] = bad
  rest = [np.zeros(SHAPE), sparse, *constants, *damaged]
  found, states, sent = decoded(codec, [*scaled.reshape(-1, *SHAPE), *rest])
  some, found = np.split(found, [len(scales) * len(kinds)])
  some = some.reshape(scaled.shape)
  share = energy((scaled - some) / scaled.max((2, 3, 4), keepdims=True))
  share /= energy(scaled / scaled.max((2, 3, 4), keepdims=True))
  assert math.isclose(share[0, 0], lost, rel_tol=0.03, abs_tol=1e-12), share
  assert np.max(share) <= 1.02 * most_lost + 1e-12
  # Errors grow with the scale; scales and ties are rounded otherwise.
  assert np.all(share <= 1.15 * share[:1] + 1e-4), share
  zero, sparse_found, *ends = found[:4]
  assert np.all(zero == 0)
  # Levels of 1 and 2 bits lie on both sides of zero.
  if not isinstance(codec, Int) or codec.bits > 2:
    assert np.max(np.abs(sparse_found[..., ::2])) <= 1e-6 * is_matrix
  assert np.isfinite(ends).all() and np.max(np.abs(ends)) <= 1.02 * huge
  # Saturation is no disappearance, as an inverse flushed to zero would be.
  assert np.max(np.abs(ends)) > 0.2 * huge
  # A layer that is not finite is none of the business of the others.
  assert np.isfinite(found[4:, 1]).all()
  messages = message_bytes(codec, {"blocks/w": SHAPE})
  count = len(scales) * len(kinds) + len(rest)
  assert sum(x.nbytes for x in jax.tree.leaves(sent)) == count * messages
  start = jax.tree.leaves(codec.init([SHAPE], jax.random.key(7)))
  kinds_of_state = [(x.shape, x.dtype) for x in start]
  assert kinds_of_state == [
    (x.shape[1:], x.dtype) for x in jax.tree.leaves(states)
  ]


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_keeps_its_promises(name):
  keeps_its_promises(*CODECS[name], is_half=name == "float16")


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_odd_shapes_are_those_of_the_encoded_arrays(name):
  codec = CODECS[name][0]
  shapes = {"leaf": (), "blocks/0": (3,), "blocks/1": (2, 13, 29), "w": (7, 5)}
  leaves = [
    jax.ShapeDtypeStruct(stacked_shape(path, shape), jnp.float32)
    for path, shape in shapes.items()
  ]
  arrays = jax.eval_shape(lambda found: alone(codec, found)[2], leaves)
  sizes = [
    math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arrays)
  ]
  assert message_bytes(codec, shapes) == sum(sizes)
