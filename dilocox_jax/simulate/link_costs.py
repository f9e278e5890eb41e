"""Computes the times of the messages that replicas send to each other.

A collective is a list of message steps. In each step every replica i sends one
message to replica i + hop. In a broadcast only one replica sends in each step.

A ring all-reduce of M = 4 cuts the operand into 4 slices and has 2 (M - 1) = 6
steps. In each step every replica sends one slice. In steps 1 to 3
(reduce-scatter) partial sums go round: each replica adds its own values to the
slice that it has just received, and sends the sum in the next step. In the end
each replica has one slice of the full sum. In steps 4 to 6 (all-gather) these
slices go round. Each replica sends 6/4 of the operand: 600 MB for 400 MB.

A transport may cut a message into n pieces, which a replica passes on as they
arrive (`Transport.pieces`). The line then stays busy while a piece travels. Let
the bytes of a message take c seconds on the line, and let L be the latency. A
step takes

  max(c, c / n + L)

seconds, and a ring of K equal steps takes (K - 1) max(c, c / n + L) + c + L. As
long as L is at most c (n - 1) / n, this is K c + L: the latency counts once,
however many replicas there are. With n = 1 it is K (c + L).

Example: 128 MiB among M = 32 on 1 Gbit/s (956 Mbit/s of payload), L = 10 ms.
A step sends 4 MiB in c = 35.1 ms. K = 62 steps take 62 c + L = 2.19 s with four
pieces, and 62 (c + L) = 2.80 s with one.

On a fast line the slices of many replicas are too small to hide the latency: at
10 Gbit/s the same steps take c = 3.5 ms, and the ring takes 0.68 s for 0.22 s
of bytes. There a tree is faster (`Transport.has_trees`): partial sums go up a
binary tree, and the sum goes down again, in 2 ceil(log2 M) steps. There are two
trees, and each carries half of the operand. An inner node of one tree is a leaf
of the other, so the busiest replica sends twice the operand. In the example
these are 10 steps of 26.8 MB with c = 22.5 ms, and 10 c + L = 0.23 s.

In gloo the receiver asks for messages, and `gloo.py` says what that costs.
"""

import collections
import dataclasses
import functools
import math
from typing import NamedTuple

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
  """A step of a collective: every replica, or only one, sends a message.

  Attributes:
    hop: Distance of the receiver: replica i of M sends to i + hop (modulo M).
    size_bytes: Size of each message (bytes).
    sender: Index of the only replica that sends; None: all replicas send.
    is_relayed: Whether a replica may send a piece only after it has received
      the same piece of the step before, as in a ring.
    pieces: Number of pieces of each message, which are sent one after the
      other.
    segments: Number of parts of each message for which the receiver asks,
      `pieces` at a time (`gloo`); 0: it does not ask for parts.
  """

  hop: int
  size_bytes: float
  sender: int | None = None
  is_relayed: bool = True
  pieces: int = 1
  segments: int = 0


class StoreTimes(NamedTuple):
  """How long members of an exchange use a store (seconds), [M] each.

  Attributes:
    write_s: Time of a write, with slow start.
    slow_read_s: Time that slow start adds to the first read.
    read_s: Time of a read, without slow start.
    request_s: Time of a request without content: one round trip.
  """

  write_s: np.ndarray
  slow_read_s: np.ndarray
  read_s: np.ndarray
  request_s: np.ndarray


def tree_steps(
  operation: Operation, num_replicas: int, pieces: int
) -> list[MessageStep]:
  """Returns the message steps of an all-reduce over two binary trees, in order.

  Source: Sanders, Speck and Traeff, 2009, "Two-tree algorithms for full
  bandwidth broadcast, reduction and scan".
  Differs: in each step every replica sends to the next one. All steps together
  have the bytes of the busiest replica, which are twice the operand.

  Args:
    operation: The all-reduce.
    num_replicas: Number of replicas, M. A single replica sends nothing.
    pieces: Number of pieces of each message.
  """
  num_steps = 2 * math.ceil(math.log2(num_replicas))
  size_bytes = 2.0 * operation.operand_bytes / max(1, num_steps)
  return [MessageStep(hop=1, size_bytes=size_bytes, pieces=pieces)] * num_steps


