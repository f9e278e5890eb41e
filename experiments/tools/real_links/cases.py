"""The fixed cases: collectives, and what the simulator says of each."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.cluster_file import cluster_from_mapping
from dilocox_jax.simulate.interpreter import Work
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Launch, Wait
from dilocox_jax.simulate.transfer import GLOO, Transport
from experiments.runtime.throttled_network import NodeLink
from experiments.tools.real_links.changing_link import OPEN_BIT_PER_S
from experiments.tools.real_links.network import (
  equal_cluster,
  measure_collectives,
  network_of,
)

_MIB = 2**20
_PLAIN = dataclasses.replace(GLOO, factors=())  # Before it is calibrated.
_KINDS = tuple(kind for kind, *_ in GLOO.factors)
REPEATS = 5  # Of a case, which may take seconds.
CALIBRATION_REPEATS = 12


@dataclasses.dataclass(frozen=True)
class Row:
  """A collective on real links beside its prediction.

  Attributes:
    cluster: Name of the cluster.
    kind: Kind of the collective.
    operand_bytes: Size of a replica's operand (bytes).
    predicted_s: Seconds by the simulator.
    measured_s: Seconds that the last process measured, the middle mean.
    planned_bytes: Bytes that a replica sends by the plan.
    link_bytes: Bytes that the kernel counted on the link of that process.
    busy_share: Share of the machine's cores that had work meanwhile.
  """

  cluster: str
  kind: str
  operand_bytes: int
  predicted_s: float
  measured_s: float
  planned_bytes: int
  link_bytes: float
  busy_share: float

  @property
  def ratio(self) -> float:
    """Predicted over measured seconds."""
    return self.predicted_s / self.measured_s


def _two_sites(placement: str) -> Cluster:
  """Two sites with two nodes each, behind a shared uplink, in a rank order."""
  site = {"up": "100 Mbit/s", "down": "100 Mbit/s", "rtt": "0 ms"}
  return cluster_from_mapping(
    {
      "name": f"2 sites, ranks {' '.join(placement)}",
      "every_site": site,
      "sites": [{"name": "A"}, {"name": "B"}],
      "placement": list(placement),
    }
  )


def _far_apart(rtt_ms: str) -> Cluster:
  """Two nodes with a round trip of so many milliseconds between them."""
  pair = equal_cluster("100 Mbit/s", 2, rtt=f"{rtt_ms} ms")
  return dataclasses.replace(pair, name=f"{pair.name}, RTT {rtt_ms} ms")


def _one_slow(rate: str, slow: str) -> Cluster:
  site = {"up": rate, "down": rate, "rtt": "0 ms"}
  sites = [{"name": "slow", "up": slow, "down": slow}]
  sites += [{"name": f"node{number}"} for number in range(1, 4)]
  return cluster_from_mapping(
    {
      "name": f"3 x {rate}, 1 x {slow}",
      "every_site": site,
      "sites": sites,
    }
  )


Cases = Sequence[tuple[Cluster, Sequence[tuple[str, int]]]]
_SUMS = [("all_reduce", size * _MIB) for size in (1, 16)]
_CODES = [(kind, 2 * _MIB) for kind in ("all_gather", "all_to_all", "permute")]


def quick_cases() -> Cases:
  """Returns a few cases that take some seconds."""
  pair = equal_cluster("100 Mbit/s", 2)
  return [(pair, [("all_reduce", 2 * _MIB), ("all_gather", 2 * _MIB)])]


def all_cases() -> Cases:
  """Returns all cases, the same every time."""
  large = [*_SUMS, ("all_reduce", 64 * _MIB), *_CODES]
  return [
    (equal_cluster("100 Mbit/s", 2), [*_SUMS, *_CODES]),
    (equal_cluster("1 Gbit/s", 2), large),
    (equal_cluster("100 Mbit/s", 4), [*_SUMS, *_CODES]),
    (equal_cluster("1 Gbit/s", 4), large),
    (_one_slow("1 Gbit/s", "100 Mbit/s"), _SUMS),
    *((_far_apart(rtt), [("all_reduce", 16 * _MIB)]) for rtt in ("10", "40")),
    (_two_sites("AABB"), _SUMS),
    (_two_sites("ABAB"), _SUMS),
  ]


def predicted_s(
  cluster: Cluster, transport: Transport, *collectives: Collective
) -> float:
  """Returns the simulated seconds of collectives, one after the other."""
  nothing = np.zeros(cluster.num_replicas)
  key = ("case", 0, 0, 0)
  ops = [Launch(key, collectives), Wait(key)]
  costs = LinkCosts(cluster, transport)
  return run_time(costs, Work(nothing, nothing), ops).total_s


def run_cases(
  cases: Cases,
  transport: Transport,
  folder: pathlib.Path,
  repeats: int = REPEATS,
) -> list[Row]:
  """Runs collectives over real links, one network after the other.

  Args:
    cases: Clusters, each with its collectives.
    transport: Transport of the predictions.
    folder: Directory for files.
    repeats: How often each is measured.
  """
  rows = []
  for cluster, collectives in cases:
    with network_of(cluster) as network:
      measured = measure_collectives(network, collectives, repeats, folder)
    for (kind, size), (seconds, sent, busy) in zip(
      collectives, measured, strict=True
    ):
      collective = Collective(kind, size)
      rows.append(
        Row(
          cluster.name,
          kind,
          size,
          predicted_s(cluster, transport, collective),
          seconds,
          collective.sent_bytes(cluster.num_replicas),
          sent,
          busy,
        )
      )
  return rows


def calibrated(
  folder: pathlib.Path, repeats: int = CALIBRATION_REPEATS
) -> Transport:
  """Measures what gloo costs here by kind, between two and among four.

  The sizes and rates differ from those of all cases.

  Args:
    folder: Directory for files.
    repeats: How often each is measured.
  """
  operands = [(kind, 3 * _MIB // 2) for kind in _KINDS]
  clusters = [equal_cluster("60 Mbit/s", count) for count in (2, 4)]
  cases = [(each, operands) for each in clusters]
  rows = run_cases(cases, _PLAIN, folder, repeats)
  found = [row.measured_s / row.predicted_s for row in rows]
  pair, more = found[: len(_KINDS)], found[len(_KINDS) :]
  factors = tuple(zip(_KINDS, pair, more, strict=True))
  return dataclasses.replace(GLOO, factors=factors)


def calibrated_open(
  folder: pathlib.Path, repeats: int = CALIBRATION_REPEATS
) -> Transport:
  """Measures what gloo costs between two here over an open link, by kind.

  Two processes of one machine copy data more slowly than an open link carries
  it, so a collective takes longer than its bytes.

  Args:
    folder: Directory for files.
    repeats: How often each is measured.
  """
  operands = [(kind, 8 * _MIB) for kind in _KINDS]
  # The link's check needs a rate that this machine can carry.
  with network_of(equal_cluster("100 Mbit/s", 2)) as network:
    for node in range(2):
      network.throttle(node, NodeLink(OPEN_BIT_PER_S, OPEN_BIT_PER_S))
    measured = measure_collectives(network, operands, repeats, folder)
  pair = equal_cluster(f"{OPEN_BIT_PER_S / 1e9} Gbit/s", 2)
  factors = tuple(
    (kind, seconds / predicted_s(pair, _PLAIN, Collective(kind, size)), 1.0)
    for (kind, size), (seconds, *_) in zip(operands, measured, strict=True)
  )
  return dataclasses.replace(GLOO, factors=factors)
