"""Code that says itself what each device of a replica does.

Inside a replica the partitioner divides whole arrays by itself. Where that
must not be left to it - bytes on a slow link, products of a pipeline, choices
by index, which it would collect first - a function is mapped over the devices
here. Without divided replicas around it, it simply runs.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dilocox_jax.plan.model.division import DATA_AXIS, STAGE_AXIS, Division
from dilocox_jax.pytypes import Array

INNER_AXES = (DATA_AXIS, STAGE_AXIS)


def current_division() -> Division:
  """How the replica is divided whose code is being traced."""
  mesh = jax.sharding.get_abstract_mesh()
  if DATA_AXIS not in mesh.auto_axes:
    return Division()
  return Division(mesh.shape[DATA_AXIS], mesh.shape[STAGE_AXIS])


def map_over_devices(function: Callable, in_specs, out_specs) -> Callable:
  """Maps a function over the devices of one replica.

  Args:
    function: Takes and returns what one device holds.
    in_specs: Tree prefix of `jax.sharding.PartitionSpec`s.
    out_specs: The same for the results.
  """
  return jax.shard_map(
    function,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=set(INNER_AXES),
    check_vma=False,
  )


def map_over_rows(function: Callable, *arrays: Array) -> Any:
  """Applies a function that treats rows alike and apart.

  Every device takes its part of the rows, as far as they come out even.

  Args:
    function: (*arrays) -> arrays; all begin with [layers, groups], and what
      it makes of a row depends on that row alone.
    *arrays: Its arguments.
  """
  division = current_division()
  if division.num_devices == 1:
    return function(*arrays)
  spec = PartitionSpec(*_rows(division, arrays[0].shape[:2]))
  return map_over_devices(function, spec, spec)(*arrays)


def _rows(division: Division, shape: tuple[int, ...]):
  """Axes for [layers, groups]: as many as divide them."""
  ways = (
    (STAGE_AXIS, DATA_AXIS),
    (None, (STAGE_AXIS, DATA_AXIS)),
    ((STAGE_AXIS, DATA_AXIS), None),
    (STAGE_AXIS, None),
    (None, DATA_AXIS),
    (None, STAGE_AXIS),
  )
  for way in ways:
    spec = tuple(
      () if axes is None else (axes,) if isinstance(axes, str) else axes
      for axes in way
    )
    if division.divides(spec, shape):
      return way
  return ()
