"""Computes gradient and loss of a replica whose devices divide the parameters.

A device gathers the layers that it needs:

- With pipeline stages, it gathers the layers of its stage before the pipeline
  starts. With `mesh.gather="layer"` it gathers one layer at a time: when the
  forward of a micro-batch passes through the layer, and again for its backward.
- Without stages, it gathers one layer after the other (`loss_by_layer`).

Other parameters are gathered before that, but large tables may stay divided
among the data shards (`inner.vocabulary`). The gradients go back to the devices
that keep the parameters.

In this module, *blocks* are the layers of the model, stacked along their first
axis. A *spec* of a leaf says for each dimension which mesh axes divide it.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dilocox_jax.distributed.local_map import (
  PIPELINE_AXES,
  is_automatic,
  map_over_devices,
  partition,
  specs_of,
)
from dilocox_jax.inner.pipeline_stage import (
  CutModel,
  LayerTransfer,
  PipelinedLoss,
)
from dilocox_jax.inner.step import Gradient, Loss
from dilocox_jax.models.transformer import remat_wrapper
from dilocox_jax.plan.model.division import (
  DATA_AXIS,
  STAGE_AXIS,
  TENSOR_AXIS,
  Division,
  Spec,
  StageLayers,
)
from dilocox_jax.plan.schedule.fragments import BLOCKS
from dilocox_jax.trees import Array, Scalar, Tree, path_name

# Function (blocks [K, ...], other leaves, tokens [m, b, L + 1]) -> (loss,
# gradients of the blocks, gradients of the other leaves). All three results are
# this stage's contribution to a sum over the stages.
StageGradient = Callable[..., tuple[Scalar, Tree, Tree]]


def sharded_gradient(
  stage_gradient: StageGradient,
  division: Division,
  stage_layers: StageLayers,
  num_micro_batches: int,
  divided_tables: Collection[str] = (),
  gather: str = "stage",
) -> Gradient:
  """Builds the gradient function of a replica from that of one stage.

  Args:
    stage_gradient: Gradient function of one stage, which uses the mesh axis
      "stage" (`inner.pipeline.pipelined_gradient`).
    division: How the parameters are divided among the devices.
    stage_layers: Which layers each stage has.
    num_micro_batches: Number of micro-batches, m, into which every data shard
      divides its rows of a batch.
    divided_tables: Paths of the tables (leaves outside the layers) that stay
      divided: each data shard gets only its own part. `stage_gradient` must
      return their gradients summed over the data shards.
    gather: "stage": data shards gather all layers of the stage at once, once in
      each step. "layer": they gather one layer at a time. `stage_gradient` then
      gets the keyword argument `transfer` (`LayerTransfer`).

  Returns:
    Function (params, batch [B, L + 1]) -> (mean loss, gradients), to be called
    inside a function that `distributed.replicas.Replicas.map` maps. The
    gradients are divided like the parameters. B must be a multiple of m times
    the number of data shards.
  """

  def from_stages(leaf: Array, spec: Spec) -> Array:
    reduce = functools.partial(_from_stages, stage_layers, gather, spec=spec)
    return _on_tensor_shards(reduce, spec)(leaf)

  def gradient(params: Tree, batch: Array) -> tuple[Scalar, Tree]:
    specs, gather_axes, partitions = _layout(params, division, divided_tables)

    def local(params: Tree, batch: Array) -> tuple[Scalar, Tree]:
      blocks, rest = _collected(
        stage_layers, params, specs=specs, axes=gather_axes, gather=gather
      )
      tokens = batch.reshape(num_micro_batches, -1, *batch.shape[1:])
      loss, block_gradients, rest_gradients = _with_transfer(
        stage_gradient, gather, specs[BLOCKS]
      )(blocks, rest, tokens)
      gradients = {
        BLOCKS: jax.tree.map(from_stages, block_gradients, specs[BLOCKS]),
        **jax.tree.map(
          _sum,
          rest_gradients,
          _without_blocks(specs),
          _without_blocks(gather_axes),
        ),
      }
      # Sums over stages are complete now: each stage contributed its part. Sums
      # over data shards must become means, because every shard's loss is
      # already the mean over its own rows.
      shards = jax.lax.axis_size(DATA_AXIS)
      loss = jax.lax.psum(loss, PIPELINE_AXES) / shards
      gradients = jax.tree.map(
        lambda total, param: (total / shards).astype(param.dtype),
        gradients,
        params,
      )
      return loss, {key: gradients[key] for key in params}

    mapped = map_over_devices(
      local,
      in_specs=(partitions, PartitionSpec(DATA_AXIS)),
      out_specs=(PartitionSpec(), partitions),
      axes=PIPELINE_AXES,
    )
    return mapped(params, batch)

  return gradient


def sharded_loss(
  stage_loss: PipelinedLoss,
  division: Division,
  stage_layers: StageLayers | None,
  num_rows: int,
  divided_tables: Collection[str] = (),
  gather: str = "stage",
) -> Loss:
  """Builds the loss function of a replica from that of one stage.

  Args:
    stage_loss: Function (blocks, other leaves, tokens [m, b, L + 1]) -> this
      stage's contribution to a sum over stages. Without stages, it must be the
      function that `loss_by_layer` returns.
    division: How the parameters are divided among the devices.
    stage_layers: Which layers each stage has. None: there are no stages, and
      `stage_loss` gathers the layers itself.
    num_rows: Largest number of rows of a micro-batch. The actual number, b, is
      the greatest common divisor of `num_rows` and the rows that a shard has of
      a batch.
    divided_tables: Paths of the tables (leaves outside the layers) that stay
      divided: each data shard gets only its own part.
    gather: "stage": data shards gather all layers of the stage at once.
      "layer": they gather one layer at a time. `stage_loss` then gets the
      keyword argument `transfer` (`LayerTransfer`). Without stages, leave this
      argument at "stage".

  Returns:
    Function (params, batches [N, B, L + 1]) -> mean loss, to be called inside a
    function that `distributed.replicas.Replicas.map` maps. If the data shards
    cannot divide the B rows evenly, every shard computes all rows.
  """
  shards = division.num_data_shards

  def loss(params: Tree, batches: Array) -> Scalar:
    specs, gather_axes, partitions = _layout(params, division, divided_tables)

    def local(params: Tree, batches: Array) -> Scalar:
      rows = math.gcd(batches.shape[1], num_rows)
      tokens = batches.reshape(-1, rows, batches.shape[2])
      blocks, rest = _collected(
        stage_layers, params, specs=specs, axes=gather_axes, gather=gather
      )
      loss = _with_transfer(stage_loss, gather, specs[BLOCKS])(
        blocks, rest, tokens
      )
      # `psum` adds up what the stages contribute, and the losses of the data
      # shards. These losses are means over rows, so they are averaged.
      return jax.lax.psum(loss, PIPELINE_AXES) / shards

    row_axis = DATA_AXIS if batches.shape[1] % shards == 0 else None
    mapped = map_over_devices(
      local,
      in_specs=(partitions, PartitionSpec(None, row_axis)),
      out_specs=PartitionSpec(),
      axes=PIPELINE_AXES,
    )
    return mapped(params, batches)

  return loss


def loss_by_layer(model: CutModel, remat: str) -> PipelinedLoss:
  """Builds the loss function of a data shard if there are no stages.

  A shard gathers one layer after the other. The backward gathers each layer
  again. Exception: with `remat="none"`, the forward saves the whole layers, and
  the backward uses these.

  Source: Zhao et al. 2023, arXiv 2304.11277.

  Args:
    model: The model, cut into embedding, layers and loss.
    remat: What a layer's forward saves (`models.transformer.remat_wrapper`).

  Returns:
    Function (blocks, other leaves, tokens [m, b, L + 1]) -> mean loss of this
    shard's rows. `blocks` is a tuple: this device's parts of the layers, and
    for each leaf the mesh axes that divide its dimensions.
  """

  def loss(blocks: tuple[Tree, Tree], rest: Tree, tokens: Array) -> Scalar:
    block_parts, specs = blocks
    rows = tokens.reshape(-1, tokens.shape[-1])
    inputs = rows[:, :-1]
    targets = rows[:, 1:].reshape(-1)
    context = model.context(inputs)
    transfer = _layer_transfer(specs)

    @remat_wrapper(remat)
    def layer(x_TxD: Array, layer_part: Tree) -> Array:
      leaves = transfer.whole_layer(layer_part, x_TxD.dtype)
      return model.block(leaves, x_TxD, inputs.shape[1], **context)

    x_TxD, _ = jax.lax.scan(
      lambda x_TxD, layer_part: (layer(x_TxD, layer_part), None),
      model.embed(rest, inputs, **context),
      block_parts,
    )
    return model.loss(rest, x_TxD, targets)

  return loss


def _with_transfer(function: Callable, gather: str, specs: Tree) -> Callable:
  """Gives a stage's function the argument `transfer` if `gather` is "layer".

  `transfer` says how a device gathers one layer.
  """
  if gather == "stage":
    return function
  return functools.partial(function, transfer=_layer_transfer(specs))


def _layer_transfer(specs: Tree) -> LayerTransfer:
  """Returns how data shards gather one layer, and sum its gradient."""

  def collect(layer: Tree) -> Tree:
    return jax.tree.map(
      lambda leaf, spec: _gather(leaf, spec[1:], (DATA_AXIS,)), layer, specs
    )

  def reduce(gradient: Tree) -> Tree:
    return jax.tree.map(
      lambda leaf, spec: _scatter(leaf, spec[1:], (DATA_AXIS,)), gradient, specs
    )

  return LayerTransfer(collect, reduce)


def _collected(
  stage_layers: StageLayers | None,
  params: Tree,
  specs: Tree,
  axes: Tree,
  gather: str,
) -> tuple[Tree, Tree]:
  """Returns the layers and the other leaves that this device needs, gathered.

  With `gather="layer"`, layers stay divided among the data shards. Without
  stages, the first result is a tuple: this device's parts of all layers, and
  their specs (which mesh axes divide them). `axes` are the mesh axes over which
  the other leaves are gathered.
  """
  rest = jax.tree.map(
    _gather,
    _without_blocks(params),
    _without_blocks(specs),
    _without_blocks(axes),
  )
  if stage_layers is None:
    return (params[BLOCKS], specs[BLOCKS]), rest

  def to_stages(leaf: Array, spec: Spec) -> Array:
    collect = functools.partial(_to_stages, stage_layers, gather, spec=spec)
    return _on_tensor_shards(collect, spec)(leaf)

  return jax.tree.map(to_stages, params[BLOCKS], specs[BLOCKS]), rest


def _without_blocks(tree: dict[str, Tree]) -> Tree:
  """Returns a tree of parameters without the key "blocks"."""
  return {key: leaves for key, leaves in tree.items() if key != BLOCKS}


def _layout(
  params: Tree, division: Division, divided_tables: Collection[str]
) -> tuple[Tree, Tree, Tree]:
  """Returns three trees like `params`, which say how each leaf is divided.

  - specs: for each dimension of the leaf, the mesh axes that divide it.
  - gather_axes: the mesh axes over which the leaf is gathered.
  - partitions: the `PartitionSpec` of the leaf for data shards and stages. It
    leaves out tensor shards.
  """

  def collected_over(path: Any, leaf: Array) -> tuple[str, ...]:
    del leaf
    # A table stays divided among the data shards.
    if path_name(path) in divided_tables:
      return (STAGE_AXIS,)
    return PIPELINE_AXES

  specs = specs_of(division, params)
  partitions = jax.tree.map(
    lambda _, spec: partition(spec, PIPELINE_AXES), params, specs
  )
  gather_axes = jax.tree_util.tree_map_with_path(collected_over, params)
  return specs, gather_axes, partitions


def _dimension(spec: Spec, axis: str) -> int | None:
  """Returns which dimension of a leaf a mesh axis divides; None if none."""
  for dimension, axes in enumerate(spec):
    if axis in axes:
      return dimension
  return None


# Five layers over four stages (S = 4, K = 2):
#
#   stage_layers.table   [0, 1] [2, 5] [3, 5] [4, 5]   by stage
#   stage_layers.rows    [0, 1, 2, 4, 6]               by layer
#
# There is no layer 5: the number 5 fills the rows of short stages. Five layers
# cannot be divided by four, so no stage can keep its own layers. A kernel
# [5, D, F] is divided along D instead: each stage keeps [5, D / 4, F].
#
# `_to_stages` puts the rows in the order of the table, [8, D / 4, F] with zeros
# for layer 5. The all-to-all gives rows 2 s and 2 s + 1 to stage s and
# concatenates the pieces of D there: [2, D, F]. `_from_stages` runs the
# all-to-all in the other direction and picks `stage_layers.rows` of the eight
# rows, which leaves out the rows of layer 5.
def _to_stages(
  stage_layers: StageLayers, gather: str, leaf: Array, spec: Spec
) -> Array:
  """Gathers the layers of one leaf that this stage computes.

  `leaf` is this device's part of the leaf, and `spec` says which mesh axes
  divide it. The result is [K, ...] for the K layers of the stage. If `gather`
  is "layer", the result is still divided among the data shards.
  """
  by_stage = _dimension(spec, STAGE_AXIS)
  # Row s has the numbers of the layers that stage s computes.
  table = jnp.asarray(stage_layers.table)
  if by_stage is None:
    # Every stage keeps all layers of this leaf and picks its own.
    table = table[jax.lax.axis_index(STAGE_AXIS)]
    leaf = _rows(leaf, table.reshape(-1))
  elif by_stage > 0:
    leaf = _rows(leaf, table.reshape(-1))
    leaf = jax.lax.all_to_all(leaf, STAGE_AXIS, 0, by_stage, tiled=True)
  # If `by_stage` is 0, the stage keeps exactly the layers that it computes.
  if gather == "layer":
    return leaf
  return _gather(leaf, spec, (DATA_AXIS,))


def _from_stages(
  stage_layers: StageLayers, gather: str, leaf: Array, spec: Spec
) -> Array:
  """Sums gradients of one leaf over data shards, and gives devices their parts.

  `leaf` has the gradients of this stage's layers, [K, ...]. If `gather` is
  "layer" and data shards divide the leaf, the gradients are already summed.
  """
  by_stage = _dimension(spec, STAGE_AXIS)
  by_data = _dimension(spec, DATA_AXIS)
  # Here data shards and stages divide the same dimension, and it is not
  # dimension 0, that of the layers.
  if gather == "stage" and by_data and by_data == by_stage:
    all_layers = _sum_and_swap(leaf, by_data)
    # `_rows` leaves out the rows that only fill a short stage.
    return _rows(all_layers, jnp.asarray(stage_layers.rows))
  if by_data is None:  # Every data shard keeps all of this leaf.
    leaf = jax.lax.psum(leaf, DATA_AXIS)
  elif gather == "stage":
    leaf = _scatter(leaf, spec, (DATA_AXIS,))
  if by_stage == 0:
    return leaf  # The stage keeps exactly the layers that it computes.
  if by_stage is None:  # Every stage keeps all layers of this leaf.
    leaf = jax.lax.all_gather(leaf, STAGE_AXIS, axis=0, tiled=True)
  else:
    leaf = jax.lax.all_to_all(leaf, STAGE_AXIS, by_stage, 0, tiled=True)
  # Leave out the rows that only fill a short stage.
  return _rows(leaf, jnp.asarray(stage_layers.rows))


def _sum_and_swap(leaf: Array, dimension: int) -> Array:
  """Sums gradients over data shards, and gives each device its part of a leaf.

  `leaf` has this stage's layers. The result has all layers. Its `dimension` is
  divided among the data shards, and each of these parts among the stages.
  """
  # The dimension gets an axis for data shards and an axis for stages. Otherwise
  # the compiler for TPUs would sum the whole leaf on every device: 7.5 GiB for
  # the five layers of a stage, in a model of 107 billion parameters.
  num_shards = jax.lax.axis_size(DATA_AXIS)
  num_stages = jax.lax.axis_size(STAGE_AXIS)
  # Example: 2 shards, 3 stages, dimension 1 of a leaf [n, 12, d]. It gets the
  # shapes [n, 2, 3, 2, d], [n, 3, 2, d], [3 n, 1, 2, d] and then [3 n, 2, d].
  before = leaf.shape[:dimension]
  after = leaf.shape[dimension + 1 :]
  leaf = leaf.reshape(*before, num_shards, num_stages, -1, *after)
  leaf = jax.lax.psum_scatter(leaf, DATA_AXIS, scatter_dimension=dimension)
  leaf = jax.lax.all_to_all(
    leaf, STAGE_AXIS, split_axis=dimension, concat_axis=0, tiled=True
  )
  return leaf.reshape(-1, *before[1:], leaf.shape[dimension + 1], *after)


def _rows(leaf: Array, numbers: Array) -> Array:
  """Selects layers by their numbers; a number without a layer gives zeros."""
  return leaf.at[numbers].get(mode="fill", fill_value=0)


def _gather(leaf: Array, spec: Spec, over: tuple[str, ...]) -> Array:
  """Gathers a leaf from its parts along the mesh axes in `over`.

  Along other mesh axes the leaf stays divided.
  """

  def gather(leaf: Array) -> Array:
    for dimension, axes in _divided_dimensions(spec, over):
      # XLA copies what it gathers, even from a single device.
      if jax.lax.axis_size(axes) > 1:
        leaf = jax.lax.all_gather(leaf, axes, axis=dimension, tiled=True)
    return leaf

  return _on_tensor_shards(gather, spec)(leaf)


def _scatter(leaf: Array, spec: Spec, over: tuple[str, ...]) -> Array:
  """Reduce-scatters a leaf over those mesh axes in `over` that divide it."""

  def scatter(leaf: Array) -> Array:
    for dimension, axes in _divided_dimensions(spec, over):
      leaf = jax.lax.psum_scatter(
        leaf, axes, scatter_dimension=dimension, tiled=True
      )
    return leaf

  return _on_tensor_shards(scatter, spec)(leaf)


def _on_tensor_shards(
  function: Callable[[Array], Array], spec: Spec
) -> Callable[[Array], Array]:
  """Wraps a function so that each tensor shard applies it to its own part.

  Returns `function` itself if no dimension of the leaf is divided by tensor
  shards alone, or if JAX does not partition the tensor axis.
  """
  # Without the wrapper, JAX's partitioner would first gather the leaf from all
  # tensor shards.
  # If other devices divide the same dimension as tensor shards, as in the large
  # tables, the parts of a tensor shard are not next to each other.
  has_own_dimension = (TENSOR_AXIS,) in spec
  if not has_own_dimension or not is_automatic(TENSOR_AXIS):
    return function
  by_tensor = partition(spec, (TENSOR_AXIS,))
  return map_over_devices(
    function, in_specs=by_tensor, out_specs=by_tensor, axes=(TENSOR_AXIS,)
  )


def _divided_dimensions(
  spec: Spec, over: tuple[str, ...]
) -> list[tuple[int, tuple[str, ...]]]:
  """Returns each dimension that axes in `over` divide, with these axes."""
  divided = []
  for dimension, axes in enumerate(spec):
    chosen = tuple(axis for axis in axes if axis in over)
    if chosen:
      divided.append((dimension, chosen))
  return divided


def _sum(leaf: Array, spec: Spec, over: tuple[str, ...]) -> Array:
  """Sums a leaf over the mesh axes in `over`; returns this device's part.

  Along an axis that does not divide the leaf, every device gets the whole sum.
  """
  leaf = _scatter(leaf, spec, over)
  used = {axis for axes in spec for axis in axes}
  # Along an axis that does not divide the leaf, all devices keep the whole sum.
  other_axes = tuple(axis for axis in over if axis not in used)
  if other_axes:
    leaf = jax.lax.psum(leaf, other_axes)
  return leaf
