"""Cuts fragments out of a parameter tree, and puts them back.

A fragment is a part of the parameters that is averaged on its own: the whole
tree, a slice of every leaf, some layers, or some whole leaves. It is a tree
like the caller's, in which `optax.MaskedNode()` stands for the leaves of other
fragments, as in `optax.masked`.

All slices have the same shapes, and so have all fragments of layers. They make
a *group*, and one program serves all of them: it gets a fragment's *index*,
such as the numbers of its layers, as data.

Some fragments have fewer layers than others. For example, 5 layers are divided
among P = 3 fragments, of which fragment 0 has the leaves outside the layers.
With the order "strided" the indices of the others are

    fragment 1: layers 0, 2, 4
    fragment 2: layers 1, 3, and 5 = num_layers, which is not a layer

`extract` of fragment 2 fills the missing layer with zeros, which are sent, and
`insert` drops them. Slices that have fewer rows are filled up in the same way.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

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

# How a tree is divided: by a function from a leaf's path to the number of its
# fragment, or into layers or slices by `Fragments`.
Fragmentation = Callable[[str], int] | Fragments


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FragmentView:
  """Cuts fragments (parts of the parameters) out of trees and puts them back.

  A view is a pytree without leaves, so it can be a part of a transform's state.

  Attributes:
    count: Number of fragments, P.
    fragments: Function from a leaf's path to the number of its fragment. Or a
      `Fragments`, which divides the tree into slices or layers. None: every
      fragment is some whole leaves, and their total sizes are about equal.
  """

  count: int
  fragments: Fragmentation | None = None

  def __post_init__(self):
    """Lets flax store states that contain a view, if flax is loaded."""
    _register_with_flax()

  @property
  def _by_rows(self) -> Fragments | None:
    """`fragments` if the tree is divided into slices or layers, else None."""
    if self.count > 1 and isinstance(self.fragments, Fragments):
      return self.fragments
    return None

  @property
  def _slices(self) -> Fragments | None:
    """`fragments` if every fragment is a slice of all leaves, else None."""
    division = self._by_rows
    if division is not None and division.is_sliced:
      return division
    return None

  @property
  def groups(self) -> list[int]:
    """The group of each fragment, [P]; fragments of a group have equal shapes.

    - Slices have the groups 0, 0, ..., 0.
    - Layers have the groups 0, 1, ..., 1: fragment 0 is everything outside of
      "blocks", and is a group of its own.
    - Fragments of whole leaves have the groups 0, 1, ..., P - 1.
    """
    if self._slices:
      return [0] * self.count
    if self._by_rows:
      return [0] + [1] * (self.count - 1)
    return list(range(self.count))

  def index(self, fragment: int) -> np.ndarray | None:
    """Returns the index by which `extract` finds a fragment in its group.

    Args:
      fragment: Number of the fragment, from 0.

    Returns:
      For a slice, its number (int32 scalar). For a fragment of layers, the
      numbers of its layers, int32 [K], where K is the largest number of layers
      in a fragment. If this fragment has one layer less, the last entry is
      `num_layers`, which is not a layer. None for all other fragments.
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
      tree: Parameters of one replica, or a tree like them.
      group: Group of the fragment (`groups`).
      index: Result of `index` for the fragment; it may be traced.

    Returns:
      A tree like `tree`. Each leaf is a slice, or has the K layers of the
      fragment, or is whole. An `optax.MaskedNode` stands for each leaf of other
      fragments.
    """
    if slices := self._slices:

      def take_slice(path, leaf: Array) -> Array:
        # `rows` is [..., parts, P, rows of a part, ...] (`Fragments.slices`).
        # Axis `axis` is that of the parts, and the next one is that of slices.
        rows, axis = _in_slices(path, leaf, slices)
        rows = jax.lax.dynamic_index_in_dim(
          rows, index, axis=axis + 1, keepdims=False
        )
        # The rows of all parts become one axis.
        return _joined(rows, axis, 2)

      return jax.tree_util.tree_map_with_path(take_slice, tree)
    group_of = self.divided(shapes_by_path(tree))

    def take(path, leaf: Array) -> Any:
      if group_of[path_name(path)] != group:
        return optax.MaskedNode()
      if index is None:
        return leaf
      layers = jnp.asarray(index)
      return jnp.take(leaf, layers, axis=0, mode="fill", fill_value=0)

    return jax.tree_util.tree_map_with_path(take, tree)

  def insert(self, tree: Tree, group: int, index: Any, values: Tree) -> Tree:
    """Returns the tree with one fragment replaced.

    Args:
      tree: Parameters of one replica, or a tree like them.
      group: Group of the fragment (`groups`).
      index: Result of `index` for the fragment; it may be traced.
      values: New values of the fragment, a tree like the result of `extract`.
    """
    if slices := self._slices:

      def put_slice(path, new, old: Array) -> Array:
        if is_masked(old):  # `optax.masked` hides this leaf.
          return old
        # `rows` is [..., parts, P, rows of a part, ...] (`Fragments.slices`).
        # Axis `axis` is that of the parts, and the next one is that of slices.
        rows, axis = _in_slices(path, old, slices)
        new = new.reshape(*rows.shape[: axis + 1], *rows.shape[axis + 2 :])
        put_in = jax.lax.dynamic_update_index_in_dim
        return _whole(put_in(rows, new, index, axis + 1), axis, old.shape)

      return jax.tree_util.tree_map_with_path(
        put_slice, values, tree, is_leaf=is_masked
      )
    group_of = self.divided(shapes_by_path(tree))

    def put(path, new, old: Array) -> Array:
      if is_masked(old):  # `optax.masked` hides this leaf from the transform.
        return old
      if group_of[path_name(path)] != group:
        return old
      if index is None:
        return new
      # An index out of bounds is padding, so its row is dropped.
      return old.at[jnp.asarray(index)].set(new, mode="drop")

    # `values` has an `optax.MaskedNode` where `tree` has a leaf of another
    # fragment. To JAX a `MaskedNode` is a tree without leaves, and would not
    # match. With `is_leaf` it counts as a leaf.
    return jax.tree_util.tree_map_with_path(
      put, values, tree, is_leaf=is_masked
    )

  def merge(self, like: Tree, parts: Sequence[Tree]) -> Tree:
    """Puts all fragments together into one tree.

    Args:
      like: A tree with the shapes of the result, with `optax.MaskedNode` for
        leaves that no fragment has.
      parts: All P fragments in order, as `extract` returns them.
    """
    if slices := self._slices:

      def join(path, leaf, *leaf_slices: Array) -> Array:
        # `shape` is [..., parts, P, rows of a part, ...] (`Fragments.slices`).
        # Axis `axis` is that of the parts. A single slice has no axis P.
        shape, axis = slices.slices(path_name(path), leaf.shape)
        slice_shape = (*shape[: axis + 1], *shape[axis + 2 :])
        rows = jnp.stack(
          [each.reshape(slice_shape) for each in leaf_slices], axis + 1
        )
        return _whole(rows, axis, leaf.shape)

      return jax.tree_util.tree_map_with_path(join, like, *parts)
    whole = jax.tree.map(jnp.zeros_like, like)
    for number, part in enumerate(parts):
      whole = self.insert(whole, self.groups[number], self.index(number), part)
    return whole

  def check(self, params: Tree) -> None:
    """Raises ValueError if a tree cannot be trained, or cannot be divided.

    For example, a leaf is no array of real floats, or a fragment of whole
    leaves has no leaf.

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
    """Returns the group (`groups`) of each leaf by path.

    The result is {} if every fragment is a slice of every leaf, because no leaf
    belongs to one group then.

    Args:
      shapes: Leaf shapes by path. If there are none, the result is {}.

    Raises:
      ValueError: If `fragments` is a function that gives a leaf another value
        than a number from 0 to P - 1, or if a fragment of whole leaves has no
        leaf.
    """
    # `optax.tree.map_params` calls init with a tree that has no leaves.
    if self._slices or not shapes:
      return {}
    if self._by_rows:
      return {path: int(is_stacked(path)) for path in shapes}
    if callable(self.fragments):
      return by_path(shapes, self.count, self.fragments)
    return balanced(shapes, self.count)


