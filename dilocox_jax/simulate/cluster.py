"""Sites (places with devices), replicas, and the links that a transfer takes.

An attribute that has a unit ends in it, e.g. `up_bps` (bit/s) and `rtt_s`
(seconds). The keys of a cluster file lack this end ("up", "rtt").

Transfers that cross the same link share its rate. A transfer from Oslo to
Utrecht occupies the links "up:Oslo" and "down:Utrecht". If a rate was measured
between these sites, it also occupies "pair:Oslo>Utrecht". A transfer inside
Oslo occupies only "inside:Oslo". If each replica of Oslo has a link of its own,
these names have "Oslo/3" in place of "Oslo" for the fourth replica, and inside
Oslo the sender decides. An object store is one more site, "store", without
replicas.
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
# Stands for the object store where a function takes the rank of a replica.
STORE = -1
_NAME = re.compile(r"\w[\w .+-]*")
_POSITIVE = {"above": 0}
_DURATION = {"at_least": 0, "below": math.inf}


@dataclasses.dataclass(frozen=True)
class Link:
  """Access to the network, of a site or of each replica there.

  Attributes:
    up_bps: Line rate of outgoing transfers (bit/s); infinity is no limit.
    down_bps: Line rate of incoming transfers (bit/s); infinity is no limit.
    rtt_s: Round trip to another site with an equal link (seconds). Between
      unequal links it is the mean of both: 40 ms and 100 ms make 70 ms.
    loss: Probability that a packet is lost on this link.
    streams: Number of parallel TCP streams of a transfer. The smaller number of
      the two ends counts.
    efficiency: Share of the line rate that carries payload. By default it is
      1448 / 1514, as a full Ethernet frame of 1514 bytes has 1448 of payload.
    is_shared: Whether all replicas of the site share one link; if not, each
      replica has a link with these rates.
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
    link: Access of the site, or of each replica at the site, to the network.
    num_devices: Number of devices at the site.
    peak_flops: Peak of each device (FLOP/s).
    achieved_fraction: Share of the peak that training achieves, 0 to 1 (MFU).
    memory_bytes: Memory of each device (bytes); None: not known.
    speed: Factor on the speed of inner steps. With 0.5 they take twice as long.
    intra_bps: Rate of payload inside the site (bit/s). Transfers inside the
      site share it if `link.is_shared`; otherwise each sender has this rate.
    intra_rtt_s: Round trip between replicas of this site (seconds).
  """

  name: str
  link: Link
  num_devices: int = limited(8, at_least=1, at_most=MOST_DEVICES)
  peak_flops: float = limited(312e12, above=0, below=math.inf)
  achieved_fraction: float = limited(0.4, above=0, at_most=1)
  memory_bytes: float | None = limited(None, **_POSITIVE)
  speed: float = limited(1.0, above=0, below=math.inf)
  intra_bps: float = limited(100e9, **_POSITIVE)
  intra_rtt_s: float = limited(10e-6, **_DURATION)

  def __post_init__(self):
    """Raises ValueError if a number or the name of the site is not allowed."""
    check_limits(self)
    require(
      _NAME.fullmatch(self.name) is not None,
      f"name={self.name!r} must be made of letters, digits, spaces and _.+-",
    )


@dataclasses.dataclass(frozen=True)
class Pair:
  """Rate and round trip that were measured between two sites.

  The access links of the two sites limit a transfer, too.

  Attributes:
    sites: Names of the two sites.
    rate_bps: Rate of payload in each direction (bit/s). Replicas of a site that
      share a link share this rate, too; otherwise each of them has it.
    rtt_s: Round trip between the sites (seconds), in place of the round trip
      that follows from their links.
  """

  sites: tuple[str, ...]
  rate_bps: float = dataclasses.field(metadata=_POSITIVE)
  rtt_s: float = dataclasses.field(metadata=_DURATION)

  def __post_init__(self):
    """Raises ValueError if a number is wrong, or there are not two sites."""
    check_limits(self)
    is_pair = len(self.sites) == len(set(self.sites)) == 2
    require(is_pair, f"sites={self.sites} must be two different sites")


@dataclasses.dataclass(frozen=True)
class Route:
  """The links and TCP limits of a transfer from one replica to another.

  Attributes:
    links: Names of the links that the transfer occupies, from the sender to the
      receiver, such as ("up:Oslo", "down:Utrecht").
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
    name: Name of the cluster, for reports.
    sites: One site or more, with different names.
    placement: Index of the site of every replica, in rank order, which is the
      order of a ring. Every site needs a replica, and its replicas must divide
      its devices evenly. Empty: every site has one replica.
    pairs: Measurements between two sites. Other pairs of sites are limited only
      by their links.
    store: Access link of an object store. All replicas share this link. By
      default its rates are not limited.
  """

  name: str
  sites: tuple[Site, ...]
  placement: tuple[int, ...] = ()
  pairs: tuple[Pair, ...] = ()
  store: Link = Link(math.inf, math.inf)

  def __post_init__(self):
    """Fills in an empty placement; raises ValueError if the parts don't fit."""
    placement = self.placement or tuple(range(len(self.sites)))
    object.__setattr__(self, "placement", placement)
    self._check_placement()
    self._check_names()

  def _check_placement(self):
    """Raises ValueError unless replicas divide each site's devices evenly."""
    counts = collections.Counter(self.placement)
    for index, site in enumerate(self.sites):
      num_replicas = counts[index]
      name = repr(site.name)
      require(num_replicas > 0, f"placement leaves site {name} without replica")
      require(
        site.num_devices % num_replicas == 0,
        f"site {name}: num_devices={site.num_devices} must be a multiple of its"
        f" {num_replicas} replicas",
      )

  def _check_names(self):
    """Raises ValueError if a name occurs twice, or a pair's site is unknown."""
    names = [site.name for site in (*self.sites, self.site(STORE))]
    for name, count in collections.Counter(names).items():
      require(count == 1, f"name={name!r} must be that of one site only")
    names_of_pairs = [sorted(pair.sites) for pair in self.pairs]
    for pair_names in names_of_pairs:
      is_unique = names_of_pairs.count(pair_names) == 1
      require(is_unique, f"pairs must state {pair_names} only once")
      for name in pair_names:
        known("site", name, names)

  @property
  def num_replicas(self) -> int:
    """Number of replicas at all sites together."""
    return len(self.placement)

  def site(self, replica: int) -> Site:
    """Returns a replica's site, or the site "store" for the rank `STORE`."""
    if replica == STORE:
      return Site("store", self.store)
    return self.sites[self.placement[replica]]

  def num_devices(self, replica: int) -> int:
    """Returns the number of devices of a replica."""
    site = self.site(replica)
    return site.num_devices // len(self._ranks[site.name])

  def replica_flops(self, replica: int) -> float:
    """Returns the rate that a replica's devices achieve together (FLOP/s)."""
    site = self.site(replica)
    peak_flops = self.num_devices(replica) * site.peak_flops
    return peak_flops * site.achieved_fraction * site.speed

  def route(self, sender: int, receiver: int) -> Route:
    """Returns the route of a transfer from a sender to a receiver.

    Each is the rank of a replica, or `STORE` for the object store. If sender
    and receiver are the same, the route has no links and no delay.
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
      # A packet that arrives is lost on neither link.
      loss=1 - (1 - start.link.loss) * (1 - stop.link.loss),
      streams=streams,
    )

  @functools.cached_property
  def goodput_bps(self) -> dict[str, float]:
    """Largest payload rate of every link (bit/s), by name of the link.

    For example, an access link of 1 Gbit/s carries 956 Mbit/s of payload by
    default, and the rest are headers.
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
    """The end of a link's name for each rank: "Oslo" in "up:Oslo".

    If each replica of a site has its own link, the ends are "Oslo/0", "Oslo/1"
    and so on. The last end is "store", so the index `STORE`, -1, finds it.
    """
    ranks = (*range(self.num_replicas), STORE)
    ends = [self.site(rank).name for rank in ranks]
    for site in self.sites:
      if not site.link.is_shared:
        for index, rank in enumerate(self._ranks[site.name]):
          ends[rank] = f"{site.name}/{index}"
    return ends

  def _ends_at(self, name: str) -> list[str]:
    """Returns the ends of a site's link names: "Oslo", or "Oslo/0", ..."""
    return list(dict.fromkeys(self._ends[rank] for rank in self._ranks[name]))

  @functools.cached_property
  def _pair_of(self) -> dict[frozenset[str], Pair]:
    """The measured `Pair` of two sites, by the set of their names."""
    return {frozenset(pair.sites): pair for pair in self.pairs}
