"""Where replicas live: stacked on one device, or one device each.

Everything that replicas do together is written once, for one replica, with
collectives by the name of the axis. Here that code is mapped over the axis:
by `jax.vmap` for replicas simulated on one device, by `jax.shard_map` for
real ones. Which of the two is a matter of configuration, never of algorithm.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.pytypes import Tree

REPLICA_AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Replicas:
  """The replica axis: how many, and in which layout.

  Attributes:
    num_replicas: M.
    layout: "stacked" (one device holds all) or "mesh" (one device each).
  """

  num_replicas: int
  layout: str = "stacked"

  def __post_init__(self):
    if self.layout not in LAYOUTS:
      raise ValueError(
        f"layout={self.layout!r} must be one of {', '.join(LAYOUTS)}"
      )
    if self.num_replicas < 1:
      raise ValueError(f"num_replicas={self.num_replicas} must be at least 1")
    if self.layout == "mesh" and self.num_replicas > len(jax.devices()):
      raise ValueError(
        f"num_replicas={self.num_replicas} needs as many devices, but there "
        f"are {len(jax.devices())}: take mesh.layout='stacked'"
      )

  @property
  def mesh(self) -> Mesh:
    """One device a replica, along the axis `REPLICA_AXIS`."""
    devices = np.asarray(jax.devices()[: self.num_replicas])
    return Mesh(devices, (REPLICA_AXIS,), axis_types=(AxisType.Auto,))

  def over(self, function: Callable, in_axes, out_axes) -> Callable:
    """Maps code written for one replica over all of them.

    Args:
      function: Takes and returns one replica's values; may use collectives
        over `REPLICA_AXIS`.
      in_axes: Tree prefix of the arguments: 0 where leaves have a leading
        axis [M, ...], None where all replicas share the value.
      out_axes: The same for the results.

    Returns:
      The function of all replicas, not yet compiled.
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

    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=_specs(in_axes),
      out_specs=_specs(out_axes),
      # Marking values as varying (pcast) has no rule under vmap, and the code
      # must be the same under both; tests compare the replicas' copies.
      check_vma=False,
    )

  def place(self, tree: Tree, axes) -> Tree:
    """Puts values where the mapped functions expect them.

    Args:
      tree: Arrays.
      axes: Tree prefix as for `over`.
    """
    return jax.device_put(tree, self._shardings(axes))

  def abstract(self, tree: Tree, axes) -> Tree:
    """Shapes, types and places of values, without values."""
    return jax.tree.map(
      lambda sharding, part: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        part,
      ),
      self._shardings(axes),
      tree,
    )

  def _shardings(self, axes) -> Tree:
    if self.layout == "stacked":
      here = SingleDeviceSharding(jax.devices()[0])
      return jax.tree.map(lambda _: here, axes, is_leaf=_is_none)
    return jax.tree.map(
      lambda spec: NamedSharding(self.mesh, spec),
      _specs(axes),
      is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def _is_none(axis) -> bool:
  return axis is None


def _specs(axes):
  return jax.tree.map(
    lambda axis: (
      PartitionSpec() if axis is None else PartitionSpec(REPLICA_AXIS)
    ),
    axes,
    is_leaf=_is_none,
  )


def _map_prefix(function, axes, tree):
  """Applies a function to the leaves under every 0 of a tree prefix."""

  def under(axis, subtree):
    return subtree if axis is None else jax.tree.map(function, subtree)

  return jax.tree.map(under, axes, tree, is_leaf=_is_none)
