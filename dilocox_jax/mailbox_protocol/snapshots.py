"""Writes and reads snapshots of the shared state, and deletes old objects.

A snapshot is the state that all replicas share before an event (exchange). The
one replica that creates the object `claim` writes the snapshot. The store
keeps the newest three snapshots, and the objects that a replica needs to go on
from the oldest of them.

The events from one snapshot to the next one are an interval. Their objects are
deleted together. Before that, two objects are written, the *marks* of the
interval. They tell a process that has slept for long that manifests (lists of
messages) were deleted. Else it would think that nobody has written them yet,
and write others.
"""

import bisect
import functools
import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.buffers import num_bytes_of
from dilocox_jax.mailbox_protocol.messages import (
  EVENTS,
  MANIFESTS,
  PROPOSALS,
  SHARES,
  SNAPSHOTS,
  arrays_in,
  event_of,
  gone_paths,
  num_bytes,
  raw_bytes,
  snapshot_path,
)
from dilocox_jax.mailbox_protocol.signer import (
  INDEX_BYTES,
  Signer,
  signed_bytes,
)
from dilocox_jax.mailbox_protocol.store import get_all

_LOG = logging.getLogger(__name__)
# The marks of so many intervals, the newest, are kept. They take 0.6 MB.
KEPT_MARKS = 4096
KEPT_SNAPSHOTS = 3
# The parts of a snapshot.
_CLAIM = "claim"
_ARRAYS = "arrays"
_INDEX = "index"
_MARK = b"deleted"


class Snapshot(NamedTuple):
  """The state that all replicas share before an event (exchange).

  Attributes:
    event: Number of the event (exchange).
    first: The first event whose result the state does not have yet. It is
      earlier than `event` if means are applied with a delay (tau > 0).
    memory: The fields of `agreement.Memory`, as values of JSON: what replicas
      remember of earlier events.
    arrays: The arrays of the outer parameters, the outer optimizer and the
      codec's common state.
  """

  event: int
  first: int
  memory: dict[str, Any]
  arrays: list[np.ndarray]


def interval_of(event: int, starts: Sequence[int]) -> int:
  """Returns the first event of the interval to which an event belongs.

  An interval is the events (exchanges) from one snapshot to the next one.

  Args:
    event: Number of the event.
    starts: First events of the intervals so far, in increasing order. An event
      before all of them belongs to the first interval.
  """
  index = bisect.bisect_right(starts, event) - 1
  return starts[max(index, 0)]


