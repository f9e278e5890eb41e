"""Fragments that have some rows of every leaf.

A slice is a leaf of its own here: "blocks/w/0@2" is slice 2 of "blocks/w/0".
The fast code picks rows by number: outer/cuts.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays
from dilocox_jax.reference.methods import LossAndGradient, Result, train


def cut_into_slices(
  params: Arrays, num_fragments: int, fragment_order: str = "sliced"
) -> Arrays:
  """Cuts every leaf into P slices of ceil(n / P) of its n rows.

  Rows of a layer [1, n, ...] are on its second axis. A number for each layer
  has none, so its layers are shared out instead. Source: ours.

  Args:
    params: Arrays by name; those of layer n begin with "blocks/" and end in
      "/n".
    num_fragments: P.
    fragment_order: "sliced" gives a slice neighbouring rows, and "interleaved"
      the rows p, p + P, p + 2 P, ...
  """
  num_layers = len({n.rsplit("/", 1)[1] for n in params if "blocks/" in n})
  slices: Arrays = {}
  for name, leaf in params.items():
    axis = int(name.startswith("blocks/"))
    if leaf.ndim == 0 and not axis:  # One number is in slice 0.
      slices[f"{name}@0"] = leaf
      continue
    if leaf.ndim == axis:  # One number of a layer.
      layer = int(name.rsplit("/", 1)[1])
      for fragment in range(num_fragments):
        if layer in _rows(fragment, num_layers, num_fragments, fragment_order):
          slices[f"{name}@{fragment}"] = leaf
      continue
    for fragment in range(num_fragments):
      num_rows = leaf.shape[axis]
      rows = _rows(fragment, num_rows, num_fragments, fragment_order)
      if rows:
        slices[f"{name}@{fragment}"] = leaf.take(rows, axis)
  return slices


def _rows(
  fragment: int, num_rows: int, num_fragments: int, fragment_order: str
) -> range:
  if fragment_order == "interleaved":
    return range(fragment, num_rows, num_fragments)
  width = -(-num_rows // num_fragments)
  return range(num_rows)[fragment * width : (fragment + 1) * width]


def put_together(slices: Arrays, fragment_order: str = "sliced") -> Arrays:
  """Undoes `cut_into_slices`."""
  parts: dict[str, list[np.ndarray]] = {}
  for name, part in slices.items():
    parts.setdefault(name.split("@")[0], []).append(part)
  wholes: Arrays = {}
  for name, found in parts.items():
    if found[0].ndim == 0:
      wholes[name] = found[0]
      continue
    axis = min(int(name.startswith("blocks/")), found[0].ndim - 1)
    whole = np.concatenate(found, axis)
    if fragment_order == "interleaved":
      count, num_rows = len(found), whole.shape[axis]
      order = [r for p in range(count) for r in range(p, num_rows, count)]
      whole = whole.take(np.argsort(order), axis)
    wholes[name] = whole
  return wholes


def train_slices(
  loss_and_gradient: LossAndGradient,
  params: Arrays,
  batches: Sequence[Sequence[Any]],
  *,
  num_fragments: int,
  fragment_order: str = "sliced",
  **settings: Any,
) -> Result:
  """Trains as `methods.train` does, with fragments that are sliced.

  Args:
    loss_and_gradient: The model and its loss, of whole leaves.
    params: Where every replica and theta start, whole leaves.
    batches: Batches by replica and step.
    num_fragments: P.
    fragment_order: As for `cut_into_slices`.
    **settings: As for `methods.train`.
  """

  def of_slices(slices: Arrays, batch: Any) -> tuple[float, Arrays]:
    params = put_together(slices, fragment_order)
    loss, gradient = loss_and_gradient(params, batch)
    return loss, cut_into_slices(gradient, num_fragments, fragment_order)

  slices = cut_into_slices(params, num_fragments, fragment_order)
  found = train(
    of_slices,
    slices,
    batches,
    fragments=[
      [name for name in slices if name.endswith(f"@{fragment}")]
      for fragment in range(num_fragments)
    ],
    **settings,
  )

  def whole(theta: Any) -> Any:
    if isinstance(theta, list):
      return [put_together(own, fragment_order) for own in theta]
    return put_together(theta, fragment_order)

  return Result(
    whole(found.theta),
    whole(found.params),
    found.losses,
    [whole(theta) for theta in found.snapshots],
  )
