import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.schedule.fragments import (
  ORDERS,
  Fragments,
  balanced,
  by_path,
  stacked_shape,
)

SHAPES = {
  "embed/embedding": (7, 3),
  "blocks/mlp/kernel": (5, 3, 2),
  "blocks/norm/scale": (5,),
  "blocksize": (11,),  # Not under "blocks", whatever it begins with.
}


@st.composite
def divisions(draw):
  num_layers = draw(st.integers(1, 40))
  num_fragments = draw(st.integers(1, num_layers))
  return Fragments(num_fragments, num_layers, draw(st.sampled_from(ORDERS[:2])))


@given(divisions())
def test_every_layer_is_in_one_fragment_and_the_table_is_padded(fragments):
  table = fragments.layer_table
  count = fragments.num_layers
  assert table.dtype == np.int32
  assert len(table) == fragments.num_fragments - 1
  if not len(table):
    return
  first, *rows = map(fragments.layers, range(fragments.num_fragments))
  assert not len(first)
  assert sorted(np.concatenate(rows)) == list(range(count))
  lengths = [len(row) for row in rows]
  assert min(lengths) >= max(lengths) - 1 and max(lengths) == table.shape[1]
  for layers, padded in zip(rows, table, strict=True):
    np.testing.assert_array_equal(padded[: len(layers)], layers)
    assert (padded[len(layers) :] == count).all()


def test_strided_fragments_interleave_and_sequential_ones_do_not():
  strided = [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
  assert Fragments(4, 8, "strided").layer_table.tolist() == strided
  sequential = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
  assert Fragments(4, 8, "sequential").layer_table.tolist() == sequential
  assert Fragments(4, 8, "sliced").layer_table.size == 0


def test_fragments_have_the_shapes_of_their_leaves_layers_and_rows():
  fragments = Fragments(3, 5)
  rest = {"embed/embedding": (7, 3), "blocksize": (11,)}
  assert fragments.shapes(0, SHAPES) == rest
  layers = {"blocks/mlp/kernel": (3, 3, 2), "blocks/norm/scale": (3,)}
  # The second is one layer shorter, and padded.
  assert [fragments.shapes(p, SHAPES) for p in (1, 2)] == [layers] * 2
  assert Fragments(1, 5).shapes(0, SHAPES) == SHAPES
  for order in ORDERS[2:]:
    sliced = Fragments(2, 5, order).shapes(1, SHAPES | {"one": ()})
    assert sliced == {
      "embed/embedding": (4, 3),
      "blocks/mlp/kernel": (5, 2, 2),
      "blocks/norm/scale": (3,),
      "blocksize": (6,),
      "one": (1,),
    }


@pytest.mark.parametrize("shape", [(), (5,), (3, 7)])
def test_a_leaf_has_its_layers_in_front_whether_it_is_stacked_or_not(shape):
  assert stacked_shape("blocks/w", (4, *shape)) == (4, *shape)
  for alone in ("embed", "head/blocks", "blocks/0/w", "blocks/12"):
    assert stacked_shape(alone, shape) == (1, *shape)
  assert stacked_shape("blocks/scale", ()) == (1,)


LEAVES = {"a": (6,), "b": (5,), "c": (4,), "d": (3,)}


def test_whole_leaves_are_divided_by_size_or_by_their_path():
  # 9 values each.
  assert balanced(LEAVES, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}
  assert balanced(dict.fromkeys("ab", (2,)), 2) == {"a": 0, "b": 1}
  found = by_path(LEAVES, 2, lambda path: int(path > "a"))
  assert found == {"a": 0, "b": 1, "c": 1, "d": 1}
  with pytest.raises(ValueError, match="number of leaves of the tree, 4"):
    balanced(LEAVES, 5)
  for number in (2, -1):
    with pytest.raises(ValueError, match="numbers them from 0 to 1"):
      by_path(LEAVES, 2, lambda path, number=number: number)
  with pytest.raises(ValueError, match="fragment 1 has no leaf: lower num_fra"):
    by_path(LEAVES, 2, lambda path: 0)
