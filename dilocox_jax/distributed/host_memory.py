"""Arrays in the host's memory, read and written row by row.

A round needs the outer state at a few steps and one fragment at a time; in
between it would only fill the accelerator. The type of an array says which
memory it is in, and only the rows that are asked for move. So everything else
in the project is written once, for arrays in either memory. A row is read by a
dynamic slice along one dimension and never by a gather, because compilers can
slice host memory directly and cannot gather from it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
  SingleDeviceSharding,
)
from jax.typing import ArrayLike

from dilocox_jax.plan.choices import MEMORIES
from dilocox_jax.pytypes import Array, Index, Tree

DEVICE, HOST = MEMORIES
_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host

# A TPU stores arrays in tiles of this many rows, in host memory too, and its
# compiler cannot move a part of a tile.
_TILE_ROWS = 8


def is_worth_moving(shape: tuple[int, ...]) -> bool:
  """Whether an array of an outer state in host memory should be there, too.

  Matrices should. Counts, scales of norms and odd shapes stay on the device:
  they are less than one percent, and not every compiler could slice them.

  Args:
    shape: Shape of what one device holds of one replica's array.
  """
  return len(shape) > 1 and shape[-2] % _TILE_ROWS == 0


def is_on_host(leaf: ArrayLike) -> bool:
  """Whether an array, or the array that is traced, is in host memory."""
  return jax.typeof(leaf).memory_space == _HOST


def on_device(tree: Tree) -> Tree:
  """Moves arrays to device memory; those that are there already stay."""
  return jax.tree.map(
    lambda leaf: jax.device_put(leaf, _DEVICE) if is_on_host(leaf) else leaf,
    tree,
  )


def move_like(tree: Tree, old: Tree) -> Tree:
  """Moves values to the memory of the arrays that they replace."""
  return jax.tree.map(
    lambda leaf, place: (
      jax.device_put(leaf, _HOST) if is_on_host(place) else leaf
    ),
    tree,
    old,
  )


def with_memory_kind(place: Sharding, kind: str) -> Sharding:
  """Returns a sharding over the same devices in another memory."""
  if isinstance(place, SingleDeviceSharding):
    # The type of an array tells its memory only if it has a mesh.
    (device,) = place.device_set
    mesh = Mesh(np.asarray([device]), ("device",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
  return place.with_memory_kind(kind)


def row(leaf: Array, *index: Index) -> Array:
  """Returns leaf[index] in device memory; nothing else is moved there.

  Args:
    leaf: An array in either memory.
    *index: Scalars for the first dimensions, within their bounds.
  """
  return _read(0)(leaf, index) if is_on_host(leaf) else leaf[index]


def with_row(leaf: Array, value: Array, *index: Index) -> Array:
  """Returns the array, in the memory it is in, with leaf[index] replaced.

  Args:
    leaf: An array in either memory.
    value: New value of leaf[index], in device memory.
    *index: Scalars for the first dimensions, within their bounds.
  """
  if is_on_host(leaf):
    return _write(0)(leaf, value, index)
  return leaf.at[index].set(value)


def rows(leaf: Array, numbers: Array) -> Array:
  """Returns leaf[numbers] of an array in host memory, moved one by one."""
  return jax.lax.map(lambda number: row(leaf, number), numbers)


def with_rows(
  leaf: Array, values: Array, numbers: Array, places: Array
) -> Array:
  """Returns an array in host memory with leaf[numbers] = values[places]."""

  def put(array, pair):
    number, place = pair
    return with_row(array, values[place], number), None

  return jax.lax.scan(put, leaf, (numbers, places))[0]


# Under vmap JAX turns a dynamic slice into a gather, even if all replicas read
# the same row. So reading and writing a row have vmap rules of their own: the
# replica axis becomes one more dimension that is read whole, in front.
#
# For example a leaf [F, D] of F fragments, of which row f is read: one dynamic
# slice of length 1 along dimension 0 of [F, D]. Under vmap over M replicas the
# leaf is [M, F, D] and f is one number for all: one slice of length 1 along
# dimension 1, so num_whole = 1 dimension in front of it is read whole. If
# replicas share the leaf (it is not batched), they share the row as well.


@functools.cache
def _read(num_whole: int):
  """Builds (leaf, index) -> leaf[:, ..., index].

  Args:
    num_whole: Dimensions in front of those that are indexed.
  """

  @custom_vmap
  def read(leaf: Array, index: tuple[Index, ...]) -> Array:
    flat, number = _flattened(leaf, num_whole, index)
    part = jax.lax.dynamic_slice_in_dim(flat, number, 1, num_whole)
    return jax.device_put(part, _DEVICE).squeeze(num_whole)

  @read.def_vmap
  def _(axis_size, in_batched, leaf, index):
    del axis_size
    is_batched, of_index = in_batched
    assert not any(of_index), f"replicas read one row, not {index}"
    return _read(num_whole + is_batched)(leaf, index), is_batched

  return read


@functools.cache
def _write(num_whole: int):
  """Builds (leaf, value, index) -> leaf with what `_read` reads replaced."""

  @custom_vmap
  def write(leaf: Array, value: Array, index: tuple[Index, ...]) -> Array:
    flat, number = _flattened(leaf, num_whole, index)
    part = jax.device_put(jnp.expand_dims(value, num_whole), _HOST)
    new = jax.lax.dynamic_update_slice_in_dim(flat, part, number, num_whole)
    return new if new.shape == leaf.shape else new.reshape(leaf.shape)

  @write.def_vmap
  def _(axis_size, in_batched, leaf, value, index):
    is_batched, is_value_batched, of_index = in_batched
    assert not any(of_index), f"replicas write one row, not {index}"
    if not is_batched and not is_value_batched:
      return _write(num_whole)(leaf, value, index), False
    assert is_batched, "replicas cannot write different values to one array"
    if not is_value_batched:  # Every replica writes the same row.
      value = jnp.broadcast_to(value, (axis_size, *value.shape))
    return _write(num_whole + 1)(leaf, value, index), True

  return write


def _flattened(leaf: Array, num_whole: int, index) -> tuple[Array, Index]:
  """Merges the dimensions that are indexed, and the index.

  leaf [M, 3, 4, D] at (f, l) with num_whole = 1 becomes [M, 12, D] at 4 f + l.
  """
  end = num_whole + len(index)
  number = index[0]
  for size, place in zip(
    leaf.shape[num_whole + 1 : end], index[1:], strict=True
  ):
    number = number * size + place
  shape = (*leaf.shape[:num_whole], -1, *leaf.shape[end:])
  return (leaf if len(index) == 1 else leaf.reshape(shape)), number


def unsupported(kind: str, devices) -> str | None:
  """Returns why devices cannot keep the outer state in a memory, or None.

  Args:
    kind: One of `plan.choices.MEMORIES`.
    devices: Devices of this process.
  """
  if kind == DEVICE:
    return None
  for device in devices:
    kinds = {memory.kind for memory in device.addressable_memories()}
    if kind not in kinds:
      names = ", ".join(sorted(kinds))
      return f"the devices ({device.platform}) have only {names}"
  try:
    _try_out(jax.sharding.SingleDeviceSharding(devices[0], memory_kind=kind))
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    line = str(error).strip().splitlines()[0]
    return (
      f"the devices ({devices[0].platform}) have it, but fail at it: {line}"
    )
  return None


def _try_out(place) -> None:
  """Runs a program that reads and writes a row of an array in some memory."""

  def double(leaf):
    return with_row(leaf, 2 * row(leaf, jnp.int32(0)), jnp.int32(0))

  ones = jax.device_put(jnp.ones((2, 2)), place)
  doubled = jax.jit(double, out_shardings=place)(ones)
  if doubled.sharding.memory_kind != place.memory_kind:
    raise ValueError(f"a program leaves it in {doubled.sharding.memory_kind}")
