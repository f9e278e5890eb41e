"""How replicas lie on devices, and what one replica's code becomes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dilocox_jax.distributed.local_map import (
  current_division,
  map_over_rows,
  on_whole_layers,
)
from dilocox_jax.distributed.replicas import REPLICA_AXIS, Replicas
from dilocox_jax.optimizers import inner_optimizer
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.plan.model.division import Division
from dilocox_jax.training.states import copies_are_equal

OWN = np.arange(12, dtype=np.float32).reshape(4, 3)
SHARED = np.asarray([1.0, -2.0, 0.5], np.float32)
FOUR = Division(2, 2)
KERNEL = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)


def tree(kernel):
  return {"blocks": {"up": {"kernel": kernel}}}


def held(array):
  """What every device holds, by its number."""
  return {shard.device.id: shard.data for shard in array.addressable_shards}


def one(shared, own):
  """One replica's code: keeps its own, and agrees on a sum."""
  index = jax.lax.axis_index(REPLICA_AXIS)
  moved = own["x"] * shared + index.astype(jnp.float32)
  return {"moved": moved}, jax.lax.psum(moved, REPLICA_AXIS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_of_one_replica_becomes_one_of_all(layout):
  replicas = Replicas(4, layout)
  axes = (None, {"x": 0})
  shared, own = replicas.place((SHARED, {"x": OWN}), axes)
  moved, total = jax.jit(replicas.map(one, axes, (0, None)))(shared, own)
  expected = OWN * SHARED + np.arange(4, dtype=np.float32)[:, None]
  np.testing.assert_array_equal(moved["moved"], expected)
  np.testing.assert_array_equal(total, expected.sum(axis=0))
  abstract = replicas.abstract((SHARED, {"x": OWN}), axes)
  for known, leaf in zip(
    jax.tree.leaves(abstract), jax.tree.leaves((shared, own)), strict=True
  ):
    assert (known.shape, known.dtype) == (leaf.shape, leaf.dtype)
    assert known.sharding == leaf.sharding
  if layout == "stacked":
    assert own["x"].devices() == shared.devices() == {jax.devices()[0]}
    return
  assert moved["moved"].sharding.spec == PartitionSpec(REPLICA_AXIS)
  assert total.sharding.is_fully_replicated
  for number, piece in held(own["x"]).items():
    np.testing.assert_array_equal(piece, OWN[number : number + 1])


def test_neighboring_devices_make_up_a_replica_and_divide_its_state():
  devices = Replicas(2, "mesh", FOUR)
  assert devices.mesh.axis_names == ("replica", "data", "stage", "tensor")
  assert [device.id for device in devices.mesh.devices.flat] == list(range(8))
  assert devices.own == [0, 1]
  state = tree(KERNEL) | {"count": jnp.int32(3)}
  shared = devices.place_state(state, None)
  kernel = shared["blocks"]["up"]["kernel"]
  assert kernel.sharding.spec == PartitionSpec("stage", "data", None)
  assert shared["count"].sharding.is_fully_replicated
  known = devices.abstract(tree(KERNEL), None)["blocks"]["up"]["kernel"]
  assert known.sharding == kernel.sharding
  again = devices.place_state(shared, None)["blocks"]["up"]["kernel"]
  assert again is kernel  # What lies well is not moved.
  own = devices.place_state(tree(np.stack([KERNEL, -KERNEL])), 0)
  for pieces, sign in ((kernel, 1), (own["blocks"]["up"]["kernel"], -1)):
    pieces = held(pieces)
    for first in range(4):
      assert pieces[first].shape[-3:] == (2, 3, 2)
      np.testing.assert_array_equal(pieces[first], sign * pieces[first + 4])


@pytest.mark.parametrize(
  ("layout", "division"),
  [("stacked", Division()), ("mesh", FOUR), ("mesh", Division(1, 4))],
)
def test_a_data_shard_gets_its_part_of_every_batch(layout, division):
  batches = np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5)
  with jax.transfer_guard("disallow"):
    placed = Replicas(2, layout, division).place_batches(batches)
  np.testing.assert_array_equal(placed, batches)
  width = 4 // division.num_data_shards
  assert {piece.shape[2] for piece in held(placed).values()} == {width}


@pytest.mark.parametrize(
  ("given", "says"),
  [
    ((0,), "at least 1"),
    ((2, "grid"), "one of stacked"),
    ((9, "mesh"), "needs 9 devices.* there .*8"),
    ((3, "mesh", FOUR), r"needs 12 devices \(4 .* 8"),
    ((2, "stacked", FOUR), "mesh.layout='mesh'"),
  ],
)
def test_replicas_that_cannot_be_are_refused(given, says):
  with pytest.raises(ValueError, match=says):
    Replicas(*given)
  assert Replicas(9).num_replicas == 9


def test_replicas_without_compiled_programs_are_refused():
  with jax.disable_jit(), pytest.raises(ValueError, match="JAX_DISABLE_JIT"):
    Replicas(2)


@pytest.mark.parametrize("spec", [(), ("stage",), (("data", "stage"),)])
def test_one_bit_of_one_replica_is_enough_to_differ(spec):
  mesh = Replicas(2, "mesh", FOUR).mesh
  where = NamedSharding(mesh, PartitionSpec(*spec))
  values = np.arange(8, dtype=np.float32)
  other = values.copy()
  other[6] = np.nextafter(values[6], np.inf, dtype=np.float32)

  def placed(*of_replicas):
    index = where.devices_indices_map((8,))
    parts = [
      jax.device_put(own[index[device]], device)
      for own, devices in zip(of_replicas, mesh.devices, strict=True)
      for device in devices.flat
    ]
    return jax.make_array_from_single_device_arrays((8,), where, parts)

  assert copies_are_equal({"params": placed(values, values)})
  found = {"params": placed(values, values), "m": placed(values, other)}
  assert not copies_are_equal(found)
  for replicas in (Replicas(4, "mesh"), Replicas(4)):
    assert copies_are_equal(replicas.place(OWN, 0))  # Each has its own.


# Code that works on its own rows, or on whole layers, of divided arrays.

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
  rng = np.random.default_rng(0)
  seen = []
  shapes = []

  def noted(values, weights):
    shapes.append(values.shape)
    return ranked(values, weights)

  def all_rows(*arrays):
    seen.append(current_division())
    return [map_over_rows(noted, *pair) for pair in arrays]

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
  if division == Division(2, 2):  # A device has its own rows.
    assert shapes == [(2, 1, 5), (1, 3, 5), (3, 1, 5), (3, 3, 5)]


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
  replicas = Replicas(1, "mesh", division)
  given = (blocks(shape),) * 3
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
