import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.outer.cuts import Cuts
from dilocox_jax.plan.schedule.fragments import ORDERS, SLICED, Fragments
from dilocox_jax.plan.schedule.leaf_fragments import LeafPiece
from tests.outer.problem import assert_equal

LAYERS = 5


def by_rows(count, order="strided"):
  return Cuts(count, Fragments(count, LAYERS, order))


SHORT = by_rows(3)  # Layers 0, 2, 4 and 1, 3.
DIVISIONS = {
  "one": Cuts(1),
  "leaves": Cuts(2),
  "by path": Cuts(2, lambda path: int("blocks" in path)),
  "1 strided": by_rows(1),
  "2 strided": by_rows(2),
  **{f"{n} {order}": by_rows(n, order) for n in (3, 5) for order in ORDERS},
}


def tree():
  rng = np.random.default_rng(0)
  shapes = {
    "embed": {"embedding": (7, 2)},
    "blocks": {"w": (LAYERS, 3, 2), "norm": {"scale": (LAYERS,)}},
    "head": (4,),
  }
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def take(cuts, fragment):
  return cuts.take(tree(), cuts.groups[fragment], cuts.place(fragment))


def put(cuts, fragment, part):
  group, place = cuts.groups[fragment], cuts.place(fragment)
  return cuts.put(tree(), group, place, part)


@pytest.mark.parametrize("name", DIVISIONS)
def test_all_fragments_together_are_the_tree(name):
  cuts, shapes = DIVISIONS[name], {}
  parts = [take(cuts, fragment) for fragment in range(cuts.count)]
  assert_equal(cuts.join(tree(), parts), tree())
  for fragment, part in enumerate(parts):
    assert_equal(put(cuts, fragment, part), tree())
    own = shapes.setdefault(cuts.groups[fragment], part)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, part)
  assert [*shapes] == [*range(len(shapes))]


@pytest.mark.parametrize(
  ("count", "order"),
  [(n, order) for n in (3, 5) for order in ORDERS if order not in SLICED],
)
def test_a_put_reaches_its_own_fragment_and_no_other(count, order):
  cuts = by_rows(count, order)
  for fragment in range(count):
    part = jax.tree.map(lambda x: x + 1, take(cuts, fragment))
    expected = jax.tree.map(np.array, tree())
    for leaf in jax.tree.leaves(expected["blocks"]):
      leaf[list(Fragments(count, LAYERS, order).layers(fragment))] += 1
    if fragment == 0:
      expected["embed"]["embedding"] += 1
      expected["head"] += 1
    assert_equal(put(cuts, fragment, part), expected)


def test_a_short_fragment_ends_in_zeros_that_are_never_written_back():
  part = take(SHORT, 2)
  assert part["head"] == optax.MaskedNode()  # A leaf of another fragment.
  rows, layers = part["blocks"]["w"], tree()["blocks"]["w"]
  np.testing.assert_array_equal(rows[:2], layers[1::2])
  np.testing.assert_array_equal(rows[2], np.zeros([3, 2]))
  part = jax.tree.map(lambda x: x.at[2].set(jnp.nan), part)
  assert_equal(put(SHORT, 2, part), tree())


@pytest.mark.parametrize("cuts", [SHORT, by_rows(3, "sliced")])
def test_fragments_of_one_group_need_one_program(cuts):
  program = jax.jit(cuts.take, static_argnums=1)
  for fragment in (1, 2):
    found = program(tree(), cuts.groups[fragment], cuts.place(fragment))
    assert_equal(found, take(cuts, fragment))
  assert program._cache_size() == 1  # pyright: ignore


def test_cuts_with_equal_settings_are_equal_trees_without_leaves():
  assert jax.tree.structure(by_rows(3)) == jax.tree.structure(SHORT)
  assert jax.tree.structure(by_rows(5)) != jax.tree.structure(SHORT)
  assert not jax.tree.leaves(SHORT)


@pytest.mark.parametrize(
  ("fragments", "message"),
  [
    (((),), "1 fragments are listed, but num_fragments=2"),
    (((LeafPiece("head"),), ()), "exactly once"),
    (((LeafPiece("tail"),), ()), "name the leaf 'tail': there is none"),
  ],
)
def test_fragments_that_are_not_the_tree_are_refused(fragments, message):
  with pytest.raises(ValueError, match=message):
    Cuts(2, fragments).take(tree(), 0, None)
