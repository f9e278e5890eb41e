"""Moves arrays between the memory of devices and the memory of the host.

To save memory of the accelerator, a run can keep the state of the outer step,
such as the outer parameters, in host memory (config field `mesh.outer_memory`).
The state is moved to the devices when it is needed.
"""

from collections.abc import Iterable
from typing import Any

import jax

from dilocox_jax.plan.choices import MEMORIES
from dilocox_jax.trees import Tree, shardings_of

DEVICE, HOST = MEMORIES


def moved(tree: Tree, kind: str) -> Tree:
  """Moves a tree of arrays to another memory of the same devices.

  Args:
    tree: Tree of arrays in any memory.
    kind: The wanted memory, "device" or "pinned_host".
  """
  return jax.device_put(tree, with_memory_kind(shardings_of(tree), kind))


def with_memory_kind(shardings: Tree, kind: str) -> Tree:
  """Returns shardings over the same devices with another memory.

  Args:
    shardings: Tree of shardings.
    kind: The memory, "device" or "pinned_host".
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
  """Returns a clause that says why devices lack a memory; None if they have it.

  Args:
    kind: The memory, "device" or "pinned_host".
    devices: Devices of this process.
  """
  if kind == DEVICE:
    return None
  for device in devices:
    kinds = {memory.kind for memory in device.addressable_memories()}
    if kind not in kinds:
      names = ", ".join(sorted(kinds))
      return f"the devices ({device.platform}) have only {names}"
  return None
