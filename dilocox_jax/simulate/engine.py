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
from dilocox_jax.simulate.graph import Graph, LinkRate, Outage
from dilocox_jax.simulate.timeline import Timeline, link_bytes, rates_of

# What may happen at one time, in this order; starts come after.
_SENT, _ENDED, _FAILED_OR_BACK = range(3)


def run_graph(
  graph: Graph,
  links: Mapping[str, LinkRate],
  outages: Sequence[Outage] = (),
  *,
  record_rates: bool = False,
) -> Timeline:
  """Runs a graph to its end.

  Args:
    graph: What is to happen.
    links: The links that flows may name.
    outages: When which of them carry nothing.
    record_rates: Whether to keep every change of a flow's rate.

  Returns:
    When everything happened.

  Raises:
    ValueError: If a link is unknown, or a flow can never finish.
  """
  return _Simulation(graph, links, outages, record_rates).run()


class _Simulation:
  """State of one run; lists by number or by link index, for speed."""

  def __init__(
    self,
    graph: Graph,
    links: Mapping[str, LinkRate],
    outages: Sequence[Outage],
    record_rates: bool,
  ):
    num = len(graph)
    self._graph = graph
    self._link_names = list(links)
    self._index = {name: index for index, name in enumerate(links)}
    self._links = list(links.values())
    self._changes: list[tuple[float, int, float]] | None = None
    if record_rates:
      self._changes = []
    self._sharing = Sharing(
      [float(link.capacity_bytes_per_s) for link in self._links],
      self._changes,
    )
    self._now_s = 0.0
    self._num_events = 0
    self._events: list[tuple[float, int, int]] = []
    self._ready_s, self._start_s = [math.nan] * num, [math.nan] * num
    self._sent_s, self._end_s = [math.nan] * num, [math.nan] * num
    self._routes: dict[tuple[str, ...], tuple[int, ...]] = {}
    self._fifo_routes: dict[tuple[str, ...], tuple[int, ...]] = {}
    self._find_routes()
    self._outages = self._planned(outages)
    self._down = [0] * len(links)
    # Waiting for a resource or a FIFO link, and who has it (-1: nobody).
    names = {place for place in graph.places if isinstance(place, str)}
    self._queues: dict[str, list[tuple[float, int]]] = {n: [] for n in names}
    self._is_busy = dict.fromkeys(names, False)
    self._lines: list[list[tuple[float, int]]] = [[] for _ in links]
    self._holders = [-1] * len(links)
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
      route = tuple(self._index[name] for name in place)
      self._routes[place] = route
      self._fifo_routes[place] = tuple(
        link for link in route if self._links[link].discipline == "fifo"
      )

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
    for number in self._starting:
      self._ready_s[number] = 0.0

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
    fifo = self._fifo_routes[place]
    if not self._graph.amounts[number]:
      self._num_events += 1
      self._start_s[number] = self._now_s
      self._leave(number)
    elif not fifo:
      self._send(number)
    else:
      for link in fifo:
        heapq.heappush(self._lines[link], (self._now_s, number))
      self._send_if_first(number)

  def _run_task(self, number: int, resource: str) -> None:
    self._num_events += 1
    self._is_busy[resource] = True
    self._start_s[number] = self._now_s
    end_s = self._now_s + self._graph.amounts[number]
    heapq.heappush(self._events, (end_s, _ENDED, number))

  def _send_if_first(self, number: int) -> None:
    """Sends if all its FIFO links are free and nobody is before it."""
    fifo = self._fifo_routes[self._graph.places[number]]  # type: ignore
    for link in fifo:
      if self._holders[link] >= 0 or self._lines[link][0][1] != number:
        return
    for link in fifo:
      heapq.heappop(self._lines[link])
      self._holders[link] = number
    self._send(number)

  def _send(self, number: int) -> None:
    self._num_events += 1
    self._start_s[number] = self._now_s
    graph = self._graph
    self._sharing.add(
      number,
      self._routes[graph.places[number]],  # type: ignore
      graph.amounts[number],
      graph.limits_bytes_per_s[number],
    )

  def _sent(self, number: int) -> None:
    """A flow's last byte has left, unless its rate changed meanwhile."""
    flow = self._sharing.flows.get(number)
    if flow is None or flow.due_s != self._now_s:
      return
    self._num_events += 1
    self._sharing.remove(number, self._now_s)
    fifo = self._fifo_routes[self._graph.places[number]]  # type: ignore
    for link in fifo:
      self._holders[link] = -1
    for link in fifo:
      if self._lines[link]:
        self._send_if_first(self._lines[link][0][1])
    self._leave(number)

  def _leave(self, number: int) -> None:
    self._sent_s[number] = self._now_s
    latency_s = self._graph.latencies_s[number]
    if latency_s:
      event = (self._now_s + latency_s, _ENDED, number)
      heapq.heappush(self._events, event)
    else:
      self._ended(number)

  def _ended(self, number: int) -> None:
    self._num_events += 1
    now_s = self._end_s[number] = self._now_s
    place = self._graph.places[number]
    if isinstance(place, str):
      self._sent_s[number] = now_s
      self._is_busy[place] = False
      if self._queues[place]:
        self._run_task(heapq.heappop(self._queues[place])[1], place)
    start, stop = self._successors_start[number : number + 2]
    for successor in self._successors[start:stop]:
      self._num_missing[successor] -= 1
      if not self._num_missing[successor]:
        self._ready_s[successor] = now_s
        heapq.heappush(self._starting, successor)

  def _failed_or_back(self, number: int) -> None:
    self._num_events += 1
    link, step = self._outages[number]
    self._down[link] += step
    capacity = float(self._links[link].capacity_bytes_per_s)
    self._sharing.set_capacity(link, 0.0 if self._down[link] else capacity)

  def _timeline(self) -> Timeline:
    self._check_all_ended()
    end_s = np.array(self._end_s, np.float64)
    changes = self._changes
    return Timeline(
      ready_s=np.array(self._ready_s, np.float64),
      start_s=np.array(self._start_s, np.float64),
      sent_s=np.array(self._sent_s, np.float64),
      end_s=end_s,
      makespan_s=float(end_s.max(initial=0.0)),
      num_events=self._num_events,
      num_solves=self._sharing.num_solves,
      link_bytes=link_bytes(self._graph, self._link_names),
      rates=None if changes is None else rates_of(changes),
    )

  def _check_all_ended(self) -> None:
    for number, flow in self._sharing.flows.items():
      dead = min(flow.route, key=self._sharing.capacities.__getitem__)
      raise ValueError(
        f"flow {self._graph.names[number]!r} can never finish: link"
        f" {self._link_names[dead]!r} has no capacity and no outage of it"
        " ends"
      )
