"""What transforms see of a caller's tree, their states, and the model in them.

Real floats are trained, and complex numbers as two of them, as
`optax.contrib.split_real_and_imaginary` does it. Integers and booleans, such as
a counter, have no gradient: each replica keeps its own as they are, no
optimizer sees them, and nothing of them is sent. Everything else is refused.

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
from dilocox_jax.outer.cuts import Cuts
from dilocox_jax.outer.outer_step import FragmentState
from dilocox_jax.trees import (
  Index,
  Tree,
  check_trainable,
  is_complex,
  is_count,
  is_masked,
  path_name,
)


class StepState(NamedTuple):
  """State of one replica between two inner steps.

  Attributes:
    step: Inner steps done (int32 scalar).
    inner: State of the inner optimizer.
    fragments: State of every group of fragments (`cuts`), stacked where a group
      has several.
    cuts: How the tree is divided into fragments.
  """

  step: Index
  inner: Any
  fragments: tuple[FragmentState, ...]
  cuts: Cuts


class GradientState(NamedTuple):
  """State of a method that averages gradients.

  Attributes:
    inner: State of the inner optimizer.
    exchange: State of the aggregator.
  """

  inner: Any
  exchange: Any


def outer_params(state: Tree, params: Tree | None = None) -> Tree:
  """Returns the outer parameters of a transform, which are the model to keep.

  `outer_params(state, params)` works for every method. If the outer optimizer
  keeps an average, it is this average. A method that averages gradients has the
  parameters themselves as its model, unless its optimizer keeps their average.

  Args:
    state: State of one replica, or with a replica axis. It may lie inside the
      states of wrappers, such as `optax.chain`, `MultiSteps`, `masked`,
      `inject_hyperparams` or `multi_transform`.
    params: The parameters that the state belongs to, with a replica axis if it
      has one. It may be left out if the whole model is in the outer parameters
      of one transform, or in an average, and fragments do not divide leaves.

  Returns:
    The caller's tree. A replica axis stays; replicas have equal values, except
    under the rule "eager" and with exchanges whose result is not shared. Leaves
    that a wrapper kept from the transform, and integers, are those of `params`,
    or `optax.MaskedNode` without `params`.

  Raises:
    ValueError: If the state of no transform of this package is in it, or if
      `params` is needed and missing.
  """

  def is_ours(node: Any) -> bool:
    return isinstance(node, StepState | GradientState)

  states = list(filter(is_ours, jax.tree.leaves(state, is_leaf=is_ours)))
  if not states:
    raise ValueError(
      f"the state, a {type(state).__name__}, holds none of a transform of "
      "dilocox_jax: pass what init and update of the whole optimizer return"
    )
  if params is None:
    if len(states) > 1:
      raise ValueError(
        f"the state holds those of {len(states)} transforms: call "
        "dilocox_jax.outer_params(state, params)"
      )
    return merged(_kept(states[0], None))
  for own in states:
    params = jax.tree.map(
      lambda kept, old: old if is_masked(kept) else kept,
      merged(_kept(own, trained(params, params))),
      params,
      is_leaf=is_masked,
    )
  return params


def _kept(state: StepState | GradientState, params: Tree | None) -> Tree:
  """Returns what one transform keeps; masked where it has no leaf."""
  if isinstance(state, GradientState):
    return _average_of(state, params)
  trees = [
    parameters_to_keep(fragment.optimizer, fragment.params)
    for fragment in state.fragments
  ]
  groups = state.cuts.groups
  is_divided = len(set(groups)) < len(groups)
  if params is None and not is_divided:
    return jax.tree.map(_whole, *trees, is_leaf=is_masked)
  require(
    params is not None,
    "fragments divide leaves: call dilocox_jax.outer_params(state, params)",
  )
  shapes = _shapes(params, trees, state.step.ndim)

  def join(trees: Sequence[Tree]) -> Tree:
    parts = []
    for fragment, group in enumerate(groups):
      part, index = trees[group], fragment - groups.index(group)
      if groups.count(group) > 1:
        part = jax.tree.map(lambda leaf, index=index: leaf[index], part)
      parts.append(part)
    return state.cuts.join(shapes, parts)

  return jax.vmap(join)(trees) if state.step.ndim else join(trees)


def _average_of(state: GradientState, params: Tree | None) -> Tree:
  if isinstance(state.inner, AverageState):
    return state.inner.average
  if params is None:
    raise ValueError(
      "this method averages gradients, so the parameters themselves are the "
      "model to keep: call dilocox_jax.outer_params(state, params)"
    )
  return params


def _shapes(params: Tree, trees: Sequence[Tree], num_axes: int) -> Tree:
  """Returns one replica's shapes, masked where no fragment has a value.

  Args:
    params: Parameters.
    trees: Outer parameters of all fragments.
    num_axes: 1 if there is a replica axis, else 0.
  """

  def shape(*parts):
    *parts, leaf = parts
    if all(map(is_masked, parts)):
      return optax.MaskedNode()
    return jax.ShapeDtypeStruct(leaf.shape[num_axes:], leaf.dtype)

  return jax.tree.map(shape, *trees, params, is_leaf=is_masked)


def _whole(*parts: Any) -> Any:
  """The leaf of the fragment that has it; a mask may keep it from all."""
  return next((part for part in parts if not is_masked(part)), parts[0])


class _RealPair(NamedTuple):
  """Two real arrays in the place of a complex one."""

  real: Any
  imaginary: Any


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
    updates = merged(updates)
    return jax.tree.map(_in_full, updates, like, is_leaf=is_masked), state

  return optax.GradientTransformationExtraArgs(init, update)


def trained(
  tree: Tree, params: Tree, trainable: Callable[[str], bool] | None = None
) -> Tree:
  """Returns a tree as the transform sees it.

  Args:
    tree: Values like the parameters.
    params: Parameters. A count becomes a `MaskedNode`, and a complex leaf two
      real ones.
    trainable: As in `on_trained_leaves`; others become a `MaskedNode` too.
  """

  def seen(path: Any, own: Any, leaf: Any) -> Any:
    if is_count(own) or (trainable and not trainable(path_name(path))):
      return optax.MaskedNode()
    return _RealPair(leaf.real, leaf.imag) if is_complex(own) else leaf

  return jax.tree_util.tree_map_with_path(seen, params, tree)


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
