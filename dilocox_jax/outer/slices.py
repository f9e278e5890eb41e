"""Slices of every leaf, which make fragments of equal size for any P.

Fragment p of P has the p-th slice of every leaf. A leaf of n rows is cut into
slices of ceil(n / P) rows (`plan.schedule.fragments`). Where P does not divide
n the last slices are filled up with zeros, which are sent and never written
back. For example 344 rows and P = 16 make slices of 22 rows; the last one has
14 rows of the leaf and 8 of zeros.
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
    leaf, axis, rows = _placed(path, leaf, fragment, num_fragments)
    return jnp.take(leaf, rows, axis=axis, mode="fill", fill_value=0)

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
    rows_first, axis, rows = _placed(path, leaf, fragment, num_fragments)
    index = (slice(None),) * axis + (rows,)
    written = rows_first.at[index].set(new, mode="drop")
    return written.reshape(leaf.shape)

  return jax.tree_util.tree_map_with_path(write, tree, values)


def _placed(
  path, leaf: Array, fragment: int | Index, num_fragments: int
) -> tuple[Array, int, Array]:
  """Returns a leaf of at least one dimension, its axis of rows, and the rows.

  Rows that the leaf does not have are numbered from its number of rows on.
  """
  if not leaf.ndim:
    leaf = leaf.reshape(1)
  axis = row_axis(path_name(path), leaf.shape)
  width = slice_rows(leaf.shape[axis], num_fragments)
  return leaf, axis, fragment * width + jnp.arange(width, dtype=jnp.int32)
