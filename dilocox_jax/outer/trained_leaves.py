"""Which leaves of a caller's tree a transform trains.

Real floats are trained. Integers and booleans, such as a counter, have no
gradient: each replica keeps its own as they are, no optimizer sees them, and
nothing of them is sent. Everything else is refused.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.pytypes import Tree
from dilocox_jax.trees import check_trainable, is_count, is_masked


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
    check_trainable(params, may_count=True)
    return transform.init(_trained(params, params))

  def update(updates, state, params=None, **extra):
    like = updates if params is None else params
    trained = None if params is None else _trained(params, params)
    updates, state = transform.update(
      _trained(updates, like), state, trained, **extra
    )
    return jax.tree.map(_in_full, updates, like, is_leaf=is_masked), state

  return optax.GradientTransformationExtraArgs(init, update)


def _trained(tree: Tree, params: Tree) -> Tree:
  """Returns a tree with a `MaskedNode` where the parameters have a count."""
  return jax.tree.map(
    lambda own, leaf: optax.MaskedNode() if is_count(own) else leaf,
    params,
    tree,
  )


def _in_full(update: Any, own: Any) -> Any:
  is_kept = is_masked(update) and not is_masked(own)
  return jnp.zeros_like(own) if is_kept else update
