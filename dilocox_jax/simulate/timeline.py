"""The outcome of a run: plain arrays, so that everyone may ask what they like.

It stands apart from the engine because reports and pictures need the outcome
and nothing of what made it.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from dilocox_jax.simulate.graph import Graph


@dataclasses.dataclass(frozen=True)
class Rates:
  """Every change of a flow's rate, in order of time.

  Attributes:
    time_s: When [changes].
    number: Whose [changes].
    bytes_per_s: The rate from then on [changes]; 0 when it is through or its
      link is down, infinite where nothing limits it.
  """

  time_s: np.ndarray
  number: np.ndarray
  bytes_per_s: np.ndarray


@dataclasses.dataclass(frozen=True)
class Timeline:
  """When everything happened; arrays are indexed by number.

  Attributes:
    ready_s: All that it waited for had ended.
    start_s: It got its resource, or its links.
    sent_s: A flow's last byte left; a task ended.
    end_s: It ended, latency included.
    makespan_s: The last end; 0 for an empty graph.
    num_events: Starts, ends, flows that were through, failures and returns.
    num_solves: How often rates of several flows joined by links were found.
    link_bytes: What each link has carried.
    rates: Changes of rates, if they were asked for.
  """

  ready_s: np.ndarray
  start_s: np.ndarray
  sent_s: np.ndarray
  end_s: np.ndarray
  makespan_s: float
  num_events: int
  num_solves: int
  link_bytes: dict[str, float]
  rates: Rates | None = None


def link_bytes(graph: Graph, links: Iterable[str]) -> dict[str, float]:
  """Bytes that the flows of a graph carry over each link.

  Args:
    graph: Tasks and flows.
    links: Names of all links; those nobody crosses carry 0.
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


def rates_of(changes: Sequence[tuple[float, int, float]]) -> Rates:
  """Columns of (seconds, number, bytes per second)."""
  table = np.array(changes, np.float64).reshape(-1, 3)
  return Rates(table[:, 0], table[:, 1].astype(np.int64), table[:, 2])
