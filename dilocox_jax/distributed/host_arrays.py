"""Brings arrays of several processes to every host.

This is for values that are small and read often, such as losses and drifts.
`coordinator_store` says why no program on the devices does it. With one process
nothing is sent.
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
  """Part of an array that some process lacks, and the process that sends it."""

  process: int
  array: int  # Its number among the arrays that several processes hold.
  span: Span


def arrays_to_host(tree: Tree) -> Tree:
  """Returns the values of arrays as numpy arrays, in every process.

  All processes must call it, in the same order, with trees of one structure.
  Parts that every process holds anyway are not sent.

  Args:
    tree: Arrays, each on devices of this process alone or of all processes.
  """
  leaves, structure = jax.tree.flatten(tree)
  shared = [leaf for leaf in leaves if _is_shared(leaf)]
  values = [_own_parts(leaf) for leaf in shared]
  _fill(values, _missing(shared))
  filled = iter(values)
  return jax.device_get(
    structure.unflatten(
      next(filled) if _is_shared(leaf) else leaf for leaf in leaves
    )
  )


def _is_shared(leaf: Any) -> bool:
  """Whether devices of other processes hold a part of an array too."""
  return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _own_parts(leaf: jax.Array) -> np.ndarray:
  """Returns an array in which only this process's parts are filled."""
  values = np.empty(leaf.shape, leaf.dtype)
  shards = leaf.addressable_shards
  parts = jax.device_get([shard.data for shard in shards])
  for shard, part in zip(shards, parts, strict=True):
    values[shard.index] = part
  return values


def _missing(shared: Sequence[jax.Array]) -> list[_Piece]:
  """Returns what must be sent, in the same order in every process.

  A part is missing if not all processes hold it; the first of those that do
  sends it. For example losses [2, 6] of two replicas on two processes: rows 0:1
  are held by {0} and rows 1:2 by {1}, so each process sends its row. If replica
  0 spans both processes, its row is held by {0, 1} and is not sent.
  """
  pieces = []
  for number, leaf in enumerate(shared):
    # Slices cannot be keys (before Python 3.12), so their bounds are.
    holders: dict[Any, tuple[Span, set[int]]] = {}
    spans = leaf.sharding.devices_indices_map(leaf.shape)
    for device, span in spans.items():
      bounds = tuple((dim.start, dim.stop) for dim in span)
      holders.setdefault(bounds, (span, set()))[1].add(device.process_index)
    pieces.extend(
      _Piece(min(processes), number, span)
      for span, processes in holders.values()
      if len(processes) < jax.process_count()
    )
  return sorted(pieces, key=lambda piece: piece.process)


def _fill(values: Sequence[np.ndarray], missing: Sequence[_Piece]) -> None:
  """Sends own pieces, and writes those of others where they belong.

  Args:
    values: Arrays whose own parts are filled.
    missing: All pieces, sorted by process. A process's message is its pieces
      one after the other, so their order and sizes say where each begins.
  """
  if not missing:
    return
  by_process = {
    process: [values[piece.array][(*piece.span, ...)] for piece in pieces]
    for process, pieces in itertools.groupby(missing, lambda p: p.process)
  }
  own = by_process.get(jax.process_index(), [])
  messages = coordinator_store.allgather(
    b"".join(part.tobytes() for part in own)
  )
  for process, parts in by_process.items():
    offset = 0
    for part in parts:
      sent = np.frombuffer(messages[process], part.dtype, part.size, offset)
      part[...] = sent.reshape(part.shape)
      offset += part.nbytes
