"""Bytes by formula; that they are sent is held in contracts/test_codecs."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.wire.chain import num_bytes
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import E3M0, Dense, Int, group_shape


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_dense_values_have_the_size_of_their_type(dtype, size):
  shapes = {"scalar": (), "blocks/w": (3, 5, 7)}
  assert num_bytes(Dense(dtype), shapes) == size * (1 + 105)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_are_packed_a_group_and_layer_at_a_time(bits):
  blocks = Int(bits, block_size=10)
  # 21 values: three blocks of seven.
  a_block = math.ceil(7 * bits / 8) + (4 if bits == 2 else 2)
  assert num_bytes(blocks, {"blocks/w": (5, 3, 7)}) == 5 * 3 * a_block
  rows = num_bytes(Int(bits, "row"), {"blocks/w": (5, 2, 7)})
  assert rows == 5 * 2 * a_block
  tensor = num_bytes(Int(bits, "tensor"), {"blocks/w": (5, 7)})
  assert tensor == 5 * a_block


def test_stochastic_rounding_needs_one_scale_even_at_two_bits():
  shapes = {"w": (8,)}
  by_rounding = [
    num_bytes(Int(2, "tensor", 128, rounding), shapes)
    for rounding in ("nearest", "stochastic")
  ]
  assert by_rounding == [2 + 4, 2 + 2]


@given(size=st.integers(1, 5000), block_size=st.integers(1, 300))
def test_blocks_hold_every_value_and_waste_less_than_a_block(size, block_size):
  groups, width = group_shape(Leaf(1, (size,)), "block", block_size)
  assert width <= block_size
  assert size <= groups * width < size + min(groups, block_size)


def test_a_scalar_is_a_row_of_its_own():
  assert group_shape(Leaf(3, ()), "row", 128) == (1, 1)


def test_rows_follow_the_last_axis():
  assert group_shape(Leaf(1, (2, 3, 5)), "row", 128) == (6, 5)


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: Dense("float64"), "dtype='float64' must be one of float32"),
    (lambda: Int(3), "bits=3 must be one of 8, 4, 2, 1"),
    (lambda: Int(scale="column"), "scale='column' must be one of block"),
    (lambda: Int(rounding="up"), "rounding='up' must be one of nearest"),
    (lambda: Int(block_size=0), "block_size=0 must be at least 1"),
    (lambda: E3M0(0), "block_size=0 must be at least 1"),
  ],
)
def test_a_bad_attribute_is_refused_with_what_it_may_be(make, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    make()
