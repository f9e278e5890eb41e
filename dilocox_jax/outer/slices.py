"""Slices of every leaf, which make fragments of equal size for any P.

A slice has neighbouring rows or every P-th row of a leaf, as the order of the
fragments says (`plan.schedule.fragments`). Where P does not divide the n rows
of a leaf, rows of zeros fill it up, which are sent and never written back. For
example 344 rows and P = 16 make slices of 22 rows; the last one of neighbours
has 14 rows of the leaf and 8 of zeros.
"""

import math

import jax
import jax.numpy as jnp

from dilocox_jax.plan.schedule.fragments import (
  Fragments,
  row_axis,
  slice_parts,
  slice_rows,
)
from dilocox_jax.pytypes import Array, Index, Tree
from dilocox_jax.trees import path_name


def take_slice(tree: Tree, fragment: int | Index, fragments: Fragments) -> Tree:
  """Returns slice `fragment` of every leaf.

  Args:
    tree: Parameters; leaves below "blocks" have a layer axis in front.
    fragment: Number p of the slice.
    fragments: The division into slices.
  """

  def cut(path, leaf: Array) -> Array:
    rows, axis = _in_slices(path, leaf, fragments)
    own = jax.lax.dynamic_index_in_dim(rows, fragment, axis + 1, False)
    return _joined(own, axis, 2)

  return jax.tree_util.tree_map_with_path(cut, tree)


def put_slice(
  tree: Tree, fragment: int | Index, fragments: Fragments, values: Tree
) -> Tree:
  """Returns the tree with slice `fragment` of every leaf replaced.

  Args:
    tree: Parameters, as for `take_slice`.
    fragment: Number p of the slice.
    fragments: The division into slices.
    values: New slices, a tree that `take_slice` could have returned.
  """

  def write(path, leaf: Array, new: Array) -> Array:
    rows, axis = _in_slices(path, leaf, fragments)
    own = new.reshape(*rows.shape[: axis + 1], *rows.shape[axis + 2 :])
    rows = jax.lax.dynamic_update_index_in_dim(rows, own, fragment, axis + 1)
    rows = _joined(rows, axis, 3)
    num_rows = leaf.shape[axis] if leaf.ndim else 1
    return jax.lax.slice_in_dim(rows, 0, num_rows, axis=axis).reshape(
      leaf.shape
    )

  return jax.tree_util.tree_map_with_path(write, tree, values)


def join_slices(like: Tree, stacked: Tree, fragments: Fragments) -> Tree:
  """Returns the tree of which all slices are given.

  Args:
    like: Arrays, or shapes, of the tree.
    stacked: Slices as `take_slice` returns them, leaves [P, ...] in order.
    fragments: The division into slices.
  """

  def join(path, leaf, parts: Array) -> Array:
    shape = leaf.shape or (1,)
    axis = row_axis(path_name(path), shape)
    number = slice_parts(shape[axis], len(parts), fragments.order)
    rest = shape[axis + 1 :]
    size = slice_rows(shape[axis], len(parts)) // max(number, 1)
    rows = parts.reshape(len(parts), *shape[:axis], number, size, *rest)
    rows = _joined(jnp.moveaxis(rows, 0, axis + 1), axis, 3)
    rows = jax.lax.slice_in_dim(rows, 0, shape[axis], axis=axis)
    return rows.reshape(leaf.shape)

  return jax.tree_util.tree_map_with_path(join, like, stacked)


def _in_slices(path, leaf: Array, fragments: Fragments) -> tuple[Array, int]:
  """Returns a leaf [..., parts, P, rows of a part, ...] and its parts' axis."""
  if not leaf.ndim:
    leaf = leaf.reshape(1)
  count = fragments.num_fragments
  axis = row_axis(path_name(path), leaf.shape)
  num_rows = leaf.shape[axis]
  pad = [(0, 0)] * leaf.ndim
  pad[axis] = (0, slice_rows(num_rows, count) * count - num_rows)
  parts = slice_parts(num_rows, count, fragments.order)
  rows = slice_rows(num_rows, count) // max(parts, 1)
  shape = (*leaf.shape[:axis], parts, count, rows, *leaf.shape[axis + 1 :])
  return jnp.pad(leaf, pad).reshape(shape), axis


def _joined(array: Array, axis: int, num_axes: int) -> Array:
  """Makes one axis of neighbouring ones, which may have no entries at all."""
  end = axis + num_axes
  size = math.prod(array.shape[axis:end])
  return array.reshape(*array.shape[:axis], size, *array.shape[end:])
