import pytest

from dilocox_jax.plan.schedule import leaf_fragments
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.leaf_fragments import LeafPiece

SHAPES = {"a": (6,), "b": (5,), "c": (4,), "d": (3,)}
STACKED = {"blocks/w": (5, 2), "head": (3,)}


def paths(fragments):
  return [[piece.path for piece in fragment] for fragment in fragments]


def test_leaves_are_divided_into_fragments_of_about_equal_size():
  fragments = leaf_fragments.balanced(SHAPES, 2)
  assert paths(fragments) == [["a", "d"], ["b", "c"]]  # 9 values each
  with pytest.raises(
    ValueError, match="must not exceed the number of leaves of the tree, 4"
  ):
    leaf_fragments.balanced(SHAPES, 5)


def test_a_function_of_the_path_divides():
  fragments = leaf_fragments.by_path(SHAPES, 2, lambda path: int(path > "a"))
  assert paths(fragments) == [["a"], ["b", "c", "d"]]


@pytest.mark.parametrize(
  ("number", "message"),
  [
    (2, "numbers them from 0 to 1"),
    (0, "fragment 1 has no leaf: lower num_fragments=2"),
  ],
)
def test_a_function_that_does_not_divide_is_refused(number, message):
  with pytest.raises(ValueError, match=message):
    leaf_fragments.by_path(SHAPES, 2, lambda path: number)


def test_layers_are_divided_as_the_trainer_divides_them():
  fragments = leaf_fragments.by_layer(STACKED, Fragments(3, 5))
  assert fragments == (
    (LeafPiece("head"),),
    (LeafPiece("blocks/w", (0, 2, 4)),),
    (LeafPiece("blocks/w", (1, 3, 5)),),  # 5 stands for a layer of zeros.
  )
  leaf_fragments.covered(fragments, STACKED)


@pytest.mark.parametrize(
  "fragments",
  [
    ((LeafPiece("head"),),),
    ((LeafPiece("head"), LeafPiece("blocks/w", (0, 1, 2, 3))),),
    ((LeafPiece("head"), LeafPiece("head"), LeafPiece("blocks/w")),),
    ((LeafPiece("tail"),),),
    ((LeafPiece("head"), LeafPiece("blocks/w", (0,))),),
    ((LeafPiece("head"), LeafPiece("blocks/w", (0, 1))),),
    (
      (LeafPiece("head"), LeafPiece("blocks/w", (0, 1, 2, 3, 4))),
      (LeafPiece("blocks/w", (0, 1), 1),),
    ),
  ],
)
def test_every_leaf_must_be_listed_once(fragments):
  with pytest.raises(ValueError, match="exactly once|there is none"):
    leaf_fragments.covered(fragments, STACKED)
