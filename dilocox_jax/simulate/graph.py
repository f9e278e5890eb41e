"""What is to happen, without when: tasks, flows, and what waits for what.

A million nodes must fit, so a node is a number into flat columns rather than
an object. Numbers are given in order of creation and a node waits for earlier
ones only, so a graph cannot hold a cycle and needs no search for one.
"""

import array
import dataclasses
import math
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Outage:
  """A time in which a link carries nothing; its flows wait and go on after.

  Attributes:
    link: Name of the link.
    start_s: When it fails.
    stop_s: When it is back; infinity is never.
  """

  link: str
  start_s: float | int
  stop_s: float | int

  def __post_init__(self):
    if not 0 <= self.start_s < self.stop_s:
      raise ValueError(
        f"outage of link {self.link!r}: start_s={self.start_s} must be >= 0"
        f" and before stop_s={self.stop_s}"
      )


class Graph:
  """Tasks and flows in order of creation; a number names either.

  Columns are read by the engine and by whoever draws the outcome.

  Attributes:
    names: Of every node.
    tags: What kind of thing it is, for reports; may be empty.
    places: The resource of a task (a string), the links of a flow (a tuple).
    amounts: Duration of a task (seconds), size of a flow (bytes).
    latencies_s: Of a flow; 0 for a task.
    limits_bytes_per_s: Of a flow; infinity for a task.
    after: Numbers waited for, node after node.
    after_stop: Where a node's part of `after` ends; the next one starts there.
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
      name: For messages and pictures; need not be unique.
      resource: Where it runs.
      duration_s: How long.
      after: Numbers that must have ended.
      tag: What kind of thing it is, for reports.

    Returns:
      The number of the task.

    Raises:
      ValueError: If it can never be run as described.
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

    A flow ends `latency_s` after its last byte has left; the links are free
    meanwhile. One of size 0 needs no link: it ends `latency_s` after it is
    ready.

    Args:
      name: For messages and pictures; need not be unique.
      links: Names of the links it occupies together; none is a local copy.
      size_bytes: What it carries over each of them.
      after: Numbers that must have ended.
      latency_s: From the last byte sent to the last byte there.
      limit_bytes_per_s: Its own highest rate, whatever the links offer.
      tag: What kind of thing it is, for reports.

    Returns:
      The number of the flow.

    Raises:
      ValueError: If it can never be sent as described.
    """
    route = self._route(name, links)
    if not 0 <= latency_s < math.inf:
      raise ValueError(f"flow {name!r}: latency_s={latency_s} must be >= 0")
    if not limit_bytes_per_s > 0:
      raise ValueError(
        f"flow {name!r}: limit_bytes_per_s={limit_bytes_per_s} must be > 0"
      )
    return self._add(
      name, route, size_bytes, after, tag, latency_s, limit_bytes_per_s
    )

  def _route(self, name: str, links: tuple[str, ...]) -> tuple[str, ...]:
    """The same object for the same links, so that a million flows share it."""
    is_tuple = isinstance(links, tuple)
    if is_tuple and links in self._routes:
      return self._routes[links]
    if not is_tuple or len(set(links)) < len(links):
      raise ValueError(
        f"flow {name!r}: links={links!r} must be a tuple of different names"
      )
    return self._routes.setdefault(links, links)

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
    number = len(self.names)
    is_task = isinstance(place, str)
    kind, field = ("task", "duration_s") if is_task else ("flow", "size_bytes")
    if not 0 <= amount < math.inf:
      raise ValueError(
        f"{kind} {name!r}: {field}={amount} must be finite and >= 0"
      )
    waits = tuple(after)
    if waits and not (0 <= min(waits) and max(waits) < number):
      raise ValueError(
        f"{kind} {name!r}: after={waits} must name numbers from 0 to"
        f" {number - 1}, which exist already"
      )
    self.after.extend(waits)
    self.after_stop.append(len(self.after))
    self.names.append(name)
    self.tags.append(tag)
    self.places.append(place)
    self.amounts.append(amount)
    self.latencies_s.append(latency_s)
    self.limits_bytes_per_s.append(limit_bytes_per_s)
    return number
