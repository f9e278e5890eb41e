"""Snapshots of the shared state, and the deletion of old objects.

A snapshot is the state before an event. It is written once the event's manifest
lists messages that belong to that state. The replica that claims the snapshot
first writes it. The store keeps the newest three snapshots, and the events
since the oldest of them. So a replica can still read a snapshot while two newer
ones are written, and it can read an older one if the newest is damaged.

Events are deleted by blocks. Before a block is deleted, two marks (tombstones)
are written for it. A process may sleep so long that its next event is deleted.
The mark then tells it that the manifest was deleted, and is not just missing
because nobody has written it yet.
"""

import itertools
import logging
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.messages import (
  EVENTS,
  MANIFESTS,
  PROPOSALS,
  SNAPSHOTS,
  arrays_in,
  event_of,
  gone_paths,
  num_bytes,
  raw_bytes,
  snapshot_path,
)
from dilocox_jax.mailbox_protocol.signer import INDEX_BYTES, TAG_BYTES, Signer

_LOG = logging.getLogger(__name__)
KEPT_MARKS = 1000
KEPT_SNAPSHOTS = 3
# The parts of a snapshot.
_CLAIM = "claim"
_ARRAYS = "arrays"
_INDEX = "index"
_MARK = b"deleted"


class Snapshot(NamedTuple):
  """The shared state before an event.

  Attributes:
    event: The event.
    first: The first event whose result the state does not have yet. It is
      earlier than `event` if results are applied late.
    memory: `agreement.Memory` as JSON: what replicas know of earlier events.
    arrays: The arrays of the shared state.
  """

  event: int
  first: int
  memory: dict[str, Any]
  arrays: list[np.ndarray]


class Snapshots:
  """The snapshots of one run."""

  def __init__(self, store: Any, signer: Signer, every: int):
    """Opens the snapshots of a run.

    Args:
      store: A `RetryingStore` store.
      signer: The signer of the run.
      every: Number of events in a block. Snapshots are written at the starts of
        blocks.
    """
    self._store = store
    self._signer = signer
    self._every = every
    self._token = secrets.token_bytes(16)

  def claim(self, event: int) -> bool:
    """Claims the snapshot before an event.

    Returns:
      Whether this replica has the claim. If another one has it, False.
    """
    path = snapshot_path(event, _CLAIM)
    claim = self._signer.sign(path, self._token)
    if self._store.create(path, claim):
      return True
    stored = self._store.get(path, len(claim))
    if self._signer.verify(path, stored) is None:
      # No replica wrote this object, or it was deleted meanwhile.
      self._store.put(path, claim)
      return True
    # If the stored claim is that of this replica, the answer to its first
    # request was lost.
    return stored == claim

  def write(self, snapshot: Snapshot) -> None:
    """Writes a snapshot that this replica claimed, and deletes old objects.

    The index is written last. A snapshot with an index is whole.
    """
    arrays_path = snapshot_path(snapshot.event, _ARRAYS)
    content = [raw_bytes(array) for array in snapshot.arrays]
    self._store.put(arrays_path, self._signer.sign(arrays_path, *content))
    index_path = snapshot_path(snapshot.event, _INDEX)
    kinds = [(array.dtype.name, list(array.shape)) for array in snapshot.arrays]
    index = snapshot._asdict() | {"arrays": kinds}
    self._store.put(index_path, self._signer.sign_json(index_path, index))
    self._delete_before(snapshot.event)

  def events(self) -> list[int]:
    """Returns the events of all whole snapshots, the newest first."""
    return [event for event, _ in self._whole(self._store.sizes(SNAPSHOTS))]

  def read(self, event: int) -> Snapshot | None:
    """Returns the snapshot before an event; None if damaged or missing."""
    index = self._index(event)
    if index is None:
      return None
    kinds = [(np.dtype(name), tuple(shape)) for name, shape in index["arrays"]]
    size = num_bytes(kinds)
    path = snapshot_path(event, _ARRAYS)
    data = self._store.get(path, TAG_BYTES + size)
    content = self._signer.verify(path, data)
    if content is None or len(content) != size:
      return None
    fields = {**index, "arrays": arrays_in(content, kinds)}
    return Snapshot(**fields)  # pyright: ignore

  def is_gone(self, event: int, thoroughly: bool = False) -> bool:
    """Returns whether an event was deleted, or is about to be.

    Args:
      event: The event.
      thoroughly: Whether to read the second mark, too. It costs a request, and
        helps if the first mark was lost.
    """
    paths = gone_paths(event // self._every)
    if not thoroughly:
      paths = paths[:1]
    for path in paths:
      data = self._store.get(path, TAG_BYTES + len(_MARK))
      if self._signer.verify(path, data) == _MARK:
        return True
    return False

  def _whole(self, paths: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yields event and `first` of whole snapshots, the newest first."""
    events = {event_of(path) for path in paths if path.endswith(_INDEX)}
    for event in sorted(events, reverse=True):
      index = self._index(event)
      if index is not None:
        yield event, int(index["first"])

  def _index(self, event: int) -> dict[str, Any] | None:
    """Returns the index of a snapshot; None if it is missing or damaged."""
    path = snapshot_path(event, _INDEX)
    return self._signer.verify_json(path, self._store.get(path, INDEX_BYTES))

  def _delete_before(self, event: int) -> None:
    """Deletes the objects that nobody needs any more.

    Args:
      event: Event of the newest snapshot.
    """
    sizes: dict[str, int] = {}
    for folder in (EVENTS, PROPOSALS, MANIFESTS, SNAPSHOTS):
      sizes |= self._store.sizes(folder)
    stale = self._stale(event, sizes)
    blocks = {
      event_of(path) // self._every
      for path in stale
      if not path.startswith(SNAPSHOTS)
    }
    old_marks = []
    for block in sorted(blocks):
      for path in gone_paths(block):
        self._store.put(path, self._signer.sign(path, _MARK))
      if block >= KEPT_MARKS:
        old_marks += gone_paths(block - KEPT_MARKS)
    self._store.delete([*stale, *old_marks])
    remaining = [sizes[path] for path in sizes.keys() - set(stale)]
    _LOG.info(
      "the snapshot before event %d is written; the store has %.1f MB in %d"
      " objects",
      event,
      sum(remaining) / 1e6,
      len(remaining),
    )

  def _stale(self, event: int, paths: Iterable[str]) -> list[str]:
    """Returns the paths of the objects that nobody needs any more.

    A replica may start at the oldest snapshot that is kept. It needs that
    snapshot, and all events whose results the snapshot does not have.

    Args:
      event: Event of the newest snapshot.
      paths: Paths of all messages, lists and snapshots.
    """
    older = (
      (older_event, first)
      for older_event, first in self._whole(paths)
      if older_event < event
    )
    kept_older = list(itertools.islice(older, KEPT_SNAPSHOTS - 1))
    if len(kept_older) < KEPT_SNAPSHOTS - 1:
      return []
    oldest_event, first = kept_older[-1]
    # Only whole blocks of events are deleted.
    end = first // self._every * self._every
    limits = {
      EVENTS: end,
      PROPOSALS: end,
      MANIFESTS: end,
      SNAPSHOTS: oldest_event,
    }
    return [
      path
      for path in paths
      if 0 <= event_of(path) < limits[path.partition("/")[0]]
    ]
