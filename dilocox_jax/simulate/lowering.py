"""Turns a script into a graph of tasks and flows, and runs it on the engine.

The graph does not assume that replicas work at the same pace. It only says what
waits for what: each op of a replica waits for the op before it. A message waits
until its replica has sent its last message and received its neighbour's. The
event engine computes the times.
"""

from collections.abc import Iterable

import numpy as np

from dilocox_jax.simulate.engine import Timeline, run_graph
from dilocox_jax.simulate.graph import Graph
from dilocox_jax.simulate.interpreter import Interpreter
from dilocox_jax.simulate.link_costs import (
  LinkCosts,
  MessageStep,
  message_steps,
)
from dilocox_jax.simulate.outcome import Outcome, Work
from dilocox_jax.simulate.script import Compute, Join, Launch, Op
from dilocox_jax.simulate.transfer import limit_bytes_per_s

# One list of node numbers per replica. Where a moment is needed, a list stands
# for the time at which the last of its nodes ends.
Nodes = list[list[int]]


class Lowering(Interpreter[Nodes]):
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

  def _task(self, replica: int, name: str, seconds: float, tag: str) -> int:
    number = self.graph.task(
      name, f"replica {replica}", seconds, self.now[replica], tag
    )
    self.now[replica] = [number]
    return number

  def _take_steps(self, op: Compute, seconds: np.ndarray) -> None:
    for replica in self._replicas[: 1 if op.is_alone else None]:
      name = f"{op.num_steps} steps"
      number = self._task(replica, name, seconds[replica], "steps")
      self.steps[replica].append(number)

  def _run_codec(self, name: str, seconds: np.ndarray) -> None:
    for replica, codec_s in enumerate(seconds):
      if codec_s:
        number = self._task(replica, name, codec_s, "codec")
        self.codecs[replica].append(number)

  def _free_from(self) -> Nodes:
    return _joined(self.now, self.channel)

  def _send(
    self,
    name: str,
    step: MessageStep,
    sizes_bytes: np.ndarray,
    slow_s: np.ndarray,
    start: Nodes,
    links: LinkCosts,
  ) -> Nodes:
    waits_s = links.latency_s(step.hop) + slow_s
    sent: Nodes = []
    for place, replica in enumerate(links.members):
      if step.sender not in (None, place):
        sent.append(start[replica])
        continue
      route = links.route(place, step.hop)
      flow = self.graph.flow(
        name,
        route.links,
        sizes_bytes[place],
        start[replica],
        waits_s[place],
        limit_bytes_per_s(route),
        "exchange",
      )
      sent.append([flow])
    count = len(sent)
    received = [sent[(place - step.hop) % count] for place in range(count)]
    end = list(start)
    for replica, nodes in zip(
      links.members, _joined(sent, received), strict=True
    ):
      end[replica] = nodes
    return end

  def _join(self, op: Join) -> None:
    for replica in op.returning:
      self.now[replica] = list(self.now[op.donor])
      self.channel[replica] = list(self.channel[op.donor])

  def _occupy_channel(self, start: Nodes, end: Nodes) -> None:
    self.channel = end
    self.exchanges += zip(self._replicas, start, end, strict=True)

  def _wait(self, exchange_end: Nodes) -> None:
    self.waits += zip(self._replicas, self.now, exchange_end, strict=True)
    self.now = _joined(self.now, exchange_end)


def _joined(first: Nodes, second: Nodes) -> Nodes:
  """Returns the nodes of two moments together: the time when both are over.

  Example for one replica: [[3, 5]] and [[5, 7]] give [[3, 5, 7]].

  Every node is listed once. If duplicates stayed in the lists, each exchange of
  a flush would make them about 2.6 times longer, because there are no tasks
  between its exchanges that would replace the lists by a single node.

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


def simulate(lowered: Lowering) -> tuple[Outcome, Timeline]:
  """Runs the graph of a script on the event engine.

  Args:
    lowered: The result of `lower`.

  Returns:
    The times of every replica, and the start and end of every task and flow.
  """
  link_costs = lowered.link_costs
  outages = link_costs.cluster.link_outages
  timeline = run_graph(lowered.graph, link_costs.capacities, outages)
  ends_s = timeline.end_s
  lengths_s = ends_s - timeline.start_s

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

  outcome = Outcome(
    busy_until_s=latest(lowered.now),
    end_s=np.maximum(latest(lowered.now), latest(lowered.channel)),
    compute_s=spent(lowered.steps),
    codec_s=spent(lowered.codecs),
    exposed_s=gaps(lowered.waits),
    exchange_s=gaps(lowered.exchanges),
    num_steps=lowered.num_steps,
    sent_bytes=lowered.sent_bytes,
  )
  return outcome, timeline


def fits(ops: Iterable[Op], num_replicas: int, most_nodes: int) -> bool:
  """Returns whether the graph of a script has at most `most_nodes` nodes."""
  return sum(_num_nodes(op, num_replicas) for op in ops) <= most_nodes


def _num_nodes(op: Op, num_replicas: int) -> int:
  if not isinstance(op, Launch):
    return num_replicas
  steps = (
    len(message_steps(collective, num_replicas)) for collective in op.operations
  )
  return num_replicas * sum(steps)
