"""Fragments are cut out of a tree and put back, whatever divides it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.outer.fragment_view import FragmentView
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
  return FragmentView(count, Fragments(count, LAYERS, order))


SHORT = by_rows(3)  # Layers 0, 2, 4 and 1, 3.
DIVISIONS = {
  "one": FragmentView(1),
  "leaves": FragmentView(2),
  "by path": FragmentView(2, lambda path: int("blocks" in path)),
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


def take(view, fragment, whole):
  return view.extract(whole, view.groups[fragment], view.index(fragment))


def put(view, fragment, part, whole):
  group = view.groups[fragment]
  index = view.index(fragment)
  return view.insert(whole, group, index, part)


@functools.partial(jax.jit, static_argnums=0)
def cut(view, whole):
  """The parts, and whole trees with each of them or all put back."""
  every = range(view.count)
  parts = [take(view, fragment, whole) for fragment in every]
  again = [put(view, *each, whole) for each in zip(every, parts, strict=True)]
  made = jax.tree.map(jnp.zeros_like, whole)
  for each in zip(every, parts, strict=True):
    made = put(view, *each, made)
  return parts, [*again, made, view.merge(whole, parts)]


@pytest.mark.parametrize("name", DIVISIONS)
def test_all_fragments_together_are_the_tree(name):
  view = DIVISIONS[name]
  shapes = {}
  is_sliced = isinstance(view.fragments, Fragments) and view.fragments.is_sliced
  whole = tree(WHOLE | ODD if is_sliced else WHOLE)
  view.check(whole)
  parts, again = cut(view, whole)
  for each in again:
    assert_equal(each, whole)
  for fragment, part in enumerate(parts):
    own = shapes.setdefault(view.groups[fragment], part)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, part)
    if isinstance(view.fragments, Fragments):
      planned = view.fragments.shapes(fragment, shapes_by_path(whole))
      assert shapes_by_path(part) == planned
  assert [*shapes] == [*range(len(shapes))]


def test_short_fragments_end_in_zeros_that_are_never_written_back():
  part = take(SHORT, 2, tree())
  assert part["head"] == optax.MaskedNode()  # A leaf of another fragment.
  rows = part["blocks"]["w"]
  layers = tree()["blocks"]["w"]
  np.testing.assert_array_equal(rows[:2], layers[1::2])
  np.testing.assert_array_equal(rows[2], np.zeros([3, 2]))
  part = jax.tree.map(lambda x: x.at[2].set(jnp.nan), part)
  assert_equal(put(SHORT, 2, part, tree()), tree())
  for order in SLICED:  # Seven rows in two slices.
    last = take(by_rows(2, order), 1, tree())["embed"]["embedding"]
    assert np.any(last[2]) and not np.any(last[3:])


@pytest.mark.parametrize(
  ("view", "params", "message"),
  [
    (SHORT, {"w": jnp.ones((LAYERS, 2))}, "below 'blocks' has a value"),
    (SHORT, {"blocks": jnp.ones((4, 2)), "w": jnp.ones(2)}, "not .5, ...."),
    (
      SHORT,
      {"blocks": {"w": jnp.ones((LAYERS, 2))}},
      "outside of 'blocks' has a value",
    ),
    (SHORT, {"w": jnp.ones(2, jnp.int32)}, "real floats"),
    (
      FragmentView(3, Fragments(3, LAYERS + 1)),
      tree(),
      "leaf 'blocks/.*not .6, ....",
    ),
    (
      FragmentView(2, SHORT.fragments),
      tree(),
      "has 3 of them.* num_fragments=2",
    ),
  ],
)
def test_parameters_that_do_not_fit_are_refused(view, params, message):
  with pytest.raises(ValueError, match=message):
    view.check(params)
