"""What every codec promises, whatever it sends.

Properties of one codec share one compiled program, since compiling takes far
longer than running.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilocox_jax.aggregators.collectives import message_bytes
from dilocox_jax.codecs.local_low_rank import LocalLowRank
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import (
  BITS,
  E3M0,
  FLOATS,
  ROUNDINGS,
  SCALES,
  Float,
  Int,
)
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.plan.schedule.fragments import stacked_shape
from tests.codecs.alone import alone, first_state

SHAPE = 2, 12, 22  # 264 values a layer: three blocks of 88
BLOCK_SIZE = 100
ROUNDED = 2.0**-7  # Relative; bfloat16 scales, and fp32 sums of 264 squares.
RANK = 3


def integers():
  for bits in BITS:
    for scale in SCALES:
      for rounding in ROUNDINGS:
        codec = Int(bits, scale, BLOCK_SIZE, rounding)
        yield f"int{bits}_{scale}_{rounding}", codec


CODECS = {
  **{dtype: Float(dtype) for dtype in FLOATS},
  **dict(integers()),
  "e3m0": E3M0(BLOCK_SIZE),
  "low_rank_shared": LowRank(RANK),
  "low_rank_local": LocalLowRank(RANK, 2),
  "top_k_packed": TopK(0.1, BLOCK_SIZE),
  "top_k_bitmap": TopK(0.1, BLOCK_SIZE, "bitmap"),
  "random_mask": RandomMask(0.3),
  "dilocox": LowRank(RANK, then=Int(4)),
  "cocktail_sgd": RandomMask(0.5, then=TopK(0.2, 64, "bitmap", Int(4))),
  "sparse_loco": TopK(0.1, BLOCK_SIZE, then=Int(2, "tensor")),
}
every_codec = pytest.mark.parametrize("name", CODECS)


def codecs_but(*left_out):
  """Marks a test for all codecs but those whose names start so."""
  names = [name for name in CODECS if not name.startswith(left_out)]
  return pytest.mark.parametrize("name", names)


STOCHASTIC = [name for name in CODECS if name.endswith("stochastic")]
# The norm of a matrix must be a float, too.
MATRICES = ("low_rank", "dilocox")


START = jax.random.key(7)


@dataclasses.dataclass
class Program:
  """A codec's one program for a leaf, and how often it was traced."""

  codec: Any
  shape: tuple[int, ...] = SHAPE
  num_traces: int = 0

  def __post_init__(self):
    self.start = first_state(self.codec, [self.shape], START)
    self.compiled = jax.jit(self.run)

  def run(self, values, state, key):
    self.num_traces += 1
    [found], state, sent = alone(self.codec, [values], state, key)
    return found, state, sent

  def decoded(self, values, seed=0):
    """What comes back of some values, in float64."""
    values = jnp.asarray(values, jnp.float32)
    found, _, _ = self.compiled(values, self.start, jax.random.key(seed))
    return np.asarray(found, np.float64)


@functools.cache
def program_of(codec, shape=SHAPE):
  return Program(codec, shape)


def program(name):
  return program_of(CODECS[name])


@functools.cache
def gaussian():
  values = np.random.default_rng(0).normal(size=SHAPE)
  return values.astype(np.float32).astype(np.float64)


def energy(values):
  return float(np.sum(np.square(values)))


def by_layer(values):
  return values.reshape(SHAPE[0], -1)


# The same as `recovered` by type, for quantisers outside the package.
BOUNDS = {}


