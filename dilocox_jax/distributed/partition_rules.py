"""Divides the parameters of a user's model among the devices of a replica.

A function takes the path and the shape of a parameter. It says which dimensions
are divided among data shards (devices that read different rows of a batch), and
which among tensor shards (devices that read the same rows). The user gives this
function, or it is made from the partitioning metadata of an NNX or linen module
(`models.custom`). If there is no function, or if its result is None, the data
shards divide the largest dimension (`Division.largest_dimension_spec`).

JAX's partitioner then divides the work. The user's code is not changed.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from dilocox_jax.checks import require
from dilocox_jax.plan.model.division import (
  DATA_AXIS,
  TENSOR_AXIS,
  Division,
  Spec,
)
from dilocox_jax.trees import Tree, shapes_by_path

# Function from a parameter's path, such as "blocks/up/kernel", and its shape to
# its partition over the mesh axes "data" and "tensor". If it returns None, the
# data shards divide the largest dimension that they can.
PartitionRule = Callable[[str, tuple[int, ...]], PartitionSpec | None]

_AXES = (DATA_AXIS, TENSOR_AXIS)


def divide_model(
  params: Tree,
  *,
  num_data_shards: int,
  num_tensor_shards: int = 1,
  partition: PartitionRule | None = None,
) -> Division:
  """Returns how the devices of a replica divide a model, for `make_rounds`.

  A replica has num_data_shards * num_tensor_shards devices.

  Args:
    params: Parameters of the model, or their shapes and dtypes.
    num_data_shards: Number of data shards. They divide the rows of a batch, and
      the dimensions that `partition` gives to the axis "data".
    num_tensor_shards: Number of tensor shards. They divide the dimensions that
      `partition` gives to the axis "tensor", but not the rows of a batch.
    partition: Function (path, shape) -> `jax.sharding.PartitionSpec` of a
      parameter over the mesh axes "data" and "tensor". If the function returns
      None, or if `partition` is None, the data shards divide the largest
      dimension that they can (`Division.largest_dimension_spec`).

  Raises:
    ValueError: If a number of shards is below 1, if the result of `partition`
      does not fit a parameter, or if there are several tensor shards and no
      `partition`.
  """
  division = Division(
    num_data_shards=num_data_shards, num_tensor_shards=num_tensor_shards
  )
  return divided_by_rule(division, shapes_by_path(params), partition)


def divided_by_rule(
  division: Division,
  shapes: Mapping[str, tuple[int, ...]],
  rule: PartitionRule | None,
) -> Division:
  """Returns a division with the partition of every parameter of a model.

  Args:
    division: Numbers of data shards and of tensor shards.
    shapes: Shape of every parameter, by path.
    rule: Function from path and shape to a partition. If the rule is None, or
      returns None, the data shards divide the largest dimension that they can
      (`Division.largest_dimension_spec`).

  Raises:
    ValueError: If the partition of a parameter is no `PartitionSpec` over the
      axes "data" and "tensor" that divides the parameter evenly; if there are
      several pipeline stages; or if there are several tensor shards but no
      rule.
  """
  require(
    division.num_stages == 1,
    f"mesh.num_stages={division.num_stages} needs a model in layers: register "
    "one with the functions embed, block and logits "
    "(dilocox_jax.register_model), or set mesh.num_stages=1 and divide the "
    "model by mesh.num_data_shards",
  )
  require(
    division.num_tensor_shards == 1 or rule is not None,
    f"mesh.num_tensor_shards={division.num_tensor_shards} needs to know what "
    "tensor shards divide: give partition, a function from the path and the "
    "shape of a parameter to a jax.sharding.PartitionSpec, or set "
    "mesh.num_tensor_shards=1",
  )
  specs = []
  for path, shape in shapes.items():
    partition = None
    if rule is not None:
      partition = rule(path, tuple(shape))
    if partition is None:
      spec = division.largest_dimension_spec(tuple(shape))
    else:
      spec = _checked_spec(division, path, tuple(shape), partition)
    specs.append((path, spec))
  return dataclasses.replace(division, leaf_specs=tuple(specs))


def _checked_spec(
  division: Division, path: str, shape: tuple[int, ...], partition: Any
) -> Spec:
  """Returns the mesh axes of every dimension of a parameter.

  Raises:
    ValueError: If the partition does not fit the parameter.
  """
  name = f"partition of {path} {list(shape)}"
  require(
    isinstance(partition, PartitionSpec),
    f"{name}: it must be a jax.sharding.PartitionSpec or None, not "
    f"{type(partition).__name__}",
  )
  require(
    len(partition) <= len(shape),
    f"{name}: {partition} has {len(partition)} entries, but the parameter has "
    f"{len(shape)} dimensions",
  )
  # A partition may leave out the last dimensions, which are then not divided.
  entries = (*partition, *(None,) * (len(shape) - len(partition)))
  spec = tuple(_axes_of(entry) for entry in entries)
  used_axes = [axis for axes in spec for axis in axes]
  for axis in used_axes:
    require(
      axis in _AXES,
      f"{name}: there is no mesh axis {axis!r}, only {' and '.join(_AXES)}: "
      "give partition, which maps names of your own to these",
    )
    require(
      used_axes.count(axis) == 1,
      f"{name}: {partition} names the axis {axis!r} twice",
    )
  for size, axes in zip(shape, spec, strict=True):
    num_shards = division.num_shards(axes)
    require(
      size % num_shards == 0,
      f"{name}: {num_shards} shards ({', '.join(axes)}) cannot divide a "
      f"dimension of {size}: take another partition, or other numbers of "
      "shards",
    )
  return spec


def _axes_of(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes in one entry of a `PartitionSpec`, as a tuple."""
  if entry is None:
    return ()
  if isinstance(entry, tuple):
    return entry
  return (entry,)
