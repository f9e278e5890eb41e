"""Computes the gradient of one replica whose arrays are on several devices.

The loss of an evaluation is computed in the same way, without a gradient.

Before the pipeline starts, every device collects the layers that its stage
computes, and the few leaves that all stages share. Of large tables it collects
only a part (`inner.vocabulary`). Afterwards the gradients go back to the
devices that keep the parameters. Both happen once in each optimizer step, for
any number of micro-batches, over the fast links inside a cluster.

If a whole stage is too large for a device, the data shards of the stage keep
their parts of its layers (`mesh.gather="layer"`). They collect a layer whenever
a micro-batch passes through it. So a device holds only one or two whole layers
at a time, but collects every layer twice for each micro-batch.

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

  The function spreads the work over the devices of the replica.

  Args:
    stage_gradient: Gradient function of one stage, which uses the mesh axis
      "stage" (`inner.pipeline.pipelined_gradient`).
    division: How the parameters are divided among the devices.
    stage_layers: Which layers each stage has.
    num_micro_batches: Number of micro-batches, m, into which every data shard
      divides its rows of a batch.
    divided_tables: Paths of the tables (leaves outside the blocks) that stay
      divided: each data shard gets only its own part of them
      (`Division.divided_tables`). The gradient of such a part, as
      `stage_gradient` returns it, is already summed over the data shards.
    gather: When data shards collect layers: "stage" (all layers of the stage
      once in each step) or "layer" (one layer at a time, for each micro-batch).
      With "layer", `stage_gradient` gets the argument `transfer`, which
      collects one layer (`LayerTransfer`).

  Returns:
    Function (params, batch [B, L + 1]) -> (loss, gradients), to be called
    inside a function that `distributed.replicas.Replicas.map` maps. The
    gradients are divided like the parameters.
  """

  def from_stages(leaf: Array, spec: Spec) -> Array:
    reduce = functools.partial(_from_stages, stage_layers, gather, spec=spec)
    return _on_tensor_shards(reduce, spec)(leaf)

  def gradient(params: Tree, batch: Array) -> tuple[Scalar, Tree]:
    specs, axes, partitions = _layout(params, division, divided_tables)

    def local(params: Tree, batch: Array) -> tuple[Scalar, Tree]:
      blocks, rest = _collected(
        stage_layers, params, specs=specs, axes=axes, gather=gather
      )
      tokens = batch.reshape(num_micro_batches, -1, *batch.shape[1:])
      loss, block_gradients, rest_gradients = _with_transfer(
        stage_gradient, gather, specs[BLOCKS]
      )(blocks, rest, tokens)
      gradients = {
        BLOCKS: jax.tree.map(from_stages, block_gradients, specs[BLOCKS]),
        **jax.tree.map(
          _sum, rest_gradients, _without_blocks(specs), _without_blocks(axes)
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

  Evaluations use the function, and so does training without stages, where JAX
  differentiates it. It spreads the work over the devices of the replica. Every
  data shard divides its rows of the batches into micro-batches. If the data
  shards cannot divide the rows of a batch evenly, every shard computes all
  rows.

  Args:
    stage_loss: Loss function of one stage, which uses the mesh axis "stage":
      (blocks, other leaves, tokens [m, b, L + 1]) -> this stage's contribution
      to a sum over stages. Without stages, it is the loss of `loss_by_layer`.
    division: How the parameters are divided among the devices.
    stage_layers: Which layers each stage has. None: there are no stages, and
      `stage_loss` collects the layers itself, as `loss_by_layer` does.
    num_rows: Largest number of rows of a micro-batch, b. If it does not divide
      a shard's rows of a batch, b is the greatest common divisor of both.
    divided_tables: Paths of the tables (leaves outside the blocks) that stay
      divided: each data shard gets only its own part of them.
    gather: When data shards collect layers: "stage" (all layers of the stage
      once) or "layer" (one layer at a time, for each micro-batch). With
      "layer", `stage_loss` gets the argument `transfer`, which collects one
      layer (`LayerTransfer`). Without stages, leave it at "stage".

  Returns:
    Function (params, batches [N, B, L + 1]) -> mean loss, to be called inside a
    function that `distributed.replicas.Replicas.map` maps.
  """
  shards = division.num_data_shards

  def loss(params: Tree, batches: Array) -> Scalar:
    specs, axes, partitions = _layout(params, division, divided_tables)

    def local(params: Tree, batches: Array) -> Scalar:
      rows = math.gcd(batches.shape[1], num_rows)
      tokens = batches.reshape(-1, rows, batches.shape[2])
      blocks, rest = _collected(
        stage_layers, params, specs=specs, axes=axes, gather=gather
      )
      loss = _with_transfer(stage_loss, gather, specs[BLOCKS])(
        blocks, rest, tokens
      )
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

  JAX can differentiate it. A shard collects one layer after the other, and the
  backward collects each layer again. So a shard does not hold all layers whole
  at the same time. Exception: with `remat="none"` the forward saves the whole
  layers for the backward.
  Source: Zhao et al. 2023, arXiv 2304.11277.

  Args:
    model: The model, cut into embedding, layers and loss.
    remat: What a layer's forward saves for its backward: "none" (everything),
      "dots" (results of matrix products) or "full" (only the input).

  Returns:
    Function (blocks, other leaves, tokens [m, b, L + 1]) -> mean loss of this
    shard's rows. `blocks` is a tuple: this device's parts of the layers, and
    the mesh axes that divide their leaves.
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
  """Gives a function of a stage the argument `transfer` if it needs it.

  `transfer` says how a device collects a whole layer from the data shards.

  Args:
    function: Gradient or loss function of a stage.
    gather: When data shards collect layers: "stage" (before the function is
      called, so it needs no `transfer`) or "layer" (inside the function).
    specs: The mesh axes that divide each leaf of the blocks.
  """
  if gather == "stage":
    return function
  return functools.partial(function, transfer=_layer_transfer(specs))


def _layer_transfer(specs: Tree) -> LayerTransfer:
  """Returns how data shards collect one layer, and sum its gradient.

  Args:
    specs: For each leaf of the blocks, the mesh axes that divide its
      dimensions. The first dimension is the layers.
  """

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
  """Collects the parameters that this device needs.

  Args:
    stage_layers: Which layers each stage has; None: there are no stages.
    params: This device's parts of all parameters.
    specs: The mesh axes that divide every leaf.
    axes: Mesh axes over which each leaf outside the blocks is collected.
    gather: When data shards collect layers: "stage" (here) or "layer" (later,
      one layer for each micro-batch).

  Returns:
    A tuple (layers, other leaves). `layers` are those of this stage, leaves
    [K, ...]: whole layers with "stage", this device's parts with "layer".
    Without stages, `layers` is a tuple of this device's parts of all layers,
    and the mesh axes that divide their leaves.
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
  """Returns how parameters are divided and collected.

  Args:
    params: The parameters.
    division: How the parameters are divided among the devices.
    divided_tables: Paths of the tables (leaves outside the blocks) that stay
      divided: each data shard gets only its own part of them.

  Returns:
    A tuple of three trees like `params`. They have for every leaf: the mesh
    axes that divide each of its dimensions, the mesh axes over which it is
    collected, and its `jax.sharding.PartitionSpec` for data shards and stages
    (without tensor shards).
  """

  def collected_over(path: Any, leaf: Array) -> tuple[str, ...]:
    del leaf
    if path_name(path) in divided_tables:
      return (STAGE_AXIS,)
    return PIPELINE_AXES

  specs = specs_of(division, params)
  partitions = jax.tree.map(
    lambda _, spec: partition(spec, PIPELINE_AXES), params, specs
  )
  axes = jax.tree_util.tree_map_with_path(collected_over, params)
  return specs, axes, partitions


def _dimension(spec: Spec, axis: str) -> int | None:
  """Returns which dimension of a leaf a mesh axis divides; None if it does not.

  Args:
    spec: For each dimension of the leaf, the mesh axes that divide it.
    axis: Name of the mesh axis.
  """
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
  """Collects this stage's layers of one leaf.

  Args:
    stage_layers: Which layers each stage has.
    gather: Whether to collect the layers from the data shards ("stage"), or to
      leave them divided ("layer").
    leaf: This device's part of a leaf of the blocks.
    spec: For each dimension of the leaf, the mesh axes that divide it.

  Returns:
    The stage's layers of the leaf, [K, ...].
  """
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
  if gather == "layer":
    return leaf
  return _gather(leaf, spec, (DATA_AXIS,))


def _from_stages(
  stage_layers: StageLayers, gather: str, leaf: Array, spec: Spec
) -> Array:
  """Sums gradients of one leaf over data shards, and gives devices their parts.

  It reverses `_to_stages`.

  Args:
    stage_layers: Which layers each stage has.
    gather: "stage" or "layer". With "layer", leaves that data shards divide
      were summed over the data shards right after each layer's backward.
    leaf: Gradients of this stage's layers, [K, ...].
    spec: For each dimension of the leaf, the mesh axes that divide it.

  Returns:
    The gradient of the part of the leaf that this device keeps.
  """
  by_stage = _dimension(spec, STAGE_AXIS)
  by_data = _dimension(spec, DATA_AXIS)
  if gather == "stage" and by_data and by_data == by_stage:
    all_layers = _sum_and_swap(leaf, by_data)
    return _rows(all_layers, jnp.asarray(stage_layers.rows))
  if by_data is None:
    leaf = jax.lax.psum(leaf, DATA_AXIS)
  elif gather == "stage":
    leaf = _scatter(leaf, spec, (DATA_AXIS,))
  if by_stage == 0:
    return leaf  # The stage keeps exactly the layers that it computes.
  if by_stage is None:  # Every stage keeps all layers of this leaf.
    leaf = jax.lax.all_gather(leaf, STAGE_AXIS, axis=0, tiled=True)
  else:
    leaf = jax.lax.all_to_all(leaf, STAGE_AXIS, by_stage, 0, tiled=True)
  return _rows(leaf, jnp.asarray(stage_layers.rows))


def _sum_and_swap(leaf: Array, dimension: int) -> Array:
  """Sums gradients over data shards, and gives each device its part of a leaf.

  Before, a device has gradients of this stage's layers, whole. Afterwards it
  has the sum for all layers, of its part of one dimension. For this, the
  dimension is reshaped to an axis for data shards and an axis for stages.
  Otherwise the compiler for TPUs would sum the whole leaf on every device: 7.5
  GiB for the five layers of a stage, in a model of 107 billion parameters.

  Args:
    leaf: Gradients of this stage's n layers, [n, ...].
    dimension: Dimension that is divided by data shards and then by stages.

  Returns:
    Gradients of all layers, for this device's part of the dimension.
  """
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
  """Selects layers by their numbers. A number without a layer gives zeros.

  Args:
    leaf: Layers, [layers, ...].
    numbers: Numbers of layers, [n].

  Returns:
    The selected layers, [n, ...].
  """
  return leaf.at[numbers].get(mode="fill", fill_value=0)


def _gather(leaf: Array, spec: Spec, over: tuple[str, ...]) -> Array:
  """Collects a leaf from the devices that hold its parts.

  Args:
    leaf: This device's part of the leaf.
    spec: For each dimension of the leaf, the mesh axes that divide it.
    over: Mesh axes over which the leaf is collected. Along other axes it stays
      divided.

  Returns:
    The whole leaf, or the part of it that other mesh axes leave.
  """

  def gather(leaf: Array) -> Array:
    for dimension, axes in _divided_dimensions(spec, over):
      # XLA copies what it gathers, even from a single device.
      if jax.lax.axis_size(axes) > 1:
        leaf = jax.lax.all_gather(leaf, axes, axis=dimension, tiled=True)
    return leaf

  return _on_tensor_shards(gather, spec)(leaf)


def _scatter(leaf: Array, spec: Spec, over: tuple[str, ...]) -> Array:
  """Sums a leaf over the mesh axes that divide it (a reduce-scatter).

  Args:
    leaf: Values of the whole leaf on this device.
    spec: For each dimension of the leaf, the mesh axes that divide it.
    over: Mesh axes over which the leaf is summed, if they divide it.

  Returns:
    The sum of this device's part of the leaf.
  """

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

  The function uses collectives over data shards and stages. Without the wrapper
  JAX's partitioner would first collect the leaf from all tensor shards.

  Args:
    function: Function from a leaf to a leaf.
    spec: For each dimension of the leaf, the mesh axes that divide it.

  Returns:
    The wrapped function. It is `function` itself in two cases: tensor shards
    divide no dimension of the leaf alone (they do not divide it at all, or data
    shards or stages divide the same dimension), or JAX's partitioner does not
    divide the work along the tensor axis.
  """
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
  """Returns the dimensions of a leaf that given mesh axes divide.

  Args:
    spec: For each dimension of the leaf, the mesh axes that divide it.
    over: The mesh axes.

  Returns:
    Pairs of a dimension and the axes of `over` that divide it.
  """
  divided = []
  for dimension, axes in enumerate(spec):
    chosen = tuple(axis for axis in axes if axis in over)
    if chosen:
      divided.append((dimension, chosen))
  return divided


def _sum(leaf: Array, spec: Spec, over: tuple[str, ...]) -> Array:
  """Sums a leaf over mesh axes, and gives each device its part of the sum.

  Args:
    leaf: Values of the whole leaf on this device.
    spec: For each dimension of the leaf, the mesh axes that divide it.
    over: Mesh axes over which the leaf is summed. Along an axis that does not
      divide the leaf, every device gets the whole sum.

  Returns:
    The sum of this device's part of the leaf.
  """
  leaf = _scatter(leaf, spec, over)
  used = {axis for axes in spec for axis in axes}
  # Along an axis that does not divide the leaf, all devices keep the whole sum.
  other_axes = tuple(axis for axis in over if axis not in used)
  if other_axes:
    leaf = jax.lax.psum(leaf, other_axes)
  return leaf
