"""Simulates a run event by event: the oracle of the simulator's formulas.

A script becomes a graph of nodes that wait for each other. Nothing assumes that
replicas work at the same pace: a piece waits until its replica has sent the
piece before and has received its neighbor's. Flows that share a link share it
max-min fairly: no rate can rise without lowering one that is no higher. Then
the graph is run from event to event, all rates solved anew at each. It is slow
and plain on purpose; its own times are held to SimGrid's.

Source: Bertsekas and Gallager, 1992, "Data Networks", 6.5.2.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dilocox_jax.simulate.analytic import AnalyticClock, Outcome, Work
from dilocox_jax.simulate.link_costs import LinkCosts, MessageStep
from dilocox_jax.simulate.script import Join, Op
from dilocox_jax.simulate.transfer import limit_bytes_per_s

_SAME = 1 + 1e-12  # Times with a smaller ratio differ by rounding alone.


@dataclasses.dataclass(frozen=True)
class Node:
  """Bytes that cross links together, then a delay; either may be nothing.

  Attributes:
    links: Names of the links.
    size_bytes: Bytes that cross each of them.
    after: Numbers of earlier nodes that must have ended.
    delay_s: Time from the last byte sent to the end (seconds).
    limit: Highest rate of the flow alone (bytes per second).
  """

  links: tuple[str, ...]
  size_bytes: float
  after: Sequence[int] = ()
  delay_s: float = 0.0
  limit: float = math.inf


class Graph:
  """Nodes, which wait for earlier ones only."""

  def __init__(self):
    self.nodes: list[Node] = []

  def flow(self, *args) -> int:
    """Adds a node; returns its number."""
    self.nodes.append(Node(*args))
    return len(self.nodes) - 1


def fair_rates(
  flows: Iterable[Node], capacities: Mapping[str, float]
) -> dict[int, float]:
  """Returns max-min fair rates by identity of the flow.

  All rates rise together; a flow stops at its limit, or when a link is full.
  """
  left = dict(capacities)
  rising = list(flows)
  rates: dict[int, float] = {}
  while rising:
    counts = collections.Counter(x for flow in rising for x in flow.links)
    share = {link: left[link] / count for link, count in counts.items()}
    highest = [min(f.limit, *(share[x] for x in f.links)) for f in rising]
    level = min(highest)
    stopped = [
      flow
      for flow, most in zip(rising, highest, strict=True)
      if most <= level * _SAME
    ]
    for flow in stopped:
      rates[id(flow)] = level
      rising.remove(flow)
      for link in flow.links:
        left[link] -= level
  return rates


class _Run:
  """A graph under way; `run` goes from event to event."""

  def __init__(self, graph: Graph, capacities: Mapping[str, float]):
    self.nodes = graph.nodes
    self.now_s = 0.0
    self.start_s, self.end_s = np.full((2, len(self.nodes)), np.nan)
    self._capacities = capacities
    self._missing = [len(set(node.after)) for node in self.nodes]
    self._followers: dict[int, list[int]] = collections.defaultdict(list)
    for number, node in enumerate(self.nodes):
      for earlier in set(node.after):
        self._followers[earlier].append(number)
    self._left: dict[int, float] = {}  # Bytes of the nodes under way.
    self._events: list[tuple[float, int]] = []  # Ends of delays.
    for number, count in enumerate(self._missing):
      if not count:
        self._start(number)

  def _start(self, number: int) -> None:
    self.start_s[number] = self.now_s
    self._left[number] = self.nodes[number].size_bytes

  def _rates(self) -> dict[int, float]:
    flows = [self.nodes[n] for n, left in self._left.items() if left]
    rates = fair_rates(flows, self._capacities)
    return {n: rates.get(id(self.nodes[n]), math.inf) for n in self._left}

  def run(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns when every node starts and ends (seconds)."""
    while self._left or self._events:
      rates = self._rates()
      ends = {n: self.now_s + x / rates[n] for n, x in self._left.items()}
      at_s = min([*ends.values(), *(t for t, _ in self._events[:1])])
      for number, end_s in ends.items():
        if end_s <= at_s * _SAME:
          del self._left[number]
          delay_s = self.nodes[number].delay_s
          heapq.heappush(self._events, (at_s + delay_s, number))
        else:
          self._left[number] -= rates[number] * (at_s - self.now_s)
      self.now_s = at_s
      while self._events and self._events[0][0] <= at_s * _SAME:
        self._end(heapq.heappop(self._events)[1])
    return self.start_s, self.end_s

  def _end(self, number: int) -> None:
    self.end_s[number] = self.now_s
    for follower in self._followers[number]:
      self._missing[follower] -= 1
      if not self._missing[follower]:
        self._start(follower)


