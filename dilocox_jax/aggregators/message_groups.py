"""Messages that do not depend on how a replica is divided among its devices.

A replica on one device encodes several small leaves together, as a group. A
replica on several devices encodes each leaf by itself. So that both can meet in
a mailbox, a message always has the groups of a replica on one device. Example
with two small leaves, a and b:

    encoded on one device       codes of a and b, scales of a and b
    encoded on several devices  codes of a, scales of a, codes of b, scales of b
    message of either           codes of a and b, scales of a and b
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder, Quantizer
from dilocox_jax.codecs.batching import (
  Arrays,
  Shape,
  groups_on_one_device,
)
from dilocox_jax.trees import Array


def is_in_rows(encoder: Encoder) -> bool:
  """Returns whether an encoder codes rows, which `MessageGroups` needs."""
  return isinstance(encoder, Quantizer)


@dataclasses.dataclass(frozen=True)
class MessageGroups:
  """Converts arrays between the groups of a program and those of a message.

  The leaves of a group are encoded together. The program of this replica may
  have one group for each leaf. A message has the groups of a replica on one
  device.

  Attributes:
    widths: Number of values in a row, by leaf.
    layers: Number of layers, by leaf.
    rows: Number of rows in a layer, by leaf.
    of_message: Indices of the leaves of each group of the message.
    of_program: Indices of the leaves of each group of the program: equal to
      `of_message`, or one group for each leaf in the same order.
  """

  widths: tuple[int, ...]
  layers: tuple[int, ...]
  rows: tuple[int, ...]
  of_message: list[list[int]]
  of_program: list[list[int]]

  @classmethod
  def of(cls, encoder: Quantizer, shapes: Sequence[Shape]) -> "MessageGroups":
    """Returns the groups of leaves with these shapes.

    The groups of the program depend on how the current replica is divided among
    its devices. `shapes` are (num_layers, *shape) for each leaf.
    """
    layout = encoder.layout(list(shapes))
    return cls(
      widths=layout.widths,
      layers=tuple(shape[0] for shape in shapes),
      rows=tuple(
        -(-math.prod(shape[1:]) // width)
        for shape, width in zip(shapes, layout.widths, strict=True)
      ),
      of_message=groups_on_one_device(layout.shapes, layout.widths),
      of_program=layout.groups,
    )

  def to_message(self, arrays: Arrays) -> list[Array]:
    """Joins the arrays of the program's groups into those of the message.

    A group is leaves that are encoded together. A replica on several devices
    encodes each leaf alone. This joins the rows of leaves that a replica on one
    device would encode together.

    Args:
      arrays: Results of the encoder, such as codes and scales, group by group:
        arrays [layers, rows, ...].

    Returns:
      The arrays of the message, group by group. Those of several leaves are [1,
      rows of all layers and leaves, ...].
    """
    if self.of_program == self.of_message:
      return list(arrays)
    # A group has `num_arrays` arrays, e.g. its codes and its scales.
    num_arrays = len(arrays) // len(self.of_program)
    joined = []
    first = 0  # Index of the program's group where the message's group begins.
    for group in self.of_message:
      for number in range(num_arrays):
        parts = [
          arrays[(first + place) * num_arrays + number]
          for place in range(len(group))
        ]
        if len(parts) > 1:
          parts = [part.reshape(1, -1, *part.shape[2:]) for part in parts]
        joined.append(jnp.concatenate(parts, axis=1))
      first += len(group)
    return joined

  def from_messages(self, arrays: Arrays) -> list[Array]:
    """Splits the arrays of K messages into those of the program's groups.

    A group is leaves that are encoded together. A replica on several devices
    encodes each leaf alone. This splits the rows of leaves that the message has
    together.

    Args:
      arrays: Arrays [K, layers, rows, ...] of the message, group by group.

    Returns:
      Arrays [K, layers, rows, ...] of the program, group by group.
    """
    if self.of_program == self.of_message:
      return list(arrays)
    # A group has `num_arrays` arrays, e.g. its codes and its scales.
    num_arrays = len(arrays) // len(self.of_message)
    separate = []
    for position, group in enumerate(self.of_message):
      first = position * num_arrays
      # Example: leaves of 2, 3 and 4 rows are split at the rows 2 and 5.
      num_rows = [self.layers[leaf] * self.rows[leaf] for leaf in group]
      ends = list(itertools.accumulate(num_rows))[:-1]
      parts_of_arrays = []
      for array in arrays[first : first + num_arrays]:
        rows = array.reshape(len(array), 1, -1, *array.shape[3:])
        parts_of_arrays.append(jnp.split(rows, ends, axis=2))
      for place, leaf in enumerate(group):
        for parts in parts_of_arrays:
          part = parts[place]
          separate.append(
            part.reshape(
              len(part), self.layers[leaf], self.rows[leaf], *part.shape[3:]
            )
          )
    return separate
