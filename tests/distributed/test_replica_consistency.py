import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dilocox_jax.distributed.replica_consistency import copies_are_equal
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.model.division import Division

VALUES = np.arange(8, dtype=np.float32)


def placed(replicas, values_of, *spec):
  """Every device of a mesh gets its part of what its replica says."""
  sharding = NamedSharding(replicas.mesh, PartitionSpec(*spec))
  index = sharding.devices_indices_map(VALUES.shape)
  parts = [
    jax.device_put(values_of(replica)[index[device]], device)
    for replica, devices in enumerate(replicas.mesh.devices)
    for device in devices.flat
  ]
  return jax.make_array_from_single_device_arrays(VALUES.shape, sharding, parts)


def alike(replica):
  return VALUES


def moved(replica):
  """Replica 1 is off by one bit in one place."""
  values = VALUES.copy()
  if replica == 1:
    values[6] = np.nextafter(values[6], np.inf, dtype=np.float32)
  return values


@pytest.mark.parametrize("spec", [(), ("stage",), (("data", "stage"),)])
def test_one_bit_of_one_replica_is_enough_to_differ(spec):
  replicas = Replicas(2, "mesh", Division(2, 2))
  params = placed(replicas, alike, *spec)
  assert copies_are_equal({"params": params, "count": params})
  momentum = placed(replicas, moved, *spec)
  assert not copies_are_equal({"params": params, "momentum": momentum})


def test_what_replicas_do_not_share_may_differ():
  own = np.arange(12, dtype=np.float32).reshape(4, 3)
  mesh, stacked = Replicas(4, "mesh"), Replicas(4)
  assert copies_are_equal(mesh.place(own, 0))
  assert copies_are_equal(stacked.place(own, 0))
