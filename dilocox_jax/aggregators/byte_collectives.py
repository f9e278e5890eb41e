"""Collectives of JAX that send several arrays as one message of bytes.

If a replica has several devices, each device sends its part of an array to the
devices that hold the same part in the other replicas.
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
  """Gathers the arrays of all M replicas: [...] becomes [M, ...].

  Args:
    arrays: Arrays [...] that this replica sends to all others.
    axis_name: Name of the axis over which replicas are mapped.
  """

  def gather(raw: Array) -> Rows:
    return tuple(jax.lax.all_gather(raw, axis_name))

  permute = functools.partial(_permuted, True, axis_name)
  return _over_devices(arrays, 0, _by_platform(gather, permute, axis_name))


def all_to_all(
  arrays: Sequence[Array], axis_name: str = REPLICA_AXIS
) -> list[Array]:
  """Sends row m of each array to replica m, for all M replicas.

  Args:
    arrays: Arrays [M, ...], with a row for each receiver.
    axis_name: Name of the axis over which replicas are mapped.

  Returns:
    Arrays [M, ...], with a row from each sender.
  """

  def swap(raw: Array) -> Rows:
    return tuple(jax.lax.all_to_all(raw, axis_name, 0, 0))

  same_for_all = False  # Each receiver gets a row of its own.
  permute = functools.partial(_permuted, same_for_all, axis_name)
  move = _by_platform(swap, permute, axis_name)
  return _over_devices(arrays, num_leading=1, move=move)


def swapped_in_pairs(
  arrays: Sequence[Array],
  rounds: Sequence[Sequence[int]],
  number: Index,
  axis_name: str = REPLICA_AXIS,
) -> list[Array]:
  """Swaps arrays between pairs of replicas, and returns the partner's arrays.

  Args:
    arrays: Arrays that this replica sends to its partner.
    rounds: Several ways to form pairs: for each way, the partner of every
      replica, [rounds][M] (`pairs.tournament`). A replica that is its own
      partner gets its own arrays back.
    number: Index of the chosen way in `rounds` (int32 scalar), equal on all
      replicas.
    axis_name: Name of the axis over which replicas are mapped.
  """

  def swap_in(partners: Sequence[int]) -> Callable[[Array], Array]:
    pairs = list(enumerate(partners))
    return lambda raw: jax.lax.ppermute(raw, axis_name, pairs)

  # The compiled program has a branch for each way, because routes are fixed.
  swaps = [swap_in(partners) for partners in rounds]

  def swap(raw: Array) -> Rows:
    return (jax.lax.switch(number, swaps, raw),)

  # The first axis is that of the senders, and the partner is the only one.
  received = _over_devices(arrays, num_leading=0, move=swap)
  return [array[0] for array in received]


# The received bytes, uint8 [N] from every sender, in the order of the replicas.
# In a swap between pairs, the partner is the only sender.
Rows = tuple[Array, ...]
# Function that sends bytes and returns the received `Rows`. Its argument is
# uint8 [N] if all replicas get the same bytes, and [M, N] if row m goes to
# replica m.
Move = Callable[[Array], Rows]


def _by_platform(collective: Move, permute: Move, axis_name: str) -> Move:
  """Returns a function that calls `permute` between TPUs, else `collective`.

  Both send the same bytes.
  """
  if axis_name not in jax.sharding.get_abstract_mesh().axis_names:
    return collective  # All replicas are on one device.

  # The compiler for TPUs turns an all-gather between TPU slices into a sum of
  # arrays that are mostly zeros, which sends more bytes.
  choose: Any = jax.lax.platform_dependent
  return functools.partial(choose, tpu=permute, default=collective)


def _permuted(same_for_all: bool, axis_name: str, raw: Array) -> Rows:
  """Does an all-gather or an all-to-all by permutes, one to each other replica.

  `raw` is uint8 [N] if `same_for_all` (all-gather), else [M, N] with a row for
  each receiver. Returns the bytes [N] of every sender, in the order of the
  replicas.
  """
  num_replicas = jax.lax.axis_size(axis_name)
  replica = jax.lax.axis_index(axis_name)
  rows = () if same_for_all else tuple(raw)
  parts = []
  for distance in range(num_replicas):
    # Every replica sends to the replica `distance` places after it. At distance
    # 0 it keeps its own bytes.
    pairs = [(i, (i + distance) % num_replicas) for i in range(num_replicas)]
    part = raw if same_for_all else _select_row(rows, replica + distance)
    if distance:
      part = jax.lax.ppermute(part, axis_name, pairs)
    parts.append(part)
  # `parts[distance]` was sent by replica `replica - distance` (modulo M).
  return tuple(
    _select_row(parts, replica - sender) for sender in range(num_replicas)
  )


def _select_row(rows: Sequence[Array], number: Index) -> Array:
  """Returns row `number % len(rows)`, where the number may be traced."""
  # The compiler for TPUs takes minutes to index bytes [M, N] with N of about
  # 10^7, but seconds to select.
  return jax.lax.select_n(number % len(rows), *rows)


def _over_devices(
  arrays: Sequence[Array], num_leading: int, move: Move
) -> list[Array]:
  """Sends arrays as bytes; each device of this replica sends its own part.

  Arrays that the devices cannot divide into equal parts are put together as
  bytes. The bytes are cut into one equal part for each device, with padding: 10
  bytes on 4 devices are 4 parts of 3 bytes.

  Args:
    arrays: Arrays to send: [M, ...] with a row for each receiver, or [...] that
      all receivers get.
    num_leading: 1 if the first axis has a row for each receiver, otherwise 0.
    move: Function that sends bytes, and returns the bytes from each sender.

  Returns:
    The received arrays, with a row from each sender: [M, ...], or [1, ...] in a
    swap between pairs.
  """
  division = current_division()
  if division.num_devices == 1:
    return _send_as_bytes(arrays, num_leading, move)
  specs = [_spec(division, array, num_leading) for array in arrays]
  pairs = list(zip(arrays, specs, strict=True))
  # Arrays that devices cannot divide equally (`spec` is None) are put together
  # as bytes, and the bytes are divided.
  undivided = [array for array, spec in pairs if not spec]
  operands = [array for array, spec in pairs if spec]
  in_specs = [spec for spec in specs if spec]
  # The first axis of a received array is that of the senders. Devices do not
  # divide it.
  out_specs = [PartitionSpec(None, *spec[num_leading:]) for spec in in_specs]
  if undivided:
    raw = _bundled(undivided, num_leading)
    raw = pad(raw, -raw.shape[-1] % division.num_devices)
    operands.append(raw)
    leading = [None] * num_leading
    in_specs.append(PartitionSpec(*leading, INNER_AXES))
    out_specs.append(PartitionSpec(None, INNER_AXES))

  def device_program(*local_arrays: Array) -> tuple[Array, ...]:
    return tuple(_send_as_bytes(local_arrays, num_leading, move))

  over_devices = map_over_devices(
    device_program, tuple(in_specs), tuple(out_specs)
  )
  results = list(over_devices(*operands))
  unpacked = []
  if undivided:
    # Their bytes are the last operand, and so the last result.
    unpacked = _unbundled(results.pop(), undivided, num_leading)
  # The results are put into the order of `arrays`.
  from_divided = iter(results)
  from_undivided = iter(unpacked)
  return [next(from_divided if spec else from_undivided) for spec in specs]


def _spec(
  division: Division, array: Array, num_leading: int
) -> PartitionSpec | None:
  """Returns how devices divide an array equally, or None if they cannot.

  The first `num_leading` axes (0 or 1) are not divided.
  """
  spec = division.flat_spec(array.shape[num_leading:])
  if spec is None:
    return None
  leading = [None] * num_leading
  return PartitionSpec(*leading, *partition(spec))


def _send_as_bytes(
  arrays: Sequence[Array], num_leading: int, move: Move
) -> list[Array]:
  """Sends arrays as one array of bytes (see `_over_devices`)."""
  received = move(_bundled(arrays, num_leading))
  arrays_by_sender = [_unbundled(raw, arrays, num_leading) for raw in received]
  return [jnp.stack(parts) for parts in zip(*arrays_by_sender, strict=True)]


def _bundled(arrays: Sequence[Array], num_leading: int) -> Array:
  """Concatenates the bytes of several arrays, uint8 [..., N].

  The first `num_leading` axes, equal in all arrays, stay.
  """

  def as_bytes(array: Array) -> Array:
    # Axes are joined before values become bytes. Otherwise the compiler for
    # TPUs takes minutes for an array such as scales [layers, groups, 1].
    leading = array.shape[:num_leading]
    raw = jax.lax.bitcast_convert_type(array.reshape(*leading, -1), jnp.uint8)
    return raw.reshape(*leading, -1)

  return jnp.concatenate([as_bytes(array) for array in arrays], axis=-1)


def _unbundled(
  raw: Array, like: Sequence[Array], num_leading: int
) -> list[Array]:
  """Makes arrays from their bytes. It reverses `_bundled`.

  Args:
    raw: Bytes uint8 [..., N]. Each result has the leading axes of `raw`.
    like: Arrays with the shapes and dtypes of the arrays that were bundled.
    num_leading: Number of leading axes in `like`, which are ignored.
  """
  start = 0
  arrays = []
  for array in like:
    shape = (*raw.shape[:-1], *array.shape[num_leading:])
    item_bytes = array.dtype.itemsize
    length = math.prod(array.shape[num_leading:]) * item_bytes
    values = raw[..., start : start + length]
    start += length
    if item_bytes > 1:
      values = values.reshape(*raw.shape[:-1], -1, item_bytes)
      values = jax.lax.bitcast_convert_type(values, array.dtype)
    arrays.append(values.reshape(shape).astype(array.dtype))
  return arrays
