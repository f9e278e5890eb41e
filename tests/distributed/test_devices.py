import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.plan.model.division import Division

FOUR = Division(2, 2)
KERNEL = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)
PARAMS = {"blocks": {"up": {"kernel": KERNEL}}}


def held(array):
  """What every device holds, by its number."""
  return {shard.device.id: shard.data for shard in array.addressable_shards}


def test_neighbouring_devices_make_up_a_replica():
  mesh = Replicas(2, "mesh", FOUR).mesh
  assert mesh.axis_names == ("replica", "data", "stage")
  numbers = [device.id for device in mesh.devices.flat]
  assert numbers == list(range(8))


def test_a_state_is_divided_by_its_rules_and_shared_by_replicas():
  devices = Replicas(2, "mesh", FOUR)
  placed = devices.place_state(PARAMS, None)["blocks"]["up"]["kernel"]
  assert placed.sharding.spec == PartitionSpec("stage", "data", None)
  np.testing.assert_array_equal(placed, KERNEL)
  pieces = held(placed)
  assert {piece.shape for piece in pieces.values()} == {(2, 3, 2)}
  for first, second in zip(range(4), range(4, 8), strict=True):
    np.testing.assert_array_equal(pieces[first], pieces[second])


def test_what_is_a_replicas_own_lies_with_it_alone():
  devices = Replicas(2, "mesh", FOUR)
  own = {"blocks": {"up": {"kernel": np.stack([KERNEL, -KERNEL])}}}
  placed = devices.place_state(own, 0)["blocks"]["up"]["kernel"]
  pieces = held(placed)
  for first, second in zip(range(4), range(4, 8), strict=True):
    np.testing.assert_array_equal(pieces[first], -pieces[second])


@pytest.mark.parametrize(
  "division", [Division(), FOUR, Division(1, 4)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_data_shard_gets_its_part_of_every_batch(layout, division):
  if layout == "stacked":
    division = Division()
  devices = Replicas(2, layout, division)
  batches = np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5)
  with jax.transfer_guard("disallow"):
    placed = devices.place_batches(batches)
  np.testing.assert_array_equal(placed, batches)
  width = 4 // division.num_data_shards
  for piece in held(placed).values():
    assert piece.shape[2] == width


def test_a_process_owns_all_replicas_if_there_is_no_other():
  assert Replicas(2, "mesh", FOUR).own == [0, 1]
  assert Replicas(3).own == [0, 1, 2]


def test_abstract_states_lie_where_real_ones_do():
  devices = Replicas(2, "mesh", FOUR)
  known = devices.abstract(PARAMS, None)["blocks"]["up"]["kernel"]
  placed = devices.place_state(PARAMS, None)["blocks"]["up"]["kernel"]
  assert known.sharding == placed.sharding


def test_values_that_lie_well_are_not_moved():
  devices = Replicas(2, "mesh", FOUR)
  placed = devices.place_state(PARAMS, None)
  again = devices.place_state(placed, None)
  assert again["blocks"]["up"]["kernel"] is placed["blocks"]["up"]["kernel"]


def test_more_devices_than_there_are_is_one_line_that_counts_them():
  message = r"needs 12 devices \(4 for each replica\), but there are 8"
  with pytest.raises(ValueError, match=message):
    Replicas(3, "mesh", FOUR)


def test_one_device_cannot_hold_a_divided_replica():
  with pytest.raises(ValueError, match="take mesh.layout='mesh'"):
    Replicas(2, "stacked", FOUR)


def test_scalars_are_placed_whole():
  placed = Replicas(2, "mesh", FOUR).place_state({"count": jnp.int32(3)}, None)
  assert placed["count"].sharding.is_fully_replicated
