import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.outer.slices import put_slice, take_slice
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.leaf_fragments import by_layer, covered
from dilocox_jax.trees import shapes_by_path
from tests.oracles import slices as reference

LAYERS = 3
ORDERS = ("sliced", "interleaved")


def divided(count, order="sliced"):
  return Fragments(count, LAYERS, order)


def tree():
  rng = np.random.default_rng(0)
  shapes = {
    "embed": {"embedding": (7, 2)},
    "blocks": {"w": (LAYERS, 5, 2), "norm": {"scale": (LAYERS,)}},
    "head": (4,),
    "number": (),
    "empty": (0, 2),
    "thin": (3, 0),
  }
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def test_a_slice_has_rows_behind_the_layers_and_ends_in_zeros():
  first, last = (take_slice(tree(), p, divided(2)) for p in (0, 1))
  w = np.asarray(tree()["blocks"]["w"])
  np.testing.assert_array_equal(first["blocks"]["w"], w[:, :3])
  np.testing.assert_array_equal(last["blocks"]["w"][:, :2], w[:, 3:])
  assert not np.any(last["blocks"]["w"][:, 2])
  assert last["blocks"]["norm"]["scale"].shape == (2,)
  assert last["number"].shape == (1,) and not np.any(last["number"])


def test_an_interleaved_slice_has_every_second_row():
  last = take_slice(tree(), 1, divided(2, "interleaved"))
  w = np.asarray(tree()["blocks"]["w"])
  np.testing.assert_array_equal(last["blocks"]["w"][:, :2], w[:, 1::2])
  assert not np.any(last["blocks"]["w"][:, 2])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 3, 4, 16])
def test_all_slices_together_are_the_tree(count, order):
  rebuilt = jax.tree.map(jnp.zeros_like, tree())
  for number in range(count):
    part = take_slice(tree(), jnp.int32(number), divided(count, order))
    rebuilt = put_slice(rebuilt, jnp.int32(number), divided(count, order), part)
  jax.tree.map(np.testing.assert_array_equal, rebuilt, tree())


def test_a_put_changes_its_own_rows_alone():
  part = take_slice(tree(), 1, divided(2))
  changed = put_slice(
    tree(), 1, divided(2), jax.tree.map(lambda x: x + 1, part)
  )
  expected = jax.tree.map(np.array, tree())
  expected["embed"]["embedding"][4:] += 1
  expected["blocks"]["w"][:, 3:] += 1
  expected["blocks"]["norm"]["scale"][2:] += 1
  expected["head"][2:] += 1
  jax.tree.map(np.testing.assert_array_equal, changed, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_plan_knows_the_shapes(count, order):
  fragments = divided(count, order)
  planned = fragments.shapes(1, shapes_by_path(tree()))
  for number in range(count):
    part = take_slice(tree(), number, fragments)
    assert shapes_by_path(part) == planned


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_transforms_cut_the_same_rows(count, order):
  is_cut = {"embed", "blocks", "head"}  # Others are in fragment 0 as a whole.
  whole = shapes_by_path(tree())
  covered(by_layer(whole, divided(count, order)), whole)
  params = {k: v for k, v in tree().items() if k in is_cut}
  shapes = shapes_by_path(params)
  pieces = by_layer(shapes, divided(count, order))
  covered(pieces, shapes)
  for number, own in enumerate(pieces):
    part = take_slice(params, number, divided(count, order))
    assert {p.path: len(p.layers or ()) for p in own} == {
      path: shape[p.axis]
      for p in own
      for path, shape in shapes_by_path(part).items()
      if path == p.path
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_reference_cuts_the_same_rows(count, order):
  rng = np.random.default_rng(0)
  params = {
    "embed": rng.normal(size=[7]),
    **{f"blocks/w/{n}": rng.normal(size=[1, 5, 2]) for n in range(LAYERS)},
    **{f"blocks/b/{n}": rng.normal(size=[1]) for n in range(LAYERS)},
  }
  cut = reference.cut_into_slices(params, count, order)
  for name, leaf in reference.put_together(cut, order).items():
    np.testing.assert_array_equal(leaf, params[name])
  stacked = {
    "embed": params["embed"],
    "blocks": {
      name: np.concatenate(
        [params[f"blocks/{name}/{n}"] for n in range(LAYERS)]
      )
      for name in ("w", "b")
    },
  }
  stacked = jax.tree.map(jnp.asarray, stacked)
  for number in range(count):
    part = take_slice(stacked, number, divided(count, order))
    own = {k: v for k, v in cut.items() if k.endswith(f"@{number}")}
    expected = sum(np.abs(leaf).sum() for leaf in own.values())
    found = sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(part))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
