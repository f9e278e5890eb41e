"""Takes fragments out of a parameter tree, and puts them back.

A fragment is the whole tree, a slice of every leaf, some layers of the stacked
leaves or everything else, or some leaves (`plan.schedule.fragments`). It is a
tree like the caller's, in which `optax.MaskedNode()` stands for the leaves
of other fragments, as in `optax.masked`. So optax's functions for states, such
as `optax.tree.map_params`, work.

Fragments with the same shapes make a *group*. They differ in their *index*
alone, which is an argument of a program, so one program serves the whole group.
Slices are one group, and so are the layer fragments.

Short fragments: 5 layers, P = 3, strided, have the indices

    fragment 1: layers 0, 2, 4
    fragment 2: layers 1, 3, and 5 = num_layers, which stands for no layer

`extract` of fragment 2 fills the missing row with zeros, and `insert` drops it:
an index out of bounds reads the fill value and writes nothing. Zeros change no
mean, no norm and no other row, so the padding is harmless, but it is sent. So
are rows of zeros that fill up a slice: 344 rows and P = 16 make slices of 22
rows, and the last one of neighbors has 14 rows of the leaf and 8 of zeros.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dilocox_jax.checks import require
from dilocox_jax.plan.schedule.fragments import (
  BLOCKS,
  Fragments,
  Shape,
  Shapes,
  balanced,
  by_path,
  is_stacked,
)
from dilocox_jax.trees import (
  Array,
  Tree,
  check_trainable,
  is_masked,
  path_name,
  shapes_by_path,
)

# How a tree is divided: by a function of the leaves' paths, by the layers of
# leaves that are stacked below "blocks", or by slices.
Fragmentation = Callable[[str], int] | Fragments


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FragmentView:
  """Takes fragments out of trees and puts them back.

  It is a pytree without leaves. Two with equal settings are equal, and so are
  the structures of two transforms' states: a saved state fits a transform that
  is made anew.

  Attributes:
    count: Number of fragments, P.
    fragments: How the tree is divided; None: whole leaves, such that the
      fragments have about equal sizes.
  """

  count: int
  fragments: Fragmentation | None = None

  @property
  def _by_rows(self) -> Fragments | None:
    """The division into slices or layers, if it is one."""
    is_rule = self.count > 1 and isinstance(self.fragments, Fragments)
    return self.fragments if is_rule else None  # pyright: ignore

  @property
  def _slices(self) -> Fragments | None:
    """The division, if every fragment is a slice of all leaves."""
    found = self._by_rows
    return found if found and found.is_sliced else None

  @property
  def groups(self) -> list[int]:
    """The group of every fragment."""
    if self._slices:
      return [0] * self.count
    numbers = range(self.count)
    return [min(p, 1) for p in numbers] if self._by_rows else [*numbers]

  def index(self, fragment: int) -> np.ndarray | None:
    """Returns the index of a fragment in its group, as `extract` takes it.

    Returns:
      The number of the slice (int32 scalar), or the numbers of the K layers
      ([K] int32). None: The fragment is the only one of its group.
    """
    if self._slices:
      return np.asarray(fragment, np.int32)
    division = self._by_rows
    if division and fragment:
      return division.layer_table[fragment - 1]
    return None

  def extract(self, tree: Tree, group: int, index: Any) -> Tree:
    """Returns one fragment of a tree.

    Args:
      tree: Parameters of one replica.
      group: Group of the fragment.
      index: Index of the fragment in its group (`index`); it may be traced.
    """
    owner = self.divided(shapes_by_path(tree))

    def take(path, leaf: Array) -> Any:
      if slices := self._slices:
        rows, axis = _in_slices(path, leaf, slices)
        rows = jax.lax.dynamic_index_in_dim(rows, index, axis + 1, False)
        return _joined(rows, axis, 2)
      if owner[path_name(path)] != group:
        return optax.MaskedNode()
      if index is None:
        return leaf
      layers = jnp.asarray(index)
      return jnp.take(leaf, layers, axis=0, mode="fill", fill_value=0)

    return jax.tree_util.tree_map_with_path(take, tree)

  def insert(self, tree: Tree, group: int, index: Any, values: Tree) -> Tree:
    """Returns the tree with one fragment replaced by values like `extract`'s.

    Args:
      tree: Parameters of one replica.
      group: Group of the fragment.
      index: Index of the fragment in its group, as in `extract`.
      values: The fragment, a tree that `extract` could have returned.
    """
    owner = self.divided(shapes_by_path(tree))

    def put(path, new, old: Array) -> Array:
      if is_masked(old):  # `optax.masked` kept it from the transform.
        return old
      if slices := self._slices:
        rows, axis = _in_slices(path, old, slices)
        new = new.reshape(*rows.shape[: axis + 1], *rows.shape[axis + 2 :])
        put_in = jax.lax.dynamic_update_index_in_dim
        return _whole(put_in(rows, new, index, axis + 1), axis, old.shape)
      if owner[path_name(path)] != group:
        return old
      if index is None:
        return new
      return old.at[jnp.asarray(index)].set(new, mode="drop")

    return jax.tree_util.tree_map_with_path(
      put, values, tree, is_leaf=is_masked
    )

  def merge(self, like: Tree, parts: Sequence[Tree]) -> Tree:
    """Returns the tree that consists of all fragments.

    Args:
      like: Arrays of the tree, masked where no fragment has a value.
      parts: The fragments, in order.
    """
    if slices := self._slices:

      def join(path, leaf, *own: Array) -> Array:
        shape, axis = slices.slices(path_name(path), leaf.shape)
        shape = (*shape[: axis + 1], *shape[axis + 2 :])
        rows = jnp.stack([part.reshape(shape) for part in own], axis + 1)
        return _whole(rows, axis, leaf.shape)

      return jax.tree_util.tree_map_with_path(join, like, *parts)
    whole = jax.tree.map(jnp.zeros_like, like)
    for number, part in enumerate(parts):
      whole = self.insert(whole, self.groups[number], self.index(number), part)
    return whole

  def check(self, params: Tree) -> None:
    """Raises ValueError if a tree cannot be trained, or not be divided so.

    Args:
      params: Parameters of one replica, or their shapes and types.
    """
    check_trainable(params)
    shapes = shapes_by_path(params)
    division = self.fragments
    self.divided(shapes)
    if isinstance(division, Fragments):
      require(
        division.num_fragments == self.count,
        f"fragments has {division.num_fragments} of them, but "
        f"num_fragments={self.count}",
      )
    if self._by_rows and not self._slices:
      _check_layers(shapes, self._by_rows)

  def divided(self, shapes: Shapes) -> dict[str, int]:
    """Returns the group of every leaf by path, or nothing if there are slices.

    A slice has rows of every leaf, so no leaf belongs to one group.

    Args:
      shapes: Leaf shapes by path.

    Raises:
      ValueError: If the fragments do not cover the leaves.
    """
    # `optax.tree.map_params` calls init with a tree that has no leaves.
    if self._slices or not shapes:
      return {}
    if self._by_rows:
      return {path: int(is_stacked(path)) for path in shapes}
    if callable(self.fragments):
      return by_path(shapes, self.count, self.fragments)
    return balanced(shapes, self.count)


# It has no values, so `flax.serialization` stores nothing of it.
flax.serialization.register_serialization_state(
  FragmentView, lambda view: {}, lambda view, saved: view
)


def _check_layers(shapes: Shapes, fragments: Fragments) -> None:
  """Raises ValueError unless layers lie below "blocks", and a rest beside."""
  count = fragments.num_fragments
  depth = fragments.num_layers
  problems = [
    f"leaf {path!r} of shape {shape} is not [{depth}, ...]"
    for path, shape in shapes.items()
    if is_stacked(path) and shape[:1] != (depth,)
  ]
  for number, place in enumerate(("outside", "below")):
    values = fragments.shapes(number, shapes).values()
    if not any(map(math.prod, values)):
      problems.append(f"no leaf {place} has a value for fragment {number}")
  problem = next(iter(problems), "")
  require(
    not problem,
    f"num_fragments={count} divides {depth} layers below {BLOCKS!r}, but "
    f"{problem}: set num_fragments=1, or take dilocox_jax.step_transform, "
    "which divides any tree",
  )


def _in_slices(path, leaf: Array, fragments: Fragments) -> tuple[Array, int]:
  """Returns a leaf [..., parts, P, rows of a part, ...] and its parts' axis."""
  shape, axis = fragments.slices(path_name(path), leaf.shape)
  leaf = leaf.reshape(leaf.shape or (1,))
  num_rows = math.prod(shape[axis : axis + 3])
  pad = [(0, 0)] * leaf.ndim
  pad[axis] = (0, num_rows - leaf.shape[axis])
  return jnp.pad(leaf, pad).reshape(shape), axis


def _whole(rows: Array, axis: int, shape: Shape) -> Array:
  """Returns the leaf of which all rows are given, without padding."""
  rows = _joined(rows, axis, 3)
  num_rows = shape[axis] if shape else 1
  return jax.lax.slice_in_dim(rows, 0, num_rows, axis=axis).reshape(shape)


def _joined(array: Array, axis: int, num_axes: int) -> Array:
  """Makes one axis of neighboring ones, which may have no entries at all."""
  end = axis + num_axes
  size = math.prod(array.shape[axis:end])
  return array.reshape(*array.shape[:axis], size, *array.shape[end:])
