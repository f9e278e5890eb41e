"""Keeps the outer state of a fragment in host memory between its windows.

Only a few windows need the outer state of a fragment. Between them it would
take memory of the accelerator for nothing. So it may stay in host memory, and
is moved to the devices for the windows that need it.
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
    tree: Arrays in any memory. Arrays that are in the memory already stay.
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

  def change(sharding: Any) -> Any:
    if kind != DEVICE:
      return sharding.with_memory_kind(kind)
    device = next(iter(sharding.device_set))
    return sharding.with_memory_kind(device.default_memory().kind)

  return jax.tree.map(change, shardings)


def unsupported(kind: str, devices: Iterable[Any]) -> str | None:
  """Returns why devices cannot keep the outer state in a memory.

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