class Snapshots:
  """Claims, writes, lists and reads the snapshots of one run.

  A snapshot is the state that all replicas share before an event (exchange).
  """

  def __init__(self, store: Any, signer: Signer):
    """Makes no request to the store yet.

    `store` is a `RetryingStore`, or a `Store` for calls that must not wait for
    a store that is away.
    """
    self._store = store
    self._signer = signer
    self._token = secrets.token_bytes(16)

  def claim(self, event: int) -> bool:
    """Tries to become the replica that writes the snapshot before an exchange.

    `event` is the number of the exchange.

    Returns:
      Whether this replica writes the snapshot. False: another replica does.
    """
    path = snapshot_path(event, _CLAIM)
    claim = self._signer.sign(path, self._token)
    if self._store.create(path, claim):
      return True
    stored = self._store.get(path, num_bytes_of(claim))
    holder = self._signer.verify(path, stored)
    if holder is None:
      # No replica wrote this object, or it was deleted meanwhile.
      self._store.put(path, claim)
      return True
    # The stored claim may be this replica's own: `create` also fails if the
    # object was written and the answer was lost.
    return holder == self._token

  def write(self, snapshot: Snapshot, starts: Sequence[int]) -> int:
    """Writes a snapshot that this replica claimed, and deletes old objects.

    The object `index`, with the types and shapes of the arrays, is written
    last. So a snapshot that has an index is complete.

    Args:
      snapshot: The snapshot.
      starts: First events of the intervals (events from one snapshot to the
        next one) so far. The last one is `snapshot.event`.

    Returns:
      Bytes of all objects of events and snapshots that remain in the store.
    """
    arrays_path = snapshot_path(snapshot.event, _ARRAYS)
    content = [raw_bytes(array) for array in snapshot.arrays]
    self._store.put(arrays_path, self._signer.sign(arrays_path, *content))
    index_path = snapshot_path(snapshot.event, _INDEX)
    kinds = [(array.dtype.name, list(array.shape)) for array in snapshot.arrays]
    index = snapshot._asdict() | {"arrays": kinds}
    self._store.put(index_path, self._signer.sign_json(index_path, index))
    return self._delete_before(snapshot.event, starts)

  def events(self) -> list[int]:
    """Returns the event of each complete snapshot, newest first.

    The snapshot has the state before this event (exchange). It is complete if
    its index, which is written last, is valid.
    """
    return [event for event, _ in self._whole(self._store.sizes(SNAPSHOTS))]

  def listed(self) -> list[int]:
    """Returns the event of each snapshot that has an index, oldest first.

    The snapshot has the state before this event (exchange). The index, which is
    written last, is not read. So the snapshot may turn out to be damaged.
    """
    events = {
      event_of(path)
      for path in self._store.sizes(SNAPSHOTS)
      if path.endswith(_INDEX)
    }
    return sorted(events - {-1})

  def read(self, event: int) -> Snapshot | None:
    """Returns the snapshot before an event (exchange).

    The result is None if a part of it is missing or damaged.
    """
    index = self._index(event)
    if index is None:
      return None
    kinds = [(np.dtype(name), tuple(shape)) for name, shape in index["arrays"]]
    size = num_bytes(kinds)
    path = snapshot_path(event, _ARRAYS)
    data = self._store.get(path, signed_bytes(size))
    content = self._signer.verify(path, data)
    if content is None or len(content) != size:
      return None
    fields = {**index, "arrays": arrays_in(content, kinds)}
    return Snapshot(**fields)  # pyright: ignore

  def is_gone(self, start: int, thoroughly: bool = True) -> bool:
    """Returns whether an interval of events is marked as deleted.

    An interval is the events (exchanges) from one snapshot to the next one. Two
    objects mark it, and are kept for the newest 4096 intervals only.

    Args:
      start: The first event of the interval.
      thoroughly: Whether to read both marks of the interval, in case one is
        lost. False: only the first one is read.
    """
    paths = gone_paths(start)
    if not thoroughly:
      paths = paths[:1]
    marks = get_all(self._store, dict.fromkeys(paths, signed_bytes(len(_MARK))))
    return any(
      self._signer.verify(path, mark) == _MARK
      for path, mark in zip(paths, marks, strict=True)
    )

  def _whole(self, paths: Iterable[str]) -> list[tuple[int, int]]:
    """Returns (`Snapshot.event`, `Snapshot.first`) of all complete snapshots.

    The newest comes first. A snapshot is complete if its index is among `paths`
    and is valid.
    """
    events = {event_of(path) for path in paths if path.endswith(_INDEX)}
    newest_first = sorted(events - {-1}, reverse=True)
    indices = self._store.at_once(
      [functools.partial(self._index, event) for event in newest_first]
    )
    return [
      (event, int(index["first"]))
      for event, index in zip(newest_first, indices, strict=True)
      if index is not None
    ]

  def _index(self, event: int) -> dict[str, Any] | None:
    """Reads the index of the snapshot before an event (exchange).

    It has the fields of `Snapshot`, with type and shape of each array in place
    of the array. The result is None if the index is missing or damaged.
    """
    path = snapshot_path(event, _INDEX)
    return self._signer.verify_json(path, self._store.get(path, INDEX_BYTES))

  def _delete_before(self, event: int, starts: Sequence[int]) -> int:
    """Deletes the objects that nobody needs any more (`_stale`), and old marks.

    Before that, it writes marks of the deleted intervals. An interval is the
    events from one snapshot to the next one. `starts` has the first event of
    each interval. Returns the bytes of all objects of events and snapshots that
    remain.
    """
    folders = (EVENTS, PROPOSALS, MANIFESTS, SHARES, SNAPSHOTS)
    listings = self._store.at_once(
      [functools.partial(self._store.sizes, folder) for folder in folders]
    )
    sizes: dict[str, int] = {}
    for listing in listings:
      sizes |= listing
    stale = self._stale(event, sizes, starts)
    # Objects before all `starts` belong to no interval that could be marked.
    deleted_intervals = {
      interval_of(event_of(path), starts)
      for path in stale
      if not path.startswith(SNAPSHOTS) and event_of(path) >= starts[0]
    }
    # The marks come first: a replica that has slept meanwhile must find them
    # before it misses an object.
    marks = [
      path for start in sorted(deleted_intervals) for path in gone_paths(start)
    ]
    self._store.at_once(
      [
        functools.partial(self._store.put, path, self._signer.sign(path, _MARK))
        for path in marks
      ]
    )
    old_marks = [
      path for start in starts[:-KEPT_MARKS] for path in gone_paths(start)
    ]
    self._store.delete([*stale, *old_marks])
    remaining = [sizes[path] for path in sizes.keys() - set(stale)]
    _LOG.info(
      "the snapshot before event %d is written; the store has %.1f MB in %d"
      " objects",
      event,
      sum(remaining) / 1e6,
      len(remaining),
    )
    return sum(remaining)

  def _stale(
    self, event: int, paths: Iterable[str], starts: Sequence[int]
  ) -> list[str]:
    """Returns the paths of the objects that nobody needs any more.

    The newest three complete snapshots are kept. The newest of them is the one
    before `event`. All older snapshots are stale.

    The events that somebody needs begin with `Snapshot.first` of the oldest
    snapshot that is kept. An interval is the events from one snapshot to the
    next one. The objects of an interval are stale if it ends before the first
    needed event. Nothing is stale if there are fewer than three complete
    snapshots.
    """
    older = [
      (older_event, first)
      for older_event, first in self._whole(paths)
      if older_event < event
    ]
    # The snapshot before `event` is kept, too.
    kept_older = older[: KEPT_SNAPSHOTS - 1]
    if len(kept_older) < KEPT_SNAPSHOTS - 1:
      return []
    oldest_event, first = kept_older[-1]
    # Only whole intervals are deleted.
    end = interval_of(first, starts)
    limits = {
      EVENTS: end,
      PROPOSALS: end,
      MANIFESTS: end,
      SHARES: end,
      SNAPSHOTS: oldest_event,
    }
    return [
      path
      for path in paths
      if 0 <= event_of(path) < limits[path.partition("/")[0]]
    ]
