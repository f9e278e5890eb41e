"""Computes the gradient of one replica whose arrays lie on several devices.

The loss of an evaluation, which needs no gradient, is computed in the same way.

Before the pipeline starts, every device collects the layers that its stage
computes and the few leaves that all stages share; of large tables it collects
a part only (`inner.vocabulary`). Afterwards the gradients go
back to the devices that keep the parameters. Both happen once per optimizer
step, whatever the number of micro-batches, over the fast links inside a
cluster.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dilocox_jax.distributed.local_map import (
  INNER_AXES,
  map_over_devices,
  partition,
  specs_of,
)
from dilocox_jax.inner.pipeline_stage import CutModel, PipelinedLoss
from dilocox_jax.inner.step import Gradient, Loss
from dilocox_jax.models.transformer import remat_wrapper
from dilocox_jax.plan.model.division import (
  DATA_AXIS,
  STAGE_AXIS,
  Division,
  Spec,
  StageLayers,
)
from dilocox_jax.plan.schedule.fragments import BLOCKS
from dilocox_jax.trees import Array, Scalar, Tree, path_name

# (blocks [K, ...], other leaves, tokens [m, b, L + 1]) -> (loss, gradients
# of the blocks, gradients of the other leaves). All three results are this
# stage's contribution to a sum over the stages.
StageGradient = Callable[[Tree, Tree, Array], tuple[Scalar, Tree, Tree]]


def sharded_gradient(
  stage_gradient: StageGradient,
  division: Division,
  stage_layers: StageLayers,
  num_micro_batches: int,
  divided_tables: Collection[str] = (),
) -> Gradient:
  """Spreads a gradient over the devices of one replica.

  Args:
    stage_gradient: Gradient of one stage, under the mesh axis "stage".
    division: Division of the parameters among the devices.
    stage_layers: Layers of every stage.
    num_micro_batches: Number m of micro-batches into which every data shard
      cuts its rows of a batch.
    divided_tables: Paths of leaves outside the blocks of which a data shard
      gets its own part alone (`Division.divided_tables`). The gradient of such
      a part already is a sum over the data shards.

  Returns:
    (params, batch [B, L + 1]) -> (loss, gradients), for use under
    `distributed.replicas.Replicas.map`. The gradients are divided like the
    parameters.
  """
  from_stages = functools.partial(_from_stages, stage_layers)

  def gradient(params: Tree, batch: Array) -> tuple[Scalar, Tree]:
    specs, axes, partitions = _layout(params, division, divided_tables)

    def local(params: Tree, batch: Array) -> tuple[Scalar, Tree]:
      blocks, rest = _collected(stage_layers, params, specs, axes)
      tokens = batch.reshape(num_micro_batches, -1, *batch.shape[1:])
      loss, for_blocks, for_rest = stage_gradient(blocks, rest, tokens)
      gradients = {
        BLOCKS: jax.tree.map(from_stages, for_blocks, specs[BLOCKS]),
        **jax.tree.map(_sum, for_rest, _rest(specs), _rest(axes)),
      }
      # Sums over stages are complete now: each stage contributed its part. Sums
      # over data shards must become means, because every shard's loss is
      # already the mean over its own rows.
      shards = jax.lax.axis_size(DATA_AXIS)
      loss = jax.lax.psum(loss, INNER_AXES) / shards
      gradients = jax.tree.map(
        lambda new, old: (new / shards).astype(old.dtype), gradients, params
      )
      return loss, {key: gradients[key] for key in params}

    mapped = map_over_devices(
      local,
      (partitions, PartitionSpec(DATA_AXIS)),
      (PartitionSpec(), partitions),
    )
    return mapped(params, batch)

  return gradient


def sharded_loss(
  stage_loss: PipelinedLoss,
  division: Division,
  stage_layers: StageLayers | None,
  num_rows: int,
  divided_tables: Collection[str] = (),
) -> Loss:
  """Spreads the loss of an evaluation over the devices of one replica.

  Every data shard cuts its rows of the batches into micro-batches. If the rows
  of a batch cannot be divided evenly, every shard computes all of them.

  Args:
    stage_loss: Loss of one stage, under the mesh axis "stage": (blocks, other
      leaves, tokens [m, b, L + 1]) -> its contribution to a sum over stages.
    division: Division of the parameters among the devices.
    stage_layers: Layers of every stage. None: blocks stay divided, for
      `loss_by_layer`.
    num_rows: Largest number of rows b of a micro-batch.
    divided_tables: As for `sharded_gradient`.

  Returns:
    (params, batches [N, B, L + 1]) -> mean loss, for use under
    `distributed.replicas.Replicas.map`.
  """
  shards = division.num_data_shards

  def loss(params: Tree, batches: Array) -> Scalar:
    specs, axes, partitions = _layout(params, division, divided_tables)

    def local(params: Tree, batches: Array) -> Scalar:
      rows = math.gcd(batches.shape[1], num_rows)
      tokens = batches.reshape(-1, rows, batches.shape[2])
      parts = _collected(stage_layers, params, specs, axes)
      loss = stage_loss(*parts, tokens)
      return jax.lax.psum(loss, INNER_AXES) / shards

    by_rows = DATA_AXIS if batches.shape[1] % shards == 0 else None
    in_specs = partitions, PartitionSpec(None, by_rows)
    mapped = map_over_devices(local, in_specs, PartitionSpec())
    return mapped(params, batches)

  return loss


def loss_by_layer(model: CutModel, remat: str) -> PipelinedLoss:
  """Builds a loss that JAX differentiates, of data shards without stages.

  A shard collects one layer after the other, and what the forward does not save
  once more for the backward, so it never holds all layers whole.
  Source: Zhao et al. 2023, arXiv 2304.11277.

  Args:
    model: The model.
    remat: What a layer's forward saves (`models.transformer.remat_wrapper`).

  Returns:
    (blocks, other leaves, tokens [m, b, L + 1]) -> mean loss of this shard's
    rows. Blocks are this device's parts, and their specs.
  """

  def loss(blocks: tuple[Tree, Tree], rest: Tree, tokens: Array) -> Scalar:
    parts, specs = blocks
    rows = tokens.reshape(-1, tokens.shape[-1])
    read, targets = rows[:, :-1], rows[:, 1:].reshape(-1)
    context = model.context(read)

    @remat_wrapper(remat)
    def layer(x_TxD: Array, own: Tree) -> Array:
      def whole(leaf: Array, spec: Spec) -> Array:
        narrow = leaf.astype(x_TxD.dtype) if leaf.ndim > 1 else leaf
        return _gather(narrow, spec[1:], INNER_AXES)

      leaves = jax.tree.map(whole, own, specs)
      return model.block(leaves, x_TxD, read.shape[1], **context)

    x_TxD, _ = jax.lax.scan(
      lambda x_TxD, own: (layer(x_TxD, own), None),
      model.embed(rest, read, **context),
      parts,
    )
    return model.loss(rest, x_TxD, targets)

  return loss


def _collected(
  stage_layers: StageLayers | None, params: Tree, specs: Tree, axes: Tree
) -> tuple[Tree, Tree]:
  """Returns this stage's layers, [K, ...], and all other leaves.

  Layers are whole, and other leaves are collected over the given mesh axes.
  Without stages layers stay as they are, beside their specs.
  """
  rest = jax.tree.map(_gather, *map(_rest, (params, specs, axes)))
  blocks = params[BLOCKS], specs[BLOCKS]
  if stage_layers is None:
    return blocks, rest
  to_stages = functools.partial(_to_stages, stage_layers)
  return jax.tree.map(to_stages, *blocks), rest


def _rest(tree: dict[str, Tree]) -> Tree:
  """Returns what stands beside the blocks."""
  return {key: leaves for key, leaves in tree.items() if key != BLOCKS}


def _layout(
  params: Tree, division: Division, divided_tables: Collection[str]
) -> tuple[Tree, Tree, Tree]:
  """Returns three trees with a value in the place of every leaf.

  They are its spec, the mesh axes over which it is collected, and its JAX
  partition.
  """

  def axes(path: Any, leaf: Array) -> tuple[str, ...]:
    del leaf
    return (STAGE_AXIS,) if path_name(path) in divided_tables else INNER_AXES

  specs = specs_of(division, params)
  partitions = jax.tree.map(lambda _, at: partition(at), params, specs)
  return specs, jax.tree_util.tree_map_with_path(axes, params), partitions


def _dimension(spec: Spec, axis: str) -> int | None:
  """Returns the dimension that a mesh axis divides, or None."""
  return next((n for n, axes in enumerate(spec) if axis in axes), None)


# Five layers over four stages (S = 4, K = 2):
#
#   stage_layers.table   [0, 1] [2, 5] [3, 5] [4, 5]   by stage
#   stage_layers.places  [0, 1, 2, 4, 6]               by layer
#
# There is no layer 5: the number fills the rows of short stages. Five does not
# divide by four, so no stage can keep its own layers. A kernel [5, D, F] is
# divided along D instead: each stage keeps [5, D / 4, F].
#
# `_to_stages` puts the rows in the order of the table, [8, D / 4, F] with zeros
# for layer 5. The all-to-all gives rows 2 s and 2 s + 1 to stage s and joins
# the pieces of D there: [2, D, F]. `_from_stages` runs the all-to-all backward
# and picks the rows `places` of the eight, which leaves out the fillers.
def _to_stages(stage_layers: StageLayers, leaf: Array, spec: Spec) -> Array:
  """Takes a leaf as it is kept to this stage's layers, [K, ...] whole."""
  by_stage = _dimension(spec, STAGE_AXIS)
  table = jnp.asarray(stage_layers.table)
  if by_stage is None:
    # Every stage keeps all layers of this leaf and picks its own.
    table = table[jax.lax.axis_index(STAGE_AXIS)]
    leaf = _rows(leaf, table.reshape(-1))
  elif by_stage > 0:
    leaf = _rows(leaf, table.reshape(-1))
    leaf = jax.lax.all_to_all(leaf, STAGE_AXIS, 0, by_stage, tiled=True)
  # If `by_stage` is 0, the stage keeps exactly the layers that it computes.
  by_data = _dimension(spec, DATA_AXIS)
  # XLA copies what it gathers, even from a single device.
  if by_data is not None and jax.lax.axis_size(DATA_AXIS) > 1:
    leaf = jax.lax.all_gather(leaf, DATA_AXIS, axis=by_data, tiled=True)
  return leaf


