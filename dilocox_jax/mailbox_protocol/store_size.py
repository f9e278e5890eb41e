"""Computes how many bytes a store may hold, and how many of them in messages.

A store is the folder or bucket through which replicas send their messages. From
time to time, one replica also writes a snapshot of the state that all replicas
share. The events (exchanges) from one snapshot to the next one are an
*interval*. If each snapshot is written before the next one is due, a store
holds at most

- five snapshots: three that are kept, one that is about to be deleted, and one
  that is being written;
- the messages and manifests (lists of averaged messages) of six intervals:
  three since the oldest snapshot that is kept, one before it if results are
  applied late, one whose snapshot is being written, and one that has begun
  meanwhile;
- less than 2 MB of small objects.

For example, four replicas send messages of 100 MB, and a snapshot has 800 MB.
With `store_bytes` = 10 GB an interval may have (10 - 5 * 0.8) / 6 = 1 GB of
messages. An event has 0.4 GB, so an interval has at most two events.
"""

from typing import NamedTuple

from dilocox_jax.checks import require

# The numbers of the list above.
MOST_SNAPSHOTS = 5
MOST_INTERVALS = 6
OTHER_BYTES = 2_000_000
# For a small model, a tighter limit would only make snapshots more frequent.
LEAST_DEFAULT_BYTES = 1_000_000_000


class StoreLimit(NamedTuple):
  """How many bytes a store may hold, in all and in one interval.

  An interval is the events (exchanges) from one snapshot to the next one.

  Attributes:
    store_bytes: Largest number of bytes of all objects together.
    interval_bytes: Largest number of bytes of the messages and manifests of one
      interval.
  """

  store_bytes: int
  interval_bytes: int


def least_store_bytes(snapshot_bytes: int, event_bytes: int) -> int:
  """Returns the lowest limit of a store that the protocol can keep (bytes).

  With this limit a snapshot is written at every event.

  Args:
    snapshot_bytes: Bytes of a snapshot of the shared state.
    event_bytes: Bytes of all messages and manifests of an event (exchange).
  """
  return (
    MOST_SNAPSHOTS * snapshot_bytes + MOST_INTERVALS * event_bytes + OTHER_BYTES
  )


def check_store_bytes(
  store_bytes: int | None, snapshot_bytes: int, event_bytes: int
) -> None:
  """Checks that the user's limit of a store is not too low.

  Args:
    store_bytes: The limit in bytes; None: there is nothing to check.
    snapshot_bytes: Bytes of a snapshot of the shared state.
    event_bytes: Bytes of all messages of an event (exchange).

  Raises:
    ValueError: If the limit is below `least_store_bytes`. The message is one
      line.
  """
  least = least_store_bytes(snapshot_bytes, event_bytes)
  require(
    store_bytes is None or store_bytes >= least,
    f"mailbox.store_bytes={store_bytes} is too low: {MOST_SNAPSHOTS} snapshots"
    f" of {snapshot_bytes} bytes and the messages of {MOST_INTERVALS}"
    f" events, {event_bytes} bytes each, take {least}",
  )


def store_limit(
  store_bytes: int | None, snapshot_bytes: int, num_replicas: int
) -> StoreLimit:
  """Returns how many bytes a store may have, in all and in one interval.

  An interval is the events (exchanges) from one snapshot to the next one.

  Args:
    store_bytes: The limit that the user set, in bytes. None: the limit is large
      enough for 5 snapshots and 6 intervals, if an interval has as many bytes
      as M snapshots. It is at least 1 GB.
    snapshot_bytes: Bytes of a snapshot of the shared state.
    num_replicas: Number of replicas, M.
  """
  if store_bytes is None:
    # Enough for intervals that have as many bytes as M snapshots.
    store_bytes = max(
      least_store_bytes(snapshot_bytes, num_replicas * snapshot_bytes),
      LEAST_DEFAULT_BYTES,
    )
  for_messages = store_bytes - MOST_SNAPSHOTS * snapshot_bytes - OTHER_BYTES
  return StoreLimit(store_bytes, max(for_messages, 0) // MOST_INTERVALS)
