"""Leaves in rows, and rows in codes of few bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs import batching
from dilocox_jax.codecs.batching import RowLayout
from dilocox_jax.codecs.low_rank import LocalLowRank, LowRank
from dilocox_jax.codecs.quantize import E3M0, Float, Int, unpack
from dilocox_jax.codecs.sparse import RandomMask, TopK
from tests.codecs.alone import KEY, alone, gaussian, through
from tests.oracles import codecs as oracle

SHAPES = (2, 6, 10), (1, 60), (2, 6, 10), (1,), (3, 7)
LEAVES = [
  jnp.asarray(gaussian(shape, seed), jnp.float32)
  for seed, shape in enumerate(SHAPES)
]


def program(codec):
  return jax.jit(lambda leaves: alone(codec, leaves))


@pytest.mark.parametrize(
  "codec",
  [
    Float("bfloat16"),
    Int(4, block_size=16),
    Int(1),
    Int(2, "row"),
    Int(8, "tensor"),
    E3M0(16),
    TopK(0.2, 16, then=Int(4)),
    LocalLowRank(2, then=Int(4)),
  ],
  ids=repr,
)
def test_leaves_that_share_a_body_are_coded_as_each_of_them_alone(codec):
  run = program(codec)
  found, _, sent = run(LEAVES)
  expected = [run([leaf]) for leaf in LEAVES]
  for leaf, ([alone_], _, _) in zip(found, expected, strict=True):
    np.testing.assert_allclose(leaf, alone_, rtol=1e-5, atol=1e-6)
  # Fewer arrays, but not a byte more or less.
  sent = jax.tree.leaves(sent)
  apart = [own for _, _, own in expected]
  apart = jax.tree.leaves(apart)
  sizes = [sum(array.nbytes for array in each) for each in (sent, apart)]
  assert sizes[0] == sizes[1] and len(sent) < len(apart)


@pytest.mark.parametrize("codec", [LowRank(1), RandomMask(0.5)])
def test_joined_leaves_are_coded_as_if_each_was_alone(codec, monkeypatch):
  def decoded():
    states = codec.init(SHAPES, KEY)
    return jax.jit(lambda leaves: alone(codec, leaves, states)[0])(LEAVES)

  joined = decoded()
  monkeypatch.setattr(batching, "_MOST_CONCATENATED", 0)
  for each, expected in zip(joined, decoded(), strict=True):
    np.testing.assert_allclose(each, expected, atol=1e-5)


@pytest.mark.parametrize("num_slices", [0, 1, 3, 5])
def test_rows_hold_every_value_once_in_order(num_slices):
  layout = RowLayout(SHAPES, tuple(4 for _ in SHAPES), num_slices)
  rows = layout.rows(LEAVES)
  assert len(rows) == 1 and rows[0].shape[2] == 4
  if num_slices:
    assert rows[0].shape[0] == num_slices
  for leaf, found in zip(LEAVES, layout.leaves(rows), strict=True):
    assert np.array_equal(leaf, found)
  total = sum(float(jnp.sum(leaf)) for leaf in LEAVES)
  assert float(jnp.sum(rows[0])) == pytest.approx(total, abs=1e-4)


def test_large_leaves_are_not_copied_to_join_them(monkeypatch):
  assert batching.group_by_shape(SHAPES, [0] * len(SHAPES)) == [
    [*range(len(SHAPES))]
  ]
  monkeypatch.setattr(batching, "_MOST_CONCATENATED", 60)
  groups = batching.group_by_shape(SHAPES, [0] * len(SHAPES))
  assert groups == [[0], [1, 3, 4], [2]]


@pytest.mark.parametrize("kind", [LowRank, LocalLowRank])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4)])
def test_a_leaf_that_is_not_factorized_goes_to_the_next_link(kind, shape):
  values = jnp.asarray(gaussian(shape), jnp.float32)
  [found], [state], sent = program(kind(2, then=Int(4)))([values])
  expected, arrays = through(Int(4), values)
  assert np.array_equal(found, expected)
  assert state == () and len(jax.tree.leaves(sent)) == len(arrays)


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


def test_fp16_saturates_instead_of_overflowing():
  found, _ = through(Float("float16"), np.array([[1e6, -1e6, 2.0]]))
  assert found.tolist() == [[65504.0, -65504.0, 2.0]]
