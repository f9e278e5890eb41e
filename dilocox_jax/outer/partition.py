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

from dilocox_jax.plan.fragments import BLOCKS, Fragments
from dilocox_jax.pytypes import Index, Tree

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

  def get(self, fragment: FragmentIndex) -> Tree:
    """The value of one fragment."""
    if isinstance(fragment, int):
      return self.first
    return jax.tree.map(lambda leaf: leaf[fragment - 1], self.layers)

  def set(self, fragment: FragmentIndex, value: Tree) -> "Store":
    """The store with one fragment's value replaced."""
    if isinstance(fragment, int):
      return self._replace(first=value)

    def put(leaf, new):
      return leaf.at[fragment - 1].set(new)

    return self._replace(layers=jax.tree.map(put, self.layers, value))


class Partition:
  """Takes fragments out of trees and puts them back."""

  def __init__(self, fragments: Fragments):
    """Builds the gather table of a division into fragments."""
    self.fragments = fragments
    self._table = fragments.layer_table

  def take(self, tree: Tree, fragment: FragmentIndex) -> Tree:
    """One fragment of a parameter tree; short layer fragments end in zeros."""
    if self.fragments.num_fragments == 1:
      return tree
    if isinstance(fragment, int):
      return {k: v for k, v in tree.items() if k != BLOCKS}
    return self._gather(tree, fragment)

  def put(self, tree: Tree, fragment: FragmentIndex, part: Tree) -> Tree:
    """The tree with one fragment replaced."""
    if self.fragments.num_fragments == 1:
      return part
    if isinstance(fragment, int):
      return {**tree, **part}
    layers = jnp.asarray(self._table)[fragment - 1]

    def scatter(leaf, rows):
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
    layers = jnp.asarray(self._table)[fragment - 1]

    def gather(leaf):
      return leaf.at[layers].get(mode="fill", fill_value=0)

    return {BLOCKS: jax.tree.map(gather, tree[BLOCKS])}
