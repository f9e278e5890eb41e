"""Code that works on its own rows, or on whole layers, of divided arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.distributed.local_map import (
  current_division,
  map_over_rows,
  on_whole_layers,
)
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.optimizers import inner_optimizer
from dilocox_jax.plan.model.division import Division

DIVISIONS = (Division(2, 2), Division(4, 1), Division(1, 4))
# Layers and rows come out even, one of them does, neither does.
ROWS = ((4, 2, 5), (4, 3, 5), (3, 4, 5), (3, 3, 5))
MATRICES = ((4, 8, 8), (3, 8, 6), (5, 2, 2), (3, 3, 5))


def under(division, function, *arrays):
  replicas = Replicas(1, "mesh", division)
  over = replicas.map(function, (None,) * len(arrays), None)
  return jax.jit(over)(*arrays)


def ranked(values, weights):
  """Treats every row by itself, in a way that no sum of parts could."""
  order = jnp.argsort(values, axis=-1)
  return order, jnp.take_along_axis(values * weights, order, axis=-1)


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_rows_are_the_same_however_many_devices_share_them(division):
  rng, seen = np.random.default_rng(0), []

  def all_rows(*arrays):
    seen.append(current_division())
    return [map_over_rows(ranked, *pair) for pair in arrays]

  pairs = [
    (
      rng.permutation(np.prod(shape)).reshape(shape).astype(np.float32),
      rng.integers(1, 9, shape).astype(np.float32),
    )
    for shape in ROWS
  ]
  found = under(division, all_rows, *pairs)
  jax.tree.map(
    np.testing.assert_array_equal, found, [ranked(*pair) for pair in pairs]
  )
  assert seen[0].num_devices == 4
  assert seen[0].num_stages == division.num_stages


@pytest.mark.parametrize(
  ("shape", "each"), [((4, 6, 5), (2, 3, 5)), ((3, 5, 2), (3, 5, 2))]
)
def test_a_device_has_its_own_rows_where_they_come_out_even(shape, each):
  seen = []

  def watched(values):
    seen.append(values.shape)
    return values

  values = np.zeros(shape, np.float32)
  under(Division(2, 2), lambda v: map_over_rows(watched, v), values)
  assert seen == [each]


def test_a_data_axis_of_the_callers_own_mesh_is_not_ours():
  kind = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("data",), axis_types=kind)
  with jax.set_mesh(mesh):
    assert current_division() == Division()
    double = jax.jit(lambda x: map_over_rows(lambda v: 2 * v, x))
    np.testing.assert_array_equal(double(jnp.ones((2, 2, 3))), 2.0)


seen = []  # Shapes of what each call of `cubes` works on.


def cubes(gradients, state, params):
  """Needs whole matrices: no part of a result follows from a part of it."""
  seen.append(gradients["blocks"]["x"]["kernel"].shape)

  def cubed(leaf):
    if leaf.ndim != 3:
      return 2 * leaf
    return leaf @ jnp.swapaxes(leaf, 1, 2) @ leaf

  moved = cubed(gradients["blocks"]["x"]["kernel"])
  scale = gradients["blocks"]["n"]["scale"] * params["blocks"]["n"]["scale"]
  updates = {"blocks": {"x": {"kernel": moved}, "n": {"scale": scale}}}
  return updates, jax.tree.map(lambda leaf: cubed(leaf) + 1, state)


def blocks(shape):
  rng = np.random.default_rng(0)
  kernel = rng.integers(-3, 4, shape).astype(np.float32)
  scale = rng.integers(1, 4, shape[:2]).astype(np.float32)
  return {"blocks": {"x": {"kernel": kernel}, "n": {"scale": scale}}}


@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_whole_layers_are_those_of_one_device_and_shared_out(division, shape):
  replicas, given = Replicas(1, "mesh", division), (blocks(shape),) * 3
  over = replicas.map(on_whole_layers(cubes), (None,) * 3, (None, None))
  seen.clear()
  found = jax.jit(over)(*(replicas.place_state(t, None) for t in given))
  if shape == (4, 8, 8):
    assert seen == [(1, 8, 8)]  # One layer a device, not four.
  # Small integers multiply without rounding errors.
  jax.tree.map(np.testing.assert_array_equal, found, cubes(*given))


def muon(division, num_layers):
  """Muon's update of kernels that devices divide, and its program."""
  rng = np.random.default_rng(0)
  leaf = rng.normal(size=(num_layers, 16, 24)).astype(np.float32)
  tree = {"blocks": {"mlp": {"kernel": jnp.asarray(leaf)}}}
  optimizer = inner_optimizer("muon", lambda step: 0.1, clip_norm=0.0)
  replicas = Replicas(1, "mesh", division)
  program = jax.jit(
    replicas.map(
      lambda t: optimizer.update(t, optimizer.init(t), t)[0], (None,), None
    ),
    out_shardings=replicas.state_shardings(tree, None),
  )
  placed = replicas.place_state(tree, None)
  text = program.lower(placed).compile().as_text() or ""
  return jax.device_get(program(placed))["blocks"]["mlp"]["kernel"], text


@pytest.mark.parametrize("num_layers", [3, 4])
@pytest.mark.parametrize("division", DIVISIONS[:2], ids=str)
def test_muon_updates_whole_layers_and_no_device_has_all(division, num_layers):
  expected, _ = muon(Division(), num_layers)
  found, text = muon(division, num_layers)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
  assert f"[{num_layers},16,24]" not in text
