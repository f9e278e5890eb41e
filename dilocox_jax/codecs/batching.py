"""Joins the values of leaves that are coded alike, and takes them apart again.

A program that works on each leaf by itself grows with the leaves: an unscanned
model has hundreds. So values that are treated alike are joined in one array.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.distributed.local_map import current_division
from dilocox_jax.trees import Array, Boolean, Tree, all_finite

Shape = tuple[int, ...]
Arrays = Sequence[Array]

# Values of a leaf that is joined with others, at most. To join a leaf is to
# copy it: 16 MB are copied in no time, and leaves of gigabytes are few.
_MOST_JOINED = 2**22


@dataclasses.dataclass(frozen=True)
class RowLayout:
  """Where the values of leaves lie in rows.

  A layer of n values has ceil(n / width) rows, and zeros fill the last one. The
  rows of all leaves of one width stand in one array [1, rows, width], so that a
  program does not grow with the leaves. A leaf that is alone keeps its layers,
  [num_layers, rows, width], because devices divide them.

  With slices it is [num_slices, rows, width], and rows of zeros fill the last
  slice of every leaf: 5 rows in 2 slices are rows 0-2, and 3, 4 and zeros.

  Attributes:
    shapes: Shapes of the leaves, with the layer axis.
    widths: Values of a row, by leaf.
    num_slices: Number of slices, or 0.
  """

  shapes: tuple[Shape, ...]
  widths: tuple[int, ...]
  num_slices: int = 0

  @property
  def groups(self) -> list[list[int]]:
    """The numbers of the leaves that are coded together."""
    return alike(self.shapes, self.widths)

  def rows(self, leaves: Arrays) -> list[Array]:
    """Returns the rows of every group of leaves, as float32."""
    return [
      jnp.concatenate([self._laid(n, leaves[n], group) for n in group], axis=1)
      for group in self.groups
    ]

  def leaves(self, rows: Arrays) -> list[Array]:
    """Reverses `rows`."""
    leaves = {}
    for group, array in zip(self.groups, rows, strict=True):
      lengths = [self._num_rows(number, group)[1] for number in group]
      for number, own in zip(group, apart(array, lengths, 1), strict=True):
        leaves[number] = self._picked(number, own)
    return [leaves[number] for number in range(len(self.shapes))]

  def _num_rows(self, number: int, group: list[int]) -> tuple[int, int]:
    """Returns the first two axes of a leaf's rows."""
    layers, *shape = self.shapes[number]
    rows = -(-math.prod(shape) // self.widths[number])
    if self.num_slices:
      return self.num_slices, -(-layers * rows // self.num_slices)
    return (layers, rows) if len(group) == 1 else (1, layers * rows)

  def _laid(self, number: int, leaf: Array, group: list[int]) -> Array:
    """Returns one leaf as rows."""
    width = self.widths[number]
    flat = leaf.reshape(len(leaf), -1).astype(jnp.float32)
    flat = padded(flat, -flat.shape[1] % width)
    count, rows = self._num_rows(number, group)
    if flat.size != count * rows * width:
      flat = padded(flat.reshape(1, -1), count * rows * width - flat.size)
    return flat.reshape(count, rows, width)

  def _picked(self, number: int, rows: Array) -> Array:
    """Reverses `_laid`: drops the zeros and restores the leaf's shape."""
    layers, *shape = self.shapes[number]
    size = math.prod(shape)
    of_layer = -(-size // self.widths[number]) * self.widths[number]
    if rows.size != layers * of_layer:
      rows = rows.reshape(-1)[: layers * of_layer]
    return rows.reshape(layers, of_layer)[:, :size].reshape(layers, *shape)


def alike(
  shapes: Sequence[Shape], kinds: Sequence[Hashable]
) -> list[list[int]]:
  """Groups the numbers of leaves that may share one body of a program.

  Large leaves stay alone. So do all leaves of a replica that is divided among
  devices, each of which works on its own part of every leaf.

  Args:
    shapes: Shapes of the leaves, with the layer axis.
    kinds: Kind of each leaf; those of one kind share.
  """
  is_divided = current_division().num_devices > 1
  groups: dict[Hashable, list[int]] = {}
  for number, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
    is_alone = is_divided or math.prod(shape) > _MOST_JOINED
    own = is_alone, number if is_alone else kind
    groups.setdefault(own, []).append(number)
  return list(groups.values())


def stacked(leaves: Arrays, groups: Sequence[Sequence[int]]) -> list[Array]:
  """Joins the layers of each group of leaves, whose layers have one shape.

  Args:
    leaves: Leaves [num_layers, *shape].
    groups: Numbers of the leaves that are joined (`alike`).
  """
  return [jnp.concatenate([leaves[n] for n in group]) for group in groups]


def unstacked(
  arrays: Arrays, groups: Sequence[Sequence[int]], shapes: Sequence[Shape]
) -> dict[int, Array]:
  """Reverses `stacked`: returns the layers of every leaf by its number.

  Args:
    arrays: An array for each group.
    groups: Numbers of the leaves in each.
    shapes: Shapes of all leaves, with the layer axis.
  """
  leaves = {}
  for group, array in zip(groups, arrays, strict=True):
    lengths = [shapes[number][0] for number in group]
    leaves |= dict(zip(group, apart(array, lengths, axis=0), strict=True))
  return leaves


def layer_numbers(group: Sequence[int], shapes: Sequence[Shape]) -> Array:
  """Numbers the layers of some leaves (uint32), whoever stands beside them.

  What is random in a layer follows from its number. So a replica that is
  divided draws what an undivided one draws, though its leaves stay alone.

  Args:
    group: Numbers of the leaves.
    shapes: Shapes of all leaves, with the layer axis.
  """
  own = [number * 2**16 + np.arange(shapes[number][0]) for number in group]
  return jnp.asarray(np.concatenate(own), jnp.uint32)


def apart(array: Array, lengths: Sequence[int], axis: int) -> list[Array]:
  """Cuts an array along an axis.

  Args:
    array: The array.
    lengths: Lengths of the parts, in order.
    axis: The axis.
  """
  if len(lengths) == 1:
    return [array]
  [array] = in_memory([array])
  ends = np.cumsum(lengths)[:-1].tolist()
  return in_memory(jnp.split(array, ends, axis=axis))


def in_memory(arrays: list[Array]) -> list[Array]:
  """Returns arrays that are computed once, however often they are read.

  XLA would otherwise repeat in each of 100 slices all that leads to them, and
  the slice in all that reads it. On CPUs each slice is compiled by itself (10
  ms), while equal operations of equal shapes are compiled once. There XLA
  removes a barrier before it decides that, but it does not look into a loop.
  This loop never runs, unless the first value is not a number, and then it
  changes no number that is finite.
  """

  def loop(arrays: list[Array]) -> list[Array]:
    first = arrays[0].reshape(-1)[0]
    largest = jnp.finfo(first.dtype).max
    return jax.lax.while_loop(
      lambda carry: carry[1],
      lambda carry: ([jnp.minimum(x, largest) for x in carry[0]], first > 0),
      (arrays, first != first),
    )[0]

  barrier = jax.lax.optimization_barrier
  kept: Any = jax.lax.platform_dependent(arrays, cpu=loop, default=barrier)
  return kept


def sums(arrays: list[Array], axis: int) -> list[Array]:
  """Sums arrays of one shape along an axis, in one pass over what makes them.

  XLA hands the sum of one array along rows to a library on CPUs, so that what
  is summed is computed for each sum. A sum of several it compiles itself.

  Args:
    arrays: The arrays.
    axis: The axis, which the sums do not have.
  """
  add = functools.partial(jax.tree.map, jnp.add)
  zeros = [np.zeros((), array.dtype) for array in arrays]
  return list(jax.lax.reduce(arrays, zeros, add, (axis,)))


def padded(values: Array, missing: int) -> Array:
  """Adds zeros at the end of the last axis.

  Args:
    values: Values [..., values].
    missing: Number of zeros of each row.
  """
  edges = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
  return jnp.pad(values, edges) if missing else values


def block_width(size: int, block_size: int) -> int:
  """Returns the width of equal blocks of at most `block_size` of some values.

  Blocks are as short as their number allows, which pads by less than one value
  for each block. A layer of 300 values in blocks of at most 128 needs 3 blocks:
  blocks of 100 need no padding, while blocks of 128 would have to be padded by
  84 values.

  Args:
    size: Number of values.
    block_size: Largest number of values in a block.
  """
  return -(-size // -(-size // block_size))


def are_finite(values: Tree) -> Boolean:
  """Returns whether all values are finite, read from few joined arrays.

  With a flag for each leaf, XLA lets each leaf of the result read all flags by
  itself: a program of 500 leaves has 250,000 operations that way. Leaves that
  stay alone are read as they are: to flatten what devices divide would collect
  it on every device.
  """
  leaves = jax.tree.leaves(values)
  groups = alike([x.shape for x in leaves], [x.dtype for x in leaves])
  return all_finite(
    [
      jnp.concatenate([leaves[number].reshape(-1) for number in group])
      if len(group) > 1
      else leaves[group[0]]
      for group in groups
    ]
  )
