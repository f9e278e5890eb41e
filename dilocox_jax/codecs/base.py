"""Base classes of codecs.

A codec compresses the values that replicas send each other. It is a frozen
dataclass, and its fields are its settings. It works on all leaves of a fragment
(a part of the parameters) at once: a list of arrays [num_layers, *shape], where
a leaf outside the stack of layers has num_layers = 1. There are three kinds of
codecs:

- A `Quantizer` sends every value in few bits. It works on rows of values, and
  codes leaves with rows of the same width together.
- Any other `Encoder` sends fewer numbers than there are values, such as the
  largest values. Its field `then` is the encoder of these numbers.
- A `Projection` sends a linear function of the values that is the same on all
  replicas. So replicas can average what it sends, and undo the projection
  afterwards. It may need several messages, one after the other.

A projection is written as a coroutine. It passes the leaves of a message to
`reduce`, which returns their mean over replicas, and this replica's leaves as
the other replicas decode them. The exchange encodes the leaves with `then` and
chooses the collective. For example, this projection first sends the mean of
each leaf, and then how the leaf differs from its mean:

    def run(self, leaves, state, key, reduce):
      means = [jnp.mean(leaf, keepdims=True) for leaf in leaves]
      average, decoded = yield from reduce(means)
      average_rest, decoded_rest = yield from reduce(
        [leaf - mean for leaf, mean in zip(leaves, decoded)]
      )
      ...
      return Reduced(mean=sums, own=own_sums), state

The coroutine is a generator that runs while JAX traces a program. The compiled
program has only the operations that were traced.
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
  """Result of averaging one message over replicas.

  Attributes:
    mean: Mean over replicas of the decoded leaves, [num_layers, ...] each.
    own: This replica's leaves as the other replicas decode them, in the same
      shapes.
  """

  mean: list[Array]
  own: list[Array]


# Function from the leaves of a message to a coroutine that returns `Reduced`.
Reduce = Callable[[list[Array]], Coroutine]


class Codec:
  """Base class of all codecs.

  A subclass is a frozen dataclass whose fields all have defaults. If it has a
  field `then`, this is the encoder of what the codec sends, so that codecs form
  a chain.
  """

  def __post_init__(self):
    """Checks types and limits of the fields, and that `then` is an `Encoder`.

    Raises:
      ValueError: If one of them is wrong. The message is one line.
    """
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
    """The encoder of the leaves in each message. A subclass must define it."""
    raise NotImplementedError

  @property
  def has_shared_state(self) -> bool:
    """Whether the state of this codec must be equal on all replicas.

    Then the codec works only if all replicas get the same mean, so it cannot
    be used with the collective `pairs`. A low-rank codec is an example: all
    replicas project onto the mean of the last exchange. This implementation
    returns False.
    """
    return False

  def init(self, shapes: Sequence[Shape], key: Array) -> list[Tree]:
    """Returns the initial state of every leaf. It is equal on all replicas.

    This implementation returns () for each leaf: no state.

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

    This implementation sends all leaves in one message.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.
      state: State of every leaf.
      key: Random key of the exchange, equal on all replicas.
      reduce: Function from the leaves of a message to a coroutine that averages
        them over replicas and returns `Reduced`.

    Returns:
      A coroutine that returns a tuple: `Reduced` of the leaves, and the new
      state of every leaf.
    """
    del key
    return (yield from reduce(list(leaves))), state


class Projection(Codec):
  """Base class of codecs that send a linear function of the leaves.

  The function is the same on all replicas, so its values can be averaged before
  it is undone. A subclass defines `run`, and has a field `then`: the encoder of
  the values that it sends.
  """

  then: "Encoder"

  @property
  def encoder(self) -> "Encoder":
    """The encoder of the leaves in each message: the field `then`."""
    return self.then


class Encoder(Codec):
  """Base class of codecs that turn leaves into the arrays to send, and back.

  A subclass defines `encode` and `decode`. The leaves of all replicas are
  decoded before they are averaged.
  """

  @property
  def encoder(self) -> "Encoder":
    """This object: it encodes the leaves themselves."""
    return self

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns the arrays to send for some leaves.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.

    Returns:
      Arrays whose number, shapes and dtypes depend only on the shapes of the
      leaves.
    """
    raise NotImplementedError

  def decode(self, arrays: Arrays, shapes: Sequence[Shape]) -> list[Array]:
    """Decodes the arrays of a message into leaves. It reverses `encode`.

    Args:
      arrays: Arrays that `encode` returned.
      shapes: Shape of each leaf, (num_layers, *shape).

    Returns:
      float32 leaves, [num_layers, *shape] each.
    """
    return self.leaves(self.concatenated(arrays, shapes), shapes)

  def concatenated(
    self, arrays: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Decodes a message into few arrays, each with the values of many leaves.

    The mean over replicas is computed on these arrays, because a program with
    few arrays compiles faster. `leaves` splits them. This implementation
    returns the leaves themselves.

    Args:
      arrays: Arrays that `encode` returned.
      shapes: Shape of each leaf, (num_layers, *shape).

    Returns:
      float32 arrays.
    """
    return self.decode(arrays, shapes)

  def leaves(
    self, concatenated: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Splits the arrays that `concatenated` returned into the leaves.

    Args:
      concatenated: Arrays that `concatenated` returned, or their means over
        replicas.
      shapes: Shape of each leaf, (num_layers, *shape).

    Returns:
      The leaves, [num_layers, *shape] each.
    """
    del shapes
    return list(concatenated)


class Quantizer(Encoder):
  """Base class of encoders that code every value, row by row.

  A subclass defines the width of the rows into which a leaf is divided
  (`width`), how rows become arrays to send (`code`), and how arrays become rows
  again (`values`).
  """

  def width(self, shape: Shape) -> int:
    """Returns how many values of a leaf make a row.

    Args:
      shape: Shape of one layer of the leaf.
    """
    raise NotImplementedError

  def code(self, rows: Array) -> tuple[Array, ...]:
    """Returns the arrays to send for some rows.

    Args:
      rows: float32 values [layers, rows, width].

    Returns:
      Arrays [layers, rows, ...]. Their number is the same for all rows.
    """
    raise NotImplementedError

  def values(self, arrays: Arrays, width: int) -> Array:
    """Decodes the arrays of some rows. It reverses `code`.

    Args:
      arrays: Arrays that `code` returned.
      width: Number of values in a row.

    Returns:
      float32 rows [layers, rows, width].
    """
    raise NotImplementedError

  @property
  def of_means(self) -> "Quantizer":
    """The quantizer that encodes means in a reduce-scatter.

    In a reduce-scatter each replica averages one slice of the rows, and sends
    the mean of its slice to the other replicas. The mean is encoded with this
    quantizer, whose rows must have the same width. This implementation returns
    `self`.
    """
    return self

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns the arrays to send for some leaves.

    The rows of leaves with the same width are coded together (`layout`).

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.

    Returns:
      The arrays of the first group of leaves, then those of the second one,
      and so on (`coded`).
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

    Returns:
      float32 rows of each group (`RowLayout.rows`). `leaves` splits them.
    """
    return self.decoded(self.layout(shapes), arrays)

  def leaves(
    self, concatenated: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Splits the rows of all groups into the leaves, [num_layers, *shape] each.

    Args:
      concatenated: Arrays that `concatenated` returned, or their means.
      shapes: Shape of each leaf, (num_layers, *shape).
    """
    return self.layout(shapes).leaves(concatenated)

  def layout(self, shapes: Sequence[Shape], num_slices: int = 0) -> RowLayout:
    """Returns how the values of the leaves are divided into rows.

    Args:
      shapes: Shape of each leaf, (num_layers, *shape).
      num_slices: Number of slices into which the rows are divided for a
        reduce-scatter, one for each replica; 0: they are not divided. All
        slices have equally many rows.
    """
    widths = [self.width(shape[1:]) for shape in shapes]
    if num_slices:
      widths = [
        _width_in_slices(shape, width, num_slices)
        for shape, width in zip(shapes, widths, strict=True)
      ]
    return RowLayout(tuple(shapes), tuple(widths), num_slices)

  def coded(self, rows: Arrays) -> list[Array]:
    """Returns the arrays to send for the rows of all groups of leaves.

    Args:
      rows: float32 rows of each group (`RowLayout.rows`).

    Returns:
      The arrays of the first group (`code`), then those of the second one, and
      so on.
    """
    return [array for group_rows in rows for array in self.code(group_rows)]

  def decoded(self, layout: RowLayout, arrays: Arrays) -> list[Array]:
    """Decodes the arrays of all groups of leaves. It reverses `coded`.

    Args:
      layout: How the values of the leaves are divided into rows.
      arrays: Arrays that `coded` returned.

    Returns:
      float32 rows of each group.
    """
    arrays_per_group = len(arrays) // len(layout.groups)
    rows = []
    for index, group in enumerate(layout.groups):
      first = index * arrays_per_group
      group_arrays = arrays[first : first + arrays_per_group]
      rows.append(self.values(group_arrays, layout.widths[group[0]]))
    return rows


def _width_in_slices(shape: Shape, width: int, num_slices: int) -> int:
  """Returns how many values of a leaf make a row if rows are put into slices.

  All slices have equally many whole rows, so up to num_slices - 1 rows of zeros
  are added at the end. A row has at most a 16th of a slice's values. So the
  zeros have fewer values than num_slices such rows: less than a 16th of the
  leaf. Exception: rows of up to 128 values, the default block of `int` and
  `e3m0`, are always allowed. So most slices of a small leaf may be zeros.

  Args:
    shape: Shape of the leaf, (num_layers, *shape).
    width: Width of the rows without slices, which is never exceeded.
    num_slices: Number of slices.
  """
  longest = max(128, math.prod(shape) // (16 * num_slices))
  return min(width, block_width(math.prod(shape[1:]), longest))
