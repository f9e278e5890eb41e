"""Collectives between processes behind throttled links, and their predictions.

`link_cases.json` lists clusters, each with the sizes (MiB) of its collectives.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dilocox_jax.distributed.link_counter import LINK_VARIABLE
from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.cluster_file import cluster_from_mapping
from dilocox_jax.simulate.interpreter import Work
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Launch, Wait
from dilocox_jax.simulate.transfer import GLOO, Transport
from experiments.runtime import cluster_links, link_check, process_group
from experiments.runtime.command_line import StoppedError
from experiments.runtime.namespaces import INTERFACE
from experiments.runtime.throttled_network import (
  ThrottledNetwork,
  throttled_network,
)

_MIB = 2**20
_PORT = 9876
_PLAIN = dataclasses.replace(GLOO, factors=())  # Before it is calibrated.
_KINDS = tuple(kind for kind, *_ in GLOO.factors)
REPEATS = 5  # Of a case, which may take seconds.
CALIBRATION_REPEATS = 12
Case = tuple[Cluster, Sequence[Collective]]


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
  """

  cluster: str
  kind: str
  operand_bytes: int
  predicted_s: float
  measured_s: float
  planned_bytes: int
  link_bytes: float


def cluster_of(name: str, sites: Sequence[Mapping], **more: Any) -> Cluster:
  """Returns a cluster whose links are equal in both directions, without delay.

  Args:
    name: Name of the cluster.
    sites: Its sites as a cluster file has them, each with its rate "up".
    **more: Further values of a cluster file.
  """
  every = {"name": "node", "rtt": "0 ms"}
  whole = [every | {"down": site["up"]} | dict(site) for site in sites]
  return cluster_from_mapping({"name": name, "sites": whole, **more})


def equal_cluster(rate: str, count: int) -> Cluster:
  """Returns a cluster of equal nodes.

  Args:
    rate: Rate of every link, as cluster files write it.
    count: Number of nodes.
  """
  return cluster_of(f"{count} x {rate}", [{"count": count, "up": rate}])


def all_cases() -> Iterator[Case]:
  """Yields the clusters and collectives of `link_cases.json`."""
  text = pathlib.Path(__file__).with_name("link_cases.json").read_text("utf-8")
  for case in json.loads(text):
    sizes = case.pop("collectives")
    yield (
      cluster_of(**case),
      [
        Collective(kind, n * _MIB) for kind, each in sizes.items() for n in each
      ],
    )


def quick_cases() -> Iterator[Case]:
  """Yields one case, which takes some seconds."""
  kinds = "all_reduce", "all_gather"
  pair = equal_cluster("100 Mbit/s", 2)
  yield pair, [Collective(kind, 2 * _MIB) for kind in kinds]


def predicted_s(
  cluster: Cluster, transport: Transport, collective: Collective
) -> float:
  """Returns the simulated seconds of a collective."""
  nothing = np.zeros(cluster.num_replicas)
  key = ("case", 0, 0, 0)
  ops = [Launch(key, (collective,)), Wait(key)]
  costs = LinkCosts(cluster, transport)
  return run_time(costs, Work(nothing, nothing), ops).total_s


@contextlib.contextmanager
def network_of(cluster: Cluster) -> Iterator[ThrottledNetwork]:
  """Makes the links of a cluster, and checks their rates by short transfers.

  Args:
    cluster: One node for every replica.
  """
  links = cluster_links.cluster_links(cluster)
  with throttled_network(links) as network:
    link_check.check(network, links)
    network.impair(links)
    yield network


def run_together(
  network: ThrottledNetwork, module: str, arguments: Sequence[str]
) -> None:
  """Runs one process of a module on every node, to the end of all.

  Args:
    network: The network.
    module: Module to run.
    arguments: Its arguments, in which {coordinator}, {count} and {node} stand
      for the place where the processes meet, their number and the process's.

  Raises:
    StoppedError: If one of them fails.
  """
  count = len(network.addresses)
  xla_flags = os.environ.get("XLA_FLAGS", "")
  environment = {
    **os.environ,
    **process_group.limits_beside_exchange(count, xla_flags),
    "JAX_PLATFORMS": "cpu",
    LINK_VARIABLE: INTERFACE,
  }
  place = {"coordinator": f"{network.addresses[0]}:{_PORT}", "count": count}
  members = []
  for node in range(count):
    own = [each.format(**place, node=node) for each in arguments]
    command = network.command(node, [sys.executable, "-m", module, *own])
    members.append(process_group.Member(node, command, environment))
  if failure := process_group.Group(members).run():
    raise StoppedError(failure.reason, failure.exit_code)


def run_cases(
  cases: Iterator[Case] | Sequence[Case],
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
    asked = [(each.kind, each.operand_bytes) for each in collectives]
    asks, result = folder / "asked.json", folder / "measured.json"
    asks.write_text(json.dumps(asked))
    given = "{coordinator}", "{count}", "{node}", str(repeats)
    with network_of(cluster) as network:
      run_together(
        network,
        "experiments.tools.link_collectives",
        [*given, str(asks), str(result)],
      )
    for each, (seconds, sent) in zip(
      collectives, json.loads(result.read_text()), strict=True
    ):
      expected_s = predicted_s(cluster, transport, each)
      planned = each.sent_bytes(cluster.num_replicas)
      name = cluster.name, each.kind, each.operand_bytes
      rows.append(Row(*name, expected_s, seconds, planned, sent))
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
  operands = [Collective(kind, 3 * _MIB // 2) for kind in _KINDS]
  clusters = [equal_cluster("60 Mbit/s", count) for count in (2, 4)]
  cases = [(each, operands) for each in clusters]
  rows = run_cases(cases, _PLAIN, folder, repeats)
  found = [row.measured_s / row.predicted_s for row in rows]
  pair, more = found[: len(_KINDS)], found[len(_KINDS) :]
  return dataclasses.replace(
    GLOO, factors=tuple(zip(_KINDS, pair, more, strict=True))
  )
