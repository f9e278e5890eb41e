"""The gradient of one replica whose arrays lie on several devices.

Before the pipeline starts, every device collects the layers that its stage
computes and the few leaves that all stages share; afterwards the gradients go
back to where the parameters are kept. Both happen once an optimizer step,
however many micro-batches it has, over the fast links inside a cluster.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dilocox_jax.distributed.local_map import INNER_AXES, map_over_devices
from dilocox_jax.distributed.replicas import partition
from dilocox_jax.inner.step import Gradient
from dilocox_jax.plan.model.division import (
  DATA_AXIS,
  STAGE_AXIS,
  Division,
  Spec,
)
from dilocox_jax.plan.pipeline.stage_layers import StageLayers
from dilocox_jax.plan.schedule.fragments import BLOCKS
from dilocox_jax.pytypes import Array, Scalar, Tree
from dilocox_jax.trees import path_name

# (blocks [v, K, ...], other leaves, tokens [m, b, L + 1]) -> (loss, and the
# same two trees of gradients), all of them this stage's contribution.
StageGradient = Callable[[Tree, Tree, Array], tuple[Scalar, Tree, Tree]]


class _Held(NamedTuple):
  """A leaf's division; a leaf of the tree of divisions."""

  spec: Spec


def sharded_gradient(
  stage_gradient: StageGradient,
  division: Division,
  parts: StageLayers,
  num_micro_batches: int,
) -> Gradient:
  """Spreads a gradient over the devices of one replica.

  Args:
    stage_gradient: What a stage does, under the axis "stage".
    division: How parameters are kept.
    parts: Which layers are whose.
    num_micro_batches: m, of every data shard's part of a batch.

  Returns:
    (params, batch [B, L + 1]) -> (loss, gradients), for use under
    `mesh.Replicas.over`; the gradients are divided like the parameters.
  """

  def gradient(params: Tree, batch: Array) -> tuple[Scalar, Tree]:
    held = _divisions(params, division)

    def local(params: Tree, batch: Array) -> tuple[Scalar, Tree]:
      rest = {key: tree for key, tree in params.items() if key != BLOCKS}
      rest_held = {key: held[key] for key in rest}
      blocks = jax.tree.map(
        lambda leaf, where: _to_stages(leaf, where.spec, parts),
        params[BLOCKS],
        held[BLOCKS],
      )
      whole = jax.tree.map(lambda x, at: _gathered(x, at.spec), rest, rest_held)
      tokens = batch.reshape(num_micro_batches, -1, *batch.shape[1:])
      loss, for_blocks, for_rest = stage_gradient(blocks, whole, tokens)
      gradients = {
        BLOCKS: jax.tree.map(
          lambda leaf, where: _from_stages(leaf, where.spec, parts),
          for_blocks,
          held[BLOCKS],
        ),
        **jax.tree.map(lambda x, at: _summed(x, at.spec), for_rest, rest_held),
      }
      shards = jax.lax.axis_size(DATA_AXIS)
      loss = jax.lax.psum(loss, INNER_AXES) / shards
      gradients = jax.tree.map(
        lambda new, old: (new / shards).astype(old.dtype), gradients, params
      )
      return loss, {key: gradients[key] for key in params}

    specs = jax.tree.map(
      lambda where: partition(where.spec), held, is_leaf=_is_held
    )
    mapped = map_over_devices(
      local, (specs, PartitionSpec(DATA_AXIS)), (PartitionSpec(), specs)
    )
    return mapped(params, batch)

  return gradient


def _is_held(value: Any) -> bool:
  return isinstance(value, _Held)


def _divisions(params: Tree, division: Division) -> Tree:
  def held(path, leaf) -> _Held:
    named = path_name(path)
    return _Held(division.spec(named, leaf.shape))

  return jax.tree_util.tree_map_with_path(held, params)


def _dimension(spec: Spec, axis: str) -> int | None:
  """The dimension that an axis divides."""
  return next((n for n, axes in enumerate(spec) if axis in axes), None)


def _to_stages(leaf: Array, spec: Spec, parts: StageLayers) -> Array:
  """A leaf's layers, as kept, to those of this stage, [v, K, ...] whole."""
  by_stage = _dimension(spec, STAGE_AXIS)
  if by_stage is None:
    table = jnp.asarray(parts.table)[jax.lax.axis_index(STAGE_AXIS)]
    leaf = _rows(leaf, table.reshape(-1))
  elif by_stage:
    leaf = _rows(leaf, jnp.asarray(parts.table.reshape(-1)))
    leaf = jax.lax.all_to_all(leaf, STAGE_AXIS, 0, by_stage, tiled=True)
  by_data = _dimension(spec, DATA_AXIS)
  if by_data is not None:
    leaf = jax.lax.all_gather(leaf, DATA_AXIS, axis=by_data, tiled=True)
  return leaf.reshape(*parts.table.shape[1:], *leaf.shape[1:])


def _from_stages(leaf: Array, spec: Spec, parts: StageLayers) -> Array:
  """Gradients of this stage's layers, summed, to where the leaf is kept."""
  leaf = leaf.reshape(-1, *leaf.shape[2:])
  by_stage, by_data = _dimension(spec, STAGE_AXIS), _dimension(spec, DATA_AXIS)
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
  return _rows(leaf, jnp.asarray(parts.places))


def _rows(leaf: Array, numbers: Array) -> Array:
  """Layers by number; zeros where there is no such layer."""
  return leaf.at[numbers].get(mode="fill", fill_value=0)


def _gathered(leaf: Array, spec: Spec) -> Array:
  """The whole of a leaf that devices keep parts of."""
  for dimension, axes in enumerate(spec):
    if axes:
      leaf = jax.lax.all_gather(leaf, axes, axis=dimension, tiled=True)
  return leaf


def _summed(leaf: Array, spec: Spec) -> Array:
  """The part that is kept of the sum over all devices."""
  used = set()
  for dimension, axes in enumerate(spec):
    if axes:
      used |= set(axes)
      leaf = jax.lax.psum_scatter(
        leaf, axes, scatter_dimension=dimension, tiled=True
      )
  missing = tuple(axis for axis in INNER_AXES if axis not in used)
  return jax.lax.psum(leaf, missing) if missing else leaf
