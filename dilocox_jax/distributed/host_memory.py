"""Where the outer state of a fragment lies between its windows.

A fragment is needed in few windows; in between it would only fill the
accelerator. In host memory it costs nothing there, and the host moves it for
the windows that need it.
"""

from typing import Any

import jax

from dilocox_jax.plan.choices import MEMORIES
from dilocox_jax.trees import Tree, shardings_of

DEVICE, HOST = MEMORIES


def moved(tree: Tree, kind: str) -> Tree:
  """Returns arrays in a memory of the devices that hold them.

  Args:
    tree: Arrays in any memory; those that are there already stay.
    kind: One of `plan.choices.MEMORIES`.
  """
  return jax.device_put(tree, with_memory_kind(shardings_of(tree), kind))


def with_memory_kind(places: Tree, kind: str) -> Tree:
  """Returns a tree of shardings over the same devices in a memory.

  Args:
    places: Tree of shardings.
    kind: One of `plan.choices.MEMORIES`.
  """

  def change(place: Any) -> Any:
    own = next(iter(place.device_set)).default_memory().kind
    return place.with_memory_kind(own if kind == DEVICE else kind)

  return jax.tree.map(change, places)


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
  return None
