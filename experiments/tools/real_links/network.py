"""Runs groups of processes in networks that a cluster file describes."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from dilocox_jax.distributed.link_counter import LINK_VARIABLE
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.cluster_file import cluster_from_mapping
from experiments.runtime import cores, link_check, process_group
from experiments.runtime.cluster_links import cluster_links
from experiments.runtime.command_line import StoppedError
from experiments.runtime.namespaces import INTERFACE
from experiments.runtime.throttled_network import (
  ThrottledNetwork,
  throttled_network,
)

_PORT = 9876


def equal_cluster(rate: str, count: int, **every_site: Any) -> Cluster:
  """Returns a cluster of equal nodes without delay.

  Args:
    rate: Rate of every link, as cluster files write it.
    count: Number of nodes.
    **every_site: Further values of all sites, or other values of these.
  """
  site = {"up": rate, "down": rate, "rtt": "0 ms", **every_site}
  sites = [{"name": "node", "count": count}]
  name = f"{count} x {rate}"
  return cluster_from_mapping(
    {"name": name, "every_site": site, "sites": sites}
  )


@contextlib.contextmanager
def network_of(cluster: Cluster) -> Iterator[ThrottledNetwork]:
  """Makes the links of a cluster, and checks their rates by short transfers.

  Args:
    cluster: One node for every replica.
  """
  links = cluster_links(cluster)
  with throttled_network(links) as network:
    link_check.check(network, links)
    network.impair(links)
    yield network


def run_together(
  network: ThrottledNetwork, module: str, arguments: Sequence[Sequence[str]]
) -> None:
  """Runs one process of a module on every node, to the end of all.

  Args:
    network: The network.
    module: Module to run.
    arguments: Arguments of the process on each node.

  Raises:
    StoppedError: If one of them fails.
  """
  environment = {
    **os.environ,
    **cores.limits_beside_exchange(
      len(arguments), os.environ.get("XLA_FLAGS", "")
    ),
    "JAX_PLATFORMS": "cpu",
    LINK_VARIABLE: INTERFACE,
  }
  members = [
    process_group.Member(
      node,
      network.command(node, [sys.executable, "-m", module, *own]),
      environment,
    )
    for node, own in enumerate(arguments)
  ]
  if failure := process_group.Group(members).run():
    raise StoppedError(failure.reason, failure.exit_code)


def coordinator_of(network: ThrottledNetwork) -> str:
  """Returns the address at which the processes meet, on node 0."""
  return f"{network.addresses[0]}:{_PORT}"


def train_together(network: ThrottledNetwork, flags: Sequence[str]) -> None:
  """Trains one run with a process on every node.

  Args:
    network: The network.
    flags: Flags of `experiments.train`, the same for all processes.

  Raises:
    StoppedError: If a process fails.
  """
  count = len(network.addresses)
  given = (
    *(*flags, "--distributed", f"--num_processes={count}"),
    f"--coordinator={coordinator_of(network)}",
  )
  run_together(
    network,
    "experiments.train",
    [[*given, f"--process_id={node}"] for node in range(count)],
  )


def measure_collectives(
  network: ThrottledNetwork,
  cases: Sequence[tuple[str, int]],
  repeats: int,
  folder: pathlib.Path,
) -> list[tuple[float, float, float]]:
  """Returns seconds, sent bytes and busy cores of collectives over a network.

  Args:
    network: The network.
    cases: Kind and operand size (bytes) of each.
    repeats: How often each is measured.
    folder: Directory for the result's file.
  """
  result = folder / "collectives.json"
  count = len(network.addresses)
  given = coordinator_of(network), str(count)
  run_together(
    network,
    "experiments.tools.real_links.collectives",
    [
      [*given, str(node), json.dumps(cases), str(repeats), str(result)]
      for node in range(count)
    ],
  )
  return [tuple(each) for each in json.loads(result.read_text())]
