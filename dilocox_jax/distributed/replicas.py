"""Assigns devices to replicas, and places values on these devices.

Replicas are stacked on one device, or spread over a mesh whose axes are
replica, data shard and stage. The plan's division decides which part of an
array each device holds. Only this file turns the division into shardings.

Many functions take `axes`, a tree prefix as in `jax.vmap`. A prefix has one
entry for a whole subtree: 0 if the subtree's leaves have a replica axis
[M, ...], or None if all replicas share the leaves.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
  SingleDeviceSharding,
)

from dilocox_jax.distributed.local_map import INNER_AXES
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.plan.model.division import DATA_AXIS, Division, Spec
from dilocox_jax.pytypes import Tree
from dilocox_jax.trees import path_name

REPLICA_AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Replicas:
  """Describes the devices of all replicas.

  Attributes:
    num_replicas: Number of replicas, M.
    layout: "stacked" if one device holds all replicas, or "mesh" if each
      replica has its own devices.
    division: How a replica is divided among its devices.
  """

  num_replicas: int
  layout: str = "stacked"
  division: Division = Division()

  def __post_init__(self):
    if self.layout not in LAYOUTS:
      raise ValueError(
        f"layout={self.layout!r} must be one of {', '.join(LAYOUTS)}"
      )
    if self.num_replicas < 1:
      raise ValueError(f"num_replicas={self.num_replicas} must be at least 1")
    if self.layout == "mesh":
      self._check_devices()
    elif self.is_divided:
      raise ValueError(
        f"layout={self.layout!r} has one device, but a replica is divided "
        f"among {self.division.num_devices}: take mesh.layout='mesh'"
      )

  def _check_devices(self):
    available, share = len(jax.devices()), self.division.num_devices
    needed = "as many devices" if share == 1 else f"{share} devices each"
    if self.num_devices > available:
      raise ValueError(
        f"num_replicas={self.num_replicas} needs {needed}, but there are "
        f"{available}: take mesh.layout='stacked', or a smaller mesh"
      )
    if jax.process_count() > 1 and self.num_devices < available:
      raise ValueError(
        f"num_replicas={self.num_replicas} needs {needed}, but there are "
        f"{available}: with several processes the mesh must use all devices"
      )

  @property
  def is_divided(self) -> bool:
    """Whether a replica has several devices."""
    return self.division.num_devices > 1

  @property
  def num_devices(self) -> int:
    """Number of devices of all replicas in a mesh."""
    return self.num_replicas * self.division.num_devices

  @functools.cached_property
  def mesh(self) -> Mesh:
    """Mesh of all devices, [M, data shards, stages].

    The replica axis is outermost. So the devices of a replica are neighbours,
    and only `REPLICA_AXIS` crosses slow links. For example, two slices (or
    processes) have the devices 0-3 and 4-7, and there are 4 replicas of 2
    stages. Replicas 0 and 1 get the devices (0, 1) and (2, 3). Replicas 2 and
    3 get (4, 5) and (6, 7).
    """
    division = self.division
    inside = (division.num_data_shards, division.num_stages)
    shape = (self.num_replicas, *inside)
    devices = jax.devices()[: self.num_devices]
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1 and self.num_replicas % len(slices) == 0:
      within = (self.num_replicas // len(slices), *inside)
      grid = mesh_utils.create_hybrid_device_mesh(
        within, (len(slices), 1, 1), devices
      )
    else:  # Devices are numbered process by process.
      grid = np.asarray(devices).reshape(shape)
    types = (AxisType.Auto,) * len(shape)
    return Mesh(grid, (REPLICA_AXIS, *INNER_AXES), axis_types=types)

  @property
  def own(self) -> list[int]:
    """Numbers of the replicas that have a device in this process."""
    if self.layout == "stacked":
      return list(range(self.num_replicas))
    here = jax.process_index()
    return [
      replica
      for replica, devices in enumerate(self.mesh.devices)
      if any(device.process_index == here for device in devices.flat)
    ]

  def place(self, tree: Tree, axes) -> Tree:
    """Copies each replica's values whole to every device of the replica.

    Args:
      tree: Arrays [M, ...] or [...], with the same values in every process.
      axes: Tree prefix of `tree`: 0 where leaves have a replica axis
        [M, ...], None where all replicas share the leaves.
    """
    return self._put(tree, self._shardings(tree, axes, _whole))

  def place_state(self, tree: Tree, axes) -> Tree:
    """Places parameters and states, and divides them inside each replica.

    Args:
      tree: Arrays [M, ...] or [...], with the same values in every process.
      axes: Tree prefix of `tree`: 0 where leaves have a replica axis
        [M, ...], None where all replicas share the leaves.
    """
    return self._put(tree, self.state_shardings(tree, axes))

  def place_batches(self, batches: Tree) -> Tree:
    """Puts the batches of this process on the devices that read them.

    Args:
      batches: Batches of this process's replicas, leaves
        [len(self.own), H, B, ...]. Data shards divide B.
    """
    # Maps a replica to its row of `batches`. If this process has the replicas 2
    # and 3, this is {2: 0, 3: 1}.
    row_of = {replica: row for row, replica in enumerate(self.own)}

    def put(leaf):
      if self.layout == "stacked":
        return jax.device_put(leaf, self._here)
      parts = (REPLICA_AXIS, None, *([DATA_AXIS] * self.is_divided))
      shape = (self.num_replicas, *leaf.shape[1:])

      def part(index):
        replica, *rest = index
        rows = [row_of[m] for m in range(*replica.indices(shape[0]))]
        return leaf[(rows, *rest)]

      sharding = NamedSharding(self.mesh, PartitionSpec(*parts))
      return _assembled(shape, sharding, part)

    return jax.tree.map(put, batches)

  def abstract(self, tree: Tree, axes) -> Tree:
    """Returns shapes, types and shardings of a state, without values.

    Args:
      tree: Arrays, or their shapes and types.
      axes: Tree prefix as in `place_state`.
    """
    return with_shardings(tree, self.state_shardings(tree, axes))

  def state_shardings(self, tree: Tree, axes) -> Tree:
    """Returns the sharding of every leaf of a state.

    Args:
      tree: Arrays, or their shapes.
      axes: Tree prefix as in `place_state`.

    Raises:
      ValueError: If no rule says how a leaf is divided.
    """
    return self._shardings(tree, axes, self.spec)

  def whole(self, axis: int | None) -> Sharding:
    """Returns the sharding of values that are not divided inside a replica.

    Args:
      axis: 0 for values [M, ...]; None for values that all replicas share.
    """
    if self.layout == "stacked":
      return self._here
    parts = () if axis is None else (REPLICA_AXIS,)
    return NamedSharding(self.mesh, PartitionSpec(*parts))

  def _shardings(self, tree: Tree, axes, spec_of: Callable) -> Tree:
    if self.layout == "stacked":
      return jax.tree.map(lambda _: self._here, tree)

    def under(axis, prefix, subtree):
      def sharding(path, leaf):
        shape = leaf.shape if axis is None else leaf.shape[1:]
        parts = partition(spec_of((*prefix, *path), shape))
        outer = () if axis is None else (REPLICA_AXIS,)
        return NamedSharding(self.mesh, PartitionSpec(*outer, *parts))

      return jax.tree_util.tree_map_with_path(sharding, subtree)

    return jax.tree_util.tree_map_with_path(
      lambda path, axis, subtree: under(axis, path, subtree),
      axes,
      tree,
      is_leaf=is_none,
    )

  def spec(self, path, shape: tuple[int, ...]) -> Spec:
    """Returns how a leaf of one replica's state is divided.

    Args:
      path: Key path of the leaf, as JAX gives it.
      shape: Shape of the leaf in one replica.
    """
    return self.division.spec(path_name(path), shape) if self.is_divided else ()

  def map(self, function: Callable, in_axes, out_axes) -> Callable:
    """Maps code written for one replica over all of them.

    Args:
      function: Function from one replica's values to one replica's values.
        It may use collectives over `REPLICA_AXIS`.
      in_axes: Tree prefix of the arguments: 0 where leaves have a replica
        axis [M, ...], None where all replicas share the leaves.
      out_axes: Tree prefix of the results, with the same meaning.

    Returns:
      A function of all replicas' values. It is not compiled yet.
    """
    if self.layout == "stacked":
      return jax.vmap(
        function,
        in_axes,
        out_axes,
        axis_name=REPLICA_AXIS,
        axis_size=self.num_replicas,
      )

    def local(*args):
      out = function(*_map_prefix(lambda x: x[0], in_axes, args))
      return _map_prefix(lambda x: x[None], out_axes, out)

    manual = (REPLICA_AXIS, *(() if self.is_divided else INNER_AXES))
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=_specs(in_axes),
      out_specs=_specs(out_axes),
      axis_names=set(manual),
      # This check needs `jax.lax.pcast`, which does not work under vmap. The
      # same code must run under vmap and shard_map, so the check is off. Tests
      # compare the copies of the replicas instead.
      check_vma=False,
    )

  def divided(self, tree: Tree) -> Tree:
    """Tells the compiler to divide a replica's state as the division says.

    Functions that `map` maps call this, so that a new state is divided among
    the replica's devices like the old one. The values do not change.

    Args:
      tree: State of one replica, leaves without a replica axis.
    """
    if not self.is_divided:
      return tree

    def constrained(path, leaf):
      spec = partition(self.spec(path, leaf.shape))
      return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree_util.tree_map_with_path(constrained, tree)

  @property
  def _here(self) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.local_devices()[0])

  def _put(self, tree: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(_put, tree, shardings)


def _put(leaf, sharding):
  # An uncommitted array may have the right sharding by chance. It is put again,
  # because JAX compiles a program once for committed arguments and once more
  # for uncommitted arguments.
  if getattr(leaf, "sharding", None) == sharding and leaf.committed:
    return leaf
  if sharding.is_fully_addressable:
    return jax.device_put(leaf, sharding)
  values = np.asarray(leaf)
  return _assembled(values.shape, sharding, lambda index: values[index])


def _assembled(shape, sharding, part: Callable) -> jax.Array:
  """Builds a global array from the parts on this process's devices.

  Args:
    shape: Shape of the global array.
    sharding: Sharding of the global array.
    part: Function from the index of a part to its values.
  """
  indices = sharding.addressable_devices_indices_map(shape)
  pieces = [
    jax.device_put(part(index), device) for device, index in indices.items()
  ]
  return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def with_shardings(tree: Tree, shardings: Tree) -> Tree:
  """Returns shapes and types of arrays, together with the given shardings."""
  return jax.tree.map(
    lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
    tree,
    shardings,
  )


def _whole(path, shape: tuple[int, ...]) -> Spec:
  del path, shape
  return ()


def partition(spec: Spec) -> PartitionSpec:
  """Converts the mesh axes of each dimension to JAX's `PartitionSpec`."""
  return PartitionSpec(*(axes or None for axes in spec))


def is_none(axis) -> bool:
  """Whether an entry of a tree prefix is None, for use as `is_leaf`."""
  return axis is None


def _specs(axes):
  return jax.tree.map(
    lambda axis: (
      PartitionSpec() if axis is None else PartitionSpec(REPLICA_AXIS)
    ),
    axes,
    is_leaf=is_none,
  )


def _map_prefix(function, axes, tree):
  """Applies a function to the leaves under every 0 of a tree prefix."""

  def under(axis, subtree):
    return subtree if axis is None else jax.tree.map(function, subtree)

  return jax.tree.map(under, axes, tree, is_leaf=is_none)
