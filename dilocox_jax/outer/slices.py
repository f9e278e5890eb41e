"""Slices of every leaf, which make fragments of equal size for any P.

Slice p of P has the rows p, p + P, p + 2 P, ... of every leaf. Devices that
divide the rows of a leaf then have a part of every slice, and none has to send
rows to another one before an exchange. Where P does not divide the n rows of a
leaf, rows of zeros fill it up, which are sent and never written back. For
example 7 rows and P = 3 make the slices (0, 3, 6), (1, 4, -) and (2, 5, -).
"""

import jax
import jax.numpy as jnp

from dilocox_jax.plan.schedule.fragments import row_axis, slice_rows
from dilocox_jax.pytypes import Array, Index, Tree
from dilocox_jax.trees import path_name


def take_slice(tree: Tree, fragment: int | Index, num_fragments: int) -> Tree:
  """Returns slice `fragment` of every leaf.

  Args:
    tree: Parameters; leaves below "blocks" have a layer axis in front.
    fragment: Number p of the slice.
    num_fragments: Number of slices, P.
  """

  def cut(path, leaf: Array) -> Array:
    rows, axis = _in_slices(path, leaf, num_fragments)
    return jax.lax.dynamic_index_in_dim(rows, fragment, axis + 1, False)

  return jax.tree_util.tree_map_with_path(cut, tree)


def put_slice(
  tree: Tree, fragment: int | Index, num_fragments: int, values: Tree
) -> Tree:
  """Returns the tree with slice `fragment` of every leaf replaced.

  Args:
    tree: Parameters, as for `take_slice`.
    fragment: Number p of the slice.
    num_fragments: Number of slices, P.
    values: New slices, a tree that `take_slice` could have returned.
  """

  def write(path, leaf: Array, new: Array) -> Array:
    rows, axis = _in_slices(path, leaf, num_fragments)
    written = jax.lax.dynamic_update_index_in_dim(rows, new, fragment, axis + 1)
    joined = written.reshape(*leaf.shape[:axis], -1, *leaf.shape[axis + 1 :])
    num_rows = leaf.shape[axis] if leaf.ndim else 1
    joined = jax.lax.slice_in_dim(joined, 0, num_rows, axis=axis)
    return joined.reshape(leaf.shape)

  return jax.tree_util.tree_map_with_path(write, tree, values)


def _in_slices(path, leaf: Array, num_fragments: int) -> tuple[Array, int]:
  """Returns a leaf [..., rows of a slice, slices, ...] and its axis of rows."""
  if not leaf.ndim:
    leaf = leaf.reshape(1)
  axis = row_axis(path_name(path), leaf.shape)
  width = slice_rows(leaf.shape[axis], num_fragments)
  pad = [(0, 0)] * leaf.ndim
  pad[axis] = (0, width * num_fragments - leaf.shape[axis])
  shape = (*leaf.shape[:axis], width, num_fragments, *leaf.shape[axis + 1 :])
  return jnp.pad(leaf, pad).reshape(shape), axis
