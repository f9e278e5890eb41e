"""Leaves the division of a replica's work to JAX's partitioner.

A model that a user brings is trained as its code is written, for the whole
batch. Two things are told to the partitioner: the data shards divide the rows
of a batch, and every gradient is divided like its parameter. The partitioner
does the rest. It collects the parameters that an operation needs, one layer at
a time if the model scans over its layers, and it sums gradients over the data
shards where they are divided.
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

_TABLE_NDIM = 2  # A table whose rows are looked up is [rows, features].


def with_divided_rows(loss: Loss, division: Division) -> Loss:
  """Returns a loss whose batch is divided among the data shards of a replica.

  Args:
    loss: (params, batch) -> mean loss, for leaves [B, ...] of the batch.
    division: How a replica's arrays are divided among its devices.

  Returns:
    A function with the same arguments and result, for use under
    `distributed.replicas.Replicas.map`.
  """

  def divided_loss(params: Tree, batch: Tree) -> Scalar:
    return loss(_with_whole_tables(division, params), divided_rows(batch))

  return divided_loss


def _with_whole_tables(division: Division, params: Tree) -> Tree:
  """Collects matrices from the data shards, if there are tensor shards too.

  XLA's partitioner (JAX 0.10 and 0.12) aborts the program if tokens look up
  rows of a table, the data shards divide both the tokens and the table, and the
  mesh has a second axis that the partitioner divides. Which parameter is a
  table is not known here. So all parameters of one or two dimensions are
  collected. Stacked layers have three dimensions, and stay divided.

  Args:
    division: How a replica's arrays are divided among its devices.
    params: Parameters of one replica.

  Returns:
    The parameters. The tensor shards divide them as before.
  """
  if division.num_data_shards == 1 or division.num_tensor_shards == 1:
    return params

  def collected(leaf: Array, spec: Spec) -> Array:
    if leaf.ndim > _TABLE_NDIM:
      return leaf
    tensor_partition = partition(spec, axes=(TENSOR_AXIS,))
    return jax.lax.with_sharding_constraint(leaf, tensor_partition)

  return jax.tree.map(collected, params, specs_of(division, params))


def divided_rows(batch: Tree) -> Tree:
  """Tells JAX to divide the rows of a batch among the data shards.

  A leaf stays as it is if its number of rows is not divisible, or if the
  replica has no data shards.

  Args:
    batch: Leaves [B, ...] of one replica.
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
    gradient: (params, batch) -> (loss, gradients).
    division: How a replica's arrays are divided among its devices.
  """

  def divided_gradient(
    params: Tree, batch: Tree, **options: Any
  ) -> tuple[Scalar, Tree]:
    loss, gradients = gradient(params, batch, **options)
    return loss, divided(division, gradients)

  return divided_gradient
