"""Carries encoded arrays to the other replicas, as one message of bytes.

What is gathered or swapped is laid out as bytes in one array, so that a slow
link carries one message instead of one for each leaf.

Where a replica has several devices, each device sends what it holds to the
devices that hold the same part in the other replicas. Together they send what
one device would send, and nothing is collected first. Arrays that the devices
do not hold in equal parts are put together as bytes and cut into one equal
part for each device. That takes a few bytes of padding, fewer than there are
devices: 10 bytes on 4 devices are 4 parts of 3 bytes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dilocox_jax.codecs.batching import pad
from dilocox_jax.distributed.local_map import (
  INNER_AXES,
  current_division,
  map_over_devices,
)
from dilocox_jax.distributed.replicas import REPLICA_AXIS, partition
from dilocox_jax.plan.model.division import Division
from dilocox_jax.trees import Array, Index


def all_gathered(
  arrays: Sequence[Array], axis_name: str = REPLICA_AXIS
) -> list[Array]:
  """Gathers every replica's arrays: [...] becomes [M, ...].

  Args:
    arrays: What this replica sends to all others.
    axis_name: Axis over which replicas are mapped.
  """

  def gather(raw: Array) -> Rows:
    return tuple(jax.lax.all_gather(raw, axis_name))

  permute = functools.partial(_permuted, True, axis_name)
  return _over_devices(arrays, 0, _by_platform(gather, permute, axis_name))


def all_to_all(
  arrays: Sequence[Array], axis_name: str = REPLICA_AXIS
) -> list[Array]:
  """Swaps arrays: [M, ...] by receiver becomes [M, ...] by sender.

  Args:
    arrays: What this replica sends, [M, ...] with a row for each receiver.
    axis_name: Axis over which replicas are mapped.
  """

  def swap(raw: Array) -> Rows:
    return tuple(jax.lax.all_to_all(raw, axis_name, 0, 0))

  permute = functools.partial(_permuted, False, axis_name)
  return _over_devices(arrays, 1, _by_platform(swap, permute, axis_name))


def swapped_in_pairs(
  arrays: Sequence[Array],
  rounds: Sequence[Sequence[int]],
  number: Index,
  axis_name: str = REPLICA_AXIS,
) -> list[Array]:
  """Swaps arrays with the partner of a round: [...] becomes [...].

  Args:
    arrays: What this replica sends to its partner.
    rounds: Partner of each replica in every round, [rounds][M]. A replica that
      is its own partner gets what it has, without a link.
    number: Number of the round, equal on all replicas.
    axis_name: Axis over which replicas are mapped.
  """

  def swap_in(partners: Sequence[int]) -> Callable[[Array], Array]:
    pairs = list(enumerate(partners))
    return lambda raw: jax.lax.ppermute(raw, axis_name, pairs)

  ways = [swap_in(partners) for partners in rounds]

  def swap(raw: Array) -> Rows:
    return (jax.lax.switch(number, ways, raw),)

  return [array[0] for array in _over_devices(arrays, 0, swap)]


Rows = tuple[Array, ...]  # Bytes [N] of every replica, by sender.
Move = Callable[[Array], Rows]  # From bytes [N], or [M, N] by receiver.


def _by_platform(collective: Move, permute: Move, axis_name: str) -> Move:
  """Returns `permute` where the program is compiled for TPUs.

  The compiler for TPUs turns a gathering over slices into a sum of arrays that
  are mostly zeros, which sends more bytes; it leaves permutes as they are.
  """
  if axis_name not in jax.sharding.get_abstract_mesh().axis_names:
    return collective  # All replicas are on one device.

  choose: Any = jax.lax.platform_dependent
  return functools.partial(choose, tpu=permute, default=collective)


def _permuted(same_for_all: bool, axis_name: str, raw: Array) -> Rows:
  """Gathers or swaps by permutes, one for each other replica.

  They do not depend on each other, so the same inner steps can hide all.

  Args:
    same_for_all: Whether all replicas get the same.
    axis_name: Axis over which replicas are mapped.
    raw: Array that all replicas get, or [M, ...] by receiver.

  Returns:
    Arrays [...] by sender.
  """
  num_replicas = jax.lax.axis_size(axis_name)
  own = jax.lax.axis_index(axis_name)
  rows = () if same_for_all else tuple(raw)
  parts = []
  for hop in range(num_replicas):
    pairs = [(i, (i + hop) % num_replicas) for i in range(num_replicas)]
    part = raw if same_for_all else _chosen(rows, own + hop)
    parts.append(jax.lax.ppermute(part, axis_name, pairs) if hop else part)
  # What came over `hop` replicas was sent by replica own - hop.
  return tuple(_chosen(parts, own - sender) for sender in range(num_replicas))


def _chosen(rows: Sequence[Array], number: Index) -> Array:
  """Returns the row with a traced number, counted modulo their number.

  The compiler for TPUs takes minutes to index or roll bytes [M, N] where N is
  of the order of 10^7, and seconds for this.
  """
  return jax.lax.select_n(number % len(rows), *rows)


def _over_devices(
  arrays: Sequence[Array], num_kept: int, move: Move
) -> list[Array]:
  """Moves arrays as bytes; each device moves what it holds.

  Args:
    arrays: Arrays to move.
    num_kept: Leading axes that are not turned into bytes, 0 or 1.
    move: Function that moves bytes.
  """
  division = current_division()
  if division.num_devices == 1:
    return _moved(arrays, num_kept, move)
  specs = [_spec(division, array, num_kept) for array in arrays]
  pairs = list(zip(arrays, specs, strict=True))
  undivided = [array for array, spec in pairs if not spec]
  operands = [array for array, spec in pairs if spec]
  in_specs = [spec for spec in specs if spec]
  out_specs = [PartitionSpec(None, *spec[num_kept:]) for spec in in_specs]
  if undivided:
    raw = _bundled(undivided, num_kept)
    raw = pad(raw, -raw.shape[-1] % division.num_devices)
    operands.append(raw)
    in_specs.append(PartitionSpec(*([None] * num_kept), INNER_AXES))
    out_specs.append(PartitionSpec(None, INNER_AXES))

  def device_program(*local_arrays: Array) -> tuple[Array, ...]:
    return tuple(_moved(local_arrays, num_kept, move))

  over_devices = map_over_devices(
    device_program, tuple(in_specs), tuple(out_specs)
  )
  results = list(over_devices(*operands))
  unpacked = _unbundled(results.pop(), undivided, num_kept) if undivided else []
  from_divided = iter(results)
  from_undivided = iter(unpacked)
  return [next(from_divided if spec else from_undivided) for spec in specs]


def _spec(
  division: Division, array: Array, num_kept: int
) -> PartitionSpec | None:
  """How a replica's devices divide an array equally; None if they cannot."""
  spec = division.flat_spec(array.shape[num_kept:])
  if spec is None:
    return None
  return PartitionSpec(*([None] * num_kept), *partition(spec))


