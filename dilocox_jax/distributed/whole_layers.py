"""Gives each device of a replica whole layers for a while.

Muon multiplies a matrix with itself ten times in every step. If the devices of
a replica share the rows of each matrix, every product would need the rows of
all. So the devices swap rows for layers before the update, and swap back after
it. Each sends what it holds once in either direction.

Three layers [3, 8, 5] on two devices, each of which has four rows of all:

  before         [3, 4, 5] and [3, 4, 5]
  filled up      [4, 4, 5] and [4, 4, 5], layer 3 is zero
  swapped        [2, 8, 5] and [2, 8, 5], layers 0 and 1, and 2 and 3
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dilocox_jax.distributed.local_map import current_division, map_over_devices
from dilocox_jax.distributed.replicas import partition
from dilocox_jax.plan.model.division import Division, Spec
from dilocox_jax.trees import Array, Tree, path_name

_NUM_AXES = 3  # A stack of matrices is [layers, rows, columns].

# (gradients, optimizer state, parameters) -> (updates, optimizer state).
Update = Callable[..., tuple[Tree, Tree]]


def on_whole_layers(update: Update) -> Update:
  """Has each device of a replica update whole layers.

  Args:
    update: Update of an optimizer. It computes stacked matrices layer by layer,
      also a layer of zeros, and all other leaves value by value.
  """

  def mapped(updates: Tree, state: Tree, params: Tree = None):
    division = current_division()
    if division.num_devices == 1:
      return update(updates, state, params)
    given = updates, state, params
    specs = _specs(division, given)

    def local(*parts: Tree) -> tuple[Tree, Tree]:
      whole = jax.tree.map(_swapped, parts, specs)
      results = update(*whole)
      return jax.tree.map(_swapped_back, results, parts[:2], specs[:2])

    places = jax.tree.map(lambda _, spec: partition(spec), given, specs)
    return map_over_devices(local, places, places[:2])(*given)

  return mapped


def _specs(division: Division, trees: Tree) -> Tree:
  def spec(path: Any, leaf: Array) -> Spec:
    return division.spec(path_name(path), leaf.shape)

  return jax.tree_util.tree_map_with_path(spec, trees)


def _swapped(leaf: Array, spec: Spec) -> Array:
  """Returns layers [n, R, C] of a part [L, r, c] of all layers."""
  shared = _shared_axes(leaf, spec)
  num_devices = math.prod(jax.lax.axis_size(names) for _, names in shared)
  if num_devices > 1:
    missing = -leaf.shape[0] % num_devices
    leaf = jnp.pad(leaf, [(0, missing), (0, 0), (0, 0)])
  for axis, names in shared:
    leaf = jax.lax.all_to_all(leaf, names, 0, axis, tiled=True)
  return leaf


def _swapped_back(leaf: Array, part: Array, spec: Spec) -> Array:
  """Reverses `_swapped` of a part."""
  for axis, names in reversed(_shared_axes(part, spec)):
    leaf = jax.lax.all_to_all(leaf, names, axis, 0, tiled=True)
  return leaf[: len(part)] if part.ndim == _NUM_AXES else leaf


def _shared_axes(leaf: Array, spec: Spec) -> list[tuple[int, tuple[str, ...]]]:
  """Returns the axes of rows and columns that devices share, with theirs."""
  if leaf.ndim != _NUM_AXES:
    return []
  return [(axis, spec[axis]) for axis in (1, 2) if spec[axis]]
