"""Concatenates leaves that are coded in the same way, and splits them again.

A program that coded each leaf by itself would be large, because a model without
a scan over its layers has hundreds of leaves.
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

# Largest number of values of a leaf that is concatenated with others, which
# copies the leaf. Copying 16 MB takes next to no time. Larger leaves are few,
# so the program stays small although each of them is coded by itself.
_MOST_CONCATENATED = 2**22


@dataclasses.dataclass(frozen=True)
class RowLayout:
  """Divides the values of leaves into rows.

  A layer of n values has ceil(n / width) rows, and zeros fill the last row. If
  the replica has one device, small leaves with rows of the same width are a
  group, whose rows are concatenated into one array [1, rows, width]. A leaf
  that is alone in its group keeps its layers, [num_layers, rows, width].

  With slices (each replica averages one of them), the array is [num_slices,
  rows, width], and rows of zeros fill the last slices of a leaf. For example, 5
  rows in 2 slices are rows 0, 1 and 2 in the first slice, and rows 3, 4 and a
  row of zeros in the second one.

  Attributes:
    shapes: Shape of each leaf, (num_layers, *shape).
    widths: Number of values in a row, by leaf.
    num_slices: Number of slices; 0: the rows are not divided into slices.
  """

  shapes: tuple[Shape, ...]
  widths: tuple[int, ...]
  num_slices: int = 0

  @property
  def groups(self) -> list[list[int]]:
    """Indices of the leaves of each group, which are coded together."""
    return group_by_shape(self.shapes, self.widths)

  def rows(self, leaves: Arrays) -> list[Array]:
    """Returns one float32 array of rows for each group (see the class).

    Args:
      leaves: All leaves, [num_layers, *shape] each.
    """
    rows = []
    for group in self.groups:
      leaf_rows = [self._to_rows(i, leaves[i], group) for i in group]
      rows.append(jnp.concatenate(leaf_rows, axis=1))
    return rows

  def leaves(self, rows: Arrays) -> list[Array]:
    """Turns the rows of all groups back into leaves, in the dtype of the rows.

    Args:
      rows: Rows of every group of leaves, as the method `rows` returns them.
    """
    leaves = {}
    for group, group_rows in zip(self.groups, rows, strict=True):
      lengths = [self._num_rows(i, group)[1] for i in group]
      parts = split(group_rows, lengths, axis=1)
      for i, leaf_rows in zip(group, parts, strict=True):
        leaves[i] = self._to_leaf(i, leaf_rows)
    return [leaves[i] for i in range(len(self.shapes))]

  def _num_rows(self, index: int, group: list[int]) -> tuple[int, int]:
    """Returns the lengths of the first two axes of the result of `_to_rows`.

    `group` has the indices of all leaves in the group of leaf `index`.
    """
    num_layers, *shape = self.shapes[index]
    rows_per_layer = -(-math.prod(shape) // self.widths[index])
    if self.num_slices:
      num_rows = num_layers * rows_per_layer
      return self.num_slices, -(-num_rows // self.num_slices)
    if len(group) == 1:
      return num_layers, rows_per_layer
    return 1, num_layers * rows_per_layer

  def _to_rows(self, index: int, leaf: Array, group: list[int]) -> Array:
    """Returns a leaf as rows, with zeros where a row or a slice is not full.

    `group` has the indices of all leaves in the group of leaf `index`.
    """
    width = self.widths[index]
    flat = leaf.reshape(len(leaf), -1).astype(jnp.float32)
    flat = pad(flat, -flat.shape[1] % width)
    length, num_rows = self._num_rows(index, group)
    size = length * num_rows * width
    if flat.size != size:
      flat = pad(flat.reshape(1, -1), size - flat.size)
    return flat.reshape(length, num_rows, width)

  def _to_leaf(self, index: int, rows: Array) -> Array:
    """Returns a leaf from its rows; reverses `_to_rows`."""
    num_layers, *shape = self.shapes[index]
    width = self.widths[index]
    size = math.prod(shape)
    padded_size = -(-size // width) * width
    if rows.size != num_layers * padded_size:
      rows = rows.reshape(-1)[: num_layers * padded_size]
    layers = rows.reshape(num_layers, padded_size)[:, :size]
    return layers.reshape(num_layers, *shape)


def group_by_shape(
  shapes: Sequence[Shape], kinds: Sequence[Hashable]
) -> list[list[int]]:
  """Groups leaves that can be concatenated into one array.

  Small leaves of the same kind are one group, and each large leaf is a group of
  its own. If the replica is divided among devices, every leaf is its own group.

  Args:
    shapes: Shape of each leaf, (num_layers, *shape).
    kinds: A value for each leaf that is equal for leaves of the same kind, e.g.
      the width of their rows.

  Returns:
    Indices of the leaves of each group.
  """
  groups = groups_on_one_device(shapes, kinds)
  if current_division().num_devices > 1:
    return [[index] for group in groups for index in group]
  return groups


def groups_on_one_device(
  shapes: Sequence[Shape], kinds: Sequence[Hashable]
) -> list[list[int]]:
  """Groups leaves as `group_by_shape` does for a replica on one device."""
  groups: dict[Hashable, list[int]] = {}
  for index, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
    if math.prod(shape) > _MOST_CONCATENATED:
      group_key = ("alone", index)
    else:
      group_key = ("together", kind)
    groups.setdefault(group_key, []).append(index)
  return list(groups.values())


def concat_layers(
  leaves: Arrays, groups: Sequence[Sequence[int]]
) -> list[Array]:
  """Concatenates the leaves of each group along the layer axis.

  Args:
    leaves: Leaves [num_layers, *shape], with one `shape` in each group.
    groups: Indices of the leaves of each group (`group_by_shape`).

  Returns:
    An array [layers of all leaves, *shape] for each group.
  """
  return [jnp.concatenate([leaves[i] for i in group]) for group in groups]


def split_layers(
  arrays: Arrays, groups: Sequence[Sequence[int]], shapes: Sequence[Shape]
) -> dict[int, Array]:
  """Splits arrays of layers into leaves by index. It reverses `concat_layers`.

  Args:
    arrays: For each group, an array [layers of all leaves, *shape].
    groups: Indices of the leaves of each group.
    shapes: Shape of each leaf, (num_layers, *shape).
  """
  leaves = {}
  for group, array in zip(groups, arrays, strict=True):
    lengths = [shapes[i][0] for i in group]
    leaves |= dict(zip(group, split(array, lengths, axis=0), strict=True))
  return leaves


def layer_numbers(group: Sequence[int], shapes: Sequence[Shape]) -> Array:
  """Returns a number for every layer of a group, to seed its random values.

  The number depends only on the leaf and the layer. So random numbers do not
  depend on how leaves are grouped.

  Args:
    group: Indices of the leaves.
    shapes: Shape of each leaf, (num_layers, *shape).

  Returns:
    uint32 [layers of all leaves in the group].
  """
  # The numbers differ, because no model has 65,536 layers.
  numbers = [i * 2**16 + np.arange(shapes[i][0]) for i in group]
  return jnp.asarray(np.concatenate(numbers), jnp.uint32)


def split(array: Array, lengths: Sequence[int], axis: int) -> list[Array]:
  """Splits an array along an axis into parts of the given lengths."""
  if len(lengths) == 1:
    return [array]
  [array] = materialize([array])
  ends = np.cumsum(lengths)[:-1].tolist()
  return materialize(jnp.split(array, ends, axis=axis))


def materialize(arrays: list[Array]) -> list[Array]:
  """Makes XLA compute arrays once, and not again for each of their readers.

  Example: 100 slices of an array would each compute the whole array again,
  because XLA fuses operations.

  Args:
    arrays: Floating-point arrays. The first one must not be empty.

  Returns:
    The arrays. Finite values are unchanged.
  """

  def loop(arrays: list[Array]) -> list[Array]:
    first = arrays[0].reshape(-1)[0]
    largest = jnp.finfo(first.dtype).max
    return jax.lax.while_loop(
      lambda carry: carry[1],
      lambda carry: ([jnp.minimum(x, largest) for x in carry[0]], first > 0),
      (arrays, first != first),
    )[0]

  # On CPUs, XLA removes a barrier before it decides what to fuse, but it does
  # not fuse through a loop. The loop makes one step if the first value is NaN,
  # and otherwise none. The step changes no finite value.
  barrier = jax.lax.optimization_barrier
  computed: Any = jax.lax.platform_dependent(arrays, cpu=loop, default=barrier)
  return computed


def sums(arrays: list[Array], axis: int) -> list[Array]:
  """Sums several arrays of one shape along an axis, in one pass.

  An operand on which several of the arrays depend is then computed only once.
  """
  # On CPUs, XLA passes the sum of a single array to a library, and computes
  # shared operands again for each.
  add = functools.partial(jax.tree.map, jnp.add)
  zeros = [np.zeros((), array.dtype) for array in arrays]
  return list(jax.lax.reduce(arrays, zeros, add, (axis,)))


def pad(values: Array, num_zeros: int) -> Array:
  """Adds zeros at the end of the last axis."""
  if num_zeros == 0:
    return values
  edges = [(0, 0)] * (values.ndim - 1) + [(0, num_zeros)]
  return jnp.pad(values, edges)


def block_width(size: int, block_size: int) -> int:
  """Returns the width of equal blocks into which values are divided.

  There are as few blocks as `block_size` allows, each as short as possible. For
  example, 300 values in blocks of at most 128 make 3 blocks of 100.

  Args:
    size: Number of values, at least 1.
    block_size: Largest number of values in a block.
  """
  num_blocks = -(-size // block_size)
  return -(-size // num_blocks)


def are_finite(values: Tree) -> Boolean:
  """Returns whether all values of a tree are finite (boolean scalar)."""
  # With a flag for each leaf, XLA would combine all flags again for each leaf:
  # 250,000 operations for 500 leaves.
  leaves = jax.tree.leaves(values)
  shapes = [leaf.shape for leaf in leaves]
  dtypes = [leaf.dtype for leaf in leaves]
  arrays = []
  for group in group_by_shape(shapes, kinds=dtypes):
    if len(group) == 1:
      # Flattening would gather a leaf that devices divide.
      arrays.append(leaves[group[0]])
    else:
      flat = [leaves[i].reshape(-1) for i in group]
      arrays.append(jnp.concatenate(flat))
  return all_finite(arrays)
