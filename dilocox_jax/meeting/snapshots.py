"""Snapshots of the shared state, and the deletion of what nobody needs.

The state before an event is written when the event's manifest says that it is
the state that most have. Whoever claims a snapshot first writes it. The newest
two are kept, and the events since the older of them: if the newest is damaged,
the other serves.

Events are deleted by blocks, and a block's mark is written before. A replica
that slept so long that its next event was deleted sees the mark, and cannot
mistake a deleted manifest for one that is not written yet.
"""

import logging
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.meeting.messages import (
  EVENTS,
  MANIFESTS,
  SNAPSHOTS,
  arrays_in,
  event_of,
  gone_path,
  num_bytes,
  raw_bytes,
  snapshot_path,
)
from dilocox_jax.meeting.seal import INDEX_BYTES, TAG_BYTES, Seal

_LOG = logging.getLogger(__name__)
KEPT_MARKS = 1000
_CLAIM, _ARRAYS, _INDEX = "claim", "arrays", "index"
_MARK = b"deleted"


class Snapshot(NamedTuple):
  """The shared state before an event.

  Attributes:
    event: The event.
    first: The first event whose result the state does not have yet. It is
      earlier than `event` if results are applied late.
    state: Digest of the shared state.
    meeting: What the mailbox itself needs to go on.
    arrays: What the caller needs to go on.
  """

  event: int
  first: int
  state: str
  meeting: dict[str, Any]
  arrays: list[np.ndarray]


class Snapshots:
  """The snapshots of one run."""

  def __init__(self, store: Any, seal: Seal, every: int):
    """Opens the snapshots of a run.

    Args:
      store: A `Patient` store.
      seal: The seal of the run.
      every: Events of a block; snapshots are written at their starts.
    """
    self._store, self._seal, self._every = store, seal, every
    self._token = secrets.token_bytes(16)

  def claim(self, event: int) -> bool:
    """Claims the snapshot before an event; False if somebody has it."""
    path = snapshot_path(event, _CLAIM)
    claim = self._seal.closed(path, self._token)
    if self._store.create(path, claim):
      return True
    found = self._store.get(path, len(claim))
    if self._seal.opened(path, found) is None:  # A stranger's, or deleted.
      self._store.put(path, claim)
      return True
    return found == claim  # An answer was lost.

  def write(self, snapshot: Snapshot) -> None:
    """Writes a snapshot that was claimed, and deletes what nobody needs now.

    Its index, which makes it whole, comes last.
    """
    path = snapshot_path(snapshot.event, _ARRAYS)
    content = self._seal.closed(path, *map(raw_bytes, snapshot.arrays))
    self._store.put(path, content)
    kinds = [(a.dtype.name, list(a.shape)) for a in snapshot.arrays]
    path = snapshot_path(snapshot.event, _INDEX)
    index = snapshot._asdict() | {"arrays": kinds}
    self._store.put(path, self._seal.closed_json(path, index))
    self._delete_before(snapshot.event)

  def events(self) -> list[int]:
    """Returns the events of all whole snapshots, the newest first."""
    return [event for event, _ in self._whole(self._store.sizes(SNAPSHOTS))]

  def read(self, event: int) -> Snapshot | None:
    """Returns a snapshot; None if it is damaged or missing."""
    index = self._index(event)
    if index is None:
      return None
    kinds = [(np.dtype(name), tuple(s)) for name, s in index["arrays"]]
    size, path = num_bytes(kinds), snapshot_path(event, _ARRAYS)
    data = self._store.get(path, TAG_BYTES + size)
    content = self._seal.opened(path, data)
    if content is None or len(content) != size:
      return None
    return Snapshot(**{**index, "arrays": arrays_in(content, kinds)})  # pyright: ignore

  def is_gone(self, event: int) -> bool:
    """Returns whether an event was deleted, or is about to be."""
    path = gone_path(event // self._every)
    data = self._store.get(path, TAG_BYTES + len(_MARK))
    return self._seal.opened(path, data) == _MARK

  def _whole(self, paths: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yields event and `first` of whole snapshots, the newest first."""
    events = {event_of(path) for path in paths if path.endswith(_INDEX)}
    for event in sorted(events, reverse=True):
      if index := self._index(event):
        yield event, int(index["first"])

  def _index(self, event: int) -> dict[str, Any] | None:
    path = snapshot_path(event, _INDEX)
    return self._seal.opened_json(path, self._store.get(path, INDEX_BYTES))

  def _delete_before(self, event: int) -> None:
    """Deletes what the snapshot before this one replaces."""
    sizes = {}
    for folder in (EVENTS, MANIFESTS, SNAPSHOTS):
      sizes |= self._store.sizes(folder)
    stale = self._stale(event, sizes)
    blocks = {
      event_of(path) // self._every
      for path in stale
      if not path.startswith(SNAPSHOTS)
    }
    for block in sorted(blocks):
      path = gone_path(block)
      self._store.put(path, self._seal.closed(path, _MARK))
    marks = [gone_path(b - KEPT_MARKS) for b in blocks if b >= KEPT_MARKS]
    self._store.delete([*stale, *marks])
    kept = [sizes[path] for path in sizes.keys() - set(stale)]
    _LOG.info(
      "the snapshot before event %d is written; the store has %.1f MB in %d"
      " objects",
      *(event, sum(kept) / 1e6, len(kept)),
    )

  def _stale(self, event: int, paths: Iterable[str]) -> list[str]:
    """Returns what nobody needs who starts at the snapshot before this one."""
    older, first = next((x for x in self._whole(paths) if x[0] < event), (0, 0))
    end = first // self._every * self._every
    limits = {EVENTS: end, MANIFESTS: end, SNAPSHOTS: older}
    return [
      path
      for path in paths
      if 0 <= event_of(path) < limits[path.partition("/")[0]]
    ]
