"""What a codec is.

A codec is a frozen dataclass. Its fields are its settings, and it works on all
leaves of a fragment at once: a list of arrays [num_layers, *shape], where a
leaf that is not stacked has one layer. There are three kinds:

- A `Quantiser` sends every value in few bits. It works on rows of values, so
  leaves whose rows have one width are coded together.
- Any other `Encoder` sends some values. What it keeps, `then` encodes.
- A `Projection` is linear and the same on all replicas, so the mean may be
  taken before it is undone. It may need several messages in turn.

A projection is written as a generator, which hands leaves to `reduce` and gets
their mean over replicas and the replica's own part of it, as the others decode
it. The exchange encodes the leaves with `then` and chooses the collective. For
example, a projection that sends the mean of each leaf and then the rest:

    def run(self, leaves, state, key, reduce):
      sizes = [jnp.mean(leaf, keepdims=True) for leaf in leaves]
      mean, own = yield from reduce(sizes)
      rest, own_rest = yield from reduce(
        [leaf - m for leaf, m in zip(leaves, own)]
      )
      ...
      return Reduced(sums, own_sums), state

Generators run while a program is traced; nothing of them is left in it.

A program that works on each leaf by itself grows with the leaves: an unscanned
model has hundreds. So values that are treated alike are joined in one array,
and taken apart again.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import check_limits, of_type, require
from dilocox_jax.distributed.local_map import current_division
from dilocox_jax.trees import Array, Boolean, Pausing, Tree, all_finite

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
  arrays: Arrays,
  groups: Sequence[Sequence[int]],
  shapes: Sequence[Shape],
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


def padded(flat: Array, missing: int) -> Array:
  """Adds zeros at the end of the last axis.

  Args:
    flat: Values [layers, values].
    missing: Number of zeros of each layer.
  """
  return jnp.pad(flat, ((0, 0), (0, missing))) if missing else flat


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


class Reduced(NamedTuple):
  """Result of one message, decoded.

  Attributes:
    mean: Mean over replicas of the decoded leaves.
    own: Decoded leaves of this replica.
  """

  mean: list[Array]
  own: list[Array]


# Function from the leaves of a message to a generator that returns `Reduced`.
Reduce = Callable[[list[Array]], Pausing]


class Codec:
  """Base class of everything that a chain of codecs is made of."""

  def __post_init__(self):
    """Raises ValueError if a field is outside its limits."""
    for field in dataclasses.fields(self):  # pyright: ignore
      if field.name != "then":
        of_type(field.name, getattr(self, field.name), type(field.default))
    check_limits(self)
    then = getattr(self, "then", None)
    require(
      then is None or isinstance(then, Encoder),
      f"{type(then).__name__} cannot follow {type(self).__name__}: shared low "
      "rank or a random mask comes first, one quantiser comes last",
    )

  @property
  def encoder(self) -> "Encoder":
    """What encodes the leaves of each message."""
    raise NotImplementedError

  def init(self, shapes: Sequence[Shape], key: Array) -> list[Tree]:
    """Returns the state of every leaf, which is equal on all replicas.

    Args:
      shapes: Shapes of the leaves, with the layer axis.
      key: Random key, equal on all replicas.
    """
    del key
    return [()] * len(shapes)

  def run(
    self, leaves: Arrays, state: list[Tree], key: Array, reduce: Reduce
  ) -> Pausing:
    """Sends one message after the other; returns the result and new states.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.
      state: State of every leaf.
      key: Random key, equal on all replicas.
      reduce: Sends the leaves of a message, and returns `Reduced` in the end.
    """
    del key
    return (yield from reduce(list(leaves))), state


class Projection(Codec):
  """Sends a linear function of the leaves, the same on all replicas.

  A subclass has a field `then`, the encoder of what it sends.
  """

  then: "Encoder"

  @property
  def encoder(self) -> "Encoder":
    """What encodes the leaves of its messages."""
    return self.then


class Encoder(Codec):
  """Turns leaves into the arrays that are sent, and back."""

  @property
  def encoder(self) -> "Encoder":
    """The encoder itself: leaves are sent as they are."""
    return self

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns the arrays that are sent.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.
    """
    raise NotImplementedError

  def decode(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Returns float32 leaves, the reverse of `encode`.

    Args:
      arrays: What `encode` returned.
      shapes: Shapes of the leaves, with the layer axis.
    """
    return self.leaves(self.joined(arrays, shapes), shapes)

  def joined(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Returns the values of the leaves as they are added up, in few arrays."""
    return self.decode(arrays, shapes)

  def leaves(self, joined: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Returns the leaves whose values `joined` has returned."""
    del shapes
    return list(joined)


class Quantiser(Encoder):
  """Codes every value, one row of values at a time.

  It says how wide the rows of a leaf are, and how rows become arrays.
  """

  def width(self, shape: Shape) -> int:
    """Returns the number of values in a row.

    Args:
      shape: Shape of one layer of a leaf.
    """
    raise NotImplementedError

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns the arrays that are sent of some rows.

    Args:
      rows: float32 values [layers, rows, width].

    Returns:
      Arrays [layers, rows, ...].
    """
    raise NotImplementedError

  def values(self, arrays: Arrays, width: int) -> Array:
    """Returns float32 rows [layers, rows, width], the reverse of `code`.

    Args:
      arrays: What `code` returned.
      width: Values of a row (count).
    """
    raise NotImplementedError

  @property
  def of_means(self) -> "Quantiser":
    """Codes the means that a reduce-scatter sends back, in rows as wide."""
    return self

  def encode(self, leaves: Arrays) -> list[Array]:
    """Codes all rows of one width together."""
    layout = self.layout([leaf.shape for leaf in leaves])
    return self.coded(layout.rows(leaves))

  def joined(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Returns the rows of every width."""
    return self.decoded(self.layout(shapes), arrays)

  def leaves(self, joined: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Takes the rows apart."""
    return self.layout(shapes).leaves(joined)

  def layout(self, shapes: Sequence[Shape], num_slices: int = 0) -> RowLayout:
    """Says in which rows the leaves are coded.

    Args:
      shapes: Shapes of the leaves, with the layer axis.
      num_slices: Slices of equally many rows; 0 cuts none.
    """
    widths = [self.width(shape[1:]) for shape in shapes]
    if num_slices:
      pairs = zip(shapes, widths, strict=True)
      widths = [_cut(shape, width, num_slices) for shape, width in pairs]
    return RowLayout(tuple(shapes), tuple(widths), num_slices)

  def coded(self, rows: Arrays) -> list[Array]:
    """Returns the arrays that are sent of some rows.

    Args:
      rows: Rows of every group of leaves (`RowLayout.rows`).
    """
    return [array for own in rows for array in self.code(own)]

  def decoded(self, layout: RowLayout, arrays: Arrays) -> list[Array]:
    """Returns the rows of a layout, as float32.

    Args:
      layout: Where the values of the leaves lie.
      arrays: What `coded` has returned of these rows.
    """
    count = len(arrays) // len(layout.groups)
    return [
      self.values(arrays[number * count :][:count], layout.widths[group[0]])
      for number, group in enumerate(layout.groups)
    ]


def _cut(shape: Shape, width: int, num_slices: int) -> int:
  """Returns the width of a leaf's rows in slices.

  A slice has whole rows, and rows of zeros fill the last one. So rows of more
  than 128 values are cut where they are longer than a 16th of a slice.
  """
  longest = max(128, math.prod(shape) // (16 * num_slices))
  return min(width, block_width(math.prod(shape[1:]), longest))
