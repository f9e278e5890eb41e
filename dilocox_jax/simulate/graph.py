"""Tasks, flows, and what waits for what; the engine finds the times.

A graph must hold a million nodes, so a node is a number into flat columns
instead of an object. Nodes are numbered in order of creation and wait for
earlier nodes only, so a graph has no cycle and needs no search for one.
"""

import array
import dataclasses
import math
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Outage:
  """A time in which a link carries nothing. Its flows wait and then go on.

  Attributes:
    link: Name of the link.
    start_s: When the link fails (seconds).
    stop_s: When the link is back (seconds); infinity is never.
  """

  link: str
  start_s: float | int
  stop_s: float | int


class Graph:
  """Tasks and flows in order of creation. Both are nodes and have a number.

  The engine and traces read the columns, each with one entry for every node.

  Attributes:
    names: Name of the node.
    tags: Kind of the node, for reports; may be empty.
    places: Resource of a task (a string) or links of a flow (a tuple).
    amounts: Duration of a task (seconds) or size of a flow (bytes).
    latencies_s: Latency of a flow (seconds); 0 for a task.
    limits_bytes_per_s: Highest rate of a flow alone; infinity for a task.
    after: Numbers of the nodes that are waited for, node after node.
    after_stop: Where the entries of a node in `after` end. Those of the next
      node start there.
  """

  def __init__(self):
    self.names: list[str] = []
    self.tags: list[str] = []
    self.places: list[str | tuple[str, ...]] = []
    self.amounts = array.array("d")
    self.latencies_s = array.array("d")
    self.limits_bytes_per_s = array.array("d")
    self.after = array.array("q")
    self.after_stop = array.array("q")
    self._routes: dict[tuple[str, ...], tuple[str, ...]] = {}

  def __len__(self) -> int:
    return len(self.names)

  def task(
    self,
    name: str,
    resource: str,
    duration_s: float | int,
    after: Iterable[int] = (),
    tag: str = "",
  ) -> int:
    """Adds compute; a resource runs one task at a time.

    Tasks of a resource run in order of readiness, ties by number.

    Args:
      name: Name for messages and pictures; need not be unique.
      resource: Resource on which it runs.
      duration_s: Its duration (seconds).
      after: Numbers of earlier nodes that must have ended.
      tag: Kind of the node, for reports.

    Returns:
      The number of the task.
    """
    return self._add(name, resource, duration_s, after, tag)

  def flow(
    self,
    name: str,
    links: tuple[str, ...],
    size_bytes: float | int,
    after: Iterable[int] = (),
    latency_s: float | int = 0.0,
    limit_bytes_per_s: float | int = math.inf,
    tag: str = "",
  ) -> int:
    """Adds bytes that pass all their links at once.

    A flow ends `latency_s` after its last byte has left. The links are free in
    that time. A flow of size 0 needs no link: it ends `latency_s` after it is
    ready.

    Args:
      name: Name for messages and pictures; need not be unique.
      links: Names of the links that it occupies together; () is a local copy.
      size_bytes: Bytes that it carries over each of them.
      after: Numbers of earlier nodes that must have ended.
      latency_s: Time from the last byte sent to the last byte received.
      limit_bytes_per_s: Its highest rate, even if the links offer more.
      tag: Kind of the node, for reports.

    Returns:
      The number of the flow.
    """
    # Equal links become one object, which a million flows share.
    links = self._routes.setdefault(links, links)
    return self._add(
      name, links, size_bytes, after, tag, latency_s, limit_bytes_per_s
    )

  def _add(
    self,
    name: str,
    place: str | tuple[str, ...],
    amount: float | int,
    after: Iterable[int],
    tag: str,
    latency_s: float | int = 0.0,
    limit_bytes_per_s: float | int = math.inf,
  ) -> int:
    number = len(self)
    self.after.extend(after)
    self.after_stop.append(len(self.after))
    self.names.append(name)
    self.tags.append(tag)
    self.places.append(place)
    self.amounts.append(amount)
    self.latencies_s.append(latency_s)
    self.limits_bytes_per_s.append(limit_bytes_per_s)
    return number
