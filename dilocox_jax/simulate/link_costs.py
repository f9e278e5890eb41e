"""Computes the message steps of collectives, and what their messages cost.

A collective is a list of message steps. In each step every replica i sends one
message to replica i + hop. This file says which steps a collective has. It also
computes the rate and the latency of a message from the route between the two
replicas.

A ring all-reduce of M = 4 cuts the operand into 4 slices and has 2 (M - 1) = 6
steps. In each step every replica sends one slice. In steps 1 to 3
(reduce-scatter) each replica passes on the partial sum that it has just
received, so that in the end each replica has one slice of the full sum. In
steps 4 to 6 (all-gather) these slices go round. Each replica sends 6/4 of the
operand: 600 MB for 400 MB.

A transport may cut a message into pieces, which a replica passes on as they
arrive (`Transport.pieces`). The line then stays busy while a piece travels. Let
a message of n pieces take c seconds and the way L. A step takes

  max(c, c / n + L)

seconds, and a ring of K equal steps (K - 1) max(c, c / n + L) + c + L. So it
costs its bytes and one way, however many replicas there are, as long as L is
at most c (n - 1) / n. With n = 1 each step waits for the way: K (c + L).

Example: 128 MiB among M = 32 on 1 Gbit/s (956 Mbit/s of payload), L = 10 ms.
A step sends 4 MiB in c = 35 ms. K = 62 steps take 62 c + L = 2.19 s with four
pieces, and 62 (c + L) = 2.80 s with one.

On a fast line the slices of many replicas are too small for that: at 10 Gbit/s
the same steps take c = 3.5 ms and wait for L, 0.68 s for 0.22 s of bytes. There
a tree is faster (`Transport.has_trees`): sums go up a binary tree and down
again, 2 ceil(log2 M) hops in a row. Two trees carry half of the operand each,
and who is inside one is a leaf of the other, so the busiest replica sends twice
the operand. That is 10 hops of 26.8 MB here, and 10 c + L = 0.23 s.

Gloo's messages are asked for, and `gloo.py` says what that costs.
"""

import collections
import dataclasses
import functools
import math

import numpy as np

from dilocox_jax.plan.operations import (
  AllGather,
  AllReduce,
  AllToAll,
  Broadcast,
  Operation,
  Send,
)
from dilocox_jax.simulate.cluster import STORE, Cluster, Route
from dilocox_jax.simulate.gloo import (
  AT_ONCE,
  GATHERED_SEGMENTS,
  num_segments,
  request_waits_s,
)
from dilocox_jax.simulate.transfer import (
  NCCL,
  Transport,
  limit_bytes_per_s,
  slow_start_s,
)


@dataclasses.dataclass(frozen=True)
class MessageStep:
  """Describes a message step, in which every replica sends one message.

  Attributes:
    hop: Distance of the receiver: replica i sends to i + hop (modulo M).
    size_bytes: Size of each message (bytes).
    sender: Index of the only replica that sends; None if all replicas send.
    is_relayed: Whether a piece is sent on when it has arrived, as in a ring;
      otherwise it waits for nothing that is received.
    pieces: Pieces of each message that are sent on one by one.
    segments: Segments of each message for which the receiver asks, `pieces` at
      a time (`gloo`); 0 if it asks for the whole message, or for nothing.
  """

  hop: int
  size_bytes: float
  sender: int | None = None
  is_relayed: bool = True
  pieces: int = 1
  segments: int = 0


def tree_steps(
  operation: Operation, num_replicas: int, pieces: int
) -> list[MessageStep]:
  """Returns the hops of an all-reduce over two binary trees, in order.

  Every hop is counted as one to the next replica, with the messages of the
  busiest one. Trees of real programs are laid over the nodes in their order.

  Source: Sanders, Speck and Traeff, 2009, "Two-tree algorithms for full
  bandwidth broadcast, reduction and scan".

  Args:
    operation: The all-reduce.
    num_replicas: Number of replicas, M.
    pieces: Pieces of each message.
  """
  count = 2 * math.ceil(math.log2(num_replicas))
  size_bytes = 2.0 * operation.operand_bytes / max(1, count)
  return [MessageStep(hop=1, size_bytes=size_bytes, pieces=pieces)] * count


def message_steps(
  operation: Operation,
  num_replicas: int,
  transport: Transport = Transport(),  # noqa: B008 - it is frozen.
) -> list[MessageStep]:
  """Returns the message steps of an operation, in order.

  The operation says which messages there are (`plan.operations`). The transport
  says how a message is cut, and whether the receiver asks for it.

  Args:
    operation: Kind and operand size of the operation.
    num_replicas: Number of replicas, M. A single replica sends nothing.
    transport: How messages are sent; by default as whole messages.
  """
  sends = operation.sends(num_replicas)
  return [_cut_by(transport, operation, send) for send in sends]


