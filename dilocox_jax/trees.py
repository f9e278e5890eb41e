"""Types of arrays, and names and checks of a tree's leaves.

Dimension letters in all modules: B batch, L length, D model, N heads,
K head width, F feed-forward, V vocabulary, S stages, M replicas, R rank.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jaxtyping import Array, Bool, Float, Int

from dilocox_jax.checks import require

Tree = Any  # A pytree of arrays.
Scalar = Float[Array, ""]
Index = Int[Array, ""]
Boolean = Bool[Array, ""]

# Under which key a variable of Flax NNX holds its array.
_IN_VARIABLE = jax.tree_util.GetAttrKey("value")


class LazyArray:
  """An array that is not in memory, and whose parts are read when needed.

  Subclasses have the attributes `shape` and `dtype`, and the method `part`.
  `np.asarray` reads the whole array.
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
    """Reads the whole array.

    Args:
      dtype: Type of the result; None means that of the array.
      copy: Not read: the result is always a new array.
    """
    del copy
    return np.asarray(self.part((slice(None),) * len(self.shape)), dtype)


def in_memory(tree: Tree) -> Tree:
  """Returns a tree in which every `LazyArray` has been read."""

  def read(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, LazyArray) else leaf

  return jax.tree.map(read, tree)


def path_name(path: Any) -> str:
  """Returns a leaf's key path as text, e.g. "blocks/attention/query/kernel".

  A Flax NNX variable has the name of its array, with or without its box:
  `nnx.Optimizer` calls `init` with variables and `update` with their arrays.

  Args:
    path: Key path of a leaf, from `jax.tree_util`.
  """
  if path and path[-1] == _IN_VARIABLE:
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: Tree) -> dict[str, Any]:
  """Returns the leaves of a tree by `path_name`, in the order of flattening."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns leaves by path as a nested dict, which `leaves_by_path` undoes.

  Args:
    leaves: Leaves by path; numbers of lists become text.
  """
  return traverse_util.unflatten_dict(leaves, sep="/")


def shapes_by_path(tree: Tree) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a tree's leaves by `path_name`, in the same order."""
  return {path: leaf.shape for path, leaf in leaves_by_path(tree).items()}


def kinds_by_path(tree: Tree) -> dict[str, str]:
  """Returns dtype and shape of each leaf by its path, e.g. "int32[8, 16]"."""
  kinds = {p: jax.typeof(leaf) for p, leaf in leaves_by_path(tree).items()}
  return {p: f"{kind.dtype}{list(kind.shape)}" for p, kind in kinds.items()}


def tree_digest(trees: Iterable[Tree], name: str) -> str:
  """Returns 16 hex digits that name trees of arrays.

  Args:
    trees: The trees, in order.
    name: What else the digest depends on.
  """
  whole = hashlib.sha256(name.encode())
  for leaf in jax.tree.leaves(list(trees)):
    whole.update(f"{leaf.dtype}{leaf.shape}".encode())
    values = np.ascontiguousarray(leaf).reshape(-1)
    # The types of `ml_dtypes` have no buffer, so the values are seen as bytes.
    whole.update(values.view(np.uint8).data)
  return whole.hexdigest()[:16]


def check_trainable(params: Tree, may_differ: bool = False) -> None:
  """Raises ValueError for the first leaf that cannot be trained.

  Only real floats can: they have a gradient, and codecs round them.

  Args:
    params: Parameters.
    may_differ: Whether integers and booleans are accepted beside them.
  """
  for path, leaf in leaves_by_path(params).items():
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    what = f"leaf {path!r}" if path else "a single leaf"
    require(
      _is_a(leaf, jnp.floating) or (may_differ and is_count(leaf)),
      f"{what} of type {kind} cannot be trained, only arrays of real "
      "floats can: keep it out of the parameters (e.g. with optax.partition, "
      "which gives it an optimizer of its own)",
    )


def has_values(tree: Tree) -> bool:
  """Whether a tree has a leaf that is not of zero size."""
  return any(leaf.size for leaf in jax.tree.leaves(tree))


def is_count(leaf: Any) -> bool:
  """Whether an array has integers or booleans, which have no gradient."""
  return _is_a(leaf, jnp.integer) or _is_a(leaf, jnp.bool_)


def _is_a(leaf: Any, kind: Any) -> bool:
  return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, kind)


def is_masked(node: Any) -> bool:
  """Whether a node stands for a leaf that is not in this tree."""
  return isinstance(node, optax.MaskedNode)


def all_finite(tree: Tree) -> Boolean:
  """Returns whether all values of a tree's floating leaves are finite."""
  finite = [
    jnp.all(jnp.isfinite(leaf))
    for leaf in jax.tree.leaves(tree)
    if jnp.isdtype(leaf.dtype, "real floating")
  ]
  return jnp.stack(finite).all()


def widened(values: Tree) -> Tree:
  """Returns values in fp32, or in their own type if that is wider."""
  return jax.tree.map(
    lambda leaf: leaf.astype(np.promote_types(np.float32, leaf.dtype)), values
  )


def shardings_of(tree: Tree) -> Tree:
  """Returns where every leaf lies, in the place of the leaf."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)
