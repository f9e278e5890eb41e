"""Turns the cluster that the simulator reads into links that a kernel makes."""

import math

from dilocox_jax.simulate.cluster import Cluster, Jitter, Link
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
  for part, is_there in (
    ("pairs", cluster.pairs),
    ("jitter", cluster.jitter != Jitter()),
    ("outages", cluster.outages),
  ):
    if is_there:
      raise UsageError(
        f"the cluster {cluster.name!r} has {part}, which real links of this "
        "machine cannot have: leave them out of the file"
      )
  for site in cluster.sites:
    for name, is_set in (
      ("window", site.link.window_bytes is not None),
      ("efficiency", site.link.efficiency != Link.efficiency),
    ):
      if is_set:
        raise UsageError(
          f"site {site.name!r} states {name!r}, which TCP of this machine has "
          "by itself: leave it out of the file"
        )
    if not all(map(math.isfinite, (site.link.up_bps, site.link.down_bps))):
      raise UsageError(
        f"site {site.name!r} has no limit on its link: give it a rate"
      )
