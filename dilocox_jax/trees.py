"""Pytrees by path: names of leaves, and checks over all of them."""

from typing import Any

import jax
import jax.numpy as jnp

from dilocox_jax.pytypes import Boolean, Tree


def path_name(path: Any) -> str:
  """A leaf's key path as text: the keys of a `blocks/attention/query` leaf.

  Args:
    path: A key path of `jax.tree_util`.
  """
  return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: Tree) -> dict[str, Any]:
  """The leaves of a tree by `path_name`, in the order of flattening."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves}


def all_finite(tree: Tree) -> Boolean:
  """Whether every floating value of a tree is finite; other leaves pass."""
  finite = [
    jnp.all(jnp.isfinite(leaf))
    for leaf in jax.tree.leaves(tree)
    if jnp.isdtype(leaf.dtype, "real floating")
  ]
  return jnp.stack(finite).all()
