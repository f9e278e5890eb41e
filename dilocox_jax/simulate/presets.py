"""Clusters by name: round numbers to sweep over, and the settings of papers.

Each function for a paper says what was published, what is recalled and not
confirmed, and what is assumed, so that nobody takes our assumption for a
result of the paper.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from dilocox_jax.checks import known
from dilocox_jax.simulate import dtfm
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.quantities import RATE, parse_quantity, require_number
from dilocox_jax.simulate.sites import Link, Site

# Peaks in half precision, dense (FLOP/s), as recalled from the data sheets.
_A800_FLOPS = 312e12
_H100_FLOPS = 989e12
_B200_FLOPS = 2250e12
_RTX4090_FLOPS = 165e12

_RATES = {
  "100mbit": "100 Mbit/s",
  "200mbit": "200 Mbit/s",
  "500mbit": "500 Mbit/s",
  "1gbit": "1 Gbit/s",
  "2gbit": "2 Gbit/s",
  "5gbit": "5 Gbit/s",
  "10gbit": "10 Gbit/s",
  "40gbit": "40 Gbit/s",
  "100gbit": "100 Gbit/s",
}


def symmetric(name: str, num_replicas: int = 2) -> Cluster:
  """Sites with equal links, the same both ways; 40 ms between any two.

  Args:
    name: One of the rates, e.g. "1gbit".
    num_replicas: Sites, of one replica each.
  """
  bps = parse_quantity(_RATES[name], RATE, "up")
  return equal_sites(name, Site("site", Link(bps, bps)), num_replicas)


def consumer(num_replicas: int = 2) -> Cluster:
  """One card at home each: 1 Gbit/s down, 40 Mbit/s up, 30 ms.

  Assumed: a usual asymmetric access line and a card of 165 TFLOP/s.

  Args:
    num_replicas: Homes.
  """
  link = Link(up_bps=40e6, down_bps=1e9, rtt_s=0.03)
  return equal_sites(
    "consumer", Site("home", link, 1, _RTX4090_FLOPS), num_replicas
  )


def infinite(num_replicas: int = 2) -> Cluster:
  """Links that cost nothing: what is left is computing.

  Args:
    num_replicas: Sites, of one replica each.
  """
  link = Link(math.inf, math.inf, rtt_s=0.0)
  site = Site("site", link, intra_bps=math.inf, intra_rtt_s=0.0)
  return equal_sites("infinite", site, num_replicas)


def dilocox_107b(num_replicas: int = 2) -> Cluster:
  """DiLoCoX (arXiv 2506.21263), 107B: 160 devices on 20 nodes, 1 Gbit/s.

  Published: 1 Gbit/s, 160 GPUs on 20 nodes. Recalled: A800. Not stated: how
  many clusters, hence the argument, and the delay, here none. The achieved
  4.8 % is what the recalled throughput implies, whatever the batch.

  Args:
    num_replicas: Sites that share the devices; must divide 160.
  """
  return _dilocox("dilocox_107b", 160, 0.048, num_replicas)


def dilocox_1_3b(num_replicas: int = 2) -> Cluster:
  """DiLoCoX (arXiv 2506.21263), OPT-1.3B: 16 devices, 1 Gbit/s.

  Published: 1 Gbit/s. Recalled: 16 A800. Not stated: how many clusters and
  the delay, here none. The achieved 3.8 % is what the recalled throughput
  implies.

  Args:
    num_replicas: Sites that share the devices; must divide 16.
  """
  return _dilocox("dilocox_1.3b", 16, 0.038, num_replicas)


def opendiloco(num_replicas: int = 4) -> Cluster:
  """OpenDiLoCo (arXiv 2407.07852): 8 H100 a replica, 127 to 935 Mbit/s.

  Published: two continents, three countries. Recalled: 4 replicas of 8 H100
  and the slowest and the fastest link. Assumed: the rates between the two,
  evenly spaced in ratio (a ring moves at the slowest), and 100 ms.

  Args:
    num_replicas: Sites, of one replica each.
  """
  sites = []
  for index in range(num_replicas):
    mbps = 127 * (935 / 127) ** (index / max(num_replicas - 1, 1))
    link = Link(round(mbps) * 1e6, round(mbps) * 1e6, rtt_s=0.1)
    sites.append(Site(f"site{index}", link, 8, _H100_FLOPS))
  return Cluster("opendiloco", tuple(sites))


def streaming_cluster(num_replicas: int = 2) -> Cluster:
  """Streaming DiLoCo (arXiv 2501.18512): the simulated link of its tables.

  Published: 2 replicas, 1 Gbit/s in Table 1 (Table 4 sweeps the bandwidth),
  60 % of the peak in the caption of Table 4 (40 % in the text). Its simulation
  has neither delay nor protocol. Not stated: devices, here a nominal count;
  its step times are given as such.

  Args:
    num_replicas: Sites, of one replica each.
  """
  link = Link(1e9, 1e9, rtt_s=0.0, efficiency=1.0)
  site = Site("site", link, achieved_fraction=0.6)
  return equal_sites("streaming", site, num_replicas)


def intellect_1(num_replicas: int = 14) -> Cluster:
  """INTELLECT-1 (arXiv 2412.01152): 14 nodes of 8 H100, three continents.

  Published: up to 14 nodes, 112 H100, 36.2 to 41.4 % of the peak, 83 % of the
  time spent computing across continents, about 38 min between exchanges. The
  rate is fitted: the 340 Mbit/s at which a ring of 10^10 int8 values takes the
  other 17 %. Assumed: 100 ms.

  Args:
    num_replicas: Nodes.
  """
  link = Link(340e6, 340e6, rtt_s=0.1)
  site = Site("node", link, 8, _H100_FLOPS, achieved_fraction=0.362)
  return equal_sites("intellect_1", site, num_replicas)


def covenant_72b(num_replicas: int = 20) -> Cluster:
  """Covenant-72B (arXiv 2603.08163): peers of 8 B200 over access lines.

  Published: about 20 peers at a time, at least 8 B200 each. Recalled: 110
  Mbit/s up and 500 Mbit/s down, and 20 min for 30 steps of 393,216 tokens,
  which is 24 % of the peak. Assumed: 100 ms.

  Args:
    num_replicas: Peers.
  """
  link = Link(up_bps=110e6, down_bps=500e6, rtt_s=0.1)
  site = Site("peer", link, 8, _B200_FLOPS, achieved_fraction=0.24)
  return equal_sites("covenant_72b", site, num_replicas)


CLUSTER_PRESETS: dict[str, Callable[..., Cluster]] = {
  **{name: functools.partial(symmetric, name) for name in _RATES},
  "consumer": consumer,
  "infinite": infinite,
  "dilocox_1.3b": dilocox_1_3b,
  "dilocox_107b": dilocox_107b,
  "opendiloco": opendiloco,
  "streaming": streaming_cluster,
  "intellect_1": intellect_1,
  "covenant_72b": covenant_72b,
  "dtfm_datacenter": dtfm.datacenter,
  "dtfm_spot": dtfm.spot,
  "dtfm_multi_datacenter": dtfm.multi_datacenter,
  "dtfm_regional": dtfm.regional,
  "dtfm_worldwide": dtfm.worldwide,
}


def cluster_preset(name: str, num_replicas: int | None = None) -> Cluster:
  """Returns a cluster by its name.

  Args:
    name: One of `CLUSTER_PRESETS`.
    num_replicas: Number of replicas; None is as many as the setting has.

  Raises:
    ValueError: If there is no such preset, or not with so many replicas.
  """
  known("cluster preset", name, CLUSTER_PRESETS)
  if num_replicas is None:
    return CLUSTER_PRESETS[name]()
  require_number("num_replicas", num_replicas, 1)
  return CLUSTER_PRESETS[name](num_replicas)


def equal_sites(name: str, site: Site, num_replicas: int) -> Cluster:
  """Returns a cluster of equal sites, named by numbers from 0.

  Args:
    name: Name of the cluster.
    site: The site that is repeated; a number is added to its name.
    num_replicas: Number of sites, of one replica each.
  """
  return Cluster(
    name,
    tuple(
      dataclasses.replace(site, name=f"{site.name}{index}")
      for index in range(num_replicas)
    ),
  )


def _dilocox(
  name: str, num_devices: int, achieved_fraction: float, num_replicas: int
) -> Cluster:
  """Returns sites of one replica each that divide all devices evenly."""
  if num_devices % num_replicas:
    raise ValueError(
      f"num_replicas={num_replicas} must divide the {num_devices} devices of"
      f" {name}"
    )
  site = Site(
    "site",
    Link(1e9, 1e9, rtt_s=0.0),
    num_devices // num_replicas,
    _A800_FLOPS,
    achieved_fraction,
  )
  return equal_sites(name, site, num_replicas)
