import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dilocox_jax.distributed.replicas import REPLICA_AXIS, Replicas
from dilocox_jax.plan.choices import LAYOUTS

OWN = np.arange(12, dtype=np.float32).reshape(4, 3)
SHARED = np.asarray([1.0, -2.0, 0.5], np.float32)


def meet(shared, own):
  """One replica's: keeps its own, and agrees on a weighted sum."""
  index = jax.lax.axis_index(REPLICA_AXIS)
  moved = own["x"] * shared + index.astype(jnp.float32)
  return {"moved": moved}, jax.lax.psum(moved, REPLICA_AXIS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_of_one_replica_becomes_one_of_all(layout):
  replicas = Replicas(4, layout)
  axes = (None, {"x": 0})
  over = jax.jit(replicas.map(meet, axes, (0, None)))
  shared, own = replicas.place((SHARED, {"x": OWN}), axes)
  moved, total = over(shared, own)
  expected = OWN * SHARED + np.arange(4, dtype=np.float32)[:, None]
  # The numbers are small multiples of a half: sums of them are exact.
  np.testing.assert_array_equal(moved["moved"], expected)
  np.testing.assert_array_equal(total, expected.sum(axis=0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_may_be_a_prefix_of_the_tree(layout):
  replicas = Replicas(2, layout)

  def one(pair):
    (a, b), c = pair
    return (a + b, jax.lax.psum(a, REPLICA_AXIS)), c

  axes = ((0, None),)
  over = replicas.map(one, axes, ((0, None), None))
  values = (np.asarray([[1.0], [2.0]]), np.asarray([[5.0], [7.0]])), 4.0
  (own, total), kept = jax.jit(over)(values)
  np.testing.assert_array_equal(own, [[6.0], [9.0]])
  np.testing.assert_array_equal(total, [3.0])
  assert float(kept) == 4.0


def test_in_a_mesh_every_replica_has_a_device_of_its_own():
  replicas = Replicas(4, "mesh")
  own, shared = replicas.place((OWN, SHARED), (0, None))
  assert own.sharding.spec == PartitionSpec(REPLICA_AXIS)
  assert shared.sharding.spec == PartitionSpec()
  devices = jax.devices()[:4]
  assert list(replicas.mesh.devices.flat) == devices
  for shard in own.addressable_shards:
    row = devices.index(shard.device)
    np.testing.assert_array_equal(shard.data, OWN[row : row + 1])
  for shard in shared.addressable_shards:
    np.testing.assert_array_equal(shard.data, SHARED)
  assert {s.device for s in shared.addressable_shards} == set(devices)


def test_results_stay_on_the_devices_of_their_replicas():
  replicas = Replicas(4, "mesh")
  axes = (None, {"x": 0})
  over = jax.jit(replicas.map(meet, axes, (0, None)))
  moved, total = over(*replicas.place((SHARED, {"x": OWN}), axes))
  assert moved["moved"].sharding.spec == PartitionSpec(REPLICA_AXIS)
  assert total.sharding.is_fully_replicated


def test_stacked_replicas_share_one_device():
  own, shared = Replicas(4).place((OWN, SHARED), (0, None))
  assert own.devices() == shared.devices() == {jax.devices()[0]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_abstract_values_have_the_shapes_and_places_of_real_ones(layout):
  replicas = Replicas(4, layout)
  tree, axes = ({"x": OWN}, [SHARED, np.int32(3)]), (0, None)
  real, abstract = replicas.place(tree, axes), replicas.abstract(tree, axes)
  assert jax.tree.structure(abstract) == jax.tree.structure(real)
  for known, leaf in zip(
    jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True
  ):
    assert isinstance(known, jax.ShapeDtypeStruct)
    assert (known.shape, known.dtype) == (leaf.shape, leaf.dtype)
    assert known.sharding == leaf.sharding


def test_more_replicas_than_devices_are_refused_in_a_mesh_alone():
  count = len(jax.devices()) + 1
  message = f"num_replicas={count} needs {count} devices (1 for each"
  with pytest.raises(ValueError, match=re.escape(message)) as caught:
    Replicas(count, "mesh")
  assert str(len(jax.devices())) in str(caught.value).split("there")[1]
  assert Replicas(count).num_replicas == count


def test_replicas_without_compiled_programs_are_refused():
  with (
    jax.disable_jit(),
    pytest.raises(ValueError, match="JAX_DISABLE_JIT is set.* unset it"),
  ):
    Replicas(2)


def test_impossible_replicas_are_refused():
  with pytest.raises(ValueError, match="num_replicas=0 must be at least 1"):
    Replicas(0)
  with pytest.raises(ValueError, match="layout='grid' must be one of stacked"):
    Replicas(2, "grid")