def _moved(arrays: Sequence[Array], num_kept: int, move: Move) -> list[Array]:
  """Moves arrays as bytes; returns them with the axis [M] of senders."""
  moved = move(_bundled(arrays, num_kept))
  rows = [_unbundled(raw, arrays, num_kept) for raw in moved]
  return [jnp.stack(parts) for parts in zip(*rows, strict=True)]


def _bundled(arrays: Sequence[Array], num_kept: int) -> Array:
  """Returns all arrays as bytes in one; their first `num_kept` axes stay."""

  def as_bytes(array: Array) -> Array:
    # Axes are joined before values become bytes: of scales [layers, groups, 1]
    # the compiler for TPUs takes minutes otherwise.
    kept = array.shape[:num_kept]
    raw = jax.lax.bitcast_convert_type(array.reshape(*kept, -1), jnp.uint8)
    return raw.reshape(*kept, -1)

  return jnp.concatenate([as_bytes(array) for array in arrays], axis=-1)


def _unbundled(raw: Array, like: Sequence[Array], num_kept: int) -> list[Array]:
  """Reverses `_bundled`, with the leading axes of `raw` in front.

  Args:
    raw: Bytes [..., N]; the axes before the last replace the kept ones.
    like: Arrays that were bundled.
    num_kept: Leading axes that were kept, as for `_bundled`.
  """
  start = 0
  arrays = []
  for array in like:
    shape = (*raw.shape[:-1], *array.shape[num_kept:])
    item_bytes = array.dtype.itemsize
    length = math.prod(array.shape[num_kept:]) * item_bytes
    values = raw[..., start : start + length]
    start += length
    if item_bytes > 1:
      values = values.reshape(*raw.shape[:-1], -1, item_bytes)
      values = jax.lax.bitcast_convert_type(values, array.dtype)
    arrays.append(values.reshape(shape).astype(array.dtype))
  return arrays
