"""Moves arrays between the memory of devices and the memory of the host.

Only the windows that send or apply a fragment need the fragment's outer state.
Between these windows the outer state would take memory of the accelerator for
nothing. So it can be kept in host memory (the config field `mesh.outer_memory`)
and is moved to the devices for the windows that need it.
"""

from collections.abc import Iterable
from typing import Any

import jax

from dilocox_jax.plan.choices import MEMORIES
from dilocox_jax.trees import Tree, shardings_of

DEVICE, HOST = MEMORIES


def moved(tree: Tree, kind: str) -> Tree:
  """Moves arrays to a memory of the devices that hold them.

  Args:
    tree: Arrays in any memory. An array that already is in the wanted memory
      is not copied.
    kind: One of `plan.choices.MEMORIES`.

  Returns:
    The arrays in that memory.
  """
  return jax.device_put(tree, with_memory_kind(shardings_of(tree), kind))


def with_memory_kind(shardings: Tree, kind: str) -> Tree:
  """Returns shardings over the same devices with another memory.

  Args:
    shardings: Tree of shardings.
    kind: One of `plan.choices.MEMORIES`.
  """

  def with_kind(sharding: Any) -> Any:
    if kind != DEVICE:
      return sharding.with_memory_kind(kind)
    # The name of a device's own memory depends on the device. On a CPU, for
    # example, JAX has no memory called "device".
    device = next(iter(sharding.device_set))
    return sharding.with_memory_kind(device.default_memory().kind)

  return jax.tree.map(with_kind, shardings)


def unsupported(kind: str, devices: Iterable[Any]) -> str | None:
  """Returns why devices cannot keep arrays in a memory.

  Args:
    kind: One of `plan.choices.MEMORIES`.
    devices: Devices of this process.

  Returns:
    The reason; None if they can.
  """
  if kind == DEVICE:
    return None
  for device in devices:
    kinds = {memory.kind for memory in device.addressable_memories()}
    if kind not in kinds:
      names = ", ".join(sorted(kinds))
      return f"the devices ({device.platform}) have only {names}"
  return None
