"""Fragments of any tree: lists of leaves, or of layers of stacked leaves.

The trainer's own models stack their blocks, and `fragments.Fragments` divides
their layers. A tree of somebody else's is divided here by the names of its
leaves: a fragment is a list of pieces, and a piece is a whole leaf or some of
its layers.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dilocox_jax.plan.schedule.fragments import (
  Fragments,
  is_stacked,
  row_axis,
  slice_parts,
  slice_rows,
)

LeafShapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class LeafPiece:
  """A leaf, or some layers or rows of it.

  Attributes:
    path: Name of the leaf, keys joined by "/".
    layers: Layers of a stacked leaf, i.e. indices of its first axis. An index
      equal to the axis's length stands for a layer of zeros that is not
      written back: it makes short fragments as long as the others. None means
      the whole leaf.
    axis: The axis that `layers` counts, if it is not the first one.
  """

  path: str
  layers: tuple[int, ...] | None = None
  axis: int = 0


LeafFragment = tuple[LeafPiece, ...]


def balanced(
  shapes: LeafShapes, num_fragments: int
) -> tuple[LeafFragment, ...]:
  """Divides whole leaves such that the largest fragment stays small.

  Leaves are given out from the largest to the smallest, each to the fragment
  that has the fewest values so far. Example: leaves of 6, 5, 4 and 3 values in
  two fragments make (6, 3) and (5, 4).

  Args:
    shapes: Leaf shapes by path.
    num_fragments: P, at most the number of leaves.

  Raises:
    ValueError: If there are fewer leaves than fragments.
  """
  if num_fragments > len(shapes):
    raise ValueError(
      f"num_fragments={num_fragments} must not exceed the number of leaves of "
      f"the tree, {len(shapes)}: lower it, or give fragments yourself"
    )
  sizes = {path: math.prod(shape) for path, shape in shapes.items()}
  totals, owner = [0] * num_fragments, {}
  for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
    fragment = totals.index(min(totals))
    owner[path] = fragment
    totals[fragment] += sizes[path]
  return by_path(shapes, num_fragments, owner.__getitem__)


def by_path(
  shapes: LeafShapes, num_fragments: int, fragment_of: Callable[[str], int]
) -> tuple[LeafFragment, ...]:
  """Divides whole leaves by a function of their path.

  Args:
    shapes: Leaf shapes by path.
    num_fragments: P.
    fragment_of: From a path to the number of its fragment, 0 to P - 1.

  Raises:
    ValueError: If a number is out of range or a fragment has no leaf.
  """
  pieces: list[list[LeafPiece]] = [[] for _ in range(num_fragments)]
  for path in shapes:
    number = fragment_of(path)
    if not 0 <= number < num_fragments:
      raise ValueError(
        f"leaf {path!r} is given fragment {number}, but num_fragments="
        f"{num_fragments} numbers them from 0 to {num_fragments - 1}"
      )
    pieces[number].append(LeafPiece(path))
  for number, fragment in enumerate(pieces):
    if not fragment:
      raise ValueError(
        f"fragment {number} has no leaf: lower num_fragments={num_fragments}, "
        "or give it one"
      )
  return tuple(map(tuple, pieces))


def by_layer(
  shapes: LeafShapes, fragments: Fragments
) -> tuple[LeafFragment, ...]:
  """Divides stacked leaves by layer, as the trainer does.

  Args:
    shapes: Leaf shapes by path; leaves below "blocks" have a layer axis.
    fragments: The division; fragment 0 has all other leaves.
  """
  if fragments.num_fragments == 1:
    return (tuple(LeafPiece(path) for path in shapes),)
  if fragments.is_sliced:
    return _by_slice(shapes, fragments)
  first = tuple(LeafPiece(path) for path in shapes if not is_stacked(path))
  stacked = [path for path in shapes if is_stacked(path)]
  in_layers = [
    tuple(LeafPiece(path, tuple(row)) for path in stacked)
    for row in fragments.layer_table.tolist()
  ]
  return (first, *in_layers)


def _by_slice(
  shapes: LeafShapes, fragments: Fragments
) -> tuple[LeafFragment, ...]:
  """Gives every fragment a slice of every leaf, as `outer.slices` does."""
  num_fragments = fragments.num_fragments

  def piece(path: str, fragment: int) -> LeafPiece | None:
    # A single number, or a leaf without any, is in fragment 0.
    if not shapes[path] or not math.prod(shapes[path]):
      return None if fragment else LeafPiece(path)
    axis = row_axis(path, shapes[path])
    num_rows = shapes[path][axis]
    width = slice_rows(num_rows, num_fragments)
    parts = slice_parts(num_rows, num_fragments, fragments.order)
    rows = np.arange(width * num_fragments).reshape(parts, num_fragments, -1)
    return LeafPiece(path, tuple(rows[:, fragment].ravel().tolist()), axis)

  return tuple(
    tuple(found for path in shapes if (found := piece(path, fragment)))
    for fragment in range(num_fragments)
  )


def covered(fragments: Sequence[LeafFragment], shapes: LeafShapes) -> None:
  """Raises ValueError unless every leaf is in the fragments exactly once.

  Args:
    fragments: Pieces of leaves that make each fragment.
    shapes: Leaf shapes by path.
  """
  pieces_of: dict[str, list[LeafPiece]] = {path: [] for path in shapes}
  for piece in itertools.chain.from_iterable(fragments):
    if piece.path not in pieces_of:
      raise ValueError(f"fragments name the leaf {piece.path!r}: there is none")
    pieces_of[piece.path].append(piece)
  for path, pieces in pieces_of.items():
    if not _are_whole(pieces, shapes[path]):
      found = [piece.layers or "all" for piece in pieces]
      raise ValueError(
        f"leaf {path!r} of shape {shapes[path]} must be in the fragments "
        f"exactly once: its layers there are {found}"
      )


def _are_whole(pieces: Sequence[LeafPiece], shape: tuple[int, ...]) -> bool:
  """Whether pieces of one leaf have all of it, and nothing twice."""
  axes = {piece.axis for piece in pieces if piece.layers is not None}
  if not axes:
    return len(pieces) == 1
  if len(axes) > 1 or any(piece.layers is None for piece in pieces):
    return False
  count = shape[axes.pop()]
  layers = itertools.chain.from_iterable(piece.layers or () for piece in pieces)
  return sorted(n for n in layers if n < count) == list(range(count))
