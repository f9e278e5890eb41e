"""Concatenates leaves that are coded in the same way, and splits them again.

If a program coded each leaf by itself, it would grow with the number of leaves.
A model without a scan over its layers has hundreds of leaves. So the values of
leaves that are coded in the same way are concatenated into one array.
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

  A layer of n values has ceil(n / width) rows, and zeros fill the last row.
  Small leaves with rows of the same width are a group, whose rows are
  concatenated into one array [1, rows, width]. A leaf that is the only one of
  its group keeps its layers, [num_layers, rows, width], because the devices of
  a replica may divide them.

  With slices, the array is [num_slices, rows, width]. All slices of a leaf have
  equally many rows, so rows of zeros may be added at its end. For example, 5
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
    """For each group of leaves that are coded together, their indices."""
    return group_by_shape(self.shapes, self.widths)

  def rows(self, leaves: Arrays) -> list[Array]:
    """Returns the rows of every group of leaves, in the order of `groups`.

    Args:
      leaves: All leaves, [num_layers, *shape] each.

    Returns:
      A float32 array for each group. With slices (`num_slices` > 0):
      [num_slices, rows, width]. Without: [num_layers, rows, width] for a group
      of one leaf, and [1, rows, width] for several leaves.
    """
    rows = []
    for group in self.groups:
      leaf_rows = [self._to_rows(i, leaves[i], group) for i in group]
      rows.append(jnp.concatenate(leaf_rows, axis=1))
    return rows

  def leaves(self, rows: Arrays) -> list[Array]:
    """Turns the rows of all groups back into leaves. It reverses `rows`.

    Args:
      rows: Rows of every group of leaves, as `rows` returned them.

    Returns:
      All leaves, [num_layers, *shape] each, with the dtype of the rows.
    """
    leaves = {}
    for group, group_rows in zip(self.groups, rows, strict=True):
      lengths = [self._num_rows(i, group)[1] for i in group]
      parts = split(group_rows, lengths, axis=1)
      for i, leaf_rows in zip(group, parts, strict=True):
        leaves[i] = self._to_leaf(i, leaf_rows)
    return [leaves[i] for i in range(len(self.shapes))]

  def _num_rows(self, index: int, group: list[int]) -> tuple[int, int]:
    """Returns the first two lengths of the array with a leaf's rows.

    The array is [num_slices, rows, width] if there are slices. Otherwise it is
    [num_layers, rows, width] for a leaf that is alone in its group, and
    [1, rows, width] for a leaf of a larger group.

    Args:
      index: Index of the leaf.
      group: Indices of the leaves of its group, including this leaf.
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

    Args:
      index: Index of the leaf.
      leaf: The leaf, [num_layers, *shape].
      group: Indices of the leaves of its group, including this leaf.
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
    """Returns a leaf from its rows, without the zeros. It reverses `_to_rows`.

    Args:
      index: Index of the leaf.
      rows: Rows of the leaf, [layers or slices, rows, width].
    """
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

  Leaves of the same kind are one group. Exceptions: a large leaf has a group of
  its own. If the replica is divided among devices, every leaf has a group of
  its own, because each device works on its own part of every leaf. The leaves
  then have the same order and the same rows as on one device.

  Args:
    shapes: Shape of each leaf, (num_layers, *shape).
    kinds: For each leaf a value that is equal for leaves of the same kind, e.g.
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
  """Returns which leaves a replica on one device encodes together.

  Small leaves of the same kind are one group. A large leaf is a group of its
  own.

  Args:
    shapes: Shape of each leaf, (num_layers, *shape).
    kinds: For each leaf a value that is equal for leaves of the same kind, e.g.
      the width of their rows.

  Returns:
    Indices of the leaves of each group.
  """
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
  """Concatenates the layers of each group of leaves along the layer axis.

  Args:
    leaves: Leaves [num_layers, *shape]. The leaves of a group have the same
      `shape`.
    groups: Indices of the leaves of each group (`group_by_shape`).

  Returns:
    An array [layers of all leaves, *shape] for each group.
  """
  return [jnp.concatenate([leaves[i] for i in group]) for group in groups]


