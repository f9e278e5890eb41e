"""Puts arrays on the devices of replicas, and maps functions over replicas.

All replicas are on one device, or each has devices of its own in a mesh. A
`Division` (`plan.model.division`) says which part of an array each device of a
replica holds.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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

from dilocox_jax.checks import one_of, require, within_limits
from dilocox_jax.distributed.local_map import INNER_AXES, divided, partition
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.plan.model.division import DATA_AXIS, Division, Spec
from dilocox_jax.trees import Array, LazyArray, Tree, path_name

REPLICA_AXIS = "replica"
# A slice of every axis of an array.
Slices = tuple[slice, ...]
# The name of the replica axis if the other replicas of the run are other
# programs, which exchange through a mailbox (`plan.collectives.MAILBOX`). Code
# that communicates over the axis "replica" then fails, because
# there is no such axis. With an axis "replica" of length 1, a sum over replicas
# would silently have only one summand.
ALONE_AXIS = "alone"


@dataclasses.dataclass(frozen=True)
class Replicas:
  """Places values on the devices of replicas, and maps functions over them.

  Attributes:
    num_replicas: Number of replicas in this JAX runtime, M. It is 1 if replicas
      exchange through a mailbox (a shared folder or bucket): then each has a
      runtime of its own.
    layout: "stacked" (one device holds all replicas) or "mesh" (each replica
      has devices of its own).
    division: How a replica is divided among its devices.
    devices: Devices to use; None: all devices of the run's processes, or in the
      layout "stacked" the first device of this process.
    axis_name: Name of the axis over which replicas are mapped: `REPLICA_AXIS`,
      or `ALONE_AXIS` if they exchange through a mailbox.

  Raises:
    ValueError: If an attribute is wrong; if the replicas do not fit on the
      devices; if the run has several processes, and a mesh does not use all of
      their devices; or if `JAX_DISABLE_JIT` is set.
  """

  num_replicas: int
  layout: str = "stacked"
  division: Division = Division()
  devices: tuple[Any, ...] | None = None
  axis_name: str = REPLICA_AXIS

  def __post_init__(self):
    """Raises ValueError if an attribute is wrong or the replicas do not fit."""
    require(
      not jax.config.jax_disable_jit,  # pyright: ignore
      "JAX_DISABLE_JIT is set, and replicas need compiled programs: unset it",
    )
    one_of("layout", self.layout, LAYOUTS)
    within_limits("num_replicas", self.num_replicas, at_least=1)
    if self.layout == "mesh":
      self._check_devices()
    elif self.is_divided:
      raise ValueError(
        f"layout={self.layout!r} has one device, but a replica is divided "
        f"among {self.division.num_devices}: take mesh.layout='mesh'"
      )

  def _check_devices(self) -> None:
    """Raises ValueError if a mesh does not fit on the devices.

    With several processes, the mesh must use all of their devices.
    """
    available = len(self._available)
    per_replica = self.division.num_devices
    needed = f"{self.num_devices} devices ({per_replica} for each replica)"
    if self.num_devices > available:
      raise ValueError(
        f"num_replicas={self.num_replicas} needs {needed}, but there are "
        f"{available}: take mesh.layout='stacked', or fewer replicas, stages, "
        "data shards or tensor shards"
      )
    if jax.process_count() > 1 and self.num_devices < available:
      raise ValueError(
        f"num_replicas={self.num_replicas} needs {needed}, but all "
        f"processes together have {available} and must use all of them: take "
        "more replicas, or start fewer processes"
      )

  @property
  def is_divided(self) -> bool:
    """Whether a replica is divided among several devices."""
    return self.division.num_devices > 1

  @property
  def num_devices(self) -> int:
    """Number of devices of all replicas together, in the layout "mesh"."""
    return self.num_replicas * self.division.num_devices

  @functools.cached_property
  def mesh(self) -> Mesh:
    """The devices of all replicas, [M, data shards, stages, tensor shards].

    If every TPU slice can hold the same number of whole replicas, only messages
    between replicas cross the slow links between slices. For example, 4
    replicas of 2 stages are on two slices with the devices 0-3 and 4-7. Then
    replicas 0 and 1 have the devices (0, 1) and (2, 3), and replicas 2 and 3
    have (4, 5) and (6, 7). Otherwise the devices are in JAX's order.
    """
    # The replica axis is outermost, so a replica's devices are neighbors.
    inner_sizes = tuple(self.division.sizes.values())
    devices = self._available[: self.num_devices]
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1 and self.num_replicas % len(slices) == 0:
      replicas_per_slice = self.num_replicas // len(slices)
      # The sizes of the mesh inside a slice, and its sizes in slices.
      grid = mesh_utils.create_hybrid_device_mesh(
        (replicas_per_slice, *inner_sizes),
        (len(slices), 1, 1, 1),
        devices,
      )
    else:
      # JAX numbers devices process by process, so neighbors are close.
      shape = (self.num_replicas, *inner_sizes)
      grid = np.asarray(devices).reshape(shape)
    return Mesh(
      grid,
      (self.axis_name, *INNER_AXES),
      axis_types=(AxisType.Auto,) * 4,
    )

  @property
  def _available(self) -> Sequence[Any]:
    """The devices that the mesh may use."""
    return self.devices or jax.devices()

  @property
  def own(self) -> list[int]:
    """Indices of the replicas that have a device in this process."""
    if self.layout == "stacked":
      return list(range(self.num_replicas))
    process_index = jax.process_index()
    return [
      replica
      for replica, devices in enumerate(self.mesh.devices)
      if any(device.process_index == process_index for device in devices.flat)
    ]

  def place(self, tree: Tree, axes: Tree) -> Tree:
    """Puts arrays on the devices, undivided within each replica.

    Every device of a replica gets a copy of all arrays of this replica.

    Args:
      tree: Tree of arrays with the same values in every process. A leaf may
        also be a `jax.ShapeDtypeStruct`, to which a sharding is added.
      axes: Tree prefix: 0 for leaves [M, ...] of all M replicas, None for
        leaves that all replicas share.
    """

    def put(axis: int | None, subtree: Tree) -> Tree:
      return jax.tree.map(lambda leaf: put_on(leaf, self.whole(axis)), subtree)

    return jax.tree.map(put, axes, tree, is_leaf=is_none)

  def place_state(self, tree: Tree, axes: Tree) -> Tree:
    """Divides parameters and states among the devices of each replica.

    Args:
      tree: Tree of arrays with the same values in every process. Of a
        `LazyArray`, a process reads only the parts for its own devices.
      axes: Tree prefix: 0 for leaves [M, ...] of all M replicas, None for
        leaves that all replicas share.
    """
    return jax.tree.map(put_on, tree, self.state_shardings(tree, axes))

  def place_batches(self, batches: Tree) -> Tree:
    """Puts the batches of this process on the devices that read them.

    Args:
      batches: Batches of H steps for the replicas in `own`, leaves
        [len(own), H, B, ...]. The data shards of a replica divide the B rows.

    Returns:
      Arrays [M, H, B, ...]. In each process only the parts of its own devices
      have values.
    """
    # If this process has the replicas 2 and 3, their rows of `batches` are
    # {2: 0, 3: 1}.
    row_of = {replica: row for row, replica in enumerate(self.own)}

    def put(leaf: Any) -> jax.Array:
      if self.layout == "stacked":
        return jax.device_put(leaf, self.batch_sharding)
      shape = (self.num_replicas, *leaf.shape[1:])

      def part(index: tuple[slice, ...]) -> Any:
        replicas = range(*index[0].indices(self.num_replicas))
        rows = [row_of[replica] for replica in replicas]
        return leaf[(rows, *index[1:])]

      return _assembled(shape, self.batch_sharding, part)

    return jax.tree.map(put, batches)

  @property
  def batch_sharding(self) -> Sharding:
    """Sharding of batches [M, H, B, ...]. Data shards divide the B rows."""
    if self.layout == "stacked":
      return self._first_device
    if self.is_divided:
      spec = PartitionSpec(self.axis_name, None, DATA_AXIS)
    else:
      spec = PartitionSpec(self.axis_name, None)
    return NamedSharding(self.mesh, spec)

  def abstract(self, tree: Tree, axes: Tree) -> Tree:
    """Returns shapes, dtypes and shardings of a state, without values.

    Args:
      tree: Tree of arrays, or of their shapes and dtypes.
      axes: Tree prefix: 0 for leaves [M, ...] of all M replicas, None for
        leaves that all replicas share.

    Returns:
      A tree with a `jax.ShapeDtypeStruct` for each leaf.
    """
    return with_shardings(tree, self.state_shardings(tree, axes))

  def state_shardings(self, tree: Tree, axes: Tree) -> Tree:
    """Returns the sharding of every leaf of a state.

    In the layout "mesh" a sharding divides a leaf [M, ...] among the replicas,
    and the values of a replica among its devices.

    Args:
      tree: Tree of arrays, or of their shapes and dtypes.
      axes: Tree prefix: 0 for leaves [M, ...] of all M replicas, None for
        leaves that all replicas share.
    """
    if self.layout == "stacked":
      return jax.tree.map(lambda _: self._first_device, tree)

    # `axes` is a prefix of `tree`: each of its entries stands for a subtree.
    # The path of every leaf in the subtree begins with `prefix`.
    def shardings_below(
      prefix: tuple[Any, ...], axis: int | None, subtree: Tree
    ) -> Tree:
      def sharding(path: tuple[Any, ...], leaf: Any) -> Sharding:
        shape = leaf.shape if axis is None else leaf.shape[1:]
        parts = partition(self.spec((*prefix, *path), shape))
        return NamedSharding(
          self.mesh, PartitionSpec(*self._axes(axis), *parts)
        )

      return jax.tree_util.tree_map_with_path(sharding, subtree)

    return jax.tree_util.tree_map_with_path(
      shardings_below, axes, tree, is_leaf=is_none
    )

  def whole(self, axis: int | None) -> Sharding:
    """Returns the sharding that gives each device of a replica whole arrays.

    Args:
      axis: 0 for values [M, ...], None for values that all replicas share.
    """
    if self.layout == "stacked":
      return self._first_device
    return NamedSharding(self.mesh, PartitionSpec(*self._axes(axis)))

  def spec(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> Spec:
    """Returns the mesh axes that divide each dimension of a leaf.

    The result is () if a replica has only one device.

    Args:
      path: JAX key path of the leaf in the state.
      shape: Shape of the leaf in one replica.
    """
    if not self.is_divided:
      return ()
    return self.division.spec(path_name(path), shape)

  def map(self, function: Callable, in_axes: Tree, out_axes: Tree) -> Callable:
    """Maps a function that is written for one replica over all replicas.

    Args:
      function: Function that takes and returns the values of one replica. It
        may use collectives over `axis_name`.
      in_axes: Tree prefix of the arguments: 0 for leaves that have a leading
        axis, [M, ...], None for values that all replicas share.
      out_axes: Tree prefix of the results: 0 for leaves [M, ...], None for
        values that are equal on all replicas.

    Returns:
      Function of the values of all replicas. It is not compiled.
    """
    # `stacked(axes)` maps the function by vmap, with the result axes `axes`.
    stacked = functools.partial(
      jax.vmap,
      function,
      in_axes,
      axis_name=self.axis_name,
      axis_size=self.num_replicas,
    )
    if self.layout == "stacked":
      return stacked(out_axes)

    def local(*args: Tree) -> Tree:
      if self.num_replicas == 1:
        # XLA refuses a collective of one replica that has several devices. vmap
        # replaces collectives by operations on the axis [1].
        return without_axis(out_axes, stacked(0)(*args))
      # The part of one replica has a leading axis of length 1.
      arguments = map_prefix(lambda x: x[0], in_axes, args)
      results = function(*arguments)
      return map_prefix(lambda x: x[None], out_axes, results)

    manual_axes = {self.axis_name}
    if not self.is_divided:
      manual_axes |= set(INNER_AXES)
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=self._specs(in_axes),
      out_specs=self._specs(out_axes),
      axis_names=manual_axes,
      # `check_vma=True` would need values marked as varying (pcast). vmap does
      # not support that, and `function` must also work under vmap. Tests check
      # instead that copies of shared values are equal on all replicas.
      check_vma=False,
    )

  def copies(self, leaf: Array) -> Array:
    """Repeats the array of one replica for all replicas: [...] to [M, ...]."""
    return jnp.broadcast_to(leaf, (self.num_replicas, *leaf.shape))

  def divided(self, tree: Tree) -> Tree:
    """Adds sharding constraints that divide a replica's state among devices.

    If a replica has one device, the state is returned unchanged.

    Args:
      tree: State of one replica, inside a function that `map` maps.
    """
    return divided(self.division, tree)

  def _specs(self, axes: Tree) -> Tree:
    """Converts replica axes (0 or None) to a tree of `PartitionSpec`."""
    return jax.tree.map(
      lambda axis: PartitionSpec(*self._axes(axis)), axes, is_leaf=is_none
    )

  def _axes(self, axis: int | None) -> tuple[str, ...]:
    """Returns the replica axis for 0, and () for None (shared values)."""
    if axis is None:
      return ()
    return (self.axis_name,)

  @property
  def _first_device(self) -> SingleDeviceSharding:
    """The sharding in the layout "stacked": one device holds everything."""
    devices = self.devices or jax.local_devices()
    return SingleDeviceSharding(devices[0])


def put_on(leaf: Any, sharding: Sharding) -> Any:
  """Puts an array on the devices of a sharding.

  Args:
    leaf: An array; a `LazyArray`, of which only the parts for this process's
      devices are read; or a `jax.ShapeDtypeStruct`, which gets the sharding.
    sharding: Says which part of the array each device gets.
  """
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf.update(sharding=sharding)
  if isinstance(leaf, LazyArray):
    return _assembled(leaf.shape, sharding, leaf.part, one_at_a_time=True)
  # An array may have the right sharding without being committed to it. JAX
  # would compile a program again for such an array, so it is committed here.
  if getattr(leaf, "sharding", None) == sharding and leaf.committed:
    return leaf
  if sharding.is_fully_addressable:
    return jax.device_put(leaf, sharding)
  values = np.asarray(leaf)
  return _assembled(values.shape, sharding, lambda index: values[index])


def _assembled(
  shape: tuple[int, ...],
  sharding: Sharding,
  part: Callable[[Slices], Any],
  *,
  one_at_a_time: bool = False,
) -> jax.Array:
  """Builds a global array from the parts on the devices of this process.

  Args:
    shape: Shape of the whole array.
    sharding: Sharding of the whole array.
    part: Function from a slice of every axis to the values there. It is called
      once for all devices that hold the same part.
    one_at_a_time: Whether to wait until a part is on its devices before the
      next part is made, so that the host holds only one part.
  """
  indices = sharding.addressable_devices_indices_map(shape)
  # Slices cannot be keys of a dict before Python 3.12, so their bounds are.
  devices_by_bounds: dict[Any, list[Any]] = {}
  index_by_bounds: dict[Any, Slices] = {}
  for device, index in indices.items():
    assert index is not None
    bounds = tuple((axis.start, axis.stop) for axis in index)
    devices_by_bounds.setdefault(bounds, []).append(device)
    index_by_bounds[bounds] = index
  pieces = []
  for bounds, devices in devices_by_bounds.items():
    values = part(index_by_bounds[bounds])
    copies = [jax.device_put(values, device) for device in devices]
    if one_at_a_time:
      jax.block_until_ready(copies)
    pieces += copies
  return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def with_shardings(tree: Tree, shardings: Tree) -> Tree:
  """Returns shapes, dtypes and shardings as a tree of `jax.ShapeDtypeStruct`.

  Args:
    tree: Tree of arrays, or of their shapes and dtypes.
    shardings: Tree with a sharding for each leaf.
  """
  return jax.tree.map(
    lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
    tree,
    shardings,
  )


def is_none(axis: Any) -> bool:
  """Returns whether an entry of a tree prefix is None, for use as `is_leaf`."""
  return axis is None


def without_axis(axes: Tree, tree: Tree) -> Tree:
  """Removes the first axis of leaves whose entry in a tree prefix is None.

  Args:
    axes: Tree prefix: 0 for leaves that keep the axis, None for the others.
    tree: Tree of arrays that all have a first axis of length 1.
  """

  def change(axis: int | None, subtree: Tree) -> Tree:
    if axis is not None:
      return subtree
    return jax.tree.map(lambda x: x[0], subtree)

  return jax.tree.map(change, axes, tree, is_leaf=is_none)


def map_prefix(function: Callable, axes: Tree, tree: Tree) -> Tree:
  """Applies a function to all leaves whose entry in a tree prefix is 0.

  Args:
    function: Function from a leaf to a leaf.
    axes: Tree prefix: 0 for leaves that are changed, None for the others.
    tree: Tree of arrays.
  """

  def change(axis: int | None, subtree: Tree) -> Tree:
    if axis is None:
      return subtree
    return jax.tree.map(function, subtree)

  return jax.tree.map(change, axes, tree, is_leaf=is_none)
