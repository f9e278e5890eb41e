"""Names of the objects of a run, so that nobody has to list the store.

run.json                     what is trained, and by which rules
seat/0002                    who takes part, and since when
event/0000000012/0/oslo      message of a replica: event, turn, name
manifest/0000000012.0        the messages of a turn that all average
snapshot/0000000064/...      shared state before an event
gone/0000000003              says that a block of events was deleted
"""

import re

RUN = "run.json"
EVENTS, MANIFESTS, SNAPSHOTS = "event", "manifest", "snapshot"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


def checked_name(replica: str) -> str:
  """Returns the name of a replica.

  Raises:
    ValueError: If it cannot be a part of a path. The message is one line.
  """
  if not _NAME.fullmatch(replica):
    raise ValueError(
      f"replica={replica!r} must be 1 to 32 of the characters a-z, 0-9, _ and"
      " -, and begin with a letter or a digit"
    )
  return replica


def seat_path(index: int) -> str:
  """Returns the path of a seat."""
  return f"seat/{index:04d}"


def message_path(event: int, turn: int, replica: str) -> str:
  """Returns the path of a replica's message."""
  return f"{EVENTS}/{event:010d}/{turn}/{replica}"


def manifest_path(event: int, turn: int) -> str:
  """Returns the path of a turn's manifest."""
  return f"{MANIFESTS}/{event:010d}.{turn}"


def snapshot_path(event: int, part: str) -> str:
  """Returns the path of a part of the snapshot before an event."""
  return f"{SNAPSHOTS}/{event:010d}/{part}"


def gone_path(block: int) -> str:
  """Returns the path of the mark that a block of events was deleted."""
  return f"gone/{block:010d}"


def event_of(path: str) -> int:
  """Returns the event of a message, manifest or snapshot; -1 for others."""
  found = re.match(r"(?:event|manifest|snapshot)/(\d{10})[./]", path)
  return int(found.group(1)) if found else -1
