"""Runs a graph on links: what happens when, to the last digit and every time.

Only times at which something changes are visited. What falls on one time
happens in a fixed order (bytes gone, ends, links failing or coming back, then
starts by number), so no outcome depends on the order of a dict or of a heap.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dilocox_jax.simulate.fair import Sharing
from dilocox_jax.simulate.graph import Graph, Outage
from dilocox_jax.simulate.timeline import Timeline, link_bytes

# What may happen at one time, in this order; starts come after.
_SENT, _ENDED, _FAILED_OR_BACK = range(3)


def run_graph(
  graph: Graph,
  links: Mapping[str, float | int],
  outages: Sequence[Outage] = (),
) -> Timeline:
  """Runs a graph to its end.

  Args:
    graph: What is to happen.
    links: Capacity of every link that flows may name (bytes per second), one
      direction each. Flows share a link max-min fairly.
    outages: Times at which links carry nothing.

  Returns:
    When everything happened.

  Raises:
    ValueError: If a link is unknown or has no capacity, or a flow can never
      finish.
  """
  return _Simulation(graph, links, outages).run()


class _Simulation:
  """State of one run; lists by number or by link index, for speed."""

  def __init__(
    self,
    graph: Graph,
    links: Mapping[str, float | int],
    outages: Sequence[Outage],
  ):
    num = len(graph)
    self._graph = graph
    self._link_names = list(links)
    self._index = {name: index for index, name in enumerate(links)}
    self._capacities = [float(capacity) for capacity in links.values()]
    for name, capacity in links.items():
      if not capacity >= 0:
        raise ValueError(
          f"link {name!r}: capacity={capacity} bytes/s must be >= 0"
        )
    self._sharing = Sharing(self._capacities)
    self._now_s = 0.0
    self._num_events = 0
    self._events: list[tuple[float, int, int]] = []
    self._start_s, self._end_s = [math.nan] * num, [math.nan] * num
    self._routes: dict[tuple[str, ...], tuple[int, ...]] = {}
    self._find_routes()
    self._outages = self._planned(outages)
    self._down = [0] * len(links)
    # (when it was ready, number) of the tasks that wait for a resource.
    names = {place for place in graph.places if isinstance(place, str)}
    self._queues: dict[str, list[tuple[float, int]]] = {n: [] for n in names}
    self._is_busy = dict.fromkeys(names, False)
    self._find_successors()

  def _find_routes(self) -> None:
    graph = self._graph
    for number, place in enumerate(graph.places):
      if isinstance(place, str) or place in self._routes:
        continue
      unknown = [name for name in place if name not in self._index]
      if unknown:
        raise ValueError(
          f"flow {graph.names[number]!r}: link {unknown[0]!r} is unknown; there"
          f" are {', '.join(map(repr, self._link_names[:8])) or 'none'}"
        )
      self._routes[place] = tuple(self._index[name] for name in place)

  def _planned(self, outages: Sequence[Outage]) -> list[tuple[int, int]]:
    """(link, +1 for a failure, -1 for a return), by number of the event."""
    changes: list[tuple[int, int]] = []
    for outage in outages:
      if outage.link not in self._index:
        raise ValueError(f"outage of link {outage.link!r}, which is unknown")
      for time_s, step in ((outage.start_s, 1), (outage.stop_s, -1)):
        if time_s < math.inf:
          self._events.append((time_s, _FAILED_OR_BACK, len(changes)))
        changes.append((self._index[outage.link], step))
    heapq.heapify(self._events)
    return changes

  def _find_successors(self) -> None:
    """Turns "waits for" around, and starts what waits for nothing."""
    num = len(self._graph)
    after = np.array(self._graph.after, np.int64)
    counts = np.diff(np.array(self._graph.after_stop, np.int64), prepend=0)
    waiting = np.repeat(np.arange(num), counts)
    order = np.argsort(after, kind="stable")
    self._successors: list[int] = waiting[order].tolist()
    stops = np.cumsum(np.bincount(after, minlength=num))
    self._successors_start: list[int] = [0, *stops.tolist()]
    self._num_missing: list[int] = counts.tolist()
    self._starting = np.flatnonzero(counts == 0).tolist()

  def run(self) -> Timeline:
    events, starting, sharing = self._events, self._starting, self._sharing
    handlers = (self._sent, self._ended, self._failed_or_back)
    while True:
      while events and events[0][0] <= self._now_s:
        time_s, kind, number = heapq.heappop(events)
        handlers[kind](number)
      if starting:
        self._start(heapq.heappop(starting))
        continue
      for time_s, number in sharing.settle(self._now_s):
        heapq.heappush(events, (time_s, _SENT, number))
      if not events:
        return self._timeline()
      self._now_s = events[0][0]

  def _start(self, number: int) -> None:
    """Something is ready: it starts, or waits in a queue."""
    place = self._graph.places[number]
    if isinstance(place, str):
      if self._is_busy[place]:
        heapq.heappush(self._queues[place], (self._now_s, number))
      else:
        self._run_task(number, place)
      return
    self._num_events += 1
    self._start_s[number] = self._now_s
    size_bytes = self._graph.amounts[number]
    if not size_bytes:
      self._leave(number)
      return
    limit = self._graph.limits_bytes_per_s[number]
    self._sharing.add(number, self._routes[place], size_bytes, limit)

  def _run_task(self, number: int, resource: str) -> None:
    self._num_events += 1
    self._is_busy[resource] = True
    self._start_s[number] = self._now_s
    end_s = self._now_s + self._graph.amounts[number]
    heapq.heappush(self._events, (end_s, _ENDED, number))

  def _sent(self, number: int) -> None:
    """A flow's last byte has left, unless its rate changed meanwhile."""
    flow = self._sharing.flows.get(number)
    if flow is None or flow.due_s != self._now_s:
      return
    self._num_events += 1
    self._sharing.remove(number)
    self._leave(number)

  def _leave(self, number: int) -> None:
    latency_s = self._graph.latencies_s[number]
    if latency_s:
      event = (self._now_s + latency_s, _ENDED, number)
      heapq.heappush(self._events, event)
    else:
      self._ended(number)

  def _ended(self, number: int) -> None:
    self._num_events += 1
    self._end_s[number] = self._now_s
    place = self._graph.places[number]
    if isinstance(place, str):
      self._is_busy[place] = False
      if self._queues[place]:
        self._run_task(heapq.heappop(self._queues[place])[1], place)
    start, stop = self._successors_start[number : number + 2]
    for successor in self._successors[start:stop]:
      self._num_missing[successor] -= 1
      if not self._num_missing[successor]:
        heapq.heappush(self._starting, successor)

  def _failed_or_back(self, number: int) -> None:
    self._num_events += 1
    link, step = self._outages[number]
    self._down[link] += step
    # Outages may overlap: the link is back when the last of them is over.
    capacity = 0.0 if self._down[link] else self._capacities[link]
    self._sharing.set_capacity(link, capacity)

  def _timeline(self) -> Timeline:
    self._check_all_ended()
    end_s = np.array(self._end_s, np.float64)
    return Timeline(
      start_s=np.array(self._start_s, np.float64),
      end_s=end_s,
      makespan_s=float(end_s.max(initial=0.0)),
      num_events=self._num_events,
      num_solves=self._sharing.num_solves,
      link_bytes=link_bytes(self._graph, self._link_names),
    )

  def _check_all_ended(self) -> None:
    for number, flow in self._sharing.flows.items():
      dead = min(flow.route, key=self._sharing.capacities.__getitem__)
      raise ValueError(
        f"flow {self._graph.names[number]!r} can never finish: link"
        f" {self._link_names[dead]!r} has no capacity and no outage of it"
        " ends"
      )
