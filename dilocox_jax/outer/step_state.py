"""The states of the transforms, and the model that is in them.

A caller's tree is divided into fragments, each with an outer state of its own.
This file puts the fragments' outer parameters back into one tree.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import optax

from dilocox_jax.outer.average import AverageState, parameters_to_keep
from dilocox_jax.outer.transforms import OuterState
from dilocox_jax.plan.schedule.leaf_fragments import LeafFragment, LeafPiece
from dilocox_jax.pytypes import Array, Index, Tree
from dilocox_jax.trees import is_masked, path_name


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TreeDivision:
  """How a transform divides the caller's tree: a pytree without leaves.

  Attributes:
    divide: From a tree to its fragments, a list of pieces for each.
  """

  divide: Callable[[Tree], Sequence[LeafFragment]]


# It has no values, so `flax.serialization` stores nothing of it.
flax.serialization.register_serialization_state(
  TreeDivision, lambda division: {}, lambda division, saved: division
)


class StepState(NamedTuple):
  """State of one replica between two inner steps.

  Attributes:
    step: Inner steps done (int32 scalar).
    inner: State of the inner optimizer.
    fragments: For every fragment its outer parameters, the state of its outer
      optimizer and exchange, and its pseudo-gradients in flight.
    division: How the tree is divided into these fragments.
  """

  step: Index
  inner: Any
  fragments: tuple[OuterState, ...]
  division: TreeDivision


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
    return _kept(states[0], None)
  for own in states:
    params = jax.tree.map(
      lambda kept, old: old if is_masked(kept) else kept,
      _kept(own, params),
      params,
      is_leaf=is_masked,
    )
  return params


def _kept(state: StepState | GradientState, params: Tree | None) -> Tree:
  """Returns what one transform keeps; masked where it has no leaf."""
  if isinstance(state, GradientState):
    return _average_of(state, params)
  trees = [
    parameters_to_keep(fragment.optimizer.first, fragment.params)
    for fragment in state.fragments
  ]
  if params is None:
    return jax.tree.map(_whole, *trees, is_leaf=is_masked)
  shapes = _shapes(params, trees, state.step.ndim)
  join = functools.partial(_joined, shapes, state.division.divide(shapes))
  return (jax.vmap(join) if state.step.ndim else join)(*trees)


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
  own = [part for part in parts if not is_masked(part)]
  if not own:  # `optax.masked` kept it from the transform.
    return parts[0]
  if len(own) > 1:
    raise ValueError(
      "fragments divide leaves: call dilocox_jax.outer_params(state, params), "
      "or take the rows from state.fragments[p].params"
    )
  return own[0]


def _joined(
  shapes: Tree, fragments: Sequence[LeafFragment], *trees: Tree
) -> Tree:
  """Puts the rows of all fragments back into whole leaves."""
  pieces = [{piece.path: piece for piece in pieces} for pieces in fragments]

  def join(path, shape, *parts):
    own = [n for n, part in enumerate(parts) if not is_masked(part)]
    whole = jnp.zeros(shape.shape, parts[own[0]].dtype)
    for number in own:
      whole = with_piece(whole, pieces[number][path_name(path)], parts[number])
    return whole

  return jax.tree_util.tree_map_with_path(join, shapes, *trees)


def with_piece(leaf: Array, piece: LeafPiece, values: Array) -> Array:
  """Returns a leaf with new values where a piece of it lies."""
  if piece.layers is None:
    return values
  rows = jnp.asarray(piece.layers, jnp.int32)
  index = (slice(None),) * piece.axis + (rows,)
  return leaf.at[index].set(values, mode="drop")
