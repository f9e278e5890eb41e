import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.schedule.fragments import (
  ORDERS,
  Fragments,
  stacked_shape,
)

SHAPES = {
  "embed/embedding": (7, 3),
  "blocks/mlp/kernel": (5, 3, 2),
  "blocks/norm/scale": (5, 3),
  "blocksize": (11,),  # Not under "blocks", whatever it begins with.
}


@st.composite
def divisions(draw):
  num_layers = draw(st.integers(1, 40))
  num_fragments = draw(st.integers(1, num_layers))
  return Fragments(num_fragments, num_layers, draw(st.sampled_from(ORDERS)))


@given(divisions())
def test_every_layer_is_in_exactly_one_fragment(fragments):
  if fragments.num_fragments == 1 or fragments.is_sliced:
    return
  first, *rows = map(fragments.layers, range(fragments.num_fragments))
  assert all(len(row) for row in rows)
  assert not len(first)
  found = np.concatenate(rows)
  assert sorted(found) == list(range(fragments.num_layers))
  lengths = [len(row) for row in rows]
  assert max(lengths) - min(lengths) <= 1


@given(divisions())
def test_the_table_holds_the_layers_and_pads_with_one_that_is_none(fragments):
  table = fragments.layer_table
  if fragments.is_sliced:
    assert not table.size
    return
  assert table.dtype == np.int32
  assert len(table) == fragments.num_fragments - 1
  for row, padded in enumerate(table, start=1):
    layers = fragments.layers(row)
    np.testing.assert_array_equal(padded[: len(layers)], layers)
    assert (padded[len(layers) :] == fragments.num_layers).all()
  # No column is padding alone.
  assert (table[:, -1:] < fragments.num_layers).any() or not table.size


def test_strided_fragments_interleave_and_sequential_ones_do_not():
  strided = Fragments(4, 8, "strided")
  assert [strided.layers(p).tolist() for p in (1, 2, 3)] == [
    [0, 3, 6],
    [1, 4, 7],
    [2, 5],
  ]
  assert strided.layer_table.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
  sequential = Fragments(4, 8, "sequential")
  assert sequential.layer_table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
  assert Fragments(4, 8) == strided


def test_fragments_have_the_shapes_of_their_leaves_and_layers():
  fragments = Fragments(3, 5)
  rest = {"embed/embedding": (7, 3), "blocksize": (11,)}
  assert fragments.shapes(0, SHAPES) == rest
  assert fragments.shapes(1, SHAPES) == {
    "blocks/mlp/kernel": (3, 3, 2),
    "blocks/norm/scale": (3, 3),
  }
  # One layer shorter, and padded.
  assert fragments.shapes(2, SHAPES) == fragments.shapes(1, SHAPES)


@pytest.mark.parametrize("shape", [(), (5,), (3, 7)])
def test_a_leaf_has_its_layers_in_front_whether_it_is_stacked_or_not(shape):
  assert stacked_shape("blocks/w", (4, *shape)) == (4, *shape)
  for alone in ("embed", "head/blocks", "blocks/0/w", "blocks/12"):
    assert stacked_shape(alone, shape) == (1, *shape)
  assert stacked_shape("blocks/scale", ()) == (1,)


def test_one_fragment_is_the_whole_tree():
  whole = Fragments(1, 5)
  assert whole.shapes(0, SHAPES) == SHAPES
  assert whole.layer_table.shape == (0, 0)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ((6, 5), "num_fragments=6 must not exceed num_layers=5"),
    ((2, 5, "random"), "fragment_order='random' must be one of sequential"),
  ],
)
def test_an_impossible_division_says_which_values_clash(values, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    Fragments(*values)
