"""How replicas lie on devices, and what one replica's code becomes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dilocox_jax.distributed.replicas import REPLICA_AXIS, Replicas
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
  replicas, axes = Replicas(4, layout), (None, {"x": 0})
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


def test_neighbouring_devices_make_up_a_replica_and_divide_its_state():
  devices = Replicas(2, "mesh", FOUR)
  assert devices.mesh.axis_names == ("replica", "data", "stage")
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
