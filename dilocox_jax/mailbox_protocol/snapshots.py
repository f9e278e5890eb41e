"""Snapshots of the shared state, and the deletion of what nobody needs.

The state before an event is written when the event's manifest says that it is
the state that most replicas have. Whoever claims a snapshot first writes it.
The newest three are kept, and the events since the oldest of them. So a replica
can still read a snapshot while two newer ones are written, and an older one
serves if the newest is damaged.

Events are deleted by blocks, and two marks of the block are written before. A
replica that slept so long that its next event was deleted sees a mark, and
cannot mistake a deleted manifest for one that is not written yet.
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

  def __init__(self, store: Any, signer: Signer, every: int):
    """Opens the snapshots of a run.

    Args:
      store: A `RetryingStore` store.
      signer: The signer of the run.
      every: Events of a block; snapshots are written at their starts.
    """
    self._store, self._signer, self._every = store, signer, every
    self._token = secrets.token_bytes(16)

  def claim(self, event: int) -> bool:
    """Claims the snapshot before an event; False if somebody has it."""
    path = snapshot_path(event, _CLAIM)
    claim = self._signer.sign(path, self._token)
    if self._store.create(path, claim):
      return True
    found = self._store.get(path, len(claim))
    if self._signer.verify(path, found) is None:  # A stranger's, or deleted.
      self._store.put(path, claim)
      return True
    return found == claim  # An answer was lost.

  def write(self, snapshot: Snapshot) -> None:
    """Writes a snapshot that was claimed, and deletes what nobody needs now.

    Its index, which makes it whole, comes last.
    """
    path = snapshot_path(snapshot.event, _ARRAYS)
    content = self._signer.sign(path, *map(raw_bytes, snapshot.arrays))
    self._store.put(path, content)
    kinds = [(a.dtype.name, list(a.shape)) for a in snapshot.arrays]
    path = snapshot_path(snapshot.event, _INDEX)
    index = snapshot._asdict() | {"arrays": kinds}
    self._store.put(path, self._signer.sign_json(path, index))
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
    content = self._signer.verify(path, data)
    if content is None or len(content) != size:
      return None
    return Snapshot(**{**index, "arrays": arrays_in(content, kinds)})  # pyright: ignore

  def is_gone(self, event: int, thoroughly: bool = False) -> bool:
    """Returns whether an event was deleted, or is about to be.

    Args:
      event: The event.
      thoroughly: Whether to look for the second mark, too. It costs a request,
        and helps if the first mark was lost.
    """
    marks = gone_paths(event // self._every)
    for path in marks if thoroughly else marks[:1]:
      data = self._store.get(path, TAG_BYTES + len(_MARK))
      if self._signer.verify(path, data) == _MARK:
        return True
    return False

  def _whole(self, paths: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yields event and `first` of whole snapshots, the newest first."""
    events = {event_of(path) for path in paths if path.endswith(_INDEX)}
    for event in sorted(events, reverse=True):
      if index := self._index(event):
        yield event, int(index["first"])

  def _index(self, event: int) -> dict[str, Any] | None:
    path = snapshot_path(event, _INDEX)
    return self._signer.verify_json(path, self._store.get(path, INDEX_BYTES))

  def _delete_before(self, event: int) -> None:
    """Deletes what nobody needs after the snapshot before an event."""
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
    kept = [sizes[path] for path in sizes.keys() - set(stale)]
    _LOG.info(
      "the snapshot before event %d is written; the store has %.1f MB in %d"
      " objects",
      event,
      sum(kept) / 1e6,
      len(kept),
    )

  def _stale(self, event: int, paths: Iterable[str]) -> list[str]:
    """Returns what nobody needs who starts at the oldest snapshot that is kept.

    Args:
      event: Event of the newest snapshot.
      paths: Paths of all messages, lists and snapshots.
    """
    older = (found for found in self._whole(paths) if found[0] < event)
    kept_besides = list(itertools.islice(older, KEPT_SNAPSHOTS - 1))
    if len(kept_besides) < KEPT_SNAPSHOTS - 1:
      return []
    oldest_event, first = kept_besides[-1]
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
