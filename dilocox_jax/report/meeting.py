"""What a run says of replicas that met in a store: who was there, and the cost.

The trainer writes one row for each event (`training.member`). A replica that
began again may have several rows of an event; the last one counts.
"""

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from dilocox_jax.metrics import read_rows
from dilocox_jax.metrics.recorder import MEETING
from dilocox_jax.report import units
from dilocox_jax.report.tables import markdown_table


def meeting_lines(workdir: pathlib.Path) -> list[str]:
  """Returns the lines of a report; none if replicas did not meet in a store."""
  if not (workdir / MEETING).exists():
    return []
  rows = read_rows(workdir / MEETING)
  events = {row["event"]: row for row in rows}
  if not events:
    return []
  lines = markdown_table(
    ("events", "averaged (measured)", "left out"), [*_spans(events)]
  )
  usage = [last["usage"] for last in _lives(rows)]
  total = {
    kind: sum(each.get(kind, 0) for each in usage)
    for kind in sorted({kind for each in usage for kind in each})
  }
  up, down = total.pop("bytes_up", 0), total.pop("bytes_down", 0)
  requests = ", ".join(f"{number:,} {kind}" for kind, number in total.items())
  return [
    *lines,
    "",
    f"This replica made {sum(total.values()) / len(events):.1f} requests an"
    f" event ({requests}), wrote {units.human_bytes(up)} and read"
    f" {units.human_bytes(down)} (measured, snapshots and manifests included).",
  ]


def _spans(events: dict[int, Any]) -> Iterator[tuple[str, str, str]]:
  """Yields events with the same members, one after the other, as one row."""

  def outcome(event: int) -> tuple[str, str]:
    members, left_out = events[event]["members"], events[event]["left_out"]
    reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
    return ", ".join(members) or "nobody", reasons

  for found, group in itertools.groupby(sorted(events), outcome):
    first, *_, last = [*group] * 2
    yield (f"{first}" if first == last else f"{first} to {last}", *found)


def _lives(rows: list[Any]) -> Iterator[Any]:
  """Yields the last row of each start of the program, which counts anew."""
  for row, following in itertools.pairwise([*rows, None]):
    if following is None or _requests(following) < _requests(row):
      yield row


def _requests(row: Any) -> int:
  return sum(row["usage"].values())
