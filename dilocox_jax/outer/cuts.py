"""Cuts fragments out of a parameter tree, and puts them back.

A fragment is the whole tree, a slice of every leaf, some layers of the stacked
leaves or everything else (`plan.schedule.fragments`), or a list of leaves
(`plan.schedule.leaf_fragments`). It is a tree like the caller's, in which
`optax.MaskedNode()` stands for the leaves of other fragments, as in
`optax.masked`. So optax's functions for states, such as
`optax.tree.map_params`, work.

Fragments with the same shapes make a *group*: what tells them apart is data,
their *place*, so one program serves them all. Slices are one group, and so are
the layer fragments.

Short fragments: 5 layers, P = 3, strided, have the places

    fragment 1: layers 0, 2, 4
    fragment 2: layers 1, 3, and 5 = num_layers, which stands for no layer

`take` of fragment 2 fills the missing row with zeros, and `put` drops it: an
index out of bounds reads the fill value and writes nothing. Zeros change no
mean, no norm and no other row, so the padding is harmless, but it is sent.
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
from dilocox_jax.outer.slices import join_slices, put_slice, take_slice
from dilocox_jax.plan.schedule import leaf_fragments
from dilocox_jax.plan.schedule.fragments import (
  BLOCKS,
  Fragments,
  Shapes,
  is_stacked,
)
from dilocox_jax.plan.schedule.leaf_fragments import LeafFragment, LeafPiece
from dilocox_jax.pytypes import Array, Tree
from dilocox_jax.trees import (
  check_trainable,
  is_masked,
  path_name,
  shapes_by_path,
)

# How a tree is divided: by a function of the leaves' paths, as listed, or by
# the layers of leaves that are stacked below "blocks".
Fragmentation = Callable[[str], int] | Sequence[LeafFragment] | Fragments


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Cuts:
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

  def place(self, fragment: int) -> np.ndarray | None:
    """Returns what tells a fragment from others of its group.

    Returns:
      The number of a slice (int32 scalar), layers [K] int32, or None.
    """
    if self._slices:
      return np.asarray(fragment, np.int32)
    division = self._by_rows
    if division and fragment:
      return division.layer_table[fragment - 1]
    return None

  def take(self, tree: Tree, group: int, place: Any) -> Tree:
    """Returns one fragment of a tree.

    Args:
      tree: Parameters of one replica.
      group: Group of the fragment.
      place: Its place (`place`), which may be traced.
    """
    if slices := self._slices:
      return take_slice(tree, place, slices)
    own = self._own(tree, group, place)

    def take(path, leaf: Array) -> Any:
      piece = own.get(path_name(path))
      if piece is None or piece.layers is None:
        return leaf if piece else optax.MaskedNode()
      rows = jnp.asarray(piece.layers, jnp.int32)
      return jnp.take(leaf, rows, axis=piece.axis, mode="fill", fill_value=0)

    return jax.tree_util.tree_map_with_path(take, tree)

  def put(self, tree: Tree, group: int, place: Any, values: Tree) -> Tree:
    """Returns the tree with one fragment replaced by values like `take`'s.

    Args:
      tree: Parameters of one replica.
      group: Group of the fragment.
      place: Its place, as in `take`.
      values: The fragment, a tree that `take` could have returned.
    """
    if slices := self._slices:
      return put_slice(tree, place, slices, values)
    own = self._own(tree, group, place)

    def put(path, new, old: Array) -> Array:
      piece = own.get(path_name(path))
      if piece is None or piece.layers is None:
        return new if piece else old
      rows = jnp.asarray(piece.layers, jnp.int32)
      index = (slice(None),) * piece.axis + (rows,)
      return old.at[index].set(new, mode="drop")

    return jax.tree_util.tree_map_with_path(
      put, values, tree, is_leaf=is_masked
    )

  def join(self, like: Tree, parts: Sequence[Tree]) -> Tree:
    """Returns the tree that consists of all fragments.

    Args:
      like: Arrays or shapes of the tree, masked where no fragment has a value.
      parts: The fragments, in order.
    """
    if slices := self._slices:
      stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
      return join_slices(like, stacked, slices)
    whole = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    for number, part in enumerate(parts):
      whole = self.put(whole, self.groups[number], self.place(number), part)
    return whole

  def _own(self, tree: Tree, group: int, place: Any) -> dict[str, LeafPiece]:
    """Returns the pieces of a fragment by the path of their leaf."""
    shapes = shapes_by_path(tree)
    if self._by_rows:
      return {
        path: LeafPiece(path, place)
        for path in shapes
        if is_stacked(path) == bool(group)
      }
    # `optax.tree.map_params` calls init with a tree that has no leaves.
    divided = self.divided(shapes) if shapes else [()] * self.count
    return {piece.path: piece for piece in divided[group]}

  def check(self, params: Tree) -> None:
    """Raises ValueError if a tree cannot be trained, or not be divided so.

    Args:
      params: Parameters of one replica, or their shapes and types.
    """
    check_trainable(params)
    shapes = shapes_by_path(params)
    require(
      any(map(math.prod, shapes.values())),
      "the parameters have no values: there is nothing to train",
    )
    if self._by_rows and not self._slices:
      _check_layers(params, shapes, self._by_rows)

  def check_division(self, params: Tree) -> None:
    """Raises ValueError unless the fragments cover a tree of any kind."""
    division = self._by_rows
    count = division.num_fragments if division else self.count
    if not self._slices or count != self.count:
      self.divided(shapes_by_path(params))

  def divided(self, shapes: dict[str, Any]) -> tuple[LeafFragment, ...]:
    """Returns the pieces of every fragment.

    Args:
      shapes: Leaf shapes by path.

    Raises:
      ValueError: If the fragments do not cover the leaves.
    """
    if self.fragments is None:
      return leaf_fragments.balanced(shapes, self.count)
    if callable(self.fragments):
      return leaf_fragments.by_path(shapes, self.count, self.fragments)
    divided = self.fragments
    if isinstance(divided, Fragments):
      divided = leaf_fragments.by_layer(shapes, divided)
    if len(divided) != self.count:
      raise ValueError(
        f"{len(divided)} fragments are listed, but num_fragments={self.count}"
      )
    leaf_fragments.covered(divided, shapes)
    return tuple(divided)


# It has no values, so `flax.serialization` stores nothing of it.
flax.serialization.register_serialization_state(
  Cuts, lambda cuts: {}, lambda cuts, saved: cuts
)


def _check_layers(params: Tree, shapes: Shapes, fragments: Fragments) -> None:
  """Raises ValueError unless layers lie below "blocks", and a rest beside."""
  count, depth = fragments.num_fragments, fragments.num_layers

  def refuse_unless(fits: bool, problem: str) -> None:
    require(
      fits,
      f"num_fragments={count} divides {depth} layers below {BLOCKS!r}, but "
      f"{problem}: set num_fragments=1, or take dilocox_jax.step_transform, "
      "which divides any tree",
    )

  refuse_unless(isinstance(params, dict) and BLOCKS in params, "there are none")
  for path, shape in shapes.items():
    refuse_unless(
      path.split("/")[0] != BLOCKS
      or (is_stacked(path) and shape[:1] == (depth,)),
      f"leaf {path!r} of shape {shape} is not [{depth}, ...]",
    )
  for number, place in enumerate(("outside", "below")):
    values = fragments.shapes(number, shapes).values()
    refuse_unless(
      any(map(math.prod, values)),
      f"no leaf {place} has a value for fragment {number}",
    )
