"""Turns a script into tasks and flows, for the event engine.

Nothing is assumed about who is in step with whom: a replica's ops follow one
another, a message waits for the one before it to have left and arrived, and
the links decide the rest. No time is computed here.
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

# For every replica, numbers of nodes. As a moment: when the last of them ends.
Nodes = list[list[int]]


@dataclasses.dataclass
class Lowered:
  """A graph and what its nodes mean.

  Attributes:
    graph: Tasks and flows.
    own: Nodes that end a replica's own work, by replica.
    last: Nodes that end its own work or an exchange under way, by replica.
    steps: Nodes of inner steps, by replica.
    codecs: Nodes of encoding and decoding, by replica.
    waits: (replica, nodes before, nodes waited for) of every wait.
    exchanges: (replica, nodes before, last nodes) of every exchange.
    num_steps: Inner steps.
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
  """Adds ops to a graph, replica by replica."""

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

  def _wait(self, back: Nodes) -> None:
    self._lowered.waits += zip(self._replicas, self._now, back, strict=True)
    self._now = _joined(self._now, back)


def _joined(first: Nodes, second: Nodes) -> Nodes:
  """Returns the moment at which both have ended.

  A node stands in it once: with a copy at every wait, a flush of n fragments
  without tasks in between would hold some 2.6^n of them.
  """
  return [
    sorted({*nodes, *others})
    for nodes, others in zip(first, second, strict=True)
  ]


def lower(link_costs: LinkCosts, work: Work, ops: Iterable[Op]) -> Lowered:
  """Turns a script into tasks and flows.

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
  """Runs what was lowered through the engine.

  Args:
    link_costs: Cluster and transport, as given to `lower`.
    lowered: The result of `lower`.

  Returns:
    The cost, and when every task and flow began and ended.
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
  """Whether a script has at most `most_nodes` nodes when lowered."""
  counts = itertools.accumulate(_num_nodes(op, num_replicas) for op in ops)
  return all(count <= most_nodes for count in counts)


def _num_nodes(op: Op, num_replicas: int) -> int:
  if not isinstance(op, Launch):
    return num_replicas
  steps = (len(message_steps(each, num_replicas)) for each in op.operations)
  return num_replicas * sum(steps)
