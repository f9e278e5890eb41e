"""Turns a script into a graph of tasks and flows, and runs it on the engine.

The graph does not assume that replicas work at the same pace. It only says what
waits for what: each op of a replica waits for the op before it. A message waits
until its replica has sent its last message and received its neighbour's. The
event engine computes the times.
"""

import dataclasses
import itertools
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
from dilocox_jax.simulate.script import Compute, Launch, Op
from dilocox_jax.simulate.transfer import limit_bytes_per_s

# One list of node numbers per replica. Where a moment is needed, a list stands
# for the time at which the last of its nodes ends.
Nodes = list[list[int]]


@dataclasses.dataclass
class Lowered:
  """A graph, and lists that say what its nodes are.

  Attributes:
    graph: Tasks and flows.
    own: Nodes after which the replica's own work is done, by replica.
    last: Nodes after which the replica's own work and its exchanges are done,
      by replica.
    steps: Nodes of inner steps, by replica.
    codecs: Nodes of encoding and decoding, by replica.
    waits: One (replica, nodes before the wait, nodes that it waits for) for
      every wait of a replica.
    exchanges: One (replica, nodes before the exchange, last nodes of the
      exchange) for every exchange of a replica.
    num_steps: Number of inner steps.
    sent_bytes: Bytes that one replica put on the wire.
  """

  graph: Graph
  own: Nodes
  last: Nodes
  steps: Nodes
  codecs: Nodes
  waits: list[tuple[int, list[int], list[int]]]
  exchanges: list[tuple[int, list[int], list[int]]]
  num_steps: int = 0
  sent_bytes: int = 0


class _Lowering(Interpreter[Nodes]):
  """Adds the nodes of every op to a graph, for one replica after the other."""

  def __init__(self, link_costs: LinkCosts, work: Work):
    super().__init__(link_costs, work)
    self._replicas = range(self.num_replicas)
    self._now: Nodes = [[] for _ in self._replicas]
    self._channel: Nodes = [[] for _ in self._replicas]
    empty = ([[] for _ in self._replicas] for _ in range(4))
    self._lowered = Lowered(Graph(), *empty, waits=[], exchanges=[])

  def finish(self) -> Lowered:
    return dataclasses.replace(
      self._lowered,
      own=self._now,
      last=_joined(self._now, self._channel),
      num_steps=self.num_steps,
      sent_bytes=self.sent_bytes,
    )

  def _task(self, replica: int, name: str, seconds: float, tag: str) -> int:
    number = self._lowered.graph.task(
      name, f"replica {replica}", seconds, self._now[replica], tag
    )
    self._now[replica] = [number]
    return number

  def _take_steps(self, op: Compute, seconds: np.ndarray) -> None:
    for replica in self._replicas[: 1 if op.is_alone else None]:
      name = f"{op.num_steps} steps"
      number = self._task(replica, name, seconds[replica], "steps")
      self._lowered.steps[replica].append(number)

  def _run_codec(self, name: str, seconds: np.ndarray) -> None:
    for replica, codec_s in enumerate(seconds):
      if codec_s:
        number = self._task(replica, name, codec_s, "codec")
        self._lowered.codecs[replica].append(number)

  def _free_from(self) -> Nodes:
    return _joined(self._now, self._channel)

  def _send(
    self,
    name: str,
    step: MessageStep,
    sizes_bytes: np.ndarray,
    slow_s: np.ndarray,
    start: Nodes,
  ) -> Nodes:
    waits_s = self.link_costs.hop(step.hop).latency_s + slow_s
    sent: Nodes = []
    for replica in self._replicas:
      if step.sender not in (None, replica):
        sent.append(start[replica])
        continue
      route = self.link_costs.route(replica, step.hop)
      flow = self._lowered.graph.flow(
        name,
        route.links,
        sizes_bytes[replica],
        start[replica],
        waits_s[replica],
        limit_bytes_per_s(route),
        "exchange",
      )
      sent.append([flow])
    received = [sent[r - step.hop] for r in self._replicas]
    return _joined(sent, received)

  def _occupy_channel(self, start: Nodes, end: Nodes) -> None:
    self._channel = end
    self._lowered.exchanges += zip(self._replicas, start, end, strict=True)

  def _wait(self, exchange_end: Nodes) -> None:
    self._lowered.waits += zip(
      self._replicas, self._now, exchange_end, strict=True
    )
    self._now = _joined(self._now, exchange_end)


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


def lower(link_costs: LinkCosts, work: Work, ops: Iterable[Op]) -> Lowered:
  """Turns a script into a graph of tasks and flows.

  Args:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    ops: The script.
  """
  lowering = _Lowering(link_costs, work)
  lowering.interpret(ops)
  return lowering.finish()


def simulate(
  link_costs: LinkCosts, lowered: Lowered
) -> tuple[Outcome, Timeline]:
  """Runs the graph of a script on the event engine.

  Args:
    link_costs: Cluster and transport, as given to `lower`.
    lowered: The result of `lower`.

  Returns:
    The times of every replica, and the start and end of every task and flow.
  """
  outages = link_costs.cluster.link_outages
  timeline = run_graph(lowered.graph, link_costs.capacities, outages)
  ends_s = timeline.end_s
  lengths_s = ends_s - timeline.start_s

  def latest(nodes: list[int]) -> float:
    return max((ends_s[node] for node in nodes), default=0.0)

  def gaps(pairs) -> np.ndarray:
    total = np.zeros(len(lowered.last))
    for replica, before, after in pairs:
      total[replica] += max(0.0, latest(after) - latest(before))
    return total

  def spent(nodes: Nodes) -> np.ndarray:
    return np.array([sum(lengths_s[numbers]) for numbers in nodes])

  outcome = Outcome(
    busy_until_s=np.array([latest(nodes) for nodes in lowered.own]),
    end_s=np.array([latest(nodes) for nodes in lowered.last]),
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
  counts = itertools.accumulate(_num_nodes(op, num_replicas) for op in ops)
  return all(count <= most_nodes for count in counts)


def _num_nodes(op: Op, num_replicas: int) -> int:
  if not isinstance(op, Launch):
    return num_replicas
  steps = (
    len(message_steps(collective, num_replicas)) for collective in op.operations
  )
  return num_replicas * sum(steps)
