"""Arrays of several processes, put together by their hosts.

For what is small and read often, as losses and drift: see `host_messages` for
why no program does it. In a run of one process nothing is sent.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dilocox_jax.distributed import coordinator_store
from dilocox_jax.pytypes import Tree

Span = tuple[slice, ...]


class _Piece(NamedTuple):
  """Part of an array that some process lacks, and who sends it."""

  process: int
  array: int
  span: Span


def arrays_to_host(tree: Tree) -> Tree:
  """The values of arrays, wherever they lie, as numpy in every process.

  All processes must call it, in the same order, with trees alike. Parts that
  every process holds anyway are not sent.

  Args:
    tree: Arrays whose shardings name every process, or one that is local.
  """
  leaves, structure = jax.tree.flatten(tree)
  far = [leaf for leaf in leaves if _is_far(leaf)]
  whole = [_with_own_parts(leaf) for leaf in far]
  _fill(whole, _missing(far))
  found = iter(whole)
  return jax.device_get(
    structure.unflatten(
      next(found) if _is_far(leaf) else leaf for leaf in leaves
    )
  )


def _is_far(leaf: Any) -> bool:
  """Whether devices of other processes hold a part of an array too."""
  return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _with_own_parts(leaf: jax.Array) -> np.ndarray:
  """An array with what this process holds; waits for its devices."""
  values = np.empty(leaf.shape, leaf.dtype)
  shards = leaf.addressable_shards
  parts = jax.device_get([shard.data for shard in shards])
  for shard, part in zip(shards, parts, strict=True):
    values[shard.index] = part
  return values


def _missing(far: Sequence[jax.Array]) -> list[_Piece]:
  """What must be sent, in the same order in every process."""
  pieces = []
  for place, leaf in enumerate(far):
    holders: dict[Any, tuple[Span, set[int]]] = {}
    where = leaf.sharding.devices_indices_map(leaf.shape)
    for device, span in where.items():
      bounds = tuple((each.start, each.stop) for each in span)
      holders.setdefault(bounds, (span, set()))[1].add(device.process_index)
    pieces.extend(
      _Piece(min(processes), place, span)
      for span, processes in holders.values()
      if len(processes) < jax.process_count()
    )
  return sorted(pieces, key=lambda piece: piece.process)


def _fill(whole: Sequence[np.ndarray], missing: Sequence[_Piece]) -> None:
  """Sends own pieces, and writes those of others where they belong."""
  if not missing:
    return
  by_process = {
    process: [whole[piece.array][(*piece.span, ...)] for piece in pieces]
    for process, pieces in itertools.groupby(missing, lambda each: each.process)
  }
  own = by_process.get(jax.process_index(), [])
  messages = coordinator_store.allgather(
    b"".join(part.tobytes() for part in own)
  )
  for process, parts in by_process.items():
    offset = 0
    for part in parts:
      values = np.frombuffer(messages[process], part.dtype, part.size, offset)
      part[...] = values.reshape(part.shape)
      offset += part.nbytes
