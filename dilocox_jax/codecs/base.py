"""Base classes of codecs, which compress what replicas send each other.

A codec is a frozen dataclass, and its fields are its settings. It works on all
leaves of an exchange at once: a list of arrays [num_layers, *shape], where
num_layers is 1 for a leaf outside the stack of layers. The base classes are

- `Encoder`: turns leaves into arrays to send, and back. The leaves of each
  replica are decoded before they are averaged.
- `Quantizer`: an `Encoder` that codes every value, e.g. in few bits. It works
  on rows of values.
- `Projection`: applies a linear function, the same on all replicas, and sends
  the result as its field `then`, an `Encoder`, encodes it. Replicas average the
  results before they undo the function.

A projection may need several messages, one after the other. So its method `run`
is a coroutine: it passes the leaves of a message to `reduce`, which averages
them over replicas and returns `Reduced`. For example, this `run` first sends
the mean of each leaf, and then how the leaf differs from the sent mean:

    def run(self, leaves, state, key, reduce):
      first = yield from reduce(
        [jnp.mean(leaf, keepdims=True) for leaf in leaves]
      )
      second = yield from reduce(
        [leaf - sent for leaf, sent in zip(leaves, first.own)]
      )
      mean = [a + b for a, b in zip(first.mean, second.mean)]
      own = [a + b for a, b in zip(first.own, second.own)]
      return Reduced(mean=mean, own=own), state
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
  """Result of averaging leaves over replicas.

  Attributes:
    mean: Mean of the decoded leaves, [num_layers, ...] each, over the replicas
      that participate.
    own: This replica's leaves as the other replicas decode them, or zeros if
      the replica does not count in the mean. `ReduceScatterMean` may add a
      correction (`Sender.shares_add_up`).
  """

  mean: list[Array]
  own: list[Array]


# Function from the leaves of a message to a coroutine that returns `Reduced`.
Reduce = Callable[[list[Array]], Coroutine]


class Codec:
  """Base class of all codecs.

  A subclass is a frozen dataclass whose fields all have defaults. If it has a
  field `then`, this is the encoder of the values that the codec sends, so that
  codecs form a chain.
  """

  def __post_init__(self):
    """Raises ValueError if a field has a wrong type or value.

    If there is a field `then`, it must be an `Encoder`.
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

    False by default. True rules out the collective `pairs`, whose replicas get
    different means.
    """
    return False

  def init(self, shapes: Sequence[Shape], key: Array) -> list[Tree]:
    """Returns the initial state of every leaf, equal on all replicas.

    The default is () for each leaf: no state.

    Args:
      shapes: Shape of each leaf, (num_layers, *shape).
      key: Random key, equal on all replicas.
    """
    del key
    return [()] * len(shapes)

  def run(
    self, leaves: Arrays, state: list[Tree], key: Array, reduce: Reduce
  ) -> Coroutine:
    """Averages leaves over replicas; by default in one message.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.
      state: State of every leaf.
      key: Random key of the exchange, equal on all replicas.
      reduce: Function from the leaves of a message to a coroutine that averages
        them over replicas and returns `Reduced`.

    Returns:
      A coroutine that returns a tuple: `Reduced` of the leaves, and a list of
      the new state of every leaf.
    """
    del key
    return (yield from reduce(list(leaves))), state


class Projection(Codec):
  """Base class of codecs that send a linear function of the leaves.

  The function is the same on all replicas, so its values are averaged before it
  is undone. A subclass defines `run`, and has a field `then`: the encoder of
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
    """Decodes the arrays that `encode` returned into float32 leaves.

    Args:
      arrays: Arrays of a message.
      shapes: Shape of each leaf, (num_layers, *shape).
    """
    return self.leaves(self.concatenated(arrays, shapes), shapes)

  def concatenated(
    self, arrays: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Decodes a message into few float32 arrays, which `leaves` then splits.

    The mean over replicas is computed on these arrays, because a program with
    few arrays compiles faster. The default returns the leaves themselves.

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
      concatenated: The returned arrays, or their means over replicas.
      shapes: Shape of each leaf, (num_layers, *shape).
    """
    del shapes
    return list(concatenated)


class Quantizer(Encoder):
  """Base class of encoders that code every value, row by row.

  A subclass defines the width of the rows of a leaf (`width`), how rows become
  arrays to send (`code`), and how arrays become rows again (`values`).
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
    """Decodes arrays that `code` returned into float32 [layers, rows, width].

    Args:
      arrays: The arrays.
      width: Number of values in a row.
    """
    raise NotImplementedError

  @property
  def of_means(self) -> "Quantizer":
    """The quantizer that encodes means in a reduce-scatter; by default `self`.

    Its rows must be as wide as those of `self`.
    """
    return self

  def encode(self, leaves: Arrays) -> list[Array]:
    """Returns the arrays to send for some leaves.

    Leaves may form groups whose rows are coded together (`RowLayout`). The
    arrays of the first group come first.
    """
    layout = self.layout([leaf.shape for leaf in leaves])
    return self.coded(layout.rows(leaves))

  def concatenated(
    self, arrays: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Decodes a message into float32 rows of each group of leaves."""
    return self.decoded(self.layout(shapes), arrays)

  def leaves(
    self, concatenated: Arrays, shapes: Sequence[Shape]
  ) -> list[Array]:
    """Splits the rows that `concatenated` returned into leaves."""
    return self.layout(shapes).leaves(concatenated)

  def layout(self, shapes: Sequence[Shape], num_slices: int = 0) -> RowLayout:
    """Returns how the values of the leaves are divided into rows.

    Args:
      shapes: Shape of each leaf, (num_layers, *shape).
      num_slices: Number of equal slices into which the rows are divided for a
        reduce-scatter, one for each replica; 0: no slices.
    """
    widths = [self.width(shape[1:]) for shape in shapes]
    if num_slices:
      widths = [
        _width_in_slices(shape, width, num_slices)
        for shape, width in zip(shapes, widths, strict=True)
      ]
    return RowLayout(tuple(shapes), tuple(widths), num_slices)

  def coded(self, rows: Arrays) -> list[Array]:
    """Returns the arrays to send for the rows of each group of leaves."""
    return [array for group_rows in rows for array in self.code(group_rows)]

  def decoded(self, layout: RowLayout, arrays: Arrays) -> list[Array]:
    """Decodes arrays of `coded` into float32 rows of each group of leaves."""
    arrays_per_group = len(arrays) // len(layout.groups)
    rows = []
    for index, group in enumerate(layout.groups):
      first = index * arrays_per_group
      group_arrays = arrays[first : first + arrays_per_group]
      rows.append(self.values(group_arrays, layout.widths[group[0]]))
    return rows


def _width_in_slices(shape: Shape, width: int, num_slices: int) -> int:
  """Returns the width of a leaf's rows if replicas average one slice each.

  A row has at most `width` values. It also has at most a 16th of the values of
  a slice, or 128 if that is more. Slices have equally many rows, so up to
  num_slices - 1 rows of zeros are added. In a large leaf, these rows have fewer
  zeros than a 16th of its values.
  """
  longest = max(128, math.prod(shape) // (16 * num_slices))
  return min(width, block_width(math.prod(shape[1:]), longest))
