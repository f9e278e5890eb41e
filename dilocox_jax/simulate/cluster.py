"""Sites, their replicas, and the links that a transfer occupies.

Users know the numbers of their own sites: links, devices, and rates that were
measured between two sites. This file describes each of these attributes. The
end of an attribute's name is its unit (`up_bps`, `rtt_s`); the part before it
is its key in a cluster file (`up`, `rtt`).

The time of a transfer depends most on the other transfers that share its links.
Two replicas behind one access link get half of it each. A ring that visits the
sites in a bad order uses a link twice. For example, replicas 0 and 1 are at
site a, and replicas 2 and 3 are at site b. The ring a a b b leaves site a once
a round, and the ring a b a b leaves it twice. So a user describes sites and
replicas, and only this file derives the names of the links that a transfer
occupies.

A transfer leaves over "up:END" and arrives over "down:END", where END is a
site whose link is shared, or "site/3" for the fourth replica of a site whose
replicas have a link each. A measured pair of sites adds "pair:END>END".
Replicas of one site talk over the "inside:END" of the sender alone. An object
store is one more site, "store", without replicas.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re

from dilocox_jax.checks import check_limits, known, limited, require

# More devices than there are in the world. A damaged file may state more.
MOST_DEVICES = 2**31
STORE = -1  # In place of a replica's rank: the object store.
_NAME = re.compile(r"\w[\w .+-]*")
_POSITIVE = {"above": 0}
_DURATION = {"at_least": 0, "below": math.inf}


@dataclasses.dataclass(frozen=True)
class Link:
  """Access to the network, of a site or of each replica there.

  Attributes:
    up_bps: Line rate for what leaves (bit/s); infinity is no limit.
    down_bps: Line rate for what arrives (bit/s).
    rtt_s: Round trip to another site with such a link (seconds). Each end of a
      transfer adds half of its own value: 40 ms and 100 ms make 70 ms.
    loss: Probability that a packet is lost.
    streams: Parallel TCP streams of a transfer.
    efficiency: Share of the line rate that carries payload; by default 1448 of
      the 1514 bytes of an Ethernet frame, the rest being headers.
    is_shared: Whether all replicas at the site share the one link; otherwise
      each has its own.
  """

  up_bps: float = dataclasses.field(metadata=_POSITIVE)
  down_bps: float = dataclasses.field(metadata=_POSITIVE)
  rtt_s: float = limited(0.04, **_DURATION)
  loss: float = limited(0.0, at_least=0, below=1)
  streams: int = limited(8, at_least=1, at_most=2**31)
  efficiency: float = limited(1448 / 1514, above=0, at_most=1)
  is_shared: bool = True

  __post_init__ = check_limits


@dataclasses.dataclass(frozen=True)
class Site:
  """A place with devices, which its replicas divide evenly.

  Attributes:
    name: Letters, digits, spaces and any of "_.+-".
    link: Its access to the network.
    num_devices: Devices at the site.
    peak_flops: Peak of each device (FLOP/s).
    achieved_fraction: Share of the peak that training achieves (MFU).
    memory_bytes: Memory of each device (bytes); None: it is not known.
    speed: Speed of the inner steps relative to the one that the other numbers
      give; at 0.5 steps take twice as long.
    intra_bps: Rate of a transfer between replicas of this site (bit/s).
    intra_rtt_s: Round trip between replicas of this site (seconds).
  """

  name: str
  link: Link
  num_devices: int = limited(8, at_least=1, at_most=MOST_DEVICES)
  peak_flops: float = limited(312e12, **_POSITIVE)
  achieved_fraction: float = limited(0.4, above=0, at_most=1)
  memory_bytes: float | None = limited(None, **_POSITIVE)
  speed: float = limited(1.0, above=0, below=math.inf)
  intra_bps: float = limited(100e9, **_POSITIVE)
  intra_rtt_s: float = limited(10e-6, **_DURATION)

  def __post_init__(self):
    check_limits(self)
    require(
      _NAME.fullmatch(self.name) is not None,
      f"name={self.name!r} must be made of letters, digits, spaces and _.+-",
    )


@dataclasses.dataclass(frozen=True)
class Pair:
  """Rate and round trip that were measured between two sites.

  They hold in both directions.

  Attributes:
    sites: Names of the two sites.
    rate_bps: Rate of the payload from one end to the other (bit/s).
    rtt_s: Round trip between them (seconds), in place of that of their links.
  """

  sites: tuple[str, ...]
  rate_bps: float = dataclasses.field(metadata=_POSITIVE)
  rtt_s: float = dataclasses.field(metadata=_DURATION)

  def __post_init__(self):
    check_limits(self)
    is_pair = len(self.sites) == len(set(self.sites)) == 2
    require(is_pair, f"sites={self.sites} must be two different sites")


@dataclasses.dataclass(frozen=True)
class Route:
  """The links and TCP limits of a transfer from one replica to another.

  Attributes:
    links: Names of the links that the transfer occupies.
    rtt_s: Round-trip time (seconds).
    loss: Probability that a packet is lost on the way, 0 to 1.
    streams: Number of parallel TCP streams.
  """

  links: tuple[str, ...]
  rtt_s: float
  loss: float
  streams: int


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Sites, their replicas, and the measured limits between sites.

  Attributes:
    name: Name for reports.
    sites: One site or more. Their names must differ.
    placement: Index of the site of every replica, in rank order, which is the
      order of a ring. By default every site has one replica.
    pairs: Measured limits between two sites. Other pairs of sites are limited
      by their links only.
    store: Access link of the object store of a mailbox, which all replicas
      share. By default nothing limits its rate.
  """

  name: str
  sites: tuple[Site, ...]
  placement: tuple[int, ...] = ()
  pairs: tuple[Pair, ...] = ()
  store: Link = Link(math.inf, math.inf)

  def __post_init__(self):
    placement = self.placement or tuple(range(len(self.sites)))
    object.__setattr__(self, "placement", placement)
    self._check_placement()
    self._check_names()

  def _check_placement(self):
    counts = collections.Counter(self.placement)
    for index, site in enumerate(self.sites):
      count = counts[index]
      name = repr(site.name)
      require(count > 0, f"placement leaves site {name} without replica")
      require(
        not site.num_devices % count,
        f"site {name}: num_devices={site.num_devices} must be a multiple of its"
        f" {count} replicas",
      )

  def _check_names(self):
    names = [site.name for site in (*self.sites, self.site(STORE))]
    for name, count in collections.Counter(names).items():
      is_one = count == 1
      require(is_one, f"name={name!r} must be that of one site only")
    ends_of_pairs = [sorted(pair.sites) for pair in self.pairs]
    for ends in ends_of_pairs:
      is_one = ends_of_pairs.count(ends) == 1
      require(is_one, f"pairs must state {ends} only once")
      for name in ends:
        known("site", name, names)

  @property
  def num_replicas(self) -> int:
    """Number of replicas at all sites together."""
    return len(self.placement)

  def site(self, replica: int) -> Site:
    """Returns the site of a replica.

    Args:
      replica: Rank of the replica, or `STORE` for the object store.
    """
    if replica == STORE:
      return Site("store", self.store)
    return self.sites[self.placement[replica]]

  def num_devices(self, replica: int) -> int:
    """Returns the number of devices of a replica.

    The replicas of a site have equal shares of its devices.

    Args:
      replica: Rank of the replica.
    """
    site = self.site(replica)
    return site.num_devices // len(self._ranks[site.name])

  def replica_flops(self, replica: int) -> float:
    """Returns the rate at which a replica computes in training (FLOP/s).

    Args:
      replica: Rank of the replica.
    """
    site = self.site(replica)
    peak_flops = self.num_devices(replica) * site.peak_flops
    return peak_flops * site.achieved_fraction * site.speed

  def route(self, sender: int, receiver: int) -> Route:
    """Returns the route of a transfer between two replicas.

    If a replica sends to itself, the route has no links and no delay.

    Args:
      sender: Rank of the replica that sends, or `STORE`.
      receiver: Rank of the replica that receives, or `STORE`.
    """
    start = self.site(sender)
    stop = self.site(receiver)
    streams = min(start.link.streams, stop.link.streams)
    if sender == receiver:
      return Route(links=(), rtt_s=0.0, loss=0.0, streams=streams)
    source = self._ends[sender]
    target = self._ends[receiver]
    if start.name == stop.name:
      return Route(
        links=(f"inside:{source}",),
        rtt_s=start.intra_rtt_s,
        loss=0.0,
        streams=streams,
      )
    links = (f"up:{source}", f"down:{target}")
    rtt_s = (start.link.rtt_s + stop.link.rtt_s) / 2
    pair = self._pair_of.get(frozenset((start.name, stop.name)))
    if pair is not None:
      links = (f"up:{source}", f"pair:{source}>{target}", f"down:{target}")
      rtt_s = pair.rtt_s
    return Route(
      links=links,
      rtt_s=rtt_s,
      loss=1 - (1 - start.link.loss) * (1 - stop.link.loss),
      streams=streams,
    )

  @functools.cached_property
  def goodput_bps(self) -> dict[str, float]:
    """Largest payload rate of every link (bit/s), by name of the link.

    For example, an access link of 1 Gbit/s carries 956 Mbit/s of payload, and
    the rest are headers. Rates between two sites and inside a site are those of
    the payload.
    """
    goodputs = {}
    for site in (*self.sites, self.site(STORE)):
      for end in self._ends_at(site.name):
        goodputs[f"up:{end}"] = site.link.up_bps * site.link.efficiency
        goodputs[f"down:{end}"] = site.link.down_bps * site.link.efficiency
        if len(self._ranks[site.name]) > 1:
          goodputs[f"inside:{end}"] = site.intra_bps
    for pair in self.pairs:
      for left, right in itertools.product(*map(self._ends_at, pair.sites)):
        goodputs[f"pair:{left}>{right}"] = pair.rate_bps
        goodputs[f"pair:{right}>{left}"] = pair.rate_bps
    return goodputs

  @functools.cached_property
  def _ranks(self) -> dict[str, list[int]]:
    """Ranks of the replicas at every site, by name of the site."""
    ranks = {"store": [STORE]} | {site.name: [] for site in self.sites}
    for rank, index in enumerate(self.placement):
      ranks[self.sites[index].name].append(rank)
    return ranks

  @functools.cached_property
  def _ends(self) -> list[str]:
    """Name of the network end of every replica (END above), by rank.

    The last one is that of the store.
    """
    ranks = (*range(self.num_replicas), STORE)
    ends = [self.site(rank).name for rank in ranks]
    for site in self.sites:
      if not site.link.is_shared:
        for index, rank in enumerate(self._ranks[site.name]):
          ends[rank] = f"{site.name}/{index}"
    return ends

  def _ends_at(self, name: str) -> list[str]:
    """Returns the different ends of a site, in rank order."""
    return list(dict.fromkeys(self._ends[rank] for rank in self._ranks[name]))

  @functools.cached_property
  def _pair_of(self) -> dict[frozenset[str], Pair]:
    """Measured pair by the names of its sites."""
    return {frozenset(pair.sites): pair for pair in self.pairs}
