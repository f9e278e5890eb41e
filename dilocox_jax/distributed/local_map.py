"""Maps functions over the devices of one replica.

If a replica has several devices, its arrays are divided among them. For most
code JAX's partitioner decides which device computes what. Three kinds of code
must decide this themselves: code that sends bytes over a slow link, code that
multiplies matrices in pipeline stages, and code that selects values by index.
For the last kind the partitioner would first collect the whole array on every
device. This file maps such functions over the devices, so that a device works
on its own part of the arrays.

Muon multiplies a matrix with itself ten times in every step. If the devices of
a replica divide the rows of each matrix, every product needs the rows of all
devices. So the devices swap rows for layers before the update, and swap back
after it (`on_whole_layers`). Each device sends its part once in each direction.

For example, three layers [3, 8, 5] on two devices, each of which has four rows
of every layer:

  before         [3, 4, 5] and [3, 4, 5]
  filled up      [4, 4, 5] and [4, 4, 5], layer 3 is zero
  swapped        [2, 8, 5] and [2, 8, 5], layers 0 and 1, and 2 and 3
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dilocox_jax.plan.model.division import (
  DATA_AXIS,
  STAGE_AXIS,
  TENSOR_AXIS,
  Division,
  Spec,
)
from dilocox_jax.trees import Array, Tree, path_name

INNER_AXES = (DATA_AXIS, STAGE_AXIS, TENSOR_AXIS)
# A pipeline is mapped by hand over these axes. JAX's partitioner divides its
# products among the tensor shards.
PIPELINE_AXES = (DATA_AXIS, STAGE_AXIS)
_NUM_AXES = 3  # A stack of matrices is [layers, rows, columns].

# (gradients, optimizer state, parameters) -> (updates, optimizer state).
Update = Callable[..., tuple[Tree, Tree]]


def partition(spec: Spec, axes: Sequence[str] = INNER_AXES) -> PartitionSpec:
  """Returns a spec of `Division` as a JAX `PartitionSpec`.

  Args:
    spec: Mesh axes that divide each dimension of an array.
    axes: Mesh axes of the result. Other axes of the spec are left out.
  """

  def chosen(names: tuple[str, ...]) -> tuple[str, ...] | None:
    return tuple(name for name in names if name in axes) or None

  return PartitionSpec(*map(chosen, spec))


def current_division() -> Division:
  """Returns the division of the replica whose code is being traced.

  A replica on one device has the default division, `Division()`. A replica on a
  mesh of the caller has it too, because an axis "data" of that mesh is not an
  axis of this project: there the partitioner divides the work.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not set(INNER_AXES) <= set(mesh.auto_axes):
    return Division()
  return Division(
    num_data_shards=mesh.shape[DATA_AXIS],
    num_stages=mesh.shape[STAGE_AXIS],
    num_tensor_shards=mesh.shape[TENSOR_AXIS],
  )


def is_automatic(axis: str) -> bool:
  """Returns whether JAX's partitioner divides the work along a mesh axis.

  Args:
    axis: Name of the axis. It need not exist: a replica on one device has no
      such axis, and then nothing is divided.
  """
  return axis in jax.sharding.get_abstract_mesh().auto_axes


