"""Brings arrays of several processes to every host.

This is for values that are small and read often, such as losses and drifts.
`coordinator_store` says why no program on the devices does it. With one process
nothing is sent.
"""

import itertools
from typing import Any

import jax
import numpy as np

from dilocox_jax.distributed import coordinator_store
from dilocox_jax.pytypes import Tree


def arrays_to_host(tree: Tree) -> Tree:
  """Returns the values of arrays as numpy arrays, in every process.

  All processes must call it, in the same order, with trees of one structure.
  Arrays of which every process holds the same parts are not sent.

  Args:
    tree: Arrays, each on devices of this process alone or of all processes.
  """
  leaves, structure = jax.tree.flatten(tree)
  shared = {n: leaf for n, leaf in enumerate(leaves) if _is_shared(leaf)}
  values = {n: np.empty(leaf.shape, leaf.dtype) for n, leaf in shared.items()}
  shards = [
    (n, x) for n, leaf in shared.items() for x in leaf.addressable_shards
  ]
  parts = jax.device_get([(n, shard.index, shard.data) for n, shard in shards])
  divided = {n for n, leaf in shared.items() if not _is_alike_in_all(leaf)}
  if divided:
    # Of all devices that hold a part, the one with the number 0 sends it.
    sent = [
      part
      for part, (n, shard) in zip(parts, shards, strict=True)
      if n in divided and shard.replica_id == 0
    ]
    parts += itertools.chain(*coordinator_store.allgather(sent))
  for n, span, part in parts:
    values[n][span] = part
  return jax.device_get(
    structure.unflatten(values.get(n, leaf) for n, leaf in enumerate(leaves))
  )


def _is_shared(leaf: Any) -> bool:
  """Whether devices of other processes hold a part of an array too."""
  return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _is_alike_in_all(leaf: jax.Array) -> bool:
  """Whether every process holds the same parts of an array, so all of it.

  For example losses [2, 6] of two replicas on two processes: each process holds
  one row and sends it. If both replicas span both processes, each process holds
  both rows.
  """
  parts: dict[int, set[str]] = {}
  for device, span in leaf.sharding.devices_indices_map(leaf.shape).items():
    # Slices cannot be in a set before Python 3.12.
    parts.setdefault(device.process_index, set()).add(str(span))
  return len({frozenset(spans) for spans in parts.values()}) == 1
