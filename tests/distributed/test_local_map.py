import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.distributed.local_map import current_division, map_over_rows
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.model.division import Division

DIVISIONS = (Division(2, 2), Division(4, 1), Division(1, 4), Division())
SHAPES = ((4, 2, 5), (4, 3, 5), (3, 4, 5), (3, 2, 5), (3, 3, 5), (1, 8, 5))


def ranked(values, weights):
  """Treats every row by itself, in a way that no sum of parts could."""
  order = jnp.argsort(values, axis=-1)
  return order, jnp.take_along_axis(values * weights, order, axis=-1)


def under(division, function, *arrays):
  replicas = Replicas(1, "mesh", division)
  over = replicas.map(function, (None,) * len(arrays), None)
  return jax.jit(over)(*arrays)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_rows_are_the_same_however_many_devices_share_them(division, shape):
  rng = np.random.default_rng(0)
  values = rng.permutation(np.prod(shape)).reshape(shape).astype(np.float32)
  weights = rng.integers(1, 9, shape).astype(np.float32)
  found = under(
    division, lambda v, w: map_over_rows(ranked, v, w), values, weights
  )
  for got, expected in zip(found, ranked(values, weights), strict=True):
    np.testing.assert_array_equal(got, expected)


def test_every_device_has_its_own_rows_only():
  seen = []

  def watched(values):
    seen.append(values.shape)
    return values

  values = np.zeros((4, 6, 5), np.float32)
  under(Division(2, 2), lambda v: map_over_rows(watched, v), values)
  assert seen == [(2, 3, 5)]


def test_rows_that_come_out_even_nowhere_are_done_by_all():
  seen = []

  def watched(values):
    seen.append(values.shape)
    return values

  values = np.zeros((3, 5, 2), np.float32)
  under(Division(2, 2), lambda v: map_over_rows(watched, v), values)
  assert seen == [(3, 5, 2)]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_code_knows_among_how_many_devices_it_is_divided(division):
  found = []

  def look(x):
    found.append(current_division())
    return x

  under(division, look, np.float32(1))
  assert found[0].num_data_shards == division.num_data_shards
  assert found[0].num_stages == division.num_stages


def test_nothing_is_divided_outside_of_replicas():
  assert current_division() == Division()


def test_a_data_axis_of_the_callers_own_mesh_is_not_ours():
  kind = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("data",), axis_types=kind)
  with jax.set_mesh(mesh):
    assert current_division() == Division()
    found = jax.jit(lambda x: map_over_rows(lambda v: 2 * v, x))(
      jnp.ones((2, 2, 3))
    )
  np.testing.assert_array_equal(found, 2.0)