def map_over_devices(
  function: Callable,
  in_specs: Tree,
  out_specs: Tree,
  axes: Sequence[str] = INNER_AXES,
) -> Callable:
  """Maps a function over the devices of one replica.

  Args:
    function: Function of arrays. It takes and returns the parts of the arrays
      that one device holds.
    in_specs: `jax.sharding.PartitionSpec`s of the arguments (tree prefix).
    out_specs: `jax.sharding.PartitionSpec`s of the results (tree prefix).
    axes: Axes of the current mesh (`jax.sharding.get_abstract_mesh`) over which
      the function is mapped. JAX's partitioner divides the work along the other
      axes.

  Returns:
    Function of the whole arrays.
  """
  # JAX's check would need values in `function` marked as varying (pcast). Many
  # of these functions also run on one device, which has no axis to name.
  return jax.shard_map(
    function,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=set(axes),
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

  It takes the first entry of a list that divides both axes evenly. The entries
  that use all devices come first. Of these, the first ones leave layers on
  their stage, where the pipeline keeps them.

  For example take 2 stages and 2 data shards. [4, 6] is divided by ("stage",
  "data"), so a device has 2 layers and 3 groups. The 3 layers of [3, 8] cannot
  be divided by 2, so all 4 devices divide the groups. [3, 5] is not divided.
  """
  stage = (STAGE_AXIS,)
  data = (DATA_AXIS,)
  both = (STAGE_AXIS, DATA_AXIS)
  undivided = ()
  specs = (
    (stage, data),
    (undivided, both),
    (both, undivided),
    (stage, undivided),
    (undivided, data),
    (undivided, stage),
  )
  for spec in specs:
    if division.divides(spec, shape):
      return partition(spec)
  return partition(())


def on_whole_layers(update: Update) -> Update:
  """Lets each device of a replica update whole layers.

  Args:
    update: Update of an optimizer. It computes stacked matrices layer by layer,
      also a layer of zeros, and all other leaves value by value.

  Returns:
    The same update of arrays that are divided among the devices in any way.
  """

  def mapped(
    updates: Tree, state: Tree, params: Tree = None
  ) -> tuple[Tree, Tree]:
    division = current_division()
    if division.num_devices == 1:
      return update(updates, state, params)
    arguments = (updates, state, params)
    specs = specs_of(division, arguments)

    def local(*parts: Tree) -> tuple[Tree, Tree]:
      whole_layers = jax.tree.map(_rows_to_layers, parts, specs)
      results = update(*whole_layers)
      return jax.tree.map(_layers_to_rows, results, parts[:2], specs[:2])

    partitions = jax.tree.map(lambda _, spec: partition(spec), arguments, specs)
    mapped_update = map_over_devices(
      local, in_specs=partitions, out_specs=partitions[:2]
    )
    return mapped_update(*arguments)

  return mapped


def divided(division: Division, tree: Tree) -> Tree:
  """Tells JAX to divide the arrays of one replica among its devices.

  A replica on one device, or on a mesh of the caller, is left as it is.

  Args:
    division: How a replica's arrays are divided among its devices.
    tree: Arrays of one replica, inside a function that
      `distributed.replicas.Replicas.map` maps. Parameters, gradients and states
      have the same paths.

  Returns:
    The tree, with sharding constraints.
  """
  if current_division().num_devices == 1:
    return tree
  return jax.tree.map(
    lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, partition(spec)),
    tree,
    specs_of(division, tree),
  )


def specs_of(division: Division, trees: Tree) -> Tree:
  """Returns the spec of every leaf, a tree like `trees`.

  Args:
    division: How a replica's arrays are divided among its devices.
    trees: Trees of arrays.
  """

  def spec(path: Any, leaf: Array) -> Spec:
    return division.spec(path_name(path), leaf.shape)

  return jax.tree_util.tree_map_with_path(spec, trees)


def _rows_to_layers(leaf: Array, spec: Spec) -> Array:
  """Swaps a device's rows and columns of all layers for some whole layers.

  Args:
    leaf: Part of all layers, [L, r, c].
    spec: Mesh axes that divide each axis of the whole leaf.

  Returns:
    Whole layers [n, R, C]. Layers of zeros fill up the last device's part.
  """
  divided = _divided_axes(leaf, spec)
  num_devices = math.prod(jax.lax.axis_size(names) for _, names in divided)
  if num_devices > 1:
    missing = -leaf.shape[0] % num_devices
    leaf = jnp.pad(leaf, [(0, missing), (0, 0), (0, 0)])
  for axis, names in divided:
    leaf = jax.lax.all_to_all(
      leaf, names, split_axis=0, concat_axis=axis, tiled=True
    )
  return leaf


def _layers_to_rows(leaf: Array, part: Array, spec: Spec) -> Array:
  """Swaps whole layers for a device's rows and columns of all layers.

  Args:
    leaf: Whole layers [n, R, C], as `_rows_to_layers` returned them.
    part: The argument of `_rows_to_layers`, for its shape [L, r, c].
    spec: Mesh axes that divide each axis of the whole leaf.

  Returns:
    Part of all layers, [L, r, c].
  """
  for axis, names in reversed(_divided_axes(part, spec)):
    leaf = jax.lax.all_to_all(
      leaf, names, split_axis=axis, concat_axis=0, tiled=True
    )
  if part.ndim != _NUM_AXES:
    return leaf
  return leaf[: len(part)]


def _divided_axes(leaf: Array, spec: Spec) -> list[tuple[int, tuple[str, ...]]]:
  """Returns the axes of rows and columns that devices divide.

  Returns:
    Each axis with the mesh axes that divide it.
  """
  if leaf.ndim != _NUM_AXES:
    return []
  return [(axis, spec[axis]) for axis in (1, 2) if spec[axis]]