def _cut_by(
  transport: Transport, operation: Operation, send: Send
) -> MessageStep:
  """Returns the message step in which a transport sends messages.

  Those of an all-to-all do not depend on each other; a transport that sends
  whole messages takes them in turn nevertheless. Gloo asks for all at once.
  Source: Thakur et al., 2005, sections 3.1 and 4.
  """
  step = MessageStep(
    hop=send.hop, size_bytes=send.size_bytes, sender=send.sender
  )
  segment_bytes = transport.segment_bytes
  asks = segment_bytes is not None
  match operation:
    case Broadcast():
      return step
    case AllToAll():
      is_in_turn = transport.pieces == 1 and not asks
      return dataclasses.replace(
        step, is_relayed=is_in_turn, pieces=transport.pieces
      )
    case AllReduce() if segment_bytes is not None:
      segments = num_segments(send.size_bytes, segment_bytes)
      return dataclasses.replace(step, pieces=AT_ONCE, segments=segments)
    case AllGather() if asks:
      return dataclasses.replace(
        step, pieces=AT_ONCE, segments=GATHERED_SEGMENTS
      )
  return dataclasses.replace(step, pieces=transport.pieces)


# `eq=False` makes the cached methods hash this object by its identity. Hashing
# the thousand sites of a cluster at every call would be slow.
@dataclasses.dataclass(frozen=True, eq=False)
class LinkCosts:
  """Computes costs of messages in a cluster.

  Attributes:
    cluster: Replicas of the cluster, and the links between them.
    transport: Protocol that sends the messages.
    ring: Replicas that send to each other, in order; empty: all. Where there is
      a ring, a replica's index is its place in it, and M is its length.
  """

  cluster: Cluster
  transport: Transport = NCCL
  ring: tuple[int, ...] = ()

  @functools.cached_property
  def members(self) -> tuple[int, ...]:
    """The replicas that send to each other, in order."""
    return self.ring or tuple(range(self.cluster.num_replicas))

  @functools.cached_property
  def places(self) -> np.ndarray:
    """The members as an index into arrays of all replicas."""
    return np.array(self.members)

  @functools.cache  # noqa: B019 - the cache lives as long as a simulation.
  def steps(self, operation: Operation) -> list[MessageStep]:
    """Returns the message steps of a collective among the members.

    An all-reduce of a transport that has trees takes a tree where the formula
    at the top of this file says that it is faster on these links.
    """
    count = len(self.members)
    ring = message_steps(operation, count, self.transport)
    if not isinstance(operation, AllReduce) or not self.transport.has_trees:
      return ring
    trees = tree_steps(operation, count, self.transport.pieces)
    return min(ring, trees, key=self._seconds)

  def _seconds(self, steps: list[MessageStep]) -> float:
    """Returns the seconds of equal relayed steps, without slow start."""
    if not steps:
      return 0.0
    first = steps[0]
    way_s = float(self.latency_s(steps[0].hop).max())
    send_s = first.size_bytes / float(self.rate_bytes_per_s(first.hop).min())
    step_s = max(send_s, send_s / first.pieces + way_s)
    return (len(steps) - 1) * step_s + send_s + way_s

  @functools.cache  # noqa: B019 - the cache lives as long as a simulation.
  def neighbors(self, hop: int) -> np.ndarray:
    """Returns the place in the ring from which each place receives, [M]."""
    count = len(self.members)
    return (np.arange(count) - hop) % count

  @functools.cache  # noqa: B019 - the cache lives as long as a simulation.
  def among(self, members: tuple[int, ...] | None) -> "LinkCosts":
    """Returns the costs where only some replicas send; None: all of them."""
    if members is None or members == self.members:
      return self
    return dataclasses.replace(self, ring=members)

  def route(self, sender: int, hop: int) -> Route:
    """Returns the route from a replica to the one `hop` places further."""
    receiver = self.members[(sender + hop) % len(self.members)]
    route = self.cluster.route(self.members[sender], receiver)
    if self.transport.connections is None:
      return route
    streams = min(route.streams, self.transport.connections)
    return dataclasses.replace(route, streams=streams)

  @functools.cached_property
  def capacities(self) -> dict[str, float]:
    """Capacity of every link, by name (bytes of payload per second)."""
    goodput_bps = self.cluster.goodput_bps
    return {link: bits_per_s / 8 for link, bits_per_s in goodput_bps.items()}

  def _routes(self, hop: int) -> list[Route]:
    return [self.route(sender, hop) for sender in range(len(self.members))]

  @functools.cache  # noqa: B019 - the cache lives as long as a simulation.
  def rate_bytes_per_s(self, hop: int, is_alone: bool = False) -> np.ndarray:
    """Returns the rates of a step's messages while all are under way.

    If several messages of a step cross the same link, each gets an equal share
    of the link, as if all of them were under way together. Two replicas that
    send through one uplink of 1 Gbit/s get 0.5 Gbit/s each.

    Args:
      hop: Distance of the receivers: replica i sends to i + hop (modulo M).
      is_alone: Whether only one replica sends in this step, as in a broadcast.
        Its message then has all links for itself.

    Returns:
      Rate of the message of each replica, [M] (bytes per second).
    """
    return self._rates(self._routes(hop), is_alone)

  def _rates(self, routes: list[Route], is_alone: bool = False) -> np.ndarray:
    """Returns the rates of messages that are under way together, or alone."""
    crossings = collections.Counter(
      link for route in routes for link in route.links
    )

    def rate(route: Route) -> float:
      shares = [
        self.capacities[link] / (1 if is_alone else crossings[link])
        for link in route.links
      ]
      return min([limit_bytes_per_s(route), *shares])

    return np.array([rate(route) for route in routes])

  @functools.cache  # noqa: B019 - as above.
  def latency_s(self, hop: int) -> np.ndarray:
    """Returns the part of messages' times that does not depend on their size.

    Args:
      hop: Distance of the receivers.

    Returns:
      Latency of the message of each replica, [M] (seconds).
    """
    return self.transport.rtts_per_message * self._rtts_s(hop)

  def _rtts_s(self, hop: int) -> np.ndarray:
    return np.array([route.rtt_s for route in self._routes(hop)])

  @functools.cache  # noqa: B019 - as above.
  def waits_s(
    self, step: MessageStep, size_bytes: float
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the time that a piece takes besides its bytes.

    If the receiver asks for segments (`gloo`), the sender waits for requests
    and sends nothing meanwhile. Any piece also arrives later than it was sent.

    Args:
      step: The message step.
      size_bytes: Size of the piece (bytes).

    Returns:
      Time for which the sender of the piece waits, and time from its last byte
      to its arrival (seconds), [M] each.
    """
    if not step.segments:
      return np.zeros(len(self.members)), self.latency_s(step.hop)
    segments = step.segments / step.pieces
    is_alone = step.sender is not None
    rates = self.rate_bytes_per_s(step.hop, is_alone)
    wait_s, last_s = request_waits_s(
      segment_s=size_bytes / segments / rates,
      rtt_s=self._rtts_s(step.hop),
      num_replicas=len(self.members),
    )
    return segments * wait_s, last_s

  @functools.cache  # noqa: B019 - as above.
  def slow_start_s(self, step: MessageStep) -> np.ndarray:
    """Returns the extra time of messages that follow idle time.

    After idle time a connection starts slowly.

    Returns:
      Extra time of the message of each replica, [M] (seconds).
    """
    rates = self.rate_bytes_per_s(step.hop, step.sender is not None)
    return self._slow_starts_s(self._routes(step.hop), rates, step.size_bytes)

  def _slow_starts_s(
    self, routes: list[Route], rates: np.ndarray, size_bytes: float
  ) -> np.ndarray:
    return np.array(
      [
        slow_start_s(self.transport, route, rate, size_bytes)
        for route, rate in zip(routes, rates.tolist(), strict=True)
      ]
    )

  @functools.cache  # noqa: B019 - as above.
  def store_s(self, size_bytes: int) -> tuple[np.ndarray, ...]:
    """Returns how long members take to write and read a message in a store.

    Each is a request, which takes a round trip besides its bytes. All members
    write at once, and read at once. Their connections were idle before, so the
    first read starts slowly, as the write does.

    Args:
      size_bytes: Size of the message (bytes).

    Returns:
      Seconds of a write, of the slow start of reading, of a read, and of a
      request without content, [M] each.
    """
    ups = [self.cluster.route(each, STORE) for each in self.members]
    downs = [self.cluster.route(STORE, each) for each in self.members]
    request_s = np.array([route.rtt_s for route in ups])
    up = self._rates(ups)
    down = self._rates(downs)
    return (
      request_s + size_bytes / up + self._slow_starts_s(ups, up, size_bytes),
      self._slow_starts_s(downs, down, size_bytes),
      request_s + size_bytes / down,
      request_s,
    )
