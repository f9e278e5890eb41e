"""Maps functions over the devices of one replica.

If a replica has several devices, its arrays are divided among them. For most
code JAX's partitioner decides which device computes what. Three kinds of code
must decide this themselves: code that sends bytes over a slow link, code that
multiplies matrices in pipeline stages, and code that selects values by index.
For the last kind the partitioner would first collect the whole array on every
device. This file maps such functions over the devices, so that a device works
on its own part of the arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dilocox_jax.plan.model.division import DATA_AXIS, STAGE_AXIS, Division
from dilocox_jax.trees import Array

INNER_AXES = (DATA_AXIS, STAGE_AXIS)


def current_division() -> Division:
  """Returns how the replica whose code is being traced is divided.

  A replica on one device has the default division, `Division()`. So has one on
  a caller's own mesh, whose "data" axis is not ours: the partitioner divides
  its work.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not set(INNER_AXES) <= set(mesh.auto_axes):
    return Division()
  return Division(mesh.shape[DATA_AXIS], mesh.shape[STAGE_AXIS])


def map_over_devices(function: Callable, in_specs, out_specs) -> Callable:
  """Maps a function over the devices of one replica.

  Args:
    function: Function of arrays. It takes and returns the parts of the arrays
      that one device holds.
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
  """Applies a function that computes every row from the same row of its inputs.

  If the rows can be divided evenly, every device computes its share of them. If
  the replica has one device, the function is called directly.

  Args:
    function: Function (*arrays) -> arrays. All arrays begin with the axes
      [layers, groups], and a row is the rest. A row of a result depends only on
      the same rows of the arguments.
    *arrays: Arguments of the function.
  """
  division = current_division()
  if division.num_devices == 1:
    return function(*arrays)
  spec = _rows(division, arrays[0].shape[:2])
  return map_over_devices(function, spec, spec)(*arrays)


def _rows(division: Division, shape: tuple[int, ...]) -> PartitionSpec:
  """Chooses the mesh axes that divide the axes [layers, groups].

  The function takes the first way of the list that divides both axes evenly.
  Ways that use all devices come first. Among them, the first ones leave layers
  on their stage, where the pipeline keeps them.

  For example take 2 stages and 2 data shards. [4, 6] is divided by ("stage",
  "data"), so a device has 2 layers and 3 groups. The 3 layers of [3, 8] cannot
  be divided by 2, so all 4 devices divide the groups. [3, 5] is not divided.
  """
  stage, data, whole = (STAGE_AXIS,), (DATA_AXIS,), ()
  ways = (
    (stage, data),
    (whole, stage + data),
    (stage + data, whole),
    (stage, whole),
    (whole, data),
    (whole, stage),
  )
  way = next((way for way in ways if division.divides(way, shape)), ())
  return PartitionSpec(*(axes or None for axes in way))