def recovered(codec, values, shape=SHAPE):
  """Energy of values [layers, n] that must come back, rounding to nearest.

  ||x - C(x)||^2 is at most ||x||^2 less this, which sending nothing is not.
  """
  if type(codec) in BOUNDS:
    return BOUNDS[type(codec)](codec, values, shape)
  if isinstance(codec, Float):
    bits = {"float32": 0, "bfloat16": 2.0**-16, "float16": 2.0**-22}
    return (1 - bits[codec.dtype] * (1 + ROUNDED)) * energy(values)
  if isinstance(codec, E3M0):
    # A ninth of each square, or (2^-7 s)^2 if it is small, is lost.
    lost = 1 / 9 + BLOCK_SIZE * 2.0**-14
    return (1 - lost * (1 + ROUNDED)) * energy(values)
  if isinstance(codec, Int):
    return recovered_by_levels(codec, values, shape)
  if isinstance(codec, LowRank | LocalLowRank):
    return recovered_by_factors(codec, values, shape)
  layers, size = values.shape
  if isinstance(codec, RandomMask):
    kept = layers, codec.num_kept(size)
    mask = program_of(RandomMask(codec.fraction), shape)
    is_drawn = by_layer(mask.decoded(np.ones(shape))) != 0
    assert np.all(is_drawn.sum(axis=1) == kept[1])
    return recovered(codec.then, values[is_drawn].reshape(kept), kept)
  assert isinstance(codec, TopK), codec
  blocks = in_blocks(values, -(-size // -(-size // codec.block_size)))
  order = np.argsort(-np.abs(blocks), axis=-1, kind="stable")
  chosen = np.sort(order[..., : codec.num_kept(blocks.shape[-1])], axis=-1)
  largest = np.take_along_axis(blocks, chosen, axis=-1).reshape(layers, -1)
  # Sizes are compared in bfloat16: a chosen one may be 2^-7 smaller.
  return (1 - 2.0**-6) * recovered(codec.then, largest, largest.shape)


def in_blocks(values, width):
  """[layers, n] as [layers, blocks, width], zeros at the end."""
  missing = -values.shape[1] % width
  padded = np.pad(values, ((0, 0), (0, missing)))
  return padded.reshape(len(values), -1, width)


def recovered_by_levels(codec, values, shape):
  width = codec.width(shape[1:])
  if codec.bits <= 2:
    # One mean m of n sizes leaves sum x^2 - n m^2, and twice the square of its
    # own rounding; two means leave no more.
    sizes = np.abs(in_blocks(values, width)).mean(axis=-1)
    return (1 - 2.0**-13) * width * energy(sizes)
  # The largest is exact; the others err by half a step, or less than they are.
  steps = 2 ** (codec.bits - 1) - 1
  lost = (width - 1) / (width - 1 + 4 * steps**2)
  return (1 - lost * (1 + ROUNDED)) * energy(values)


def recovered_by_factors(codec, values, shape):
  """B B^T A comes back, and of B^T A what the following part recovers."""
  matrices, (layers, rows, columns) = values.reshape(shape), shape
  if isinstance(codec, LowRank):
    factors = codec.init([shape], START)[0].right
  else:
    start = jax.random.normal(jax.random.key(0), (columns, codec.rank))
    factors = np.broadcast_to(start, (layers, columns, codec.rank))
  factors = np.asarray(factors, np.float64)
  for _ in range(codec.power_iterations):
    factors = factors / np.maximum(
      np.linalg.norm(factors, axis=1, keepdims=True), 1e-30
    )
    left = layers, rows, codec.rank
    turned = program_of(codec.then, left).decoded(matrices @ factors)
    bases = [span(columns) for columns in turned]
    factors = np.stack(
      [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
    )
  right = factors.shape
  return (1 - 1e-6) * recovered(codec.then, factors.reshape(layers, -1), right)


def span(columns):
  """An orthonormal basis of some columns, zero where they have no more."""
  basis, sizes, _ = np.linalg.svd(columns, full_matrices=False)
  return basis * (sizes > 1e-5 * sizes.max())


# Shapes and bytes.

SHAPES = st.lists(st.integers(1, 40), max_size=3).map(tuple)
TREES = st.builds(
  lambda plain, stacked, layers: {
    **{f"leaf{n}": shape for n, shape in enumerate(plain)},
    **{f"blocks/{n}": (layers, *s) for n, s in enumerate(stacked)},
  },
  st.lists(SHAPES, min_size=1, max_size=2),
  st.lists(SHAPES, max_size=2),
  st.integers(1, 4),
)


@every_codec
@settings(max_examples=3)
@example(shapes={"leaf": (), "blocks/0": (3,), "blocks/1": (2, 13, 29)})
@given(shapes=TREES)
def test_predicted_bytes_are_those_of_the_encoded_arrays(name, shapes):
  codec = CODECS[name]
  stacked = [stacked_shape(path, shape) for path, shape in shapes.items()]

  def run(leaves):
    return alone(codec, leaves)[2]

  leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in stacked]
  arrays = jax.tree.leaves(jax.eval_shape(run, leaves))
  sizes = [math.prod(a.shape) * a.dtype.itemsize for a in arrays]
  assert message_bytes(codec, shapes) == sum(sizes)


@every_codec
def test_arrays_that_are_really_sent_have_the_predicted_bytes(name):
  it = program(name)
  values = jnp.asarray(gaussian(), jnp.float32)
  _, _, sent = it.compiled(values, it.start, jax.random.key(0))
  found = sum(array.nbytes for array in jax.tree.leaves(sent))
  assert found == message_bytes(CODECS[name], {"blocks/w": SHAPE})


# Values.


@codecs_but(*STOCHASTIC)  # which trades the bound for having no bias
def test_the_error_is_no_more_than_what_the_codec_cannot_recover(name):
  kinds = [
    gaussian(),
    np.where(gaussian() == gaussian().max(), 1.0, 0.0),
    np.where(gaussian() > 0, gaussian(), 0.0),
    np.ones(SHAPE),
    gaussian() ** 5,
  ]
  for values in kinds:
    # 1e-6 is below fp16's normal numbers.
    for scale in (1.0, 10.0) if name == "float16" else (1e-6, 1.0, 1e4):
      scaled = np.float64(np.float32(scale * values))
      error = energy(scaled - program(name).decoded(scaled))
      back = recovered(CODECS[name], by_layer(scaled))
      assert error <= (1 + 1e-12) * energy(scaled) - back
      # Only a mask may miss all there is, where there is one value.
      assert back > 0.01 * energy(scaled) or np.count_nonzero(scaled) == 1


@every_codec
def test_what_is_decoded_and_what_is_left_add_up_to_the_input(name):
  values = gaussian()
  decoded = program(name).decoded(values)
  residual = np.float32(values) - np.float32(decoded)
  total = np.float64(residual) + decoded
  # One rounding, of the difference.
  bound = 2.0**-23 * np.max(np.abs(residual))
  assert np.max(np.abs(total - values)) <= bound
  assert energy(residual) > 0 or name == "float32"


@every_codec
def test_zero_in_is_zero_out(name):
  found = program(name).decoded(np.zeros(SHAPE))
  assert np.all(found == 0)


# Levels of 1 and 2 bits lie on both sides of zero.
@codecs_but("int1", "int2")
def test_zeros_among_other_values_stay_zero_where_there_is_such_a_level(name):
  values = gaussian().copy()
  values[:, :, ::2] = 0
  found = program(name).decoded(values)
  bound = 1e-6 if name.startswith(MATRICES) else 0.0
  assert np.max(np.abs(found[:, :, ::2])) <= bound


@every_codec
def test_constants_at_the_ends_of_fp32_stay_finite_and_in_range(name):
  huge = 1e30 if name.startswith(MATRICES) else 1e38
  huge = 6e4 if name == "float16" else huge
  for constant in (huge, -huge, 1e-38):
    found = program(name).decoded(np.full(SHAPE, constant))
    assert np.all(np.isfinite(found))
    # The scale of stochastic rounding reaches a little too far.
    assert np.max(np.abs(found)) <= (1 + 2 * ROUNDED) * abs(constant)
    # Saturation is no disappearance, as an inverse flushed to zero would be.
    assert np.max(np.abs(found)) > 0.2 * abs(constant) or constant == 1e-38


@codecs_but("float16")  # which has no such values
def test_errors_grow_with_the_scale_from_tiny_to_huge(name):
  # Codes saturate at 2e37.
  huge = 1e30 if name.startswith(MATRICES) else 1e37
  values = gaussian() / np.max(np.abs(gaussian()))
  near = energy(values - program(name).decoded(values))
  for scale in (huge, 1e-30):
    far = program(name).decoded(scale * values) / scale
    # Scales and ties are rounded otherwise.
    bound = 1.15 * near + 1e-4 * energy(values)
    assert energy(values - far) <= bound


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_raises_nothing(name, bad):
  values = gaussian().copy()
  values[0, 3, 5] = bad
  found = program(name).decoded(values)
  # The other layer is none of its business.
  assert np.all(np.isfinite(found[1]))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_has_no_bias_and_errs_by_a_step_at_most(name):
  it, values, draws = program(name), gaussian(), 500
  found = np.stack([it.decoded(values, seed) for seed in range(draws)])
  spread = found.std(0) / math.sqrt(draws)
  is_random = spread > 0
  deviation = (found.mean(0) - values)[is_random] / spread[is_random]
  # The largest of 528 normals is about 3.2; all together show a smaller slant.
  assert np.max(np.abs(deviation)) < 5.5
  assert abs(np.mean(deviation)) * math.sqrt(deviation.size) < 4
  error = np.max(np.abs(found - values), axis=0)
  step = steps_of(CODECS[name], values)
  assert np.all(error <= step)
  assert np.max(error / step) > 0.5


def steps_of(codec, values):
  """Distance of two levels for each value, at most."""
  grouped = np.abs(values).reshape(len(values), -1, codec.width(SHAPE[1:]))
  levels = 2**codec.bits - (0 if codec.bits <= 2 else 1)
  steps = 2 * np.max(grouped, axis=-1, keepdims=True) / (levels - 1)
  steps = np.broadcast_to(steps * (1 + 2 * ROUNDED), grouped.shape)
  return steps.reshape(values.shape)


@every_codec
def test_nothing_is_compiled_twice_and_the_state_keeps_its_form(name):
  it = program(name)
  values = jnp.asarray(gaussian(), jnp.float32)
  _, state, _ = it.compiled(values, it.start, jax.random.key(0))
  _, again, _ = it.compiled(2 * values, state, jax.random.key(1))
  assert it.num_traces == 1
  kinds = [
    jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    for tree in (it.start, state, again)
  ]
  assert kinds[0] == kinds[1] == kinds[2]


# One of every kind: operation by operation, each takes seconds to compile.
@pytest.mark.parametrize(
  "name",
  [
    "int4_block_nearest",
    "int8_row_stochastic",
    "e3m0",
    "cocktail_sgd",
    "low_rank_shared",
  ],
)
def test_compiled_and_step_by_step_agree(name):
  it = program(name)
  values = jnp.asarray(gaussian(), jnp.float32)
  key = jax.random.key(3)
  compiled, _, sent = it.compiled(values, it.start, key)
  found, _, steps = it.run(values, it.start, key)
  np.testing.assert_allclose(found, compiled, rtol=1e-5, atol=1e-5)
  pairs = zip(jax.tree.leaves(sent), jax.tree.leaves(steps), strict=True)
  for ours, theirs in pairs:
    if ours.dtype == jnp.uint8:
      assert np.array_equal(ours, theirs)
