"""The engine's result: when every node of a graph started and ended."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from dilocox_jax.simulate.graph import Graph


@dataclasses.dataclass(frozen=True)
class Timeline:
  """The simulated times of all nodes (tasks and flows) of a graph.

  Arrays are indexed by the number of a node.

  Attributes:
    start_s: Time at which the task got its resource, or at which the flow
      began to send, float64 [num_nodes] (seconds).
    end_s: Time at which the task ended, or at which the last byte of the flow
      arrived, float64 [num_nodes] (seconds).
    makespan_s: Time at which the last node ended (seconds); 0 for an empty
      graph.
    num_events: Number of simulated events. An event is the start or end of a
      node, the last byte that a flow sends, or a link that fails or comes back.
    num_solves: Number of times that the engine computed new rates for a group
      of flows that share links.
    link_bytes: Bytes that each link has carried, by name of the link.
  """

  start_s: np.ndarray
  end_s: np.ndarray
  makespan_s: float
  num_events: int
  num_solves: int
  link_bytes: dict[str, float]


def link_bytes(graph: Graph, links: Iterable[str]) -> dict[str, float]:
  """Returns the bytes that the flows of a graph carry over each link.

  Args:
    graph: Tasks and flows.
    links: Names of all links. A link that no flow crosses carries 0 bytes.
  """
  route_bytes: dict[tuple[str, ...], float] = {}
  for place, amount in zip(graph.places, graph.amounts, strict=True):
    if not isinstance(place, str):
      route_bytes[place] = route_bytes.get(place, 0.0) + amount
  carried_bytes = dict.fromkeys(links, 0.0)
  for route, size_bytes in route_bytes.items():
    for link in route:
      carried_bytes[link] += size_bytes
  return carried_bytes
