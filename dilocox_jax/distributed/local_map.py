"""Maps functions over the devices of one replica.

Inside a replica JAX's partitioner divides whole arrays by itself. Some code
must not be left to it: bytes on a slow link, products of a pipeline, and
choices by index, for which it would first collect the whole array. Such
functions are mapped over the devices here. If replicas are not divided, they
simply run.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dilocox_jax.plan.model.division import DATA_AXIS, STAGE_AXIS, Division
from dilocox_jax.pytypes import Array

INNER_AXES = (DATA_AXIS, STAGE_AXIS)


def current_division() -> Division:
  """Returns the division of the replica whose code is being traced."""
  mesh = jax.sharding.get_abstract_mesh()
  if DATA_AXIS not in mesh.auto_axes:
    return Division()
  return Division(mesh.shape[DATA_AXIS], mesh.shape[STAGE_AXIS])


def map_over_devices(function: Callable, in_specs, out_specs) -> Callable:
  """Maps a function over the devices of one replica.

  Args:
    function: Takes and returns what one device holds.
    in_specs: `jax.sharding.PartitionSpec`s of the arguments (tree prefix).
    out_specs: `jax.sharding.PartitionSpec`s of the results (tree prefix).
  """
  return jax.shard_map(
    function,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=set(INNER_AXES),
    check_vma=False,
  )


def map_over_rows(function: Callable, *arrays: Array) -> Any:
  """Applies a function that handles each row by itself and all alike.

  Every device handles its share of the rows, if they can be shared evenly.

  Args:
    function: (*arrays) -> arrays. All begin with [layers, groups], and a row
      of the results depends on the same row of the arguments alone.
    *arrays: Arguments of the function.
  """
  division = current_division()
  if division.num_devices == 1:
    return function(*arrays)
  spec = PartitionSpec(*_rows(division, arrays[0].shape[:2]))
  return map_over_devices(function, spec, spec)(*arrays)


def _rows(division: Division, shape: tuple[int, ...]):
  """Chooses the mesh axes that divide [layers, groups].

  The first way is taken that divides both evenly. Ways that use all devices
  come first, and among them those that leave layers on their stage, where the
  pipeline keeps them. For example with 2 stages and 2 data shards [4, 6] is
  divided by ("stage", "data"): 2 layers and 3 groups a device. [3, 8] has no
  even layers, so its groups are divided four ways. [3, 5] stays whole.
  """
  ways = (
    (STAGE_AXIS, DATA_AXIS),
    (None, (STAGE_AXIS, DATA_AXIS)),
    ((STAGE_AXIS, DATA_AXIS), None),
    (STAGE_AXIS, None),
    (None, DATA_AXIS),
    (None, STAGE_AXIS),
  )
  for way in ways:
    spec = tuple(
      () if axes is None else (axes,) if isinstance(axes, str) else axes
      for axes in way
    )
    if division.divides(spec, shape):
      return way
  return ()
