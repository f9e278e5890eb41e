"""Fragments are cut out of a tree and put back, whatever divides it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.outer.fragment_view import Cuts
from dilocox_jax.plan.schedule.fragments import ORDERS, SLICED, Fragments
from dilocox_jax.trees import shapes_by_path
from tests.outer.problem import assert_equal

LAYERS = 5
WHOLE = {
  "embed": {"embedding": (7, 2)},
  "blocks": {"w": (LAYERS, 3, 2), "norm": {"scale": (LAYERS,)}},
  "head": (4,),
}
# Leaves that only slices divide.
ODD = {"number": (), "empty": (0, 2), "thin": (3, 0)}


def by_rows(count, order="strided"):
  return Cuts(count, Fragments(count, LAYERS, order))


SHORT = by_rows(3)  # Layers 0, 2, 4 and 1, 3.
DIVISIONS = {
  "one": Cuts(1),
  "leaves": Cuts(2),
  "by path": Cuts(2, lambda path: int("blocks" in path)),
  "1 strided": by_rows(1),
  **{f"{n} {order}": by_rows(n, order) for n in (2, 5) for order in ORDERS},
  **{f"8 {order}": by_rows(8, order) for order in SLICED},
}


def tree(shapes=WHOLE):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def take(cuts, fragment, whole):
  return cuts.take(whole, cuts.groups[fragment], cuts.place(fragment))


def put(cuts, fragment, part, whole):
  group, place = cuts.groups[fragment], cuts.place(fragment)
  return cuts.put(whole, group, place, part)


@functools.partial(jax.jit, static_argnums=0)
def cut(cuts, whole):
  """The parts, and whole trees with each of them or all put back."""
  every = range(cuts.count)
  parts = [take(cuts, fragment, whole) for fragment in every]
  again = [put(cuts, *each, whole) for each in zip(every, parts, strict=True)]
  made = jax.tree.map(jnp.zeros_like, whole)
  for each in zip(every, parts, strict=True):
    made = put(cuts, *each, made)
  return parts, [*again, made, cuts.join(whole, parts)]


@pytest.mark.parametrize("name", DIVISIONS)
def test_all_fragments_together_are_the_tree(name):
  cuts, shapes = DIVISIONS[name], {}
  is_sliced = isinstance(cuts.fragments, Fragments) and cuts.fragments.is_sliced
  whole = tree(WHOLE | ODD if is_sliced else WHOLE)
  cuts.check(whole)
  parts, again = cut(cuts, whole)
  for each in again:
    assert_equal(each, whole)
  for fragment, part in enumerate(parts):
    own = shapes.setdefault(cuts.groups[fragment], part)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, part)
    if isinstance(cuts.fragments, Fragments):
      planned = cuts.fragments.shapes(fragment, shapes_by_path(whole))
      assert shapes_by_path(part) == planned
  assert [*shapes] == [*range(len(shapes))]


def test_short_fragments_end_in_zeros_that_are_never_written_back():
  part = take(SHORT, 2, tree())
  assert part["head"] == optax.MaskedNode()  # A leaf of another fragment.
  rows, layers = part["blocks"]["w"], tree()["blocks"]["w"]
  np.testing.assert_array_equal(rows[:2], layers[1::2])
  np.testing.assert_array_equal(rows[2], np.zeros([3, 2]))
  part = jax.tree.map(lambda x: x.at[2].set(jnp.nan), part)
  assert_equal(put(SHORT, 2, part, tree()), tree())
  for order in SLICED:  # Seven rows in two slices.
    last = take(by_rows(2, order), 1, tree())["embed"]["embedding"]
    assert np.any(last[2]) and not np.any(last[3:])


@pytest.mark.parametrize(
  ("cuts", "params", "message"),
  [
    (SHORT, {"w": jnp.ones((LAYERS, 2))}, "below has a value"),
    (SHORT, {"blocks": jnp.ones((4, 2)), "w": jnp.ones(2)}, "not .5, ...."),
    (SHORT, {"blocks": {"w": jnp.ones((LAYERS, 2))}}, "outside has a value"),
    (SHORT, {"w": jnp.ones(2, jnp.int32)}, "real floats"),
    (Cuts(3, Fragments(3, LAYERS + 1)), tree(), "leaf 'blocks/.*not .6, ...."),
    (Cuts(2, SHORT.fragments), tree(), "has 3 of them.* num_fragments=2"),
  ],
)
def test_parameters_that_do_not_fit_are_refused(cuts, params, message):
  with pytest.raises(ValueError, match=message):
    cuts.check(params)
