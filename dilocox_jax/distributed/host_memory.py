"""Arrays that lie in the host's memory, read and written piece by piece.

A round touches the outer state at a few steps and one fragment at a time; in
between it would only fill the accelerator. Here an array says by its type
where it lies, and only the part that is asked for crosses over. Everything
else in the project is written once, for arrays in either memory. A part is a
dynamic slice along one dimension, never a gather: that is what compilers can
take straight out of host memory.
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

# A TPU lays arrays out in tiles of as many rows, in host memory too, and its
# compiler cannot move a part of a tile.
_TILE_ROWS = 8


def is_worth_moving(shape: tuple[int, ...]) -> bool:
  """Whether an array belongs in host memory, if the outer state does.

  Matrices do. Counts, scales of norms and odd shapes stay on the device: they
  are a fraction of a percent, and not every compiler could slice them.

  Args:
    shape: What one device holds of one replica's.
  """
  return len(shape) > 1 and shape[-2] % _TILE_ROWS == 0


def is_on_host(leaf: ArrayLike) -> bool:
  """Whether an array, or the array that is traced, is in host memory."""
  return jax.typeof(leaf).memory_space == _HOST


def on_device(tree: Tree) -> Tree:
  """Arrays in device memory; those that are there already stay."""
  return jax.tree.map(
    lambda leaf: jax.device_put(leaf, _DEVICE) if is_on_host(leaf) else leaf,
    tree,
  )


def move_like(tree: Tree, old: Tree) -> Tree:
  """Values, each brought to the memory of the array that it replaces."""
  return jax.tree.map(
    lambda leaf, place: (
      jax.device_put(leaf, _HOST) if is_on_host(place) else leaf
    ),
    tree,
    old,
  )


def with_memory_kind(place: Sharding, kind: str) -> Sharding:
  """The same place in another memory of the same devices."""
  if isinstance(place, SingleDeviceSharding):
    # Arrays of a mesh say by their type where they lie; others may not.
    (device,) = place.device_set
    mesh = Mesh(np.asarray([device]), ("device",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
  return place.with_memory_kind(kind)


def row(leaf: Array, *index: Index) -> Array:
  """leaf[index] in device memory; nothing else is brought there.

  Args:
    leaf: An array in either memory.
    *index: Scalars for the first dimensions, within their bounds.
  """
  return _read(0)(leaf, index) if is_on_host(leaf) else leaf[index]


def with_row(leaf: Array, value: Array, *index: Index) -> Array:
  """The array, where it lies, with leaf[index] replaced.

  Args:
    leaf: An array in either memory.
    value: The new part, in device memory.
    *index: As for `row`.
  """
  if is_on_host(leaf):
    return _write(0)(leaf, value, index)
  return leaf.at[index].set(value)


def rows(leaf: Array, numbers: Array) -> Array:
  """leaf[numbers] of an array in host memory, brought over one by one."""
  return jax.lax.map(lambda number: row(leaf, number), numbers)


def with_rows(
  leaf: Array, values: Array, numbers: Array, places: Array
) -> Array:
  """An array in host memory with leaf[numbers] = values[places]."""

  def put(kept, pair):
    number, place = pair
    return with_row(kept, values[place], number), None

  return jax.lax.scan(put, leaf, (numbers, places))[0]


# A dynamic slice becomes a gather under vmap, even if all replicas read the
# same place. So the two say themselves what they are under vmap.


@functools.cache
def _read(num_whole: int):
  """(leaf, index) -> leaf[:, ..., index] with some dimensions whole first."""

  @custom_vmap
  def read(leaf: Array, index: tuple[Index, ...]) -> Array:
    flat, number = _flattened(leaf, num_whole, index)
    part = jax.lax.dynamic_slice_in_dim(flat, number, 1, num_whole)
    return jax.device_put(part, _DEVICE).squeeze(num_whole)

  @read.def_vmap
  def _(axis_size, in_batched, leaf, index):
    del axis_size
    is_batched, *_ = _only_values(in_batched, index)
    return _read(num_whole + is_batched)(leaf, index), is_batched

  return read


@functools.cache
def _write(num_whole: int):
  """(leaf, value, index) -> leaf with what `_read` reads replaced."""

  @custom_vmap
  def write(leaf: Array, value: Array, index: tuple[Index, ...]) -> Array:
    flat, number = _flattened(leaf, num_whole, index)
    part = jax.device_put(jnp.expand_dims(value, num_whole), _HOST)
    new = jax.lax.dynamic_update_slice_in_dim(flat, part, number, num_whole)
    return new if new.shape == leaf.shape else new.reshape(leaf.shape)

  @write.def_vmap
  def _(axis_size, in_batched, leaf, value, index):
    is_batched, brings_own, _ = _only_values(in_batched, index)
    if not is_batched and not brings_own:
      return _write(num_whole)(leaf, value, index), False
    assert is_batched, "replicas cannot write different values to one array"
    if not brings_own:
      value = jnp.broadcast_to(value, (axis_size, *value.shape))
    return _write(num_whole + 1)(leaf, value, index), True

  return write


def _only_values(in_batched, index) -> list[bool]:
  *values, of_index = in_batched
  assert not any(of_index), f"replicas read one place, not {index}"
  return [*values, False]


def _flattened(leaf: Array, num_whole: int, index) -> tuple[Array, Index]:
  """The array with one dimension for all that are indexed, and the index."""
  end = num_whole + len(index)
  number = index[0]
  for size, place in zip(
    leaf.shape[num_whole + 1 : end], index[1:], strict=True
  ):
    number = number * size + place
  shape = (*leaf.shape[:num_whole], -1, *leaf.shape[end:])
  return (leaf if len(index) == 1 else leaf.reshape(shape)), number


def unsupported(kind: str, devices) -> str | None:
  """Why devices cannot keep the outer state in a memory; None if they can.

  Args:
    kind: One of `plan.choices.MEMORIES`.
    devices: Those of this process.
  """
  if kind == DEVICE:
    return None
  for device in devices:
    there = {memory.kind for memory in device.addressable_memories()}
    if kind not in there:
      names = ", ".join(sorted(there))
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
  """Reads from and writes to an array of some memory in a program."""

  def double(leaf):
    return with_row(leaf, 2 * row(leaf, jnp.int32(0)), jnp.int32(0))

  ones = jax.device_put(jnp.ones((2, 2)), place)
  doubled = jax.jit(double, out_shardings=place)(ones)
  if doubled.sharding.memory_kind != place.memory_kind:
    raise ValueError(f"a program leaves it in {doubled.sharding.memory_kind}")
