"""Writes a simulated run for a trace viewer (chrome://tracing, Perfetto).

Events of one lane must not overlap, so flows that use the same links at the
same time get lanes of their own.
"""

import collections
from collections.abc import Iterator
from typing import Any

from dilocox_jax.simulate.engine import Timeline
from dilocox_jax.simulate.graph import Graph

_MICROSECONDS = 1e6


def bars(graph: Graph, timeline: Timeline) -> Iterator[tuple[str, int, int]]:
  """Yields where every node is drawn: (track, lane, number), by start.

  A track is a resource or a route. Nodes of a lane do not overlap: with three
  flows from 0 to 2 s, 1 to 3 s and 2 to 4 s, the third is in lane 0 again.

  Args:
    graph: Tasks and flows.
    timeline: When they started and ended.
  """
  free: dict[str, list[float]] = collections.defaultdict(list)
  for number in sorted(range(len(graph)), key=timeline.start_s.__getitem__):
    place = graph.places[number]
    track = place if isinstance(place, str) else " > ".join(place)
    start_s, end_s = timeline.start_s[number], timeline.end_s[number]
    lanes = free[track]
    lane = next((k for k, s in enumerate(lanes) if s <= start_s), len(lanes))
    lanes[lane : lane + 1] = [end_s]
    yield track, lane, number


def chrome_trace(graph: Graph, timeline: Timeline) -> dict[str, Any]:
  """Returns the trace as JSON values: events and the names of tracks.

  Source: Trace Event Format (Chromium project).

  Args:
    graph: Tasks and flows.
    timeline: When they started and ended.
  """
  events: list[dict[str, Any]] = []
  processes: dict[str, int] = {}
  named: set[tuple[int, int]] = set()
  for track, lane, number in bars(graph, timeline):
    process = processes.setdefault(track, len(processes) + 1)
    if (process, lane) not in named:
      named.add((process, lane))
      events += _names(process, lane, track)
    start_s, end_s = timeline.start_s[number], timeline.end_s[number]
    is_flow = not isinstance(graph.places[number], str)
    details = {"bytes": graph.amounts[number]} if is_flow else {}
    events.append(
      {
        "ph": "X",
        "name": graph.names[number],
        "cat": graph.tags[number],
        "pid": process,
        "tid": lane,
        "ts": start_s * _MICROSECONDS,
        "dur": (end_s - start_s) * _MICROSECONDS,
        "args": details,
      }
    )
  return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, lane: int, track: str) -> list[dict[str, Any]]:
  where = {"ph": "M", "pid": process, "tid": lane}
  return [
    where | {"name": "process_name", "args": {"name": track}},
    where | {"name": "thread_name", "args": {"name": f"lane {lane}"}},
  ]
