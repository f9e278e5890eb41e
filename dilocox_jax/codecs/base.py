"""What a codec is.

A codec is a frozen dataclass. Its fields are its settings, and it works on all
leaves of a fragment at once: a list of arrays [num_layers, *shape], where a
leaf that is not stacked has one layer. There are three kinds:

- A `Quantizer` sends every value in few bits. It works on rows of values, so
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
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dilocox_jax.checks import check_limits, of_type, require
from dilocox_jax.codecs.batching import Arrays, RowLayout, Shape, block_width
from dilocox_jax.trees import Array, Tree
from dilocox_jax.turns import Pausing


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
      "rank or a random mask comes first, one quantizer comes last",
    )

  @property
  def encoder(self) -> "Encoder":
    """What encodes the leaves of each message."""
    raise NotImplementedError

  @property
  def has_shared_state(self) -> bool:
    """Whether it goes on from means that all replicas must have alike."""
    return False

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


class Quantizer(Encoder):
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
  def of_means(self) -> "Quantizer":
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
