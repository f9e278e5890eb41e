"""Fragments of arrays, chosen by a number at run time.

The plan says which layers a fragment has (`Fragments.layer_table`). Here they
are gathered from stacked leaves and scattered back, so that one piece of
program serves all layer fragments. Whatever belongs to a fragment (outer
momentum and count, pseudo-gradients in flight) is kept in a `Store` with one
entry for each fragment. An optimizer never learns that it sees a part of the
tree.

Short fragments: 5 layers, P = 3, strided, give the table

    fragment 1: layers 0, 2, 4
    fragment 2: layers 1, 3, and 5 = num_layers, which stands for no layer

`take` of fragment 2 fills the missing row with zeros, and `put` drops it: an
index out of bounds reads the fill value and writes nothing. Zeros change no
mean, no norm and no other row, so the padding is harmless, but it is sent.

In host memory an index cannot be out of bounds (see `host_memory`), so the
missing row stands for the fragment's first layer instead: rows (1, 3, 1). When
reading, the third row is then set to zero. When writing, it gets the first
row's values, places (0, 1, 0), so layer 1 is written twice with one value.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.distributed import host_memory
from dilocox_jax.outer.slices import put_slice, take_slice
from dilocox_jax.plan.schedule.fragments import BLOCKS, Fragments, is_stacked
from dilocox_jax.plan.wire.leaf import Shapes
from dilocox_jax.pytypes import Array, Index, Tree
from dilocox_jax.trees import check_trainable, shapes_by_path

# A known number, or a traced scalar: a layer fragment, or any slice.
FragmentIndex = int | Index


def _index(fragment: FragmentIndex) -> FragmentIndex:
  """Returns 0 for fragment 0, and a scalar array for a layer fragment."""
  if isinstance(fragment, jax.core.Tracer):
    return fragment
  return jnp.int32(fragment) if int(fragment) else 0


class Store(NamedTuple):
  """One value for every fragment.

  Attributes:
    first: Value of fragment 0; None if all fragments are alike (slices).
    layers: Values of the layer fragments, leaves stacked to [P - 1, ...], or
      of all slices, leaves [P, ...]; None if P = 1.
  """

  first: Any
  layers: Any

  def get(self, fragment: FragmentIndex, *slot: Index) -> Tree:
    """Returns the value of a fragment, or of one slot of it, on the device."""
    values, index = self._place(fragment, slot)
    if not index:
      return host_memory.on_device(values)
    return jax.tree.map(lambda leaf: host_memory.row(leaf, *index), values)

  def set(self, fragment: FragmentIndex, value: Tree, *slot: Index) -> "Store":
    """Returns a store in which a fragment's value, or a slot, is replaced."""
    values, index = self._place(fragment, slot)

    def put(leaf, new):
      return host_memory.with_row(leaf, new, *index)

    if index:
      new = jax.tree.map(put, values, value)
    else:
      new = host_memory.move_like(value, values)
    if self.first is not None and isinstance(_index(fragment), int):
      return self._replace(first=new)
    return self._replace(layers=new)

  def _place(self, fragment: FragmentIndex, slot: tuple[Index, ...]):
    """The leaves that hold a value, and the index of the value in them."""
    if self.first is None:
      return self.layers, (jnp.int32(fragment), *slot)
    index = _index(fragment)
    if isinstance(index, int):
      return self.first, slot
    return self.layers, (index - 1, *slot)


class Partition:
  """Takes fragments out of trees and puts them back."""

  def __init__(self, fragments: Fragments):
    """Builds the gather tables of a division into fragments."""
    self.fragments = fragments
    self._table = fragments.layer_table
    # For arrays in host memory; the module's docstring has an example.
    is_there = self._table < fragments.num_layers
    self._rows = np.where(is_there, self._table, self._table[:, :1])
    places = np.arange(self._table.shape[1], dtype=np.int32)
    self._places = np.where(is_there, places, np.int32(0))

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
    if self.fragments.num_fragments > 1 and not self.fragments.is_sliced:
      _check_layers(params, shapes, self.fragments)

  def take(self, tree: Tree, fragment: FragmentIndex) -> Tree:
    """Returns one fragment of a parameter tree, on the device.

    Layer fragments are all as long as the longest; short ones end in zeros.
    """
    fragment = _index(fragment)
    if self.fragments.num_fragments == 1:
      return host_memory.on_device(tree)
    if self.fragments.is_sliced:
      return take_slice(tree, fragment, self.fragments)
    if isinstance(fragment, int):
      rest = {k: v for k, v in tree.items() if k != BLOCKS}
      return host_memory.on_device(rest)
    layers, rows, _ = self._numbers(fragment)

    def gather(leaf):
      if not host_memory.is_on_host(leaf):
        return leaf.at[layers].get(mode="fill", fill_value=0)
      values = host_memory.rows(leaf, rows)
      is_there = layers < self.fragments.num_layers
      mask = is_there.reshape(-1, *[1] * (leaf.ndim - 1))
      return jnp.where(mask, values, jnp.zeros_like(values))

    return {BLOCKS: jax.tree.map(gather, tree[BLOCKS])}

  def put(self, tree: Tree, fragment: FragmentIndex, values: Tree) -> Tree:
    """Returns the tree, in the memory it is in, with one fragment replaced."""
    fragment = _index(fragment)
    if self.fragments.num_fragments == 1:
      return host_memory.move_like(values, tree)
    if self.fragments.is_sliced:
      return put_slice(tree, fragment, self.fragments, values)
    if isinstance(fragment, int):
      moved = host_memory.move_like(values, {k: tree[k] for k in values})
      return {**tree, **moved}
    layers, rows, places = self._numbers(fragment)

    def scatter(leaf, new_rows):
      if host_memory.is_on_host(leaf):
        return host_memory.with_rows(leaf, new_rows, rows, places)
      return leaf.at[layers].set(new_rows, mode="drop", unique_indices=False)

    blocks = jax.tree.map(scatter, tree[BLOCKS], values[BLOCKS])
    return {**tree, BLOCKS: blocks}

  def store(self, function, params: Tree) -> Store:
    """Returns a store of function(fragment of params) for every fragment."""
    are_alike, count = self.fragments.are_alike, self.fragments.num_fragments
    first = None if are_alike else function(self.take(params, 0))
    if count == 1:
      return Store(first, None)
    numbers = jnp.arange(0 if are_alike else 1, count, dtype=jnp.int32)
    stacked = jax.vmap(lambda p: self.take(params, p))(numbers)
    return Store(first, jax.vmap(function)(stacked))

  def for_all(self, value: Any) -> Store:
    """Returns a store with one and the same value for every fragment."""
    first = None if self.fragments.are_alike else value
    return Store(first, None if self.fragments.num_fragments == 1 else value)

  def _numbers(self, fragment: Index) -> tuple[Array, Array, Array]:
    """Returns rows of three tables for the layers of a fragment, [K] each.

    For fragment 2 above: layers (1, 3, 5), rows (1, 3, 1), places (0, 1, 0).
    """
    tables = self._table, self._rows, self._places
    layers, rows, places = (jnp.asarray(x)[fragment - 1] for x in tables)
    return layers, rows, places


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