def message_steps(
  operation: Operation,
  num_replicas: int,
  transport: Transport = Transport(),  # noqa: B008 - it is frozen.
) -> list[MessageStep]:
  """Returns the message steps of an operation, in order.

  An all-reduce goes round a ring, also if the transport has trees.

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
  """Returns a message step whose messages are cut as the transport cuts them.

  Source: Thakur et al., 2005, sections 3.1 and 4.
  """
  step = MessageStep(
    hop=send.hop, size_bytes=send.size_bytes, sender=send.sender
  )
  segment_bytes = transport.segment_bytes  # None: the receiver does not ask.
  match operation:
    case Broadcast():
      return step
    case AllToAll():
      # A transport that sends whole messages waits until one has arrived before
      # it sends the next, although the next one does not depend on it.
      is_in_turn = transport.pieces == 1 and segment_bytes is None
      return dataclasses.replace(
        step, is_relayed=is_in_turn, pieces=transport.pieces
      )
    case AllReduce() if segment_bytes is not None:
      segments = num_segments(send.size_bytes, segment_bytes)
      return dataclasses.replace(step, pieces=AT_ONCE, segments=segments)
    case AllGather() if segment_bytes is not None:
      return dataclasses.replace(
        step, pieces=AT_ONCE, segments=GATHERED_SEGMENTS
      )
  return dataclasses.replace(step, pieces=transport.pieces)


# `eq=False` makes the cached methods hash this object by its identity. Hashing
# the thousand sites of a cluster at every call would be slow.
@dataclasses.dataclass(frozen=True, eq=False)
class LinkCosts:
  """Computes the times of messages between the members of an exchange.

  The *members* are the replicas that send to each other. Here M is the number
  of members, and a *place* is an index among the members. In a step with a
  given `hop`, place i sends to place i + hop (modulo M).

  Attributes:
    cluster: Replicas of the cluster, and the links between them.
    transport: Protocol that sends the messages.
    ring: Indices of the members in the cluster, in order; empty: all replicas.
  """

  cluster: Cluster
  transport: Transport = NCCL
  ring: tuple[int, ...] = ()

  @functools.cached_property
  def members(self) -> tuple[int, ...]:
    """Index of each member in the cluster, in order, [M]."""
    return self.ring or tuple(range(self.cluster.num_replicas))

  @functools.cached_property
  def member_array(self) -> np.ndarray:
    """`members` as an array, which can index arrays over all replicas."""
    return np.array(self.members)

  @functools.cache  # noqa: B019 - the cache lives as long as a simulation.
  def steps(self, operation: Operation) -> list[MessageStep]:
    """Returns the message steps of a collective among the members, in order.

    If the transport has trees, an all-reduce takes trees or the ring, whichever
    is faster by an estimate (`_seconds`).
    """
    num_members = len(self.members)
    ring = message_steps(operation, num_members, self.transport)
    if not isinstance(operation, AllReduce) or not self.transport.has_trees:
      return ring
    trees = tree_steps(operation, num_members, self.transport.pieces)
    return min(ring, trees, key=self._seconds)

  def _seconds(self, steps: list[MessageStep]) -> float:
    """Estimates the seconds of a collective of equal, relayed message steps.

    It takes the slowest line and the longest latency between neighbors. Slow
    start is not counted.
    """
    if not steps:
      return 0.0
    step = steps[0]
    latency_s = float(self.latency_s(step.hop).max())
    send_s = step.size_bytes / float(self.rate_bytes_per_s(step.hop).min())
    # The next step starts when this message is sent and a first piece has come.
    step_s = max(send_s, send_s / step.pieces + latency_s)
    return (len(steps) - 1) * step_s + send_s + latency_s

  @functools.cache  # noqa: B019 - the cache lives as long as a simulation.
  def neighbors(self, hop: int) -> np.ndarray:
    """Returns the place of the member from which each member receives, [M].

    A place is an index among the members: i receives from i - hop (modulo M).
    """
    num_members = len(self.members)
    return (np.arange(num_members) - hop) % num_members

  @functools.cache  # noqa: B019 - the cache lives as long as a simulation.
  def among(self, members: tuple[int, ...] | None) -> "LinkCosts":
    """Returns the costs of messages among given members.

    Args:
      members: Indices of the members in the cluster, in order; None: the
        members stay.
    """
    if members is None or members == self.members:
      return self
    return dataclasses.replace(self, ring=members)

  def route(self, sender: int, hop: int) -> Route:
    """Returns the route from member `sender` to member sender + hop (modulo M).

    The transport may limit the number of parallel TCP streams.
    """
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
    """Returns the route of each member's message, [M]."""
    return [self.route(sender, hop) for sender in range(len(self.members))]

  @functools.cache  # noqa: B019 - the cache lives as long as a simulation.
  def rate_bytes_per_s(self, hop: int, is_alone: bool = False) -> np.ndarray:
    """Returns the rate of each member's message in a step (bytes/s), [M].

    Messages of the step that cross the same link have equal shares of its rate.

    Args:
      hop: Distance of the receivers.
      is_alone: Whether only one member sends in this step, as in a broadcast,
        so that its message has all links for itself.
    """
    return self._rates(self._routes(hop), is_alone)

  def _rates(self, routes: list[Route], is_alone: bool = False) -> np.ndarray:
    """Returns the rate of a message on each route (bytes/s).

    Messages that cross the same link share its rate, unless `is_alone`.
    """
    num_crossing = collections.Counter(
      link for route in routes for link in route.links
    )

    def rate(route: Route) -> float:
      limits = [limit_bytes_per_s(route)]
      for link in route.links:
        num_sharing = 1 if is_alone else num_crossing[link]
        limits.append(self.capacities[link] / num_sharing)
      return min(limits)

    return np.array([rate(route) for route in routes])

  @functools.cache  # noqa: B019 - as above.
  def latency_s(self, hop: int) -> np.ndarray:
    """Returns the delay of each message, whatever its size (seconds), [M]."""
    return self.transport.rtts_per_message * self._rtts_s(hop)

  def _rtts_s(self, hop: int) -> np.ndarray:
    """Returns the round trip of each message's route (seconds), [M]."""
    return np.array([route.rtt_s for route in self._routes(hop)])

  @functools.cache  # noqa: B019 - as above.
  def waits_s(
    self, step: MessageStep, size_bytes: float
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the times that a piece takes in addition to sending its bytes.

    Args:
      step: The message step.
      size_bytes: Size of the piece (bytes).

    Returns:
      Two times of each member's piece (seconds), [M] each. The first is how
      much longer the sender is busy than with the bytes alone. The second is
      how long after that the piece arrives.

      If the receiver does not ask for parts, the first time is 0 and the second
      is the latency. If the receiver asks for parts (`gloo`), the first time
      contains all round trips. The second is then the time that the last part
      takes longer because no further part overlaps with it
      (`request_waits_s`).
    """
    if not step.segments:
      return np.zeros(len(self.members)), self.latency_s(step.hop)
    segments_per_piece = step.segments / step.pieces
    is_alone = step.sender is not None
    rates = self.rate_bytes_per_s(step.hop, is_alone)
    wait_s, last_s = request_waits_s(
      segment_s=size_bytes / segments_per_piece / rates,
      rtt_s=self._rtts_s(step.hop),
      num_replicas=len(self.members),
    )
    return segments_per_piece * wait_s, last_s

  @functools.cache  # noqa: B019 - as above.
  def slow_start_s(self, step: MessageStep) -> np.ndarray:
    """Returns the seconds that slow start adds to a step's messages, [M].

    It assumes that each connection was idle; the caller checks whether it was.
    """
    is_alone = step.sender is not None
    rates = self.rate_bytes_per_s(step.hop, is_alone)
    return self._slow_starts_s(self._routes(step.hop), rates, step.size_bytes)

  def _slow_starts_s(
    self, routes: list[Route], rates: np.ndarray, size_bytes: float
  ) -> np.ndarray:
    """Returns the seconds that slow start adds to a message on each route."""
    return np.array(
      [
        slow_start_s(self.transport, route, rate, size_bytes)
        for route, rate in zip(routes, rates.tolist(), strict=True)
      ]
    )

  @functools.cache  # noqa: B019 - as above.
  def store_s(self, size_bytes: int) -> StoreTimes:
    """Returns how long members take to write and read a message in a store.

    All members write at the same time, and read at the same time. A request
    takes a round trip besides its bytes.

    Args:
      size_bytes: Size of the message (bytes).
    """
    uploads = [self.cluster.route(member, STORE) for member in self.members]
    downloads = [self.cluster.route(STORE, member) for member in self.members]
    upload_rates = self._rates(uploads)
    download_rates = self._rates(downloads)
    slow_write_s = self._slow_starts_s(uploads, upload_rates, size_bytes)
    slow_read_s = self._slow_starts_s(downloads, download_rates, size_bytes)
    request_s = np.array([route.rtt_s for route in uploads])
    write_s = request_s + size_bytes / upload_rates + slow_write_s
    read_s = request_s + size_bytes / download_rates
    return StoreTimes(write_s, slow_read_s, read_s, request_s)
