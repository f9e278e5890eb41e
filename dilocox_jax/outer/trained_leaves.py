"""Which leaves of a caller's tree a transform trains.

Real floats are trained, and complex numbers as two of them, as
`optax.contrib.split_real_and_imaginary` does it. Integers and booleans, such as
a counter, have no gradient: each replica keeps its own as they are, no
optimizer sees them, and nothing of them is sent. Everything else is refused.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.pytypes import Tree
from dilocox_jax.trees import (
  check_trainable,
  is_complex,
  is_count,
  is_masked,
)


class _RealPair(NamedTuple):
  """Two real arrays in the place of a complex one."""

  real: Any
  imaginary: Any


def on_trained_leaves(
  transform: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Lets a transform see real floats alone, as `optax.masked` would.

  Args:
    transform: A transform for trees in which `optax.MaskedNode()` stands for
      leaves that others train.

  Returns:
    A transform whose `init` raises ValueError for a leaf that it cannot train,
    and whose updates of integers and booleans are zeros.
  """

  def init(params: Tree) -> Any:
    check_trainable(params, may_differ=True)
    return transform.init(trained(params, params))

  def update(updates, state, params=None, **extra):
    like = updates if params is None else params
    own = None if params is None else trained(params, params)
    updates, state = transform.update(
      trained(updates, like), state, own, **extra
    )
    updates = merged(updates)
    return jax.tree.map(_in_full, updates, like, is_leaf=is_masked), state

  return optax.GradientTransformationExtraArgs(init, update)


def trained(tree: Tree, params: Tree) -> Tree:
  """Returns a tree as the transform sees it.

  Args:
    tree: Values like the parameters.
    params: Parameters. A count becomes a `MaskedNode`, and a complex leaf two
      real ones.
  """

  def seen(own: Any, leaf: Any) -> Any:
    if is_complex(own):
      return _RealPair(leaf.real, leaf.imag)
    return optax.MaskedNode() if is_count(own) else leaf

  return jax.tree.map(seen, params, tree)


def merged(tree: Tree) -> Tree:
  """Returns a tree in which two real leaves are a complex one again."""

  def is_pair(node: Any) -> bool:
    return isinstance(node, _RealPair)

  def merge(node: Any) -> Any:
    return jax.lax.complex(*node) if is_pair(node) else node

  return jax.tree.map(merge, tree, is_leaf=is_pair)


def _in_full(update: Any, own: Any) -> Any:
  is_kept = is_masked(update) and not is_masked(own)
  return jnp.zeros_like(own) if is_kept else update
