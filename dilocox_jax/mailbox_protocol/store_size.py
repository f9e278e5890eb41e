"""How many bytes a store holds at most, and when a snapshot is due for it.

A store holds snapshots, and the messages since the oldest snapshot that is
kept. So the more often a snapshot is written, the fewer messages it holds. The
events from one snapshot to the next one are an *interval*. At most, a store
holds

- five snapshots: three that are kept, one that is about to be deleted, and one
  that is being written;
- the messages and manifests of six intervals: three since the oldest snapshot
  that is kept, one before it if results are applied late, one whose snapshot is
  being written, and one that has begun meanwhile;
- seats, marks and indices, which take less than 2 MB.

For example, four replicas send messages of 100 MB, and a snapshot has 800 MB.
With `store_bytes` = 10 GB an interval has (10 - 5 * 0.8) / 6 = 1 GB of
messages, so a snapshot is written at every second event.

If no limit is set, an interval may have as many bytes as one snapshot for each
replica. Then snapshots at most double the bytes that a replica sends.
"""

from typing import NamedTuple

from dilocox_jax.checks import require

MOST_SNAPSHOTS = 5
MOST_INTERVALS = 6
OTHER_BYTES = 2_000_000
LEAST_DEFAULT_BYTES = 1_000_000_000


class StoreLimit(NamedTuple):
  """The limit of a store.

  Attributes:
    store_bytes: Most bytes of all objects.
    interval_bytes: Most bytes of the messages and manifests of an interval.
  """

  store_bytes: int
  interval_bytes: int


def least_store_bytes(snapshot_bytes: int, event_bytes: int) -> int:
  """Returns the lowest limit that can be kept, with a snapshot at every event.

  Args:
    snapshot_bytes: Bytes of a snapshot.
    event_bytes: Bytes of the messages and manifests of an event.
  """
  return (
    MOST_SNAPSHOTS * snapshot_bytes + MOST_INTERVALS * event_bytes + OTHER_BYTES
  )


def check_store_bytes(
  store_bytes: int | None, snapshot_bytes: int, event_bytes: int
) -> None:
  """Checks that a store can hold what the protocol keeps.

  Args:
    store_bytes: The limit that the user set; None: it follows from the sizes.
    snapshot_bytes: Bytes of a snapshot.
    event_bytes: Bytes of the messages of an event.

  Raises:
    ValueError: If the limit is too low. The message is one line.
  """
  least = least_store_bytes(snapshot_bytes, event_bytes)
  require(
    store_bytes is None or store_bytes >= least,
    f"mailbox.store_bytes={store_bytes} is too low: {MOST_SNAPSHOTS} snapshots"
    f" of {snapshot_bytes / 1e6:.3g} MB and the messages of {MOST_INTERVALS}"
    f" events, {event_bytes / 1e6:.3g} MB each, take {least}",
  )


def store_limit(
  store_bytes: int | None, snapshot_bytes: int, num_replicas: int
) -> StoreLimit:
  """Returns the limit of a store.

  Args:
    store_bytes: The limit that the user set; None: it follows from the sizes,
      and is at least 1 GB.
    snapshot_bytes: Bytes of a snapshot.
    num_replicas: Number of replicas, M.
  """
  if store_bytes is None:
    store_bytes = max(
      least_store_bytes(snapshot_bytes, num_replicas * snapshot_bytes),
      LEAST_DEFAULT_BYTES,
    )
  for_messages = store_bytes - MOST_SNAPSHOTS * snapshot_bytes - OTHER_BYTES
  return StoreLimit(store_bytes, max(for_messages, 0) // MOST_INTERVALS)
