"""What a message between two replicas costs, and in which order they go.

Collectives are rounds of messages: in round k every replica sends one message
to a fixed partner. This file says which rounds a collective has and what the
message to a partner `hop` places on costs; both paths of the simulator read
it, and differ in how they add times up.
"""

import dataclasses
import functools

import numpy as np

from dilocox_jax.plan.wire.collectives import Collective
from dilocox_jax.simulate.cluster import Cluster, Route
from dilocox_jax.simulate.transfer import (
  TCP,
  Transport,
  latency_s,
  limit_bytes_per_s,
  slow_start_s,
)


@dataclasses.dataclass(frozen=True)
class MessageStep:
  """One message of every replica.

  Attributes:
    hop: Replica i sends to i + hop (modulo M).
    size_bytes: Of the message.
    sender: The only replica that sends; None: all of them.
  """

  hop: int
  size_bytes: float
  sender: int | None = None


def message_steps(
  operation: Collective, num_replicas: int
) -> list[MessageStep]:
  """The rounds of a collective, in order.

  A ring for all-reduce (2 (M - 1) rounds of a chunk) and all-gather (M - 1
  rounds of the operand), one direct message to each of the others for
  all-to-all, a chain for a broadcast.

  Source: Patarasuk and Yuan, 2009; Thakur et al., 2005, sections 3.1 and 4.

  Args:
    operation: Its kind and operand.
    num_replicas: M; alone there is nothing to do.
  """
  others = num_replicas - 1
  whole_bytes = float(operation.operand_bytes)
  chunk_bytes = whole_bytes / num_replicas
  if operation.kind == "all_reduce":
    return [MessageStep(1, chunk_bytes)] * (2 * others)
  if operation.kind == "all_gather":
    return [MessageStep(1, whole_bytes)] * others
  if operation.kind == "all_to_all":
    return [MessageStep(hop, chunk_bytes) for hop in range(1, num_replicas)]
  if operation.kind == "broadcast":
    return [MessageStep(1, whole_bytes, k) for k in range(others)]
  raise ValueError(f"kind={operation.kind!r} is not a collective we know")


@dataclasses.dataclass(frozen=True)
class HopCosts:
  """Costs of the messages of all replicas to those a few places on; [M] each.

  Attributes:
    rate_bytes_per_s: What each gets while all of them are under way.
    latency_s: Beside the bytes.
  """

  rate_bytes_per_s: np.ndarray
  latency_s: np.ndarray


# Compared by identity: hashing a thousand sites at every question is slow.
@dataclasses.dataclass(frozen=True, eq=False)
class LinkCosts:
  """The messages of a cluster.

  Attributes:
    cluster: Replicas, links and what lies between.
    transport: How messages are sent.
  """

  cluster: Cluster
  transport: Transport = TCP

  def route(self, sender: int, hop: int) -> Route:
    """The way of one message."""
    receiver = (sender + hop) % self.cluster.num_replicas
    return self.cluster.route(sender, receiver)

  @functools.cached_property
  def capacities(self) -> dict[str, float]:
    """What every link carries (bytes of payload a second)."""
    return {k: bps / 8 for k, bps in self.cluster.goodput_bps.items()}

  @functools.cache  # noqa: B019 - it lives as long as a simulation.
  def hop(self, hop: int) -> HopCosts:
    """Costs of messages over a distance.

    A link that several messages of a round cross is divided among them, which
    is what happens if they are under way together.
    """
    senders = range(self.cluster.num_replicas)
    routes = [self.route(sender, hop) for sender in senders]
    rates = [self._rate(route, hop) for route in routes]
    waits = [latency_s(self.transport, route) for route in routes]
    return HopCosts(np.array(rates), np.array(waits))

  def slow_start_s(self, each: MessageStep) -> np.ndarray:
    """What the messages of a round cost more after a silence, [M] seconds."""
    rates = self.hop(each.hop).rate_bytes_per_s
    return np.array(
      [
        slow_start_s(
          self.transport, self.route(sender, each.hop), rate, each.size_bytes
        )
        for sender, rate in enumerate(rates.tolist())
      ]
    )

  def _rate(self, route: Route, hop: int) -> float:
    crossings = self._crossings(hop)
    shares = [self.capacities[link] / crossings[link] for link in route.links]
    return min([limit_bytes_per_s(route), *shares])

  @functools.cache  # noqa: B019 - as above.
  def _crossings(self, hop: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sender in range(self.cluster.num_replicas):
      for link in self.route(sender, hop).links:
        counts[link] = counts.get(link, 0) + 1
    return counts

  def link_bytes(self, operation: Collective) -> dict[str, float]:
    """What a collective puts on every link that it uses."""
    num_replicas = self.cluster.num_replicas
    found: dict[str, float] = {}
    for each in message_steps(operation, num_replicas):
      everyone = range(num_replicas)
      senders = everyone if each.sender is None else (each.sender,)
      for sender in senders:
        for link in self.route(sender, each.hop).links:
          found[link] = found.get(link, 0.0) + each.size_bytes
    return found
