"""Turns the cluster that the simulator reads into links that a kernel makes."""

import math

from dilocox_jax.simulate.cluster import Cluster, Link
from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_network import Links, NodeLink, Uplink


def cluster_links(cluster: Cluster) -> Links:
  """Returns the links of a network with one node for every replica.

  The replicas of a site share its uplink unless the cluster says otherwise.
  Inside a site nothing is throttled.

  Args:
    cluster: Sites and replicas.

  Raises:
    UsageError: If the cluster has what no kernel imposes on a link.
  """
  _check(cluster)
  nodes: list[NodeLink | None] = [None] * cluster.num_replicas
  uplinks = []
  for number, site in enumerate(cluster.sites):
    ranks = [r for r, place in enumerate(cluster.placement) if place == number]
    if site.link.is_shared and len(ranks) > 1:
      uplinks.append(Uplink(tuple(ranks), node_link(site.link)))
      continue
    for rank in ranks:
      nodes[rank] = node_link(site.link)
  return Links(nodes, uplinks)


def node_link(link: Link) -> NodeLink:
  """Returns a link of a cluster file as the kernel is told of it."""
  return NodeLink(link.up_bps, link.down_bps, link.rtt_s, link.loss)


def _check(cluster: Cluster) -> None:
  """Raises UsageError if a part of the cluster could not be imposed."""
  if cluster.pairs:
    raise UsageError(
      f"the cluster {cluster.name!r} has pairs, which real links of this "
      "machine cannot have: leave them out of the file"
    )
  for site in cluster.sites:
    if site.link.efficiency != Link.efficiency:
      raise UsageError(
        f"site {site.name!r} states 'efficiency', which TCP of this machine "
        "has by itself: leave it out of the file"
      )
    if not all(map(math.isfinite, (site.link.up_bps, site.link.down_bps))):
      raise UsageError(
        f"site {site.name!r} has no limit on its link: give it a rate"
      )
