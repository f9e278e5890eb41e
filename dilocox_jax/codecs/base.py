"""Base classes of codecs.

A codec compresses the values that replicas send each other. It is a frozen
dataclass, and its fields are its settings. It works on all leaves of a fragment
at once: a list of arrays [num_layers, *shape], where a leaf outside the stack
of layers has one layer. There are three kinds of codecs:

- A `Quantizer` sends every value in few bits. It works on rows of values, so
  leaves whose rows have one width are coded together.
- Any other `Encoder` sends fewer numbers than values, such as the largest
  values. Its field `then` is the encoder of these numbers.
- A `Projection` is a linear map that is the same on all replicas, so the mean
  may be taken before the projection is undone. It may need several messages,
  one after the other.

A projection is written as a coroutine. It hands leaves to `reduce` and gets
their mean over replicas, and this replica's leaves as the other replicas decode
them. The exchange encodes the leaves with `then` and chooses the collective.
For example, a projection that sends the mean of each leaf first, and then how
the leaf differs from its mean:

    def run(self, leaves, state, key, reduce):
      means = [jnp.mean(leaf, keepdims=True) for leaf in leaves]
      average, decoded = yield from reduce(means)
      average_rest, decoded_rest = yield from reduce(
        [leaf - mean for leaf, mean in zip(leaves, decoded)]
      )
      ...
      return Reduced(mean=sums, own=own_sums), state

Generators run while a program is traced. The compiled program contains only
the operations that were traced.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dilocox_jax.checks import check_limits, of_type, require
from dilocox_jax.codecs.batching import Arrays, RowLayout, Shape, block_width
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.trees import Array, Tree


class Reduced(NamedTuple):
  """Result of one message, decoded.

  Attributes:
    mean: Mean over replicas of the decoded leaves.
    own: This replica's leaves, as the other replicas decode them.
  """

  mean: list[Array]
  own: list[Array]


# Function from the leaves of a message to a coroutine that returns `Reduced`.
Reduce = Callable[[list[Array]], Coroutine]


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
      "rank or a random mask comes first, one quantizer comes last",
    )

  @property
  def encoder(self) -> "Encoder":
    """The encoder of the leaves in each message of this codec."""
    raise NotImplementedError

  @property
  def has_shared_state(self) -> bool:
    """Whether the codec keeps means that must be equal on all replicas."""
    return False

  def init(self, shapes: Sequence[Shape], key: Array) -> list[Tree]:
    """Returns the state of every leaf, which is equal on all replicas.

    Args:
      shapes: Shape of each leaf, (num_layers, *shape).
      key: Random key, equal on all replicas.
    """
    del key
    return [()] * len(shapes)

  def run(
    self, leaves: Arrays, state: list[Tree], key: Array, reduce: Reduce
  ) -> Coroutine:
    """Averages leaves over replicas, in one or several messages.

    This implementation sends the leaves in one message.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.
      state: State of every leaf.
      key: Random key, equal on all replicas.
      reduce: Function from the leaves of a message to a coroutine that sends
        them and returns `Reduced`.

    Returns:
      A coroutine that returns `Reduced` of the leaves, and the new state of
      every leaf.
    """
    del key
    return (yield from reduce(list(leaves))), state


class Projection(Codec):
  """Sends a linear function of the leaves, the same on all replicas.

  A subclass has a field `then`, the encoder of the values that it sends.
  """

  then: "Encoder"

  @property
  def encoder(self) -> "Encoder":
    """The encoder of the leaves in each message: the field `then`."""
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

    Returns:
      Arrays whose number, shapes and types depend only on the leaves' shapes.
    """
    raise NotImplementedError

  def decode(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Returns float32 leaves, the reverse of `encode`.

    Args:
      arrays: Arrays that `encode` returned.
      shapes: Shape of each leaf, (num_layers, *shape).
    """
    return self.leaves(self.concatenated(arrays, shapes), shapes)

  def concatenated(
    self, arrays: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Decodes a message into few arrays, each with the values of many leaves.

    A mean over replicas adds up these arrays instead of the leaves, because a
    program with few arrays is smaller.

    Args:
      arrays: Arrays that `encode` returned.
      shapes: Shape of each leaf, (num_layers, *shape).
    """
    return self.decode(arrays, shapes)

  def leaves(
    self, concatenated: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Splits the arrays that `concatenated` returned into the leaves.

    Args:
      concatenated: Arrays that `concatenated` returned, or their means.
      shapes: Shape of each leaf, (num_layers, *shape).
    """
    del shapes
    return list(concatenated)


class Quantizer(Encoder):
  """Codes every value, one row of values at a time.

  A subclass says how wide the rows of a leaf are (`width`), and how rows become
  arrays (`code`) and arrays become rows again (`values`).
  """

  def width(self, shape: Shape) -> int:
    """Returns the number of values in a row.

    Args:
      shape: Shape of one layer of a leaf.
    """
    raise NotImplementedError

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns the arrays that are sent for some rows.

    Args:
      rows: float32 values [layers, rows, width].

    Returns:
      Arrays [layers, rows, ...].
    """
    raise NotImplementedError

  def values(self, arrays: Arrays, width: int) -> Array:
    """Returns float32 rows [layers, rows, width], the reverse of `code`.

    Args:
      arrays: Arrays that `code` returned.
      width: Number of values in a row.
    """
    raise NotImplementedError

  @property
  def of_means(self) -> "Quantizer":
    """The quantizer of the means that a reduce-scatter sends back.

    Its rows have the same width as those of `self`. This implementation returns
    `self`.
    """
    return self

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns the arrays that are sent; rows of one width are coded together.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.
    """
    layout = self.layout([leaf.shape for leaf in leaves])
    return self.coded(layout.rows(leaves))

  def concatenated(
    self, arrays: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Decodes a message into one array of rows for each group of leaves.

    Args:
      arrays: Arrays that `encode` returned.
      shapes: Shape of each leaf, (num_layers, *shape).
    """
    return self.decoded(self.layout(shapes), arrays)

  def leaves(
    self, concatenated: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Splits the rows of all groups into the leaves.

    Args:
      concatenated: Arrays that `concatenated` returned, or their means.
      shapes: Shape of each leaf, (num_layers, *shape).
    """
    return self.layout(shapes).leaves(concatenated)

  def layout(self, shapes: Sequence[Shape], num_slices: int = 0) -> RowLayout:
    """Returns the rows in which the leaves are coded.

    Args:
      shapes: Shape of each leaf, (num_layers, *shape).
      num_slices: Number of slices with equally many rows, one for each replica
        of a reduce-scatter; 0: the rows are not divided into slices.
    """
    widths = [self.width(shape[1:]) for shape in shapes]
    if num_slices:
      widths = [
        _width_in_slices(shape, width, num_slices)
        for shape, width in zip(shapes, widths, strict=True)
      ]
    return RowLayout(tuple(shapes), tuple(widths), num_slices)

  def coded(self, rows: Arrays) -> list[Array]:
    """Returns the arrays that are sent for the rows of all groups.

    Args:
      rows: Rows of every group of leaves (`RowLayout.rows`).
    """
    return [array for group_rows in rows for array in self.code(group_rows)]

  def decoded(self, layout: RowLayout, arrays: Arrays) -> list[Array]:
    """Returns the float32 rows of all groups, the reverse of `coded`.

    Args:
      layout: Says in which row each value of a leaf lies.
      arrays: Arrays that `coded` returned.
    """
    arrays_per_group = len(arrays) // len(layout.groups)
    rows = []
    for index, group in enumerate(layout.groups):
      first = index * arrays_per_group
      group_arrays = arrays[first : first + arrays_per_group]
      rows.append(self.values(group_arrays, layout.widths[group[0]]))
    return rows


def _width_in_slices(shape: Shape, width: int, num_slices: int) -> int:
  """Returns the width of a leaf's rows when they are divided into slices.

  A slice has whole rows, and rows of zeros fill the last slice. The wider
  the rows are, the more zeros there may be. So a row is at most a 16th of a
  slice. Rows of up to 128 values are never made narrower.

  Args:
    shape: Shape of the leaf, (num_layers, *shape).
    width: Width of the rows without slices.
    num_slices: Number of slices.
  """
  longest = max(128, math.prod(shape) // (16 * num_slices))
  return min(width, block_width(math.prod(shape[1:]), longest))
