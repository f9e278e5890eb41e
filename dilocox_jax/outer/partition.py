"""Fragments of arrays, chosen by a number at run time.

The plan says which layers a fragment has; here they are gathered from and
scattered into stacked leaves, so that one piece of program serves all layer
fragments. Whatever belongs to a fragment (outer momentum and count,
pseudo-gradients in flight) is kept in a `Store`, one entry a fragment, and an
optimizer never learns that it sees a part of the tree.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.distributed import host_memory
from dilocox_jax.plan.schedule.fragments import BLOCKS, Fragments
from dilocox_jax.pytypes import Array, Index, Tree

# The integer 0 is fragment 0; a traced scalar is one of the layer fragments.
FragmentIndex = int | Index


class Store(NamedTuple):
  """One value for every fragment.

  Attributes:
    first: Fragment 0's value.
    layers: The others', leaves stacked to [P - 1, ...]; None if P = 1.
  """

  first: Any
  layers: Any

  def get(self, fragment: FragmentIndex, *slot: Index) -> Tree:
    """The value of one fragment, or of one of its slots, on the device."""
    values, index = self._place(fragment, slot)
    if not index:
      return host_memory.on_device(values)
    return jax.tree.map(lambda leaf: host_memory.row(leaf, *index), values)

  def set(self, fragment: FragmentIndex, value: Tree, *slot: Index) -> "Store":
    """The store with one fragment's value, or one slot of it, replaced."""
    values, index = self._place(fragment, slot)

    def put(leaf, new):
      return host_memory.with_row(leaf, new, *index)

    if index:
      new = jax.tree.map(put, values, value)
    else:
      new = host_memory.move_like(value, values)
    if isinstance(fragment, int):
      return self._replace(first=new)
    return self._replace(layers=new)

  def _place(self, fragment: FragmentIndex, slot: tuple[Index, ...]):
    if isinstance(fragment, int):
      return self.first, slot
    return self.layers, (fragment - 1, *slot)


class Partition:
  """Takes fragments out of trees and puts them back."""

  def __init__(self, fragments: Fragments):
    """Builds the gather table of a division into fragments."""
    self.fragments = fragments
    self._table = fragments.layer_table
    # In host memory, where nothing can be dropped, rows that a short fragment
    # does not have stand for its first layer again.
    self._is_there = self._table < fragments.num_layers
    self._rows = np.where(self._is_there, self._table, self._table[:, :1])
    places = np.arange(self._table.shape[1], dtype=np.int32)
    self._places = np.where(self._is_there, places, np.int32(0))

  def take(self, tree: Tree, fragment: FragmentIndex) -> Tree:
    """One fragment of a parameter tree, on the device.

    Short layer fragments end in zeros.
    """
    if self.fragments.num_fragments == 1:
      return host_memory.on_device(tree)
    if isinstance(fragment, int):
      return host_memory.on_device(
        {k: v for k, v in tree.items() if k != BLOCKS}
      )
    return self._gather(tree, fragment)

  def put(self, tree: Tree, fragment: FragmentIndex, part: Tree) -> Tree:
    """The tree, where it lies, with one fragment replaced."""
    if self.fragments.num_fragments == 1:
      return host_memory.move_like(part, tree)
    if isinstance(fragment, int):
      return {**tree, **host_memory.move_like(part, {k: tree[k] for k in part})}
    layers, numbers, places = self._numbers(fragment)

    def scatter(leaf, rows):
      if host_memory.is_on_host(leaf):
        return host_memory.with_rows(leaf, rows, numbers, places)
      return leaf.at[layers].set(rows, mode="drop", unique_indices=False)

    blocks = jax.tree.map(scatter, tree[BLOCKS], part[BLOCKS])
    return {**tree, BLOCKS: blocks}

  def store(self, function, params: Tree) -> Store:
    """A store of function(fragment of params) for every fragment."""
    first = function(self.take(params, 0))
    if self.fragments.num_fragments == 1:
      return Store(first, None)
    numbers = jnp.arange(1, self.fragments.num_fragments, dtype=jnp.int32)
    parts = jax.vmap(lambda p: self._gather(params, p))(numbers)
    return Store(first, jax.vmap(function)(parts))

  def for_all(self, value: Any) -> Store:
    """A store that holds one value for every fragment."""
    return Store(value, None if self.fragments.num_fragments == 1 else value)

  def _gather(self, tree: Tree, fragment: FragmentIndex) -> Tree:
    layers, numbers, _ = self._numbers(fragment)
    is_there = jnp.asarray(self._is_there)[fragment - 1]

    def gather(leaf):
      if not host_memory.is_on_host(leaf):
        return leaf.at[layers].get(mode="fill", fill_value=0)
      rows = host_memory.rows(leaf, numbers)
      kept = is_there.reshape(-1, *[1] * (leaf.ndim - 1))
      return jnp.where(kept, rows, jnp.zeros_like(rows))

    return {BLOCKS: jax.tree.map(gather, tree[BLOCKS])}

  def _numbers(self, fragment: FragmentIndex) -> tuple[Array, Array, Array]:
    """A fragment's layers; the same without gaps; and whose rows they are."""
    tables = self._table, self._rows, self._places
    layers, rows, places = (jnp.asarray(x)[fragment - 1] for x in tables)
    return layers, rows, places
