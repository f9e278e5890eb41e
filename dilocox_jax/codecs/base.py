"""What a codec is.

A codec is a frozen dataclass. Its fields are its settings, and it works on all
leaves of a fragment at once: a list of arrays [num_layers, *shape], where a
leaf that is not stacked has one layer. There are three kinds:

- A `Quantiser` sends every value in few bits. It works on rows of values, so
  leaves whose rows have one width are coded together.
- Any other `Encoder` sends some values. What it keeps, `then` encodes.
- A `Projection` is linear and the same on all replicas, so the mean may be
  taken before it is undone. It may need several messages in turn.

A projection is written as a generator: it yields leaves, and receives their
mean over replicas and the replica's own part of it, as the others decode it.
The exchange encodes the leaves with `then` and chooses the collective. For
example, a projection that sends the mean of each leaf and then the rest:

    def run(self, leaves, state, key):
      sizes = [jnp.mean(leaf, keepdims=True) for leaf in leaves]
      mean, own = yield sizes
      rest, own_rest = yield [leaf - m for leaf, m in zip(leaves, own)]
      ...
      return Reduced(sums, own_sums), state

Generators run while a program is traced; nothing of them is left in it.
"""

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

import jax

from dilocox_jax.checks import check_limits, require
from dilocox_jax.codecs.rows import RowLayout, Shape, block_width
from dilocox_jax.pytypes import Array, Tree


class Codec:
  """Base class of everything that a chain of codecs is made of."""

  def __post_init__(self):
    """Raises ValueError if a field is outside its limits."""
    check_limits(self)
    then = getattr(self, "then", None)
    require(
      then is None or isinstance(then, Encoder),
      f"{type(then).__name__} cannot follow {type(self).__name__}: shared low "
      "rank or a random mask comes first, one quantiser comes last",
    )


class Encoder(Codec):
  """Turns leaves into the arrays that are sent, and back."""

  def encode(self, leaves: Sequence[Array], key: Array) -> list[Array]:
    """Returns the arrays that are sent.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.
      key: Random key of this replica.
    """
    raise NotImplementedError

  def decode(
    self, arrays: Sequence[Array], shapes: Sequence[Shape]
  ) -> list[Array]:
    """Returns float32 leaves, the reverse of `encode`.

    Args:
      arrays: What `encode` returned.
      shapes: Shapes of the leaves, with the layer axis.
    """
    raise NotImplementedError


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

  def code(self, rows: Array, key: Array) -> tuple[Array, ...]:
    """Returns the arrays that are sent of some rows.

    Args:
      rows: float32 values [layers, rows, width].
      key: Random key of this replica.

    Returns:
      Arrays [layers, rows, ...].
    """
    raise NotImplementedError

  def values(self, arrays: Sequence[Array], width: int) -> Array:
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

  def encode(self, leaves: Sequence[Array], key: Array) -> list[Array]:
    """Codes all rows of one width together."""
    layout = self.layout([leaf.shape for leaf in leaves])
    return self.coded(layout.rows(leaves), key)

  def decode(
    self, arrays: Sequence[Array], shapes: Sequence[Shape]
  ) -> list[Array]:
    """Reverses `encode`."""
    layout = self.layout(shapes)
    return layout.leaves(self.decoded(layout, arrays))

  def layout(self, shapes: Sequence[Shape], num_slices: int = 0) -> "RowLayout":
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

  def coded(self, rows: Sequence[Array], key: Array) -> list[Array]:
    """Returns the arrays that are sent of some rows.

    Args:
      rows: Rows of every group of leaves (`RowLayout.rows`).
      key: Random key of this replica.
    """
    arrays = []
    for number, own in enumerate(rows):
      arrays += self.code(own, jax.random.fold_in(key, number))
    return arrays

  def decoded(
    self, layout: "RowLayout", arrays: Sequence[Array]
  ) -> list[Array]:
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


class Reduced(NamedTuple):
  """Result of one message, decoded.

  Attributes:
    mean: Mean over replicas of the decoded leaves.
    own: Decoded leaves of this replica.
  """

  mean: list[Array]
  own: list[Array]


def _cut(shape: Shape, width: int, num_slices: int) -> int:
  """Returns the width of a leaf's rows in slices.

  A slice has whole rows, and rows of zeros fill the last one. So rows of more
  than 128 values are cut where they are longer than a 16th of a slice.
  """
  longest = max(128, math.prod(shape) // (16 * num_slices))
  return min(width, block_width(math.prod(shape[1:]), longest))


Messages = Generator[list[Array], Reduced, tuple[Reduced, Tree]]


class Projection(Codec):
  """Sends a linear function of the leaves, the same on all replicas.

  A subclass has a field `then`, the encoder of what it yields.
  """

  then: Encoder

  def init(self, shapes: Sequence[Shape], key: Array) -> list[Tree]:
    """Returns the state of every leaf, which is equal on all replicas.

    Args:
      shapes: Shapes of the leaves, with the layer axis.
      key: Random key, equal on all replicas.
    """
    del key
    return [()] * len(shapes)

  def run(
    self, leaves: Sequence[Array], state: list[Tree], key: Array
  ) -> Messages:
    """Yields the leaves of each message; returns the result and new states.

    Args:
      leaves: Values of one replica, [num_layers, *shape] each.
      state: State of every leaf.
      key: Random key, equal on all replicas.
    """
    raise NotImplementedError


def encoder_of(codec: Codec) -> Encoder:
  """Returns what encodes the messages of a codec."""
  if isinstance(codec, Projection):
    return codec.then
  assert isinstance(codec, Encoder), codec
  return codec


def messages(
  codec: Codec, leaves: Sequence[Array], state: list[Tree], key: Array
) -> Messages:
  """Runs a projection; any other codec sends the leaves as they are.

  Args:
    codec: The codec.
    leaves: Values of one replica, [num_layers, *shape] each.
    state: State of every leaf.
    key: Random key, equal on all replicas.
  """
  if isinstance(codec, Projection):
    return (yield from codec.run(leaves, state, key))
  reduced = yield list(leaves)
  return reduced, state
