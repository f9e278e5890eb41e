"""What transforms see of a caller's tree, their states, and the model in them.

Real floats are trained. Integers and booleans, such as a counter, have no
gradient: each replica keeps its own as they are, no optimizer sees them, and
nothing of them is sent. Everything else is refused.

The tree is divided into fragments, each with an outer state of its own.
`outer_params` puts the fragments' outer parameters back into one tree.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.checks import require
from dilocox_jax.outer.average import AverageState, parameters_to_keep
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import FragmentState
from dilocox_jax.trees import (
  Index,
  Tree,
  check_trainable,
  is_count,
  is_masked,
  path_name,
)


class StepState(NamedTuple):
  """State of one replica between two inner steps.

  Attributes:
    step: Inner steps done (int32 scalar).
    inner: State of the inner optimizer.
    fragments: State of every group of fragments (`fragment_view`), stacked
      where a group has several.
    view: How the tree is divided into fragments.
    correction: What is added to the parameters after each inner step
      (`ApplyRule.correct`), a tree like them; None: nothing.
  """

  step: Index
  inner: Any
  fragments: tuple[FragmentState, ...]
  view: FragmentView
  correction: Tree | None = None


class GradientState(NamedTuple):
  """State of a method that averages gradients.

  Attributes:
    inner: State of the inner optimizer.
    exchange: State of the aggregator.
  """

  inner: Any
  exchange: Any


def outer_params(state: Tree, params: Tree) -> Tree:
  """Returns the outer parameters of a transform, which are the model to keep.

  If the outer optimizer keeps an average, it is this average. A method that
  averages gradients has the parameters themselves as its model, unless its
  optimizer keeps their average.

  Args:
    state: State of one replica, or with a replica axis. It may lie inside the
      states of wrappers, such as `optax.chain`, `MultiSteps`, `masked`,
      `inject_hyperparams` or `multi_transform`.
    params: The parameters that the state belongs to, with a replica axis if it
      has one.

  Returns:
    The caller's tree. A replica axis stays; replicas have equal values, except
    under the rule "eager" and with exchanges whose result is not shared. Leaves
    that a wrapper kept from the transform, and integers, are those of `params`.

  Raises:
    ValueError: If the state of no transform of this package is in it.
  """

  def is_ours(node: Any) -> bool:
    return isinstance(node, StepState | GradientState)

  states = list(filter(is_ours, jax.tree.leaves(state, is_leaf=is_ours)))
  require(
    bool(states),
    f"the state, a {type(state).__name__}, holds none of a transform of "
    "dilocox_jax: pass what init and update of the whole optimizer return",
  )
  for own in states:
    params = jax.tree.map(
      lambda kept, old: old if is_masked(kept) else kept,
      _kept(own, trained(params, params)),
      params,
      is_leaf=is_masked,
    )
  return params


def _kept(state: StepState | GradientState, params: Tree) -> Tree:
  """Returns what one transform keeps; masked where it has no leaf."""
  if isinstance(state, GradientState):
    has_average = isinstance(state.inner, AverageState)
    return state.inner.average if has_average else params
  trees = [parameters_to_keep(f.optimizer, f.params) for f in state.fragments]
  own = jax.tree.map(
    lambda *parts: parts[0] if all(map(is_masked, parts[:-1])) else parts[-1],
    *trees,
    params,
    is_leaf=is_masked,
  )
  groups = state.view.groups

  def join(own: Tree, trees: Sequence[Tree]) -> Tree:
    parts = []
    for fragment, group in enumerate(groups):
      part = trees[group]
      index = fragment - groups.index(group)
      if groups.count(group) > 1:
        part = jax.tree.map(lambda leaf, index=index: leaf[index], part)
      parts.append(part)
    return state.view.merge(own, parts)

  return (jax.vmap(join) if state.step.ndim else join)(own, trees)


def on_trained_leaves(
  transform: optax.GradientTransformationExtraArgs,
  trainable: Callable[[str], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Lets a transform see real floats alone, as `optax.masked` would.

  Args:
    transform: A transform for trees in which `optax.MaskedNode()` stands for
      leaves that others train.
    trainable: Whether the leaf at a path is trained; None: each is.

  Returns:
    A transform whose `init` raises ValueError for a leaf that it cannot train,
    and whose updates of what is not trained are zeros.
  """

  def init(params: Tree) -> Any:
    check_trainable(params, may_differ=True)
    return transform.init(trained(params, params, trainable))

  def update(updates, state, params=None, **extra):
    like = updates if params is None else params
    own = None if params is None else trained(params, params, trainable)
    updates, state = transform.update(
      trained(updates, like, trainable), state, own, **extra
    )
    return jax.tree.map(_in_full, updates, like, is_leaf=is_masked), state

  return optax.GradientTransformationExtraArgs(init, update)


def trained(
  tree: Tree, params: Tree, trainable: Callable[[str], bool] | None = None
) -> Tree:
  """Returns a tree as the transform sees it.

  Args:
    tree: Values like the parameters.
    params: Parameters. A count becomes a `MaskedNode`.
    trainable: As in `on_trained_leaves`; others become a `MaskedNode` too.
  """

  def seen(path: Any, own: Any, leaf: Any) -> Any:
    is_kept = is_count(own) or (trainable and not trainable(path_name(path)))
    return optax.MaskedNode() if is_kept else leaf

  return jax.tree_util.tree_map_with_path(seen, params, tree)


def _in_full(update: Any, own: Any) -> Any:
  is_kept = is_masked(update) and not is_masked(own)
  return jnp.zeros_like(own) if is_kept else update
