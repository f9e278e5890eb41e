import pytest

from dilocox_jax.plan.wire.leaf import Leaf, leaf_of


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 4)])
def test_a_leaf_outside_the_blocks_is_one_layer(shape):
  assert leaf_of("embed", shape) == Leaf(1, shape)
  assert leaf_of("head/blocks", shape) == Leaf(1, shape)


@pytest.mark.parametrize("shape", [(), (5,), (3, 7)])
def test_the_first_axis_of_a_leaf_in_the_blocks_is_its_layer(shape):
  assert leaf_of("blocks/w", (4, *shape)) == Leaf(4, shape)
  assert leaf_of("blocks/scale", ()) == Leaf(1, ())


def test_a_list_of_blocks_has_a_leaf_for_each_layer():
  assert leaf_of("blocks/0/w", (4, 5)) == Leaf(1, (4, 5))
  assert leaf_of("blocks/12", (4, 5)) == Leaf(1, (4, 5))


@pytest.mark.parametrize("shape, size", [((), 1), ((5,), 5), ((3, 7), 21)])
def test_the_size_is_that_of_one_layer_and_the_array_holds_all(shape, size):
  leaf = Leaf(4, shape)
  assert leaf.size == size
  assert leaf.stacked_shape == (4, *shape)
