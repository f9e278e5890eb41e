"""The states of this package's transforms, and the model that they contain.

A transform trains the leaves of real floats in a caller's tree. Integers and
booleans, such as a counter, are neither trained nor sent: each replica keeps
its own values. `outer_params` returns the model that a state contains.
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
  """State of a transform that exchanges pseudo-gradients, for one replica.

  Attributes:
    step: Number of inner steps done (int32 scalar).
    inner: State of the inner optimizer.
    fragments: Outer state of every group of fragments with equal shapes
      (`FragmentView.groups`). If a group has several fragments, the leaves of
      its state have an axis of fragments in front.
    view: Cuts fragments (parts of the parameters) out of the tree.
    correction: Tree that is added to the parameters after each inner step
      (`ApplyRule.correct`); None: nothing is added.
  """

  step: Index
  inner: Any
  fragments: tuple[FragmentState, ...]
  view: FragmentView
  correction: Tree | None = None


class GradientState(NamedTuple):
  """State of a transform that averages gradients, for one replica.

  Attributes:
    inner: State of the inner optimizer.
    exchange: State of the aggregator.
  """

  inner: Any
  exchange: Any


def outer_params(state: Tree, params: Tree) -> Tree:
  """Returns the model to evaluate and to keep: the outer parameters.

  If the outer optimizer keeps a running average (`outer.average`), the average
  is returned instead. A method that averages gradients has no outer parameters.
  For such a method the result is the inner optimizer's running average, or
  `params` if there is none.

  Args:
    state: State of one replica, or of all replicas with a replica axis. It may
      lie inside the states of wrappers, such as `optax.chain`, `MultiSteps`,
      `masked`, `inject_hyperparams` or `multi_transform`.
    params: The parameters that the state belongs to, with a replica axis if the
      state has one.

  Returns:
    A tree like `params`, with a replica axis if they have one. All replicas
    have equal values, unless each replica has its own outer parameters, as with
    the rule "eager" or with exchanges in pairs. Leaves that the transform does
    not train are taken from `params`.

  Raises:
    ValueError: If `state` contains no state of a transform of this package.
  """

  def is_ours(node: Any) -> bool:
    return isinstance(node, StepState | GradientState)

  states = list(filter(is_ours, jax.tree.leaves(state, is_leaf=is_ours)))
  require(
    bool(states),
    f"the state, a {type(state).__name__}, holds none of a transform of "
    "dilocox_jax: pass what init and update of the whole optimizer return",
  )
  # Each state fills in the leaves that its transform trains, and leaves the
  # others to the other states, e.g. those of `multi_transform`.
  for each in states:
    params = jax.tree.map(
      lambda new, old: old if is_masked(new) else new,
      _model_of(each, trained(params, params)),
      params,
      is_leaf=is_masked,
    )
  return params


def _model_of(state: StepState | GradientState, params: Tree) -> Tree:
  """Returns the outer parameters, or their average, in one transform's state.

  The result is like `params`, with an `optax.MaskedNode` for each leaf that the
  transform does not train. A `GradientState` gives its average, or `params`.
  """
  if isinstance(state, GradientState):
    if not isinstance(state.inner, AverageState):
      return params
    # The average is kept in fp32, whatever the dtype of the parameters is.
    return jax.tree.map(
      lambda mean, param: mean if is_masked(mean) else mean.astype(param.dtype),
      state.inner.average,
      params,
      is_leaf=is_masked,
    )
  group_trees = [
    parameters_to_keep(group_state.optimizer, group_state.params)
    for group_state in state.fragments
  ]

  def mask_if_absent(*leaves_and_param: Any) -> Any:
    *leaves, param = leaves_and_param
    return optax.MaskedNode() if all(map(is_masked, leaves)) else param

  # The parameters come last: a group tree may have one `MaskedNode` where the
  # parameters have a subtree, and `jax.tree.map` follows its first tree.
  like = jax.tree.map(mask_if_absent, *group_trees, params, is_leaf=is_masked)
  if not jax.tree.leaves(like):  # The transform trains no leaf.
    return like
  groups = state.view.groups

  def join(like: Tree, group_trees: Sequence[Tree]) -> Tree:
    parts = []
    for fragment, group in enumerate(groups):
      part = group_trees[group]
      # With the groups 0, 1, 1, 1, fragment 2 is entry 1 of the stack of group
      # 1, which begins with fragment 1.
      index = fragment - groups.index(group)
      if groups.count(group) > 1:
        part = jax.tree.map(lambda leaf, index=index: leaf[index], part)
      parts.append(part)
    return state.view.merge(like, parts)

  has_replica_axis = state.step.ndim > 0
  return (jax.vmap(join) if has_replica_axis else join)(like, group_trees)


def on_trained_leaves(
  transform: optax.GradientTransformationExtraArgs,
  trainable: Callable[[str], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Hides untrained leaves from a transform, as `optax.masked` does.

  Untrained leaves are integers, booleans, and those that `trainable` excludes.
  Their updates are zeros.

  Args:
    transform: A transform for trees in which `optax.MaskedNode()` stands for
      every hidden leaf.
    trainable: Function (path of a leaf, e.g. "blocks/attention/query") ->
      whether the leaf is trained. It decides only about leaves of real floats.
      None: all of these are trained.

  Returns:
    A transform whose `init` raises ValueError for a leaf that is neither a real
    float nor an integer or boolean.
  """

  def init(params: Tree) -> Any:
    check_trainable(params, allows_integers=True)
    return transform.init(trained(params, params, trainable))

  def update(updates, state, params=None, **extra):
    like = updates if params is None else params
    seen_params = None
    if params is not None:
      seen_params = trained(params, params, trainable)
    updates, state = transform.update(
      trained(updates, like, trainable), state, seen_params, **extra
    )
    updates = jax.tree.map(_zero_if_hidden, updates, like, is_leaf=is_masked)
    return updates, state

  return optax.GradientTransformationExtraArgs(init, update)


def trained(
  tree: Tree, params: Tree, trainable: Callable[[str], bool] | None = None
) -> Tree:
  """Returns a tree with `optax.MaskedNode()` for each leaf that is not trained.

  Args:
    tree: A tree like the parameters, such as their updates.
    params: Parameters. Integers and booleans are not trained.
    trainable: Function (path of a leaf) -> whether the leaf is trained. It
      decides only about leaves of real floats. None: all of these are trained.
  """

  def mask_if_hidden(path: Any, param: Any, leaf: Any) -> Any:
    if is_count(param):
      return optax.MaskedNode()
    if trainable is not None and not trainable(path_name(path)):
      return optax.MaskedNode()
    return leaf

  return jax.tree_util.tree_map_with_path(mask_if_hidden, params, tree)


def _zero_if_hidden(update: Any, param: Any) -> Any:
  """Returns the update of a leaf; zeros if the transform did not see the leaf.

  A leaf that the caller has masked already stays masked.
  """
  is_hidden = is_masked(update) and not is_masked(param)
  return jnp.zeros_like(param) if is_hidden else update