def _register_with_flax() -> None:
  """Tells `flax.serialization`, if imported, to store nothing for a view.

  A program that stores states with flax has to import flax before it makes the
  transform.
  """
  # Most programs do without flax, so this function does not import it.
  serialization = sys.modules.get("flax.serialization")
  if serialization is None:
    return
  serialization.register_serialization_state(
    FragmentView,
    ty_to_state_dict=lambda view: {},
    ty_from_state_dict=lambda view, saved: view,
    override=True,
  )


def _check_layers(shapes: Shapes, fragments: Fragments) -> None:
  """Raises ValueError if a tree cannot be divided into layers and a rest.

  Leaves below "blocks" must begin with the number of layers. There must be at
  least one value below "blocks", and one elsewhere.
  """
  count = fragments.num_fragments
  depth = fragments.num_layers
  problems = [
    f"leaf {path!r} of shape {shape} is not [{depth}, ...]"
    for path, shape in shapes.items()
    if is_stacked(path) and shape[:1] != (depth,)
  ]
  # Fragment 0 is everything outside of "blocks". All other fragments have equal
  # shapes, so fragment 1 stands for them.
  for number, place in ((0, "outside of"), (1, "below")):
    fragment_shapes = fragments.shapes(number, shapes).values()
    has_values = any(map(math.prod, fragment_shapes))
    if not has_values:
      problems.append(
        f"no leaf {place} {BLOCKS!r} has a value for fragment {number}"
      )
  problem = next(iter(problems), "")
  require(
    not problem,
    f"num_fragments={count} divides {depth} layers below {BLOCKS!r}, but "
    f"{problem}: set num_fragments=1, or take dilocox_jax.step_transform, "
    "which divides any tree",
  )


def _in_slices(path, leaf: Array, fragments: Fragments) -> tuple[Array, int]:
  """Pads a leaf with zeros, and reshapes it so that slices have an axis.

  Returns:
    The leaf reshaped to [..., parts, P, rows of a part, ...], and the index of
    the axis `parts`.
  """
  shape, axis = fragments.slices(path_name(path), leaf.shape)
  leaf = leaf.reshape(leaf.shape or (1,))
  num_rows = math.prod(shape[axis : axis + 3])
  pad = [(0, 0)] * leaf.ndim
  pad[axis] = (0, num_rows - leaf.shape[axis])
  return jnp.pad(leaf, pad).reshape(shape), axis


def _whole(rows: Array, axis: int, shape: Shape) -> Array:
  """Puts the slices of a leaf together, without padding; undoes `_in_slices`.

  `rows` is [..., parts, P, rows of a part, ...]; `axis` is the axis of parts.
  """
  rows = _joined(rows, axis, 3)
  num_rows = shape[axis] if shape else 1
  return jax.lax.slice_in_dim(rows, 0, num_rows, axis=axis).reshape(shape)


def _joined(array: Array, axis: int, num_axes: int) -> Array:
  """Reshapes `num_axes` axes of an array, from `axis` on, into one."""
  end = axis + num_axes
  size = math.prod(array.shape[axis:end])
  return array.reshape(*array.shape[:axis], size, *array.shape[end:])
