"""One replica's code, mapped over all replicas.

Everything that replicas do together is written once, for one replica, with
collectives by the name of the axis. Here that code is mapped over the axis:
by `jax.vmap` for replicas simulated on one device, by `jax.shard_map` for
real ones. Which of the two is a matter of configuration, never of algorithm.
Inside a replica of several devices the code still sees whole arrays; the
partitioner divides them along the axes "data" and "stage".
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from dilocox_jax.by_device import INNER_AXES
from dilocox_jax.devices import (
  REPLICA_AXIS,
  Devices,
  is_none,
  partition,
)
from dilocox_jax.pytypes import Tree


class Replicas(Devices):
  """The replica axis: how many, in which layout, and code mapped over it."""

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

    manual = (REPLICA_AXIS, *(() if self.is_divided else INNER_AXES))
    return jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=_specs(in_axes),
      out_specs=_specs(out_axes),
      axis_names=set(manual),
      # Marking values as varying (pcast) has no rule under vmap, and the code
      # must be the same under both; tests compare the replicas' copies.
      check_vma=False,
    )

  def divided(self, tree: Tree) -> Tree:
    """One replica's state, held to the division; for use under `over`."""
    if not self.is_divided:
      return tree

    def held(path, leaf):
      spec = partition(self.spec(path, leaf.shape))
      return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree_util.tree_map_with_path(held, tree)


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
