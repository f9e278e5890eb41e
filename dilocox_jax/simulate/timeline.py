"""What the engine returns: when every node of a graph started and ended."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from dilocox_jax.simulate.graph import Graph


@dataclasses.dataclass(frozen=True)
class Timeline:
  """When everything happened. Arrays are indexed by the number of a node.

  Attributes:
    start_s: When the task got its resource, or the flow its links, [nodes].
    end_s: When the task or the flow ended, latency included, [nodes].
    makespan_s: The last end; 0 for an empty graph.
    num_events: Number of starts, ends, last bytes sent, failures and returns
      of links.
    num_solves: How often the rates of a group of flows that share links were
      found.
    link_bytes: Bytes that each link has carried.
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
  of_route: dict[tuple[str, ...], float] = {}
  for place, amount in zip(graph.places, graph.amounts, strict=True):
    if not isinstance(place, str):
      of_route[place] = of_route.get(place, 0.0) + amount
  carried = dict.fromkeys(links, 0.0)
  for route, size_bytes in of_route.items():
    for link in route:
      carried[link] += size_bytes
  return carried