def split_layers(
  arrays: Arrays, groups: Sequence[Sequence[int]], shapes: Sequence[Shape]
) -> dict[int, Array]:
  """Splits arrays of layers into leaves. It reverses `concat_layers`.

  Args:
    arrays: For each group, an array [layers of all leaves, *shape].
    groups: Indices of the leaves of each group.
    shapes: Shape of each leaf, (num_layers, *shape).

  Returns:
    The leaves [num_layers, *shape] by index.
  """
  leaves = {}
  for group, array in zip(groups, arrays, strict=True):
    lengths = [shapes[i][0] for i in group]
    leaves |= dict(zip(group, split(array, lengths, axis=0), strict=True))
  return leaves


def layer_numbers(group: Sequence[int], shapes: Sequence[Shape]) -> Array:
  """Returns a number for every layer of a group, to seed its random values.

  The number depends only on the leaf and the layer, not on the group. So a
  replica that is divided among devices draws the same random numbers as an
  undivided one, although its leaves are grouped in another way.

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
  """Splits an array along an axis.

  Args:
    array: The array.
    lengths: Lengths of the parts along the axis, in order.
    axis: The axis that is split.

  Returns:
    The parts.
  """
  if len(lengths) == 1:
    return [array]
  [array] = materialize([array])
  ends = np.cumsum(lengths)[:-1].tolist()
  return materialize(jnp.split(array, ends, axis=axis))


def materialize(arrays: list[Array]) -> list[Array]:
  """Makes XLA compute arrays once, and not again for each of their readers.

  Without this function, XLA fuses operations: each of 100 slices of an array
  would compute the array again, and each reader of a slice would compute the
  slice again. On CPUs, XLA would also compile each slice by itself (10 ms
  each).

  The function uses an optimization barrier. On CPUs, XLA removes such a barrier
  before it decides what to fuse, but it does not fuse through a loop. So the
  arrays pass through a loop there. The loop makes no step, unless the first
  value of the first array is NaN. Then it makes one step, which changes no
  finite value.

  Args:
    arrays: Floating-point arrays. The first one must not be empty.

  Returns:
    The arrays with the same values.
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
  computed: Any = jax.lax.platform_dependent(arrays, cpu=loop, default=barrier)
  return computed


def sums(arrays: list[Array], axis: int) -> list[Array]:
  """Sums several arrays of one shape along an axis, in one pass.

  On CPUs, XLA passes the sum of a single array to a library. If several sums
  share an operand, it is then computed again for each sum. XLA compiles a sum
  of several arrays itself, and computes shared operands once.

  Args:
    arrays: The arrays, of one shape.
    axis: The axis to sum over.

  Returns:
    The sums, each without this axis.
  """
  add = functools.partial(jax.tree.map, jnp.add)
  zeros = [np.zeros((), array.dtype) for array in arrays]
  return list(jax.lax.reduce(arrays, zeros, add, (axis,)))


def pad(values: Array, num_zeros: int) -> Array:
  """Adds zeros at the end of the last axis.

  Args:
    values: Values [..., length].
    num_zeros: Number of zeros that each row gets.

  Returns:
    Values [..., length + num_zeros].
  """
  if num_zeros == 0:
    return values
  edges = [(0, 0)] * (values.ndim - 1) + [(0, num_zeros)]
  return jnp.pad(values, edges)


def block_width(size: int, block_size: int) -> int:
  """Returns the width of equal blocks into which values are divided.

  There are as few blocks as `block_size` allows, and each is as short as this
  number of blocks allows. So less than one value of padding is needed for each
  block. For example, 300 values in blocks of at most 128 need 3 blocks. Blocks
  of 100 need no padding, while blocks of 128 would need 84 values of padding.

  Args:
    size: Number of values.
    block_size: Largest number of values in a block.
  """
  num_blocks = -(-size // block_size)
  return -(-size // num_blocks)


def are_finite(values: Tree) -> Boolean:
  """Returns whether all values of a tree are finite (boolean scalar).

  The values are concatenated into few arrays before they are checked. With a
  flag for each leaf, a program that uses the result for 500 leaves would have
  250,000 operations: XLA would combine all flags again for each leaf. A leaf
  that is not concatenated keeps its shape. If devices divide the leaf,
  flattening would collect it on every device.

  Args:
    values: Tree of floating-point leaves, of any shapes.
  """
  leaves = jax.tree.leaves(values)
  shapes = [leaf.shape for leaf in leaves]
  dtypes = [leaf.dtype for leaf in leaves]
  arrays = []
  for group in group_by_shape(shapes, kinds=dtypes):
    if len(group) == 1:
      arrays.append(leaves[group[0]])
    else:
      flat = [leaves[i].reshape(-1) for i in group]
      arrays.append(jnp.concatenate(flat))
  return all_finite(arrays)
