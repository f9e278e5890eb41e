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
from dilocox_jax.trees import path_name


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


def outer_params(
  state: StepState | GradientState, params: Tree | None = None
) -> Tree:
  """Returns the outer parameters of a transform, which are the model to keep.

  If the outer optimizer keeps their average, it is this average.

  Args:
    state: State of the transform itself, of one replica or with a replica axis.
      A wrapper has it among its own: `optax.chain` as one of its list,
      `optax.MultiSteps` as `inner_opt_state`, `optax.masked` as `inner_state`.
    params: The parameters that the state belongs to, with a replica axis if it
      has one. Needed if fragments divide leaves; their shapes alone are read.

  Returns:
    The caller's tree. A replica axis stays; replicas have equal values, except
    under the rule "eager" and with exchanges whose result is not shared. Leaves
    that `optax.masked` kept from the transform are `optax.MaskedNode`.

  Raises:
    ValueError: If it is not the state of a transform of this package, if
      fragments divide leaves and `params` is missing, or if the method averages
      gradients and keeps no average of the parameters.
  """
  if isinstance(state, GradientState):
    return _average_of(state)
  if not isinstance(state, StepState):
    raise ValueError(
      f"the state is a {type(state).__name__}, and not that of a transform of "
      "dilocox_jax: take it out of what wraps it, as state[i] of optax.chain, "
      "state.inner_opt_state of MultiSteps or state.inner_state of masked"
    )
  trees = [
    parameters_to_keep(fragment.optimizer.first, fragment.params)
    for fragment in state.fragments
  ]
  if params is None:
    return jax.tree.map(_whole, *trees, is_leaf=is_masked)
  shapes = _shapes(params, trees, state.step.ndim)
  join = functools.partial(_joined, shapes, state.division.divide(shapes))
  return (jax.vmap(join) if state.step.ndim else join)(*trees)


def _average_of(state: GradientState) -> Tree:
  if isinstance(state.inner, AverageState):
    return state.inner.average
  raise ValueError(
    "this method averages gradients, so it has no outer parameters: the "
    "parameters themselves are the model to keep"
  )


def _shapes(params: Tree, trees: Sequence[Tree], num_axes: int) -> Tree:
  """Returns one replica's shapes, masked where no fragment has a value.

  Args:
    params: Parameters.
    trees: Outer parameters of all fragments.
    num_axes: 1 if there is a replica axis, else 0.
  """

  def shape(leaf, *parts):
    if all(map(is_masked, parts)):
      return optax.MaskedNode()
    return jax.ShapeDtypeStruct(leaf.shape[num_axes:], leaf.dtype)

  return jax.tree.map(shape, params, *trees, is_leaf=is_masked)


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


def is_masked(node: Any) -> bool:
  """Whether a node stands for a leaf of another fragment."""
  return isinstance(node, optax.MaskedNode)
