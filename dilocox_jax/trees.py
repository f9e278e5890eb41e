"""Types of arrays and trees, and functions that name and check leaves.

Letters in shapes, unless a docstring says otherwise: B batch, L length, D model
width, N heads, K head width, F width inside the MLP, V vocabulary, S stages,
M replicas, R rank.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from dilocox_jax.checks import require, unflat

Tree = Any  # A pytree of arrays.
Scalar = Float[Array, ""]
Index = Int[Array, ""]
Boolean = Bool[Array, ""]

# Last key in the path of an array that is inside a variable of Flax NNX.
_IN_VARIABLE = jax.tree_util.GetAttrKey("value")


class LazyArray:
  """An array that is not in memory, and whose parts are read when needed.

  Subclasses have `shape` and `dtype`, and implement `part`. `np.asarray` reads
  the whole array.
  """

  shape: tuple[int, ...]
  dtype: Any

  def part(self, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of the array into the memory of the host.

    Args:
      index: Slice of every axis, with steps of 1.
    """
    raise NotImplementedError

  def __array__(
    self, dtype: Any = None, copy: bool | None = None
  ) -> np.ndarray:
    """Reads the whole array, for `np.asarray`."""
    del copy
    return np.asarray(self.part((slice(None),) * len(self.shape)), dtype)


def in_memory(tree: Tree) -> Tree:
  """Returns a tree with an array of numpy in place of each `LazyArray`."""

  def read(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, LazyArray) else leaf

  return jax.tree.map(read, tree)


def path_name(path: Any) -> str:
  """Returns a leaf's key path as text, e.g. "blocks/attention/query/kernel".

  An array inside a Flax NNX variable has the same name as the array alone.

  Args:
    path: Key path of a leaf, from `jax.tree_util`.
  """
  if path and path[-1] == _IN_VARIABLE:
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: Tree) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths, in the order of flattening.

  Args:
    tree: Any tree. The path of a leaf is its `path_name`.
  """
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Builds a nested dict from leaves by path. `leaves_by_path` is its reverse.

  Example: {"a/b": x} becomes {"a": {"b": x}}. A list of the original tree
  becomes a dict with the keys "0", "1" and so on.
  """
  return unflat(leaves, "/")


def shapes_by_path(tree: Tree) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a tree's leaves by their paths (`path_name`)."""
  return {path: leaf.shape for path, leaf in leaves_by_path(tree).items()}


def kinds_by_path(tree: Tree) -> dict[str, str]:
  """Returns dtype and shape of each leaf by its path, e.g. "int32[8, 16]".

  The dtype is that of the leaf as a JAX array: int64 of numpy becomes "int32",
  unless JAX's 64-bit types are enabled.
  """
  kinds = {}
  for path, leaf in leaves_by_path(tree).items():
    kind = jax.typeof(leaf)
    kinds[path] = f"{kind.dtype}{list(kind.shape)}"
  return kinds


def tree_digest(trees: Iterable[Tree], name: str) -> str:
  """Returns a digest of the arrays in some trees, 16 hex digits.

  The digest depends on the values, dtypes and shapes of the leaves in order,
  and on `name`, but not on the paths of the leaves.

  Args:
    trees: The trees, in order.
    name: Any text; another text gives another digest.
  """
  digest = hashlib.sha256(name.encode())
  for leaf in jax.tree.leaves(list(trees)):
    digest.update(f"{leaf.dtype}{leaf.shape}".encode())
    values = np.ascontiguousarray(leaf).reshape(-1)
    # The types of `ml_dtypes` have no buffer, so the values are seen as bytes.
    digest.update(values.view(np.uint8).data)
  return digest.hexdigest()[:16]


def check_trainable(params: Tree, allows_integers: bool = False) -> None:
  """Raises ValueError for the first leaf that is no array of real floats.

  It also does so if two leaves have the same path, as in {"a/b": x, "a": {"b":
  y}}, because leaves are told apart by their paths.

  Args:
    params: Parameters.
    allows_integers: Whether arrays of integers and booleans are accepted, too.
      They are not trained.
  """
  seen = set()
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = path_name(keys)
    require(
      path not in seen,
      f"two leaves have the path {path!r}: rename a key that contains '/'",
    )
    seen.add(path)
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    what = f"leaf {path!r}" if path else "a single leaf"
    is_float = _has_dtype(leaf, jnp.floating)
    is_allowed_integer = allows_integers and is_count(leaf)
    require(
      is_float or is_allowed_integer,
      f"{what} of type {kind} cannot be trained, only arrays of real "
      "floats can: keep it out of the parameters (e.g. with optax.partition, "
      "which gives it an optimizer of its own)",
    )


def has_values(tree: Tree) -> bool:
  """Whether a tree has a leaf with at least one value."""
  return any(leaf.size for leaf in jax.tree.leaves(tree))


def is_count(leaf: Any) -> bool:
  """Whether a leaf is an array of integers or booleans, so has no gradient."""
  return _has_dtype(leaf, jnp.integer) or _has_dtype(leaf, jnp.bool_)


def _has_dtype(leaf: Any, kind: Any) -> bool:
  """Whether a leaf is an array of a kind of dtype, e.g. `jnp.floating`."""
  return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, kind)


def is_masked(node: Any) -> bool:
  """Whether a node is optax's placeholder for a leaf that was masked out."""
  return isinstance(node, optax.MaskedNode)


def all_finite(tree: Tree) -> Boolean:
  """Returns whether all values of a tree's floating leaves are finite.

  The result is a boolean scalar of JAX, also inside a compiled program.

  Args:
    tree: A tree with at least one floating leaf.
  """
  finite = [
    jnp.all(jnp.isfinite(leaf))
    for leaf in jax.tree.leaves(tree)
    if jnp.isdtype(leaf.dtype, "real floating")
  ]
  return jnp.stack(finite).all()


def widened(values: Tree) -> Tree:
  """Converts a tree of floating arrays to fp32. Wider types stay."""
  return jax.tree.map(
    lambda leaf: leaf.astype(np.promote_types(np.float32, leaf.dtype)), values
  )


def shardings_of(tree: Tree) -> Tree:
  """Returns a tree that has, in the place of each array, its sharding."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)
