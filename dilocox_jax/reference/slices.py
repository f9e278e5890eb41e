"""Fragments that have some rows of every leaf.

A slice is a leaf of its own here: "blocks/w/0@2" is slice 2 of "blocks/w/0".
The fast code picks rows by number: outer/slices.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays
from dilocox_jax.reference.methods import LossAndGradient, Result, train


def cut_into_slices(params: Arrays, num_fragments: int) -> Arrays:
  """Cuts every leaf into P slices: p, p + P, p + 2 P, ... of its n rows.

  Rows of a layer [1, n, ...] are on its second axis. A number for each layer
  has none, so its layers are shared out instead. Source: ours.

  Args:
    params: Arrays by name; those of layer n begin with "blocks/" and end in
      "/n".
    num_fragments: P.
  """
  slices: Arrays = {}
  for name, leaf in params.items():
    axis = int(name.startswith("blocks/"))
    if leaf.ndim == axis:  # One number of a layer.
      fragment = int(name.rsplit("/", 1)[1]) % num_fragments
      slices[f"{name}@{fragment}"] = leaf
      continue
    for fragment in range(num_fragments):
      rows = range(fragment, leaf.shape[axis], num_fragments)
      if rows:
        slices[f"{name}@{fragment}"] = leaf.take(rows, axis)
  return slices


def put_together(slices: Arrays) -> Arrays:
  """Undoes `cut_into_slices`."""
  parts: dict[str, list[np.ndarray]] = {}
  for name, part in slices.items():
    parts.setdefault(name.split("@")[0], []).append(part)
  return {name: _joined(name, found) for name, found in parts.items()}


def _joined(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
  axis = int(name.startswith("blocks/"))
  if parts[0].ndim == axis:  # One number of a layer.
    return parts[0]
  rows = [np.moveaxis(part, axis, 0) for part in parts]
  joined = np.empty((sum(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype)
  for fragment, part in enumerate(rows):
    joined[fragment :: len(rows)] = part
  return np.moveaxis(joined, 0, axis)


def train_slices(
  loss_and_gradient: LossAndGradient,
  params: Arrays,
  batches: Sequence[Sequence[Any]],
  *,
  num_fragments: int,
  **settings: Any,
) -> Result:
  """Trains as `methods.train` does, with fragments that are sliced.

  Args:
    loss_and_gradient: The model and its loss, of whole leaves.
    params: Where every replica and theta start, whole leaves.
    batches: Batches by replica and step.
    num_fragments: P.
    **settings: As for `methods.train`.
  """

  def of_slices(slices: Arrays, batch: Any) -> tuple[float, Arrays]:
    loss, gradient = loss_and_gradient(put_together(slices), batch)
    return loss, cut_into_slices(gradient, num_fragments)

  slices = cut_into_slices(params, num_fragments)
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
      return [put_together(own) for own in theta]
    return put_together(theta)

  return Result(
    whole(found.theta),
    whole(found.params),
    found.losses,
    [whole(theta) for theta in found.snapshots],
  )