def run_graph(
  graph: Graph, capacities: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
  """Finds when every node starts and ends (seconds).

  Args:
    graph: Nodes.
    capacities: Capacity of every link (bytes per second).
  """
  return _Run(graph, capacities).run()


# One list of node numbers per replica. Where a moment is needed, a list stands
# for the time at which the last of its nodes ends.
Nodes = list[list[int]]


class Lowering(AnalyticClock):
  """Turns ops into a graph, and lists that say what its nodes are.

  Attributes:
    graph: Tasks and flows.
    now: Nodes after which the replica's own work is done, by replica.
    channel: Nodes after which the replica's last exchange is done, by replica.
    steps: Nodes of inner steps, by replica.
    codecs: Nodes of encoding and decoding, by replica.
    waits: One (replica, nodes before the wait, nodes that it waits for) for
      every wait of a replica.
    exchanges: One (replica, nodes before the exchange, last nodes of the
      exchange) for every exchange of a replica.
  """

  def __init__(self, link_costs: LinkCosts, work: Work):
    super().__init__(link_costs, work)
    self._replicas = range(self.num_replicas)
    self.graph = Graph()
    self.now, self.channel, self.steps, self.codecs = (
      [[] for _ in self._replicas] for _ in range(4)
    )
    self.waits: list[tuple[int, list[int], list[int]]] = []
    self.exchanges: list[tuple[int, list[int], list[int]]] = []

  def _task(self, replica: int, seconds: float) -> int:
    number = self.graph.flow((), 0.0, self.now[replica], seconds)
    self.now[replica] = [number]
    return number

  def _take_steps(self, seconds: np.ndarray) -> None:
    for replica in self._replicas:
      self.steps[replica].append(self._task(replica, seconds[replica]))

  def _run_codec(self, seconds: np.ndarray) -> None:
    for replica, codec_s in enumerate(seconds):
      if codec_s:
        self.codecs[replica].append(self._task(replica, codec_s))

  def _channel_free_at(self) -> Nodes:
    return _joined(self.now, self.channel)

  def _send(
    self,
    step: MessageStep,
    size_bytes: float,
    slow_s: np.ndarray,
    ready: Nodes,
    links: LinkCosts,
  ) -> tuple[Nodes, Nodes]:
    waits_s, ways_s = links.waits_s(step, size_bytes)
    sent = list(ready)
    received = list(ready)
    for place, replica in enumerate(links.members):
      if step.sender not in (None, place):
        continue
      route = links.route(place, step.hop)
      flow = self.graph.flow(
        route.links,
        size_bytes,
        ready[replica],
        slow_s[place] + waits_s[place],
        limit_bytes_per_s(route),
      )
      # On its way a piece occupies no link.
      way = self.graph.flow((), 0.0, [flow], ways_s[place])
      receiver = links.members[(place + step.hop) % len(links.members)]
      sent[replica] = [flow]
      received[receiver] = [way]
    return sent, received

  def _later(self, first: Nodes, second: Nodes) -> Nodes:
    return _joined(first, second)

  def _join(self, op: Join) -> None:
    for replica in op.returning:
      self.now[replica] = list(self.now[op.source_replica])
      self.channel[replica] = list(self.channel[op.source_replica])

  def _occupy_channel(self, start: Nodes, end: Nodes) -> None:
    self.channel = end
    self.exchanges += zip(self._replicas, start, end, strict=True)

  def _wait(self, exchange_end: Nodes) -> None:
    self.waits += zip(self._replicas, self.now, exchange_end, strict=True)
    self.now = _joined(self.now, exchange_end)


def _joined(first: Nodes, second: Nodes) -> Nodes:
  """Returns the nodes of two moments together: the time when both are over.

  Example for one replica: [[3, 5]] and [[5, 7]] give [[3, 5, 7]].

  Args:
    first: Nodes of the first moment, by replica.
    second: Nodes of the second moment, by replica.

  Returns:
    Sorted numbers of nodes, by replica.
  """
  return [
    sorted({*first_nodes, *second_nodes})
    for first_nodes, second_nodes in zip(first, second, strict=True)
  ]


def lower(link_costs: LinkCosts, work: Work, ops: Iterable[Op]) -> Lowering:
  """Turns a script into a graph of tasks and flows.

  Args:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    ops: The script.
  """
  lowering = Lowering(link_costs, work)
  lowering.interpret(ops)
  return lowering


def simulate(link_costs: LinkCosts, work: Work, ops: Iterable[Op]) -> Outcome:
  """Returns the times of every replica, as `run_time` does by formula."""
  lowered = lower(link_costs, work, ops)
  starts_s, ends_s = run_graph(lowered.graph, link_costs.capacities)
  lengths_s = ends_s - starts_s

  def latest(nodes: Nodes) -> np.ndarray:
    return np.array([max(ends_s[numbers], default=0.0) for numbers in nodes])

  def gaps(pairs) -> np.ndarray:
    total = np.zeros(lowered.num_replicas)
    for replica, *moments in pairs:
      before_s, after_s = latest(moments)
      total[replica] += max(0.0, after_s - before_s)
    return total

  def spent(nodes: Nodes) -> np.ndarray:
    return np.array([sum(lengths_s[numbers]) for numbers in nodes])

  return Outcome(
    busy_until_s=latest(lowered.now),
    end_s=np.maximum(latest(lowered.now), latest(lowered.channel)),
    compute_s=spent(lowered.steps),
    codec_s=spent(lowered.codecs),
    exposed_s=gaps(lowered.waits),
    exchange_s=gaps(lowered.exchanges),
    num_steps=lowered.num_steps,
    sent_bytes=lowered.sent_bytes,
  )
