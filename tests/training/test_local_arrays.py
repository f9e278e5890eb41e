import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dilocox_jax.training import local_arrays
from dilocox_jax.training.local_arrays import LocalArrays, LocalArraysHandler
from tests import runs

ODD = np.asarray([[np.nan, -0.0], [np.inf, 1e-45]], np.float32)
ARRAYS = {
  "0000['w|x']": ODD,
  "0001": np.asarray(ODD.astype(jnp.bfloat16)),
  "0002": np.arange(-3, 3, dtype=np.int8),
  "0003": np.uint32(7) * np.ones((), np.uint32),
  "0004": np.arange(4, dtype=jnp.float8_e4m3fn),
  "0005": np.zeros((0, 3), np.int32),
  "0006": np.array([True, False]),
}


@pytest.fixture(name="folder")
def folder_fixture(tmp_path):
  """A folder to which an asynchronous checkpointer wrote `ARRAYS`."""
  handler = LocalArraysHandler()
  with ocp.AsyncCheckpointer(handler) as checkpointer:
    checkpointer.save(tmp_path / "item", LocalArrays(ARRAYS))
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "item", LocalArrays(ARRAYS))
  runs.assert_same_bits(restored, ARRAYS)
  return tmp_path / "item"


def test_all_types_come_back_in_every_bit(folder):
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ARRAYS)
  found = local_arrays.read(folder, like)
  runs.assert_same_bits(found, ARRAYS)
  again = local_arrays.read(folder, {"0002": ARRAYS["0002"]})
  assert list(again) == ["0002"]


@pytest.mark.parametrize(
  ("name", "shape", "dtype"),
  [
    ("0000['w|x']", (4,), jnp.float32),
    ("0000['w|x']", (2, 2), jnp.int32),
    ("0001", (2, 2), jnp.float32),
    ("0002", (6,), jnp.float8_e4m3fn),
  ],
)
def test_other_shapes_and_types_are_named(folder, name, shape, dtype):
  like = {name: jax.ShapeDtypeStruct(shape, dtype)}
  with pytest.raises(ValueError, match="is needed") as error:
    local_arrays.read(folder, like)
  assert str(error.value).startswith(name) and "\n" not in str(error.value)


def test_a_name_that_is_missing_is_an_error(folder):
  with pytest.raises(KeyError, match="0009"):
    local_arrays.read(folder, {"0009": ARRAYS["0002"]})


def test_parts_of_an_array_go_to_the_devices_that_divide_it():
  mesh = jax.make_mesh((2,), ("replica",), devices=jax.devices()[:2])
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("replica"))
  like = {"a": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=spec)}
  values = {"a": np.arange(12, dtype=np.float32).reshape(4, 3)}
  found = local_arrays.placed(like, values)
  assert found["a"].sharding == spec
  runs.assert_same_bits(found, values)
