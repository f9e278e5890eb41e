"""Wire arrays as bytes, in one message.

What is gathered or swapped is laid out as bytes in one array, so that a slow
link sees one message and not one a leaf. Where a replica has several devices
each sends what it holds, to its like in the other replicas: together they
send what one device would, and nothing is collected first. What does not come
out even is cut into equal numbers of bytes, so that all devices together send
fewer bytes more than they are.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dilocox_jax.distributed.local_map import (
  INNER_AXES,
  current_division,
  map_over_devices,
)
from dilocox_jax.distributed.replicas import REPLICA_AXIS, partition
from dilocox_jax.plan.model.division import Division
from dilocox_jax.pytypes import Array

Sent = Sequence[tuple[Array, ...]]  # Wire arrays of every parcel.


def all_gathered(sent: Sent) -> list[tuple[Array, ...]]:
  """Everything that all replicas send, [M, ...] where it was [...]."""
  return _by_device(sent, 0, lambda raw: jax.lax.all_gather(raw, REPLICA_AXIS))


def all_to_all(sent: Sent) -> list[tuple[Array, ...]]:
  """From [M, ...] by receiver to [M, ...] by sender."""
  return _by_device(
    sent, 1, lambda raw: jax.lax.all_to_all(raw, REPLICA_AXIS, 0, 0)
  )


def _by_device(
  sent: Sent, num_kept: int, move: Callable[[Array], Array]
) -> list[tuple[Array, ...]]:
  """Moves arrays as bytes, each device what it holds.

  Args:
    sent: What is moved; its first `num_kept` axes are.
    num_kept: 0 or 1.
    move: From bytes [..., N] to bytes [M, N].
  """
  arrays, tree = jax.tree.flatten(list(sent))
  division = current_division()
  if division.num_devices == 1:
    return jax.tree.unflatten(tree, _moved(arrays, num_kept, move))
  specs = [_spec(division, array, num_kept) for array in arrays]
  odd = [array for array, spec in zip(arrays, specs, strict=True) if not spec]
  even = [array for array, spec in zip(arrays, specs, strict=True) if spec]
  in_specs = [spec for spec in specs if spec]
  out_specs = [PartitionSpec(None, *spec[num_kept:]) for spec in in_specs]
  if odd:
    even.append(_filled(_bundled(odd, num_kept), division.num_devices))
    in_specs.append(PartitionSpec(*([None] * num_kept), INNER_AXES))
    out_specs.append(PartitionSpec(None, INNER_AXES))

  def local(*pieces: Array) -> tuple[Array, ...]:
    return tuple(_moved(pieces, num_kept, move))

  found = list(
    map_over_devices(local, tuple(in_specs), tuple(out_specs))(*even)
  )
  cut = _unbundled(found.pop(), odd, num_kept) if odd else []
  of_even, of_odd = iter(found), iter(cut)
  moved = [next(of_even if spec else of_odd) for spec in specs]
  return jax.tree.unflatten(tree, moved)


def _spec(
  division: Division, array: Array, num_kept: int
) -> PartitionSpec | None:
  """How the devices of a replica divide an array, if it comes out even."""
  found = division.flat_spec(array.shape[num_kept:])
  if found is None:
    return None
  return PartitionSpec(*([None] * num_kept), *partition(found))


def _filled(raw: Array, multiple: int) -> Array:
  """Bytes [..., N], with zeros up to a multiple."""
  missing = -raw.shape[-1] % multiple
  return jnp.pad(raw, [(0, 0)] * (raw.ndim - 1) + [(0, missing)])


def _moved(
  arrays: Sequence[Array], num_kept: int, move: Callable[[Array], Array]
) -> list[Array]:
  return _unbundled(move(_bundled(arrays, num_kept)), arrays, num_kept)


def _bundled(arrays: Sequence[Array], num_kept: int) -> Array:
  """All arrays as bytes in one; their first `num_kept` axes stay."""

  def as_bytes(array: Array) -> Array:
    raw = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return raw.reshape(*array.shape[:num_kept], -1)

  return jnp.concatenate([as_bytes(array) for array in arrays], axis=-1)


def _unbundled(raw: Array, like: Sequence[Array], num_kept: int) -> list[Array]:
  """Arrays like those that were bundled, with the axes of `raw` in front.

  Args:
    raw: Bytes [..., N]; the axes before the last replace the kept ones.
    like: What was bundled.
    num_kept: As it was bundled.
  """
  start, found = 0, []
  for array in like:
    shape = (*raw.shape[:-1], *array.shape[num_kept:])
    size = array.dtype.itemsize
    length = math.prod(array.shape[num_kept:]) * size
    part = raw[..., start : start + length]
    start += length
    if size > 1:
      part = part.reshape(*shape, size)
      found.append(jax.lax.bitcast_convert_type(part, array.dtype))
    else:
      found.append(part.reshape(shape).astype(array.dtype))
  return found
