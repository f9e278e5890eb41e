"""Runs a graph on links and finds when every task and flow starts and ends.

This is a discrete-event simulation: it visits only the times at which
something changes. Events at the same time are handled in a fixed order: flows
send their last bytes, nodes end, links fail or come back, then nodes start in
the order of their numbers. So every run gives the same bits and does not depend
on the order of a dict or a heap.

Outages: while a link is down, its capacity is 0. So the flows on this link have
rate 0 and their remaining bytes wait. For example, a flow of 4 bytes uses a
link of 2 bytes/s that is down from second 1 to second 6.5. The flow sends 2
bytes, waits 5.5 s, sends 2 bytes, and ends at 7.5 s.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dilocox_jax.simulate.fair import Flow, Sharing
from dilocox_jax.simulate.graph import Graph, Outage

# Kinds of events. Events at the same time are handled in this order, and before
# any node starts.
_SENT, _ENDED, _FAILED_OR_BACK = range(3)


@dataclasses.dataclass(frozen=True)
class Timeline:
  """The simulated times of all nodes (tasks and flows) of a graph.

  Arrays are indexed by the number of a node.

  Attributes:
    start_s: Time at which the task got its resource, or at which the flow
      began to send, float64 [num_nodes] (seconds).
    end_s: Time at which the task ended, or at which the last byte of the flow
      arrived, float64 [num_nodes] (seconds).
    num_events: Number of simulated events. An event is the start or end of a
      node, the last byte that a flow sends, or a link that fails or comes back.
    num_solves: Number of times that the engine computed new rates for a group
      of flows that share links.
  """

  start_s: np.ndarray
  end_s: np.ndarray
  num_events: int
  num_solves: int


def run_graph(
  graph: Graph,
  links: Mapping[str, float | int],
  outages: Sequence[Outage] = (),
) -> Timeline:
  """Simulates all tasks and flows of a graph until the last one has ended.

  A task occupies a resource for some seconds. A flow sends bytes over links.
  Flows that share a link share its capacity max-min fairly
  (`dilocox_jax.simulate.fair`).

  Args:
    graph: Tasks, flows, and which of them wait for which.
    links: Capacity (bytes per second, 0 or more) of every link, by name. A link
      has one direction.
    outages: Times in which a link carries nothing.

  Returns:
    The times (seconds) at which every task and flow started and ended.

  Raises:
    ValueError: If a flow can never finish.
  """
  return _Simulation(graph, links, outages).run()


class _Simulation:
  """State of one simulation. Lists are indexed by node or link, for speed."""

  def __init__(
    self,
    graph: Graph,
    links: Mapping[str, float | int],
    outages: Sequence[Outage],
  ):
    num = len(graph)
    self._graph = graph
    self._link_names = list(links)
    self._capacities = [float(capacity) for capacity in links.values()]
    self._sharing = Sharing(self._capacities)
    self._now_s = 0.0
    self._num_events = 0
    self._events: list[tuple[float, int, int]] = []
    self._start_s, self._end_s = [math.nan] * num, [math.nan] * num
    index = {name: index for index, name in enumerate(links)}
    self._routes = {
      place: tuple(index[name] for name in place)
      for place in set(graph.places)
      if not isinstance(place, str)
    }
    self._outages = self._planned(outages, index)
    self._down = [0] * len(links)  # Number of current outages of each link.
    # Each resource has a heap of the tasks that wait for it. An entry is the
    # time at which the task was ready, and the task's number.
    names = {place for place in graph.places if isinstance(place, str)}
    self._queues: dict[str, list[tuple[float, int]]] = {n: [] for n in names}
    self._is_busy = dict.fromkeys(names, False)
    self._find_successors()

  def _planned(
    self, outages: Sequence[Outage], index: Mapping[str, int]
  ) -> list[tuple[int, int]]:
    """Adds the events of outages to the heap.

    Args:
      outages: Times in which a link carries nothing.
      index: Index of every link, by name.

    Returns:
      For every such event its link's index, and +1 if the link fails or -1 if
      the link comes back.
    """
    changes: list[tuple[int, int]] = []
    for outage in outages:
      for time_s, step in ((outage.start_s, 1), (outage.stop_s, -1)):
        if time_s < math.inf:
          self._events.append((time_s, _FAILED_OR_BACK, len(changes)))
        changes.append((index[outage.link], step))
    heapq.heapify(self._events)
    return changes

  def _find_successors(self) -> None:
    """Lists the successors of every node: the nodes that wait for it.

    Also lists the nodes that wait for nothing, which start first. With `start`
    for `_successors_start`, node n has the successors
    _successors[start[n] : start[n + 1]]. Example: node 2 waits for nodes 0 and
    1, and node 3 waits for node 0. Then `_successors` is [2, 3, 2], and `start`
    is [0, 2, 3, 3, 3].
    """
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
    """Handles events and starts nodes until nothing is left to do."""
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
    """Starts a node that is ready. A task waits if its resource is busy."""
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
    self._sharing.add(Flow(number, self._routes[place], size_bytes, limit))

  def _run_task(self, number: int, resource: str) -> None:
    self._num_events += 1
    self._is_busy[resource] = True
    self._start_s[number] = self._now_s
    end_s = self._now_s + self._graph.amounts[number]
    heapq.heappush(self._events, (end_s, _ENDED, number))

  def _sent(self, number: int) -> None:
    """Handles the time at which a flow has sent its last byte."""
    flow = self._sharing.flows.get(number)
    # If the rate of a flow changes, it gets a new event. The old event cannot
    # be removed from the heap, so it is ignored here.
    if flow is None or flow.due_s != self._now_s:
      return
    self._num_events += 1
    self._sharing.remove(number)
    self._leave(number)

  def _leave(self, number: int) -> None:
    """Ends a flow that has sent its last byte, after its latency."""
    latency_s = self._graph.latencies_s[number]
    if latency_s:
      event = (self._now_s + latency_s, _ENDED, number)
      heapq.heappush(self._events, event)
    else:
      self._ended(number)

  def _ended(self, number: int) -> None:
    """Handles the end of a node: frees its resource and its successors."""
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
    """Handles the start or the end of an outage of a link."""
    self._num_events += 1
    link, step = self._outages[number]
    self._down[link] += step
    # Outages may overlap. The link comes back when the last of them is over.
    capacity = 0.0 if self._down[link] else self._capacities[link]
    self._sharing.set_capacity(link, capacity)

  def _timeline(self) -> Timeline:
    self._check_all_ended()
    return Timeline(
      np.array(self._start_s, np.float64),
      np.array(self._end_s, np.float64),
      self._num_events,
      self._sharing.num_solves,
    )

  def _check_all_ended(self) -> None:
    for number, flow in self._sharing.flows.items():
      slowest = min(flow.route, key=self._sharing.capacities.__getitem__)
      raise ValueError(
        f"flow {self._graph.names[number]!r} can never finish: link"
        f" {self._link_names[slowest]!r} has capacity 0, or an outage of it"
        " never ends"
      )
