"""Types of arrays and trees, and functions that name and check leaves.

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
      dtype: Type of the result; None means the type of the array.
      copy: Not read: the result is always a new array.
    """
    del copy
    return np.asarray(self.part((slice(None),) * len(self.shape)), dtype)


def in_memory(tree: Tree) -> Tree:
  """Reads every `LazyArray` of a tree into the memory of the host.

  Args:
    tree: Any tree.

  Returns:
    The tree with an array of numpy in place of each `LazyArray`.
  """

  def read(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, LazyArray) else leaf

  return jax.tree.map(read, tree)


def path_name(path: Any) -> str:
  """Returns a leaf's key path as text, e.g. "blocks/attention/query/kernel".

  An array inside a Flax NNX variable has the same name as the array alone,
  because `nnx.Optimizer` calls `init` with variables and `update` with their
  arrays.

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

  Example: {"a/b": x} becomes {"a": {"b": x}}.

  Args:
    leaves: Leaves by path. A list of the original tree becomes a dict with the
      keys "0", "1" and so on.
  """
  return unflat(leaves, "/")


def shapes_by_path(tree: Tree) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a tree's leaves by their paths (`path_name`).

  The leaves have the order of flattening.

  Args:
    tree: Tree of arrays.
  """
  return {path: leaf.shape for path, leaf in leaves_by_path(tree).items()}


def kinds_by_path(tree: Tree) -> dict[str, str]:
  """Returns dtype and shape of each leaf by its path, e.g. "int32[8, 16]".

  The dtype is the one that JAX gives the leaf. So an int64 array of numpy is an
  "int32" here, unless JAX's 64-bit types are enabled.

  Args:
    tree: Tree of arrays.
  """
  kinds = {}
  for path, leaf in leaves_by_path(tree).items():
    kind = jax.typeof(leaf)
    kinds[path] = f"{kind.dtype}{list(kind.shape)}"
  return kinds


def tree_digest(trees: Iterable[Tree], name: str) -> str:
  """Returns a digest of the arrays in some trees, 16 hex digits.

  The digest depends on the values, types and shapes of the leaves in order, and
  on `name`.

  Args:
    trees: The trees, in order.
    name: A text that becomes part of the digest, so that equal arrays with
      another name have another digest.
  """
  digest = hashlib.sha256(name.encode())
  for leaf in jax.tree.leaves(list(trees)):
    digest.update(f"{leaf.dtype}{leaf.shape}".encode())
    values = np.ascontiguousarray(leaf).reshape(-1)
    # The types of `ml_dtypes` have no buffer, so the values are seen as bytes.
    digest.update(values.view(np.uint8).data)
  return digest.hexdigest()[:16]


def check_trainable(params: Tree, allows_integers: bool = False) -> None:
  """Raises ValueError for the first leaf that cannot be trained.

  Only arrays of real floats can be trained: they have a gradient, and codecs
  can round them.

  Args:
    params: Parameters.
    allows_integers: Whether arrays of integers and booleans are accepted, too.
      They are not trained.
  """
  for path, leaf in leaves_by_path(params).items():
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
  """Whether a tree has a leaf with at least one value.

  Args:
    tree: Tree of arrays.
  """
  return any(leaf.size for leaf in jax.tree.leaves(tree))


def is_count(leaf: Any) -> bool:
  """Whether a leaf is an array of integers or booleans, which has no gradient.

  Args:
    leaf: Any value.
  """
  return _has_dtype(leaf, jnp.integer) or _has_dtype(leaf, jnp.bool_)


def _has_dtype(leaf: Any, kind: Any) -> bool:
  """Whether a leaf is an array with a dtype of a kind.

  Args:
    leaf: Any value.
    kind: Kind of dtype, e.g. `jnp.floating`.
  """
  return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, kind)


def is_masked(node: Any) -> bool:
  """Whether a node is optax's placeholder for a leaf that was masked out.

  Args:
    node: Node of a tree.
  """
  return isinstance(node, optax.MaskedNode)


def all_finite(tree: Tree) -> Boolean:
  """Returns whether all values of a tree's floating leaves are finite.

  Args:
    tree: A tree with at least one floating leaf.

  Returns:
    A boolean scalar, also inside a compiled program.
  """
  finite = [
    jnp.all(jnp.isfinite(leaf))
    for leaf in jax.tree.leaves(tree)
    if jnp.isdtype(leaf.dtype, "real floating")
  ]
  return jnp.stack(finite).all()


def widened(values: Tree) -> Tree:
  """Converts a tree of floating arrays to fp32; wider types stay.

  Args:
    values: A tree of floating arrays.
  """
  return jax.tree.map(
    lambda leaf: leaf.astype(np.promote_types(np.float32, leaf.dtype)), values
  )


def shardings_of(tree: Tree) -> Tree:
  """Returns a tree that has the sharding of each leaf in the place of the leaf.

  Args:
    tree: Tree of arrays of JAX.
  """
  return jax.tree.map(lambda leaf: leaf.sharding, tree)