def _from_stages(stage_layers: StageLayers, leaf: Array, spec: Spec) -> Array:
  """Sums gradients of this stage's layers over data; reverses `_to_stages`."""
  by_stage, by_data = _dimension(spec, STAGE_AXIS), _dimension(spec, DATA_AXIS)
  if by_data and by_data == by_stage:
    return _rows(_scattered(leaf, by_data), jnp.asarray(stage_layers.places))
  if by_data is None:
    leaf = jax.lax.psum(leaf, DATA_AXIS)
  else:
    leaf = jax.lax.psum_scatter(
      leaf, DATA_AXIS, scatter_dimension=by_data, tiled=True
    )
  if by_stage == 0:
    return leaf
  if by_stage is None:
    leaf = jax.lax.all_gather(leaf, STAGE_AXIS, axis=0, tiled=True)
  else:
    leaf = jax.lax.all_to_all(leaf, STAGE_AXIS, by_stage, 0, tiled=True)
  return _rows(leaf, jnp.asarray(stage_layers.places))


def _scattered(leaf: Array, dimension: int) -> Array:
  """Sums over data, and swaps parts of a dimension that all devices divide.

  Shards and stages have an axis of their own here. Without it the compiler for
  TPUs sums the whole leaf on every device: 7.5 GiB for the five layers of a
  stage of 107B.

  Args:
    leaf: Gradients [n, ...] of this stage's layers.
    dimension: Dimension divided by data shard and then by stage.
  """
  sizes = map(jax.lax.axis_size, INNER_AXES)
  shape, rest = leaf.shape[:dimension], leaf.shape[dimension + 1 :]
  leaf = leaf.reshape(*shape, *sizes, -1, *rest)
  leaf = jax.lax.psum_scatter(leaf, DATA_AXIS, scatter_dimension=dimension)
  leaf = jax.lax.all_to_all(leaf, STAGE_AXIS, dimension, 0, tiled=True)
  return leaf.reshape(-1, *shape[1:], leaf.shape[dimension + 1], *rest)


def _rows(leaf: Array, numbers: Array) -> Array:
  """Picks layers by number; a number without a layer gives zeros."""
  return leaf.at[numbers].get(mode="fill", fill_value=0)


def _gather(leaf: Array, spec: Spec, over: tuple[str, ...]) -> Array:
  """Returns the leaf of which every device along some axes keeps a part."""
  for dimension, axes in enumerate(spec):
    axes = tuple(axis for axis in axes if axis in over)
    if axes:
      leaf = jax.lax.all_gather(leaf, axes, axis=dimension, tiled=True)
  return leaf


def _sum(leaf: Array, spec: Spec, over: tuple[str, ...]) -> Array:
  """Sums a leaf over some axes; each device returns the part that it keeps."""
  used = set()
  for dimension, axes in enumerate(spec):
    axes = tuple(axis for axis in axes if axis in over)
    if axes:
      used |= set(axes)
      leaf = jax.lax.psum_scatter(
        leaf, axes, scatter_dimension=dimension, tiled=True
      )
  # A leaf that is not divided along an axis is kept by all devices of it.
  missing = tuple(axis for axis in over if axis not in used)
  return jax.lax.psum(leaf, missing) if missing else leaf
