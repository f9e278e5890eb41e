"""A script as tasks and flows, for the engine.

Nothing is assumed about who is in step with whom: a replica's ops follow one
another, a message waits for the one before it to have left and arrived, and
the links decide the rest.
"""

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from dilocox_jax.plan.wire.collectives import Collective
from dilocox_jax.simulate.engine import Timeline, run_graph
from dilocox_jax.simulate.graph import Graph, LinkRate
from dilocox_jax.simulate.idle_time import IdleTime
from dilocox_jax.simulate.link_costs import (
  LinkCosts,
  MessageStep,
  message_steps,
)
from dilocox_jax.simulate.noise import Noise
from dilocox_jax.simulate.outcome import Outcome, Work
from dilocox_jax.simulate.script import Compute, Key, Launch, Op, Wait
from dilocox_jax.simulate.transfer import limit_bytes_per_s

Nodes = list[list[int]]  # For every replica, what has to have ended.


@dataclasses.dataclass
class Lowered:
  """A graph and what its nodes mean.

  Attributes:
    graph: Tasks and flows.
    own: For every replica, the nodes that end its own part.
    last: The same, with the exchanges still under way.
    steps: Nodes of inner steps, by replica.
    codecs: Nodes of encoding and decoding, by replica.
    waits: (replica, nodes before, nodes waited for) of every wait.
    exchanges: (replica, nodes before, last nodes) of every exchange.
    num_steps: Inner steps.
    sent_bytes: What a replica put on the wire.
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


class _Lowering:
  """Adds ops to a graph, replica by replica."""

  def __init__(self, link_costs: LinkCosts, work: Work):
    num_replicas = link_costs.cluster.num_replicas
    self._link_costs, self._work = link_costs, work
    self._replicas = range(num_replicas)
    self._noise = Noise(link_costs.cluster.jitter, num_replicas)
    self._idle_time = IdleTime(num_replicas)
    self._now: Nodes = [[] for _ in self._replicas]
    self._channel: Nodes = [[] for _ in self._replicas]
    self._back: dict[Key, Nodes] = {}
    empty = ([[] for _ in self._replicas] for _ in range(4))
    self.lowered = Lowered(Graph(), *empty, waits=[], exchanges=[])

  def add(self, op: Op) -> None:
    if isinstance(op, Compute):
      self._take_steps(op)
    elif isinstance(op, Launch):
      self._launch(op)
    else:
      self._wait(op)

  def finish(self) -> Lowered:
    self.lowered.own = self._now
    ends = zip(self._now, self._channel, strict=True)
    self.lowered.last = [now + channel for now, channel in ends]
    return self.lowered

  def _task(self, replica: int, name: str, seconds: float, tag: str) -> int:
    number = self.lowered.graph.task(
      name, f"replica {replica}", seconds, self._now[replica], tag
    )
    self._now[replica] = [number]
    return number

  def _take_steps(self, op: Compute) -> None:
    taken_s = self._noise.steps(op.num_steps) * self._work.step_s
    for replica in self._replicas[: 1 if op.is_alone else None]:
      name = f"{op.num_steps} steps"
      number = self._task(replica, name, taken_s[replica], "steps")
      self.lowered.steps[replica].append(number)
    self._idle_time.last(op.num_steps * self._work.step_s)
    self.lowered.num_steps += op.num_steps

  def _launch(self, op: Launch) -> None:
    self._spend_on_codec("encode")
    num_replicas = len(self._replicas)
    start = [self._now[r] + self._channel[r] for r in self._replicas]
    nodes, starts_anew = start, self._idle_time.end()
    for operation in op.operations:
      name = f"{op.key[0]} {op.key[1]} {operation.kind}"
      nodes = self._collective(name, operation, nodes, starts_anew)
      starts_anew = np.zeros_like(starts_anew)
      self.lowered.sent_bytes += operation.sent_bytes(num_replicas)
    self._channel = nodes
    self._back[op.key] = nodes
    self.lowered.exchanges += list(
      zip(self._replicas, start, nodes, strict=True)
    )

  def _wait(self, op: Wait) -> None:
    back = self._back.pop(op.key)
    for replica in self._replicas:
      self.lowered.waits.append((replica, self._now[replica], back[replica]))
      self._now[replica] = [*self._now[replica], *back[replica]]
    self._spend_on_codec("decode")

  def _spend_on_codec(self, name: str) -> None:
    for replica, codec_s in enumerate(self._work.codec_s):
      if codec_s:
        number = self._task(replica, name, codec_s / 2, "codec")
        self.lowered.codecs[replica].append(number)

  def _collective(
    self,
    name: str,
    operation: Collective,
    start: Nodes,
    starts_anew: np.ndarray,
  ) -> Nodes:
    todo = message_steps(operation, len(self._replicas))
    factors = self._noise.transfers(len(todo))
    for number, (each, factor) in enumerate(zip(todo, factors, strict=True)):
      is_slow = starts_anew & (number == 0)
      start = self._round(name, each, factor, start, is_slow)
    return start

  def _round(
    self,
    name: str,
    each: MessageStep,
    factor: np.ndarray,
    start: Nodes,
    is_slow: np.ndarray,
  ) -> Nodes:
    waits_s = self._link_costs.hop(each.hop).latency_s
    if is_slow.any():
      slow_s = self._link_costs.slow_start_s(each)
      waits_s = waits_s + np.where(is_slow, slow_s, 0.0)
    sent: Nodes = []
    for replica in self._replicas:
      if each.sender not in (None, replica):
        sent.append(start[replica])
        continue
      route = self._link_costs.route(replica, each.hop)
      flow = self.lowered.graph.flow(
        name,
        route.links,
        each.size_bytes * factor[replica],
        start[replica],
        waits_s[replica],
        limit_bytes_per_s(route),
        "exchange",
      )
      sent.append([flow])
    count = len(self._replicas)
    return [
      list({*sent[r], *sent[(r - each.hop) % count]}) for r in self._replicas
    ]


def lower(link_costs: LinkCosts, work: Work, ops: Iterable[Op]) -> Lowered:
  """Turns a script into tasks and flows.

  Args:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    ops: The script.
  """
  lowering = _Lowering(link_costs, work)
  for op in ops:
    lowering.add(op)
  return lowering.finish()


def simulate(
  link_costs: LinkCosts, lowered: Lowered
) -> tuple[Outcome, Timeline]:
  """Runs what was lowered through the engine.

  Args:
    link_costs: The same as in `lower`.
    lowered: Its result.

  Returns:
    The cost, and when every task and flow began and ended.
  """
  links = {name: LinkRate(rate) for name, rate in link_costs.capacities.items()}
  timeline = run_graph(lowered.graph, links, link_costs.cluster.link_outages)
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
    return np.array([sum(lengths_s[each]) for each in nodes])

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
  """Whether a script has at most so many nodes when lowered."""
  counts = itertools.accumulate(_num_nodes(op, num_replicas) for op in ops)
  return all(count <= most_nodes for count in counts)


def _num_nodes(op: Op, num_replicas: int) -> int:
  if not isinstance(op, Launch):
    return num_replicas
  each = (len(message_steps(one, num_replicas)) for one in op.operations)
  return num_replicas * sum(each)
