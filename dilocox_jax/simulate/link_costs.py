"""What a message between two replicas costs, and how messages form collectives.

A collective is a list of message steps. In each step every replica i sends one
message to replica i + hop. This file says which steps a collective has, and
what a message over a distance `hop` costs. Both paths of the simulator use it.

A ring all-reduce of M = 4 cuts the operand into 4 slices and has 2 (M - 1) = 6
steps of one slice. In steps 1 to 3 (reduce-scatter) each replica passes on the
partial sum that it has just received, so that in the end each replica has one
slice of the full sum. In steps 4 to 6 (all-gather) these slices go round. Each
replica sends 6/4 of the operand: 600 MB for 400 MB.
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
  """One message of every replica, sent at the same time.

  Attributes:
    hop: Replica i sends to i + hop (modulo M).
    size_bytes: Bytes of each message.
    sender: The only replica that sends; None: all replicas send.
  """

  hop: int
  size_bytes: float
  sender: int | None = None


def message_steps(
  operation: Collective, num_replicas: int
) -> list[MessageStep]:
  """Returns the message steps of a collective, in order.

  All-reduce is a ring (2 (M - 1) steps of a slice), and so is all-gather
  (M - 1 steps of the operand). All-to-all sends one message to each of the
  other replicas. A broadcast is a chain from replica 0 to replica M - 1.

  Source: Patarasuk and Yuan, 2009; Thakur et al., 2005, sections 3.1 and 4.

  Args:
    operation: Kind and operand of the collective.
    num_replicas: M; a single replica sends nothing.
  """
  others = num_replicas - 1
  whole_bytes = float(operation.operand_bytes)
  slice_bytes = whole_bytes / num_replicas
  if operation.kind == "all_reduce":
    return [MessageStep(1, slice_bytes)] * (2 * others)
  if operation.kind == "all_gather":
    return [MessageStep(1, whole_bytes)] * others
  if operation.kind == "all_to_all":
    return [MessageStep(hop, slice_bytes) for hop in range(1, num_replicas)]
  if operation.kind == "broadcast":
    return [MessageStep(1, whole_bytes, k) for k in range(others)]
  raise ValueError(f"kind={operation.kind!r} is not a collective we know")


@dataclasses.dataclass(frozen=True)
class HopCosts:
  """Costs of the messages of all replicas to those `hop` places on; [M] each.

  Attributes:
    rate_bytes_per_s: Rate of each message while all of them are under way.
    latency_s: Time of a message besides its bytes (seconds).
  """

  rate_bytes_per_s: np.ndarray
  latency_s: np.ndarray


# Compared by identity, because hashing a thousand sites at every call is slow.
@dataclasses.dataclass(frozen=True, eq=False)
class LinkCosts:
  """Costs of messages in a cluster.

  Attributes:
    cluster: Replicas and links.
    transport: How messages are sent.
  """

  cluster: Cluster
  transport: Transport = TCP

  def route(self, sender: int, hop: int) -> Route:
    """Returns the route of the message from a replica over a distance."""
    receiver = (sender + hop) % self.cluster.num_replicas
    return self.cluster.route(sender, receiver)

  @functools.cached_property
  def capacities(self) -> dict[str, float]:
    """Capacity of every link, by name (bytes of payload a second)."""
    return {k: bps / 8 for k, bps in self.cluster.goodput_bps.items()}

  @functools.cache  # noqa: B019 - it lives as long as a simulation.
  def hop(self, hop: int) -> HopCosts:
    """Returns the costs of messages over a distance.

    A link that several messages of a step cross is divided evenly among them,
    as if they were under way together. Two replicas behind one uplink of 1
    Gbit/s that both send away get 0.5 Gbit/s each.
    """
    senders = range(self.cluster.num_replicas)
    routes = [self.route(sender, hop) for sender in senders]
    rates = [self._rate(route, hop) for route in routes]
    waits = [latency_s(self.transport, route) for route in routes]
    return HopCosts(np.array(rates), np.array(waits))

  def slow_start_s(self, step: MessageStep) -> np.ndarray:
    """Returns the extra seconds of messages after idle time, [M]."""
    rates = self.hop(step.hop).rate_bytes_per_s
    return np.array(
      [
        slow_start_s(
          self.transport, self.route(sender, step.hop), rate, step.size_bytes
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
    """Returns the bytes that a collective puts on each link it uses."""
    num_replicas = self.cluster.num_replicas
    carried: dict[str, float] = {}
    for step in message_steps(operation, num_replicas):
      everyone = range(num_replicas)
      senders = everyone if step.sender is None else (step.sender,)
      for sender in senders:
        for link in self.route(sender, step.hop).links:
          carried[link] = carried.get(link, 0.0) + step.size_bytes
    return carried
