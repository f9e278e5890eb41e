"""Lets JAX's partitioner divide a replica's work among its devices.

A model of the user whose layers are not known is trained in this way. Data
shards are devices that read different rows of a batch. The functions here tell
the partitioner that data shards divide the rows, and that a gradient is divided
like its parameter. The partitioner gathers parameters and sums gradients where
needed.

Source: Xu et al. 2021, arXiv 2105.04663 (GSPMD).
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from dilocox_jax.distributed.local_map import (
  current_division,
  divided,
  partition,
  specs_of,
)
from dilocox_jax.inner.step import Gradient, Loss
from dilocox_jax.plan.model.division import (
  DATA_AXIS,
  TENSOR_AXIS,
  Division,
  Spec,
)
from dilocox_jax.trees import Array, Scalar, Tree

_TABLE_NDIM = 2  # An embedding table has the axes [tokens, features].


def with_divided_rows(loss: Loss, division: Division) -> Loss:
  """Returns a loss whose batch is divided among the data shards of a replica.

  The returned function tells JAX to divide the rows of the batch
  (`divided_rows`). It also gathers parameters that may be tables, if XLA would
  otherwise abort (`with_whole_tables`). It must be called inside a function
  that `distributed.replicas.Replicas.map` maps.

  Args:
    loss: Function (params, batch) -> mean loss, where the batch has leaves
      [B, ...].
    division: How a replica's arrays are divided among its devices.
  """

  def divided_loss(params: Tree, batch: Tree) -> Scalar:
    return loss(with_whole_tables(division, params), divided_rows(batch))

  return divided_loss


def with_whole_tables(division: Division, params: Tree) -> Tree:
  """Gathers parameters of at most two dimensions over the data shards.

  With only one data shard or only one tensor shard, it returns all parameters
  unchanged. With several of both, XLA's partitioner (JAX 0.10 and 0.12) aborts
  if tokens look up rows of a table that data shards divide. Any parameter of at
  most two dimensions may be such a table. If tensor shards divide the rows of a
  table, the partitioner still aborts.

  Args:
    division: How a replica's arrays are divided among its devices.
    params: Parameters of one replica, inside a function that
      `distributed.replicas.Replicas.map` maps.

  Returns:
    The parameters. Tensor shards divide them as before.
  """
  if division.num_data_shards == 1 or division.num_tensor_shards == 1:
    return params

  def collected(leaf: Array, spec: Spec) -> Array:
    if leaf.ndim > _TABLE_NDIM:
      return leaf
    # Without the data shards' axis, each data shard has all of the leaf.
    tensor_partition = partition(spec, axes=(TENSOR_AXIS,))
    return jax.lax.with_sharding_constraint(leaf, tensor_partition)

  return jax.tree.map(collected, params, specs_of(division, params))


def divided_rows(batch: Tree) -> Tree:
  """Tells JAX to divide the rows of a batch among the data shards.

  Data shards are devices that read different rows. Leaves are [B, ...]. A leaf
  whose rows cannot be divided evenly stays as it is.
  """
  num_shards = current_division().num_data_shards
  if num_shards == 1:
    return batch

  def with_divided_axis(leaf: Array) -> Array:
    if not leaf.ndim or leaf.shape[0] % num_shards:
      return leaf
    return jax.lax.with_sharding_constraint(leaf, PartitionSpec(DATA_AXIS))

  return jax.tree.map(with_divided_axis, batch)


def with_divided_gradients(gradient: Gradient, division: Division) -> Gradient:
  """Returns a gradient function whose gradients are divided like parameters.

  Args:
    gradient: Function (params, batch, **options) -> (loss, gradients).
    division: How a replica's arrays are divided among its devices.
  """

  def divided_gradient(
    params: Tree, batch: Tree, **options: Any
  ) -> tuple[Scalar, Tree]:
    loss, gradients = gradient(params, batch, **options)
    return loss, divided(division, gradients)

  return divided_gradient
