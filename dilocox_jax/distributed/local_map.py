"""Maps functions over the devices of one replica.

If a replica has several devices, its arrays are divided among them. For most
code JAX's partitioner decides which device computes what. Some code is mapped
over the devices by hand, so that each device works on its own part of the
arrays: exchanges over a slow link, pipeline stages, Muon's update, and the
selection of values by index.
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
# matrix products among the tensor shards.
PIPELINE_AXES = (DATA_AXIS, STAGE_AXIS)
_NUM_AXES = 3  # A stack of matrices is [layers, rows, columns].

# (gradients, optimizer state, parameters) -> (updates, optimizer state).
Update = Callable[..., tuple[Tree, Tree]]


def partition(spec: Spec, axes: Sequence[str] = INNER_AXES) -> PartitionSpec:
  """Converts a spec of a `Division` to a `jax.sharding.PartitionSpec`.

  Args:
    spec: For each dimension of an array, the names of the mesh axes that divide
      it.
    axes: Mesh axes that the result may have. Other axes are left out.
  """

  def chosen(names: tuple[str, ...]) -> tuple[str, ...] | None:
    return tuple(name for name in names if name in axes) or None

  return PartitionSpec(*map(chosen, spec))


def current_division() -> Division:
  """Returns the numbers of shards and stages of the replica being traced.

  The result is `Division()` (one device) in three cases: the replica has one
  device, a user has set up the mesh, or the traced code is already mapped over
  the devices (`map_over_devices`).
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

  If there is no axis of this name, the result is False.
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
    in_specs: How each argument is divided: a tree prefix of the arguments, with
      values of the type `jax.sharding.PartitionSpec`.
    out_specs: How each result is divided, in the form of `in_specs`.
    axes: Axes of the current mesh over which the function is mapped. JAX's
      partitioner divides the work along the other axes.

  Returns:
    Function of the whole arrays, with the whole results.
  """
  # `check_vma=True` would need values in `function` marked as varying (pcast).
  # Many of these functions also run on one device, which has no axis to name.
  return jax.shard_map(
    function,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=set(axes),
    check_vma=False,
  )


def map_over_rows(function: Callable, *arrays: Array) -> Any:
  """Applies a function row by row, with the rows divided among the devices.

  Stages and data shards divide the rows, as far as the rows divide evenly.
  Tensor shards compute the same rows.

  Args:
    function: Function (*arrays) -> arrays. All arrays have the shape
      [layers, groups, ...]. The values of one group in one layer are a row. A
      row of a result must depend only on the same rows of the arguments.
    *arrays: Arguments for the function.
  """
  division = current_division()
  if division.num_devices == 1:
    return function(*arrays)
  spec = _rows(division, arrays[0].shape[:2])
  return map_over_devices(function, spec, spec)(*arrays)


def _rows(division: Division, shape: tuple[int, ...]) -> PartitionSpec:
  """Returns mesh axes that divide the first two axes, [layers, groups], evenly.

  Example with 2 stages and 2 data shards: [4, 6] is divided by ("stage",
  "data"). The 3 layers of [3, 8] cannot be divided by 2, so all 4 devices
  divide the groups. [3, 5] is not divided.
  """
  stage = (STAGE_AXIS,)
  data = (DATA_AXIS,)
  both = (STAGE_AXIS, DATA_AXIS)
  undivided = ()
  # At best all stages and data shards get rows of their own, and layers stay on
  # the stage on which the pipeline keeps them.
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
  """Wraps an optimizer's update so that each device updates whole layers.

  Muon needs this: it multiplies each matrix with its own transpose, which needs
  all rows of the matrix. Before the update the devices swap their rows of all
  layers for some whole layers, and after the update they swap back. For
  example, three layers [3, 8, 5] on two devices, each of which has four rows of
  every layer:

    before      [3, 4, 5] on each device
    filled up   [4, 4, 5] on each device; the last layer is zeros
    swapped     [2, 8, 5]: two whole layers on each device

  Args:
    update: Function (gradients, optimizer state, parameters) -> (updates,
      optimizer state). It must treat every layer of stacked matrices by itself,
      must accept a layer of zeros, and must treat all other leaves value by
      value.

  Returns:
    A function with the same arguments and results, for arrays that are divided
    among the devices in any way.
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
      # The results have the shapes of the first two arguments.
      return jax.tree.map(_layers_to_rows, results, parts[:2], specs[:2])

    partitions = jax.tree.map(lambda _, spec: partition(spec), arguments, specs)
    mapped_update = map_over_devices(
      local, in_specs=partitions, out_specs=partitions[:2]
    )
    return mapped_update(*arguments)

  return mapped


def divided(division: Division, tree: Tree) -> Tree:
  """Adds sharding constraints that divide a replica's arrays among its devices.

  If the replica has one device, or runs in a mesh that a user has set up, the
  tree is returned unchanged.

  Args:
    division: How a replica's arrays are divided among its devices.
    tree: Parameters, gradients or optimizer state of one replica, inside a
      function that `distributed.replicas.Replicas.map` maps.
  """
  if current_division().num_devices == 1:
    return tree
  return jax.tree.map(
    lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, partition(spec)),
    tree,
    specs_of(division, tree),
  )


def specs_of(division: Division, trees: Tree) -> Tree:
  """Returns a tree with the spec of every leaf of `trees`.

  A spec has, for each dimension of the leaf, the names of the mesh axes that
  divide the dimension. `trees` has arrays of one replica.
  """

  def spec(path: Any, leaf: Array) -> Spec:
    return division.spec(path_name(path), leaf.shape)

  return jax.tree_util.tree_map_with_path(spec, trees)


def _rows_to_layers(leaf: Array, spec: Spec) -> Array:
  """Swaps a device's part of all layers, [L, r, c], for n whole layers.

  The result is [n, R, C]. Layers of zeros are added if the devices cannot
  divide L evenly. Arrays that are not 3-D, or whose rows and columns are not
  divided, stay as they are.
  """
  divided_axes = _divided_axes(leaf, spec)
  num_devices = math.prod(jax.lax.axis_size(names) for _, names in divided_axes)
  if num_devices > 1:
    # Number of layers up to the next multiple of `num_devices`.
    missing = -leaf.shape[0] % num_devices
    leaf = jnp.pad(leaf, [(0, missing), (0, 0), (0, 0)])
  for axis, names in divided_axes:
    leaf = jax.lax.all_to_all(
      leaf, names, split_axis=0, concat_axis=axis, tiled=True
    )
  return leaf


def _layers_to_rows(leaf: Array, part: Array, spec: Spec) -> Array:
  """Swaps whole layers, [n, R, C], for a part of all layers, [L, r, c].

  It reverses `_rows_to_layers`. `part` was the argument `leaf` of that
  function; only its shape is read.
  """
  for axis, names in reversed(_divided_axes(part, spec)):
    leaf = jax.lax.all_to_all(
      leaf, names, split_axis=axis, concat_axis=0, tiled=True
    )
  if part.ndim != _NUM_AXES:
    return leaf
  return leaf[: len(part)]


def _divided_axes(leaf: Array, spec: Spec) -> list[tuple[int, tuple[str, ...]]]:
  """Returns the divided ones of axes 1 and 2, each with its mesh axes.

  The result is [] for arrays that are not [layers, rows, columns].
  """
  if leaf.ndim != _NUM_AXES:
    return []
  return [(axis, spec[axis]) for axis in (1, 2) if spec[axis]]
