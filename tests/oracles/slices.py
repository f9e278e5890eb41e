"""Fragments that have some rows of every leaf.

A slice is a leaf of its own here: "blocks/w@2" is slice 2 of "blocks/w". The
fast code picks rows by number: outer/cuts.py.
"""

import dataclasses
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays
from dilocox_jax.reference.methods import LossAndGradient, Result, train


def cut_into_slices(params: Arrays, count: int, order: str) -> Arrays:
  """Cuts every leaf into slices of ceil(n / count) of its n rows.

  Rows of layers [num_layers, n, ...] are on the second axis, and those of one
  number for each layer are its layers. Source: ours.

  Args:
    params: Arrays by name; those of layers begin with "blocks/".
    count: Number of slices, P.
    order: "sliced" gives a slice neighboring rows, and "interleaved" the rows
      p, p + P, p + 2 P, ...
  """
  slices: Arrays = {}
  for name, leaf in params.items():
    axis = _axis(name, leaf)
    num_rows = leaf.shape[axis]
    width = -(-leaf.shape[axis] // count)
    for number in range(count):
      rows = range(number, num_rows, count)
      if order == "sliced":
        rows = range(num_rows)[number * width : (number + 1) * width]
      if rows:
        slices[f"{name}@{number}"] = leaf.take(rows, axis)
  return slices


def put_together(slices: Arrays, order: str) -> Arrays:
  """Undoes `cut_into_slices`."""
  parts: dict[str, list[np.ndarray]] = {}
  for name, part in slices.items():
    parts.setdefault(name.split("@")[0], []).append(part)
  wholes: Arrays = {}
  for name, found in parts.items():
    axis = _axis(name, found[0])
    whole = np.concatenate(found, axis)
    if order == "interleaved":
      count = len(found)
      num_rows = whole.shape[axis]
      places = [r for p in range(count) for r in range(p, num_rows, count)]
      whole = whole.take(np.argsort(places), axis)
    wholes[name] = whole
  return wholes


def _axis(name: str, leaf: np.ndarray) -> int:
  return min(int(name.startswith("blocks/")), leaf.ndim - 1)


@dataclasses.dataclass
class _OnWholeLeaves:
  """An optimizer that steps on whole leaves, as Muon must.

  Attributes:
    optimizer: The optimizer of whole leaves.
    count: Number of slices, P.
    order: As for `cut_into_slices`.
  """

  optimizer: Any
  count: int
  order: str

  def step(self, slices: Arrays, gradients: Arrays) -> Arrays:
    """Returns the slices after one step."""
    whole = put_together(slices, self.order)
    step = self.optimizer.step(whole, put_together(gradients, self.order))
    return cut_into_slices(step, self.count, self.order)


def train_slices(
  loss_and_gradient: LossAndGradient,
  params: Arrays,
  batches: Any,
  *,
  num_fragments: int,
  fragment_order: str,
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
  given = num_fragments, fragment_order

  def of_slices(slices: Arrays, batch: Any) -> tuple[float, Arrays]:
    params = put_together(slices, fragment_order)
    loss, gradient = loss_and_gradient(params, batch)
    return loss, cut_into_slices(gradient, *given)

  inner = settings.pop("inner")
  slices = cut_into_slices(params, *given)
  names = [[n for n in slices if n.endswith(f"@{p}")] for p in range(given[0])]
  settings |= {"inner": _OnWholeLeaves(inner, *given), "fragments": names}
  found = train(of_slices, slices, batches, **settings)

  def whole(theta: Any) -> Any:
    if isinstance(theta, list):
      return [whole(own) for own in theta]
    return put_together(theta, fragment_order)

  each = found.theta, found.params, found.snapshots
  theta, params_found, snapshots = map(whole, each)
  return Result(theta, params_found, found.losses, snapshots)
