"""Sites, their replicas, and the links that a transfer occupies.

People know the numbers of their own sites: links, devices, measured pairs,
jitter, outages. Each attribute is described once, in its type: the key that a
cluster file uses for it, what it holds, and its range.

The time of a transfer depends most on the other transfers that share its links.
Two replicas behind one access link get half of it each. A ring that visits the
sites in a bad order uses a link twice. For example, replicas 0 and 1 are at
site a, and replicas 2 and 3 are at site b. The ring a a b b leaves site a once
a round, and the ring a b a b leaves it twice. So a user describes sites and
replicas, and only this module derives the names of the links that a transfer
occupies.

A transfer leaves over "up:END" and arrives over "down:END", where END is a
site whose link is shared, or "site/3" for the fourth replica of a site whose
replicas have a link each. A measured pair of sites adds "pair:END>END".
Replicas of one site talk over the "inside:END" of the sender alone.
"""

import collections
import dataclasses
import functools
import itertools
import re
from typing import Annotated

from dilocox_jax.checks import known
from dilocox_jax.simulate.quantities import (
  COMPUTE,
  RATE,
  SHARE,
  SIZE,
  TIME,
  Checked,
  FileKey,
  duration,
  positive,
)

_NAME = re.compile(r"\w[\w .+-]*")


@dataclasses.dataclass(frozen=True)
class Link(Checked):
  """Access to the network, of a site or of each replica there.

  Attributes:
    up_bps: Line rate for what leaves (bit/s); infinity is no limit.
    down_bps: Line rate for what arrives (bit/s).
    rtt_s: Round trip to another site with such a link (seconds). Each end of a
      transfer adds half of its own value: 40 ms and 100 ms make 70 ms.
    loss: Probability that a packet is lost.
    streams: Parallel TCP streams of a transfer.
    window_bytes: TCP window of a stream (bytes); None is no limit.
    efficiency: Share of the line rate that carries payload; by default 1448 of
      the 1514 bytes of an Ethernet frame, the rest being headers.
    is_shared: Whether all replicas at the site share the one link; otherwise
      each has its own.
  """

  up_bps: Annotated[float, positive("up", RATE)]
  down_bps: Annotated[float, positive("down", RATE)]
  rtt_s: Annotated[float, duration("rtt")] = 0.04
  loss: Annotated[float, FileKey("loss", SHARE, 0, 1, "[)")] = 0.0
  streams: Annotated[int, FileKey("streams", int, 1)] = 8
  window_bytes: Annotated[float | None, positive("window", SIZE)] = None
  efficiency: Annotated[float, FileKey("efficiency", SHARE, 0, 1, "(]")] = (
    1448 / 1514
  )
  is_shared: Annotated[bool, FileKey("shared", bool)] = True


@dataclasses.dataclass(frozen=True)
class Site(Checked):
  """A place with devices; its replicas divide them evenly.

  Attributes:
    name: Letters, digits, spaces and any of "_.+-".
    link: Its access to the network.
    num_devices: Devices at the site.
    peak_flops: Peak of each device (FLOP/s).
    achieved_fraction: Share of the peak that training achieves (MFU).
    memory_bytes: Memory of each device (bytes); None is not known.
    speed: Speed of its steps relative to what the other numbers give; 0.5 is
      a straggler whose steps take twice as long.
    intra_bps: Rate of a transfer between replicas of this site (bit/s).
    intra_rtt_s: Round trip between replicas of this site (seconds).
  """

  name: Annotated[str, FileKey("name", str)]
  link: Link
  num_devices: Annotated[int, FileKey("num_devices", int, 1)] = 8
  peak_flops: Annotated[float, positive("peak", COMPUTE)] = 312e12
  achieved_fraction: Annotated[
    float, FileKey("achieved", SHARE, 0, 1, "(]")
  ] = 0.4
  memory_bytes: Annotated[float | None, positive("memory", SIZE)] = None
  speed: Annotated[float, FileKey("speed", float, 0, ends="()")] = 1.0
  intra_bps: Annotated[float, positive("intra", RATE)] = 100e9
  intra_rtt_s: Annotated[float, duration("intra_rtt")] = 10e-6

  def __post_init__(self):
    super().__post_init__()
    if not _NAME.fullmatch(self.name):
      raise ValueError(
        f"name={self.name!r} must be made of letters, digits, spaces and _.+-"
      )


@dataclasses.dataclass(frozen=True)
class Pair(Checked):
  """What was measured between two sites; it holds in either direction.

  Attributes:
    sites: Names of the two sites.
    bps: Payload that passes from one end to the other (bit/s).
    rtt_s: Round trip between them (seconds), instead of what their links say.
  """

  sites: Annotated[tuple[str, str], FileKey("sites", tuple)]
  bps: Annotated[float, positive("rate", RATE)]
  rtt_s: Annotated[float, duration("rtt")]

  def __post_init__(self):
    super().__post_init__()
    if self.sites[0] == self.sites[1]:
      raise ValueError(f"sites={self.sites} must be two different sites")


@dataclasses.dataclass(frozen=True)
class Jitter(Checked):
  """Lognormal noise with mean 1; a sigma of 0 is no noise.

  Attributes:
    step_sigma: Standard deviation of the logarithm of a step's time.
    transfer_sigma: Standard deviation of the logarithm of a transfer's time.
    seed: Integer seed of the noise.
  """

  step_sigma: Annotated[float, FileKey("step", SHARE, 0, ends="[)")] = 0.0
  transfer_sigma: Annotated[float, FileKey("transfer", SHARE, 0, ends="[)")] = (
    0.0
  )
  seed: Annotated[int, FileKey("seed", int, 0)] = 0


@dataclasses.dataclass(frozen=True)
class SiteOutage(Checked):
  """A time in which nothing leaves or reaches a site.

  Attributes:
    site: Name of the site.
    start_s: When its link fails (seconds).
    stop_s: When its link is back (seconds); infinity is never.
  """

  site: Annotated[str, FileKey("site", str)]
  start_s: Annotated[float, duration("start")]
  stop_s: Annotated[float, FileKey("stop", TIME)]

  def __post_init__(self):
    super().__post_init__()
    FileKey("stop", TIME, self.start_s, ends="(]").check("stop_s", self.stop_s)


@dataclasses.dataclass(frozen=True)
class Outage:
  """A time in which a link carries nothing. What is sent waits and goes on.

  Attributes:
    link: Name of the link.
    start_s: When the link fails (seconds).
    stop_s: When the link is back (seconds); infinity is never.
  """

  link: str
  start_s: float | int
  stop_s: float | int


@dataclasses.dataclass(frozen=True)
class Route:
  """The links and TCP limits of a transfer from one replica to another.

  Attributes:
    links: Names of the links that the transfer occupies.
    rtt_s: Round-trip time (seconds).
    loss: Probability that a packet is lost on the way, 0 to 1.
    streams: Number of parallel TCP streams.
    window_bytes: TCP window of a stream (bytes), or None for no limit.
  """

  links: tuple[str, ...]
  rtt_s: float
  loss: float
  streams: int
  window_bytes: float | None


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
    jitter: Noise of steps and transfers.
    outages: Times in which the access links of a site carry nothing.
  """

  name: str
  sites: tuple[Site, ...]
  placement: tuple[int, ...] = ()
  pairs: tuple[Pair, ...] = ()
  jitter: Jitter = Jitter()
  outages: tuple[SiteOutage, ...] = ()

  def __post_init__(self):
    placement = self.placement or tuple(range(len(self.sites)))
    object.__setattr__(self, "placement", placement)
    self._check_placement()
    self._check_names()

  def _check_placement(self):
    counts = collections.Counter(self.placement)
    for index, site in enumerate(self.sites):
      count = counts[index]
      if not count:
        raise ValueError(f"placement leaves site {site.name!r} without replica")
      if site.num_devices % count:
        raise ValueError(
          f"site {site.name!r}: num_devices={site.num_devices} must be a"
          f" multiple of its {count} replicas"
        )

  def _check_names(self):
    names = [site.name for site in self.sites]
    for name, count in collections.Counter(names).items():
      if count > 1:
        raise ValueError(f"name={name!r} must be that of one site only")
    pair_names = [name for pair in self.pairs for name in pair.sites]
    for name in pair_names + [outage.site for outage in self.outages]:
      known("site", name, names)
    counts = collections.Counter(frozenset(pair.sites) for pair in self.pairs)
    for ends, count in counts.items():
      if count > 1:
        raise ValueError(f"pairs must state {sorted(ends)} only once")

  @property
  def num_replicas(self) -> int:
    """Number of replicas at all sites together."""
    return len(self.placement)

  def site(self, replica: int) -> Site:
    """Returns the site of a replica.

    Args:
      replica: Rank of the replica.
    """
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
      sender: Rank of the replica that sends.
      receiver: Rank of the replica that receives.
    """
    start, stop = self.site(sender), self.site(receiver)
    streams = min(start.link.streams, stop.link.streams)
    if sender == receiver:
      return Route((), 0.0, 0.0, streams, None)
    source, target = self._ends[sender], self._ends[receiver]
    if start.name == stop.name:
      return Route((f"inside:{source}",), start.intra_rtt_s, 0.0, streams, None)
    pair = self._pair_of.get(frozenset((start.name, stop.name)))
    between = (f"pair:{source}>{target}",) if pair else ()
    windows = [start.link.window_bytes, stop.link.window_bytes]
    return Route(
      (f"up:{source}", *between, f"down:{target}"),
      pair.rtt_s if pair else (start.link.rtt_s + stop.link.rtt_s) / 2,
      1 - (1 - start.link.loss) * (1 - stop.link.loss),
      streams,
      min((window for window in windows if window is not None), default=None),
    )

  @functools.cached_property
  def goodput_bps(self) -> dict[str, float]:
    """Largest payload rate of every link (bit/s), by name of the link.

    For example, an access link of 1 Gbit/s carries 956 Mbit/s of payload; the
    rest are headers. Rates that were measured between two sites, or are stated
    for the inside of a site, do not include headers.
    """
    goodputs = {}
    for site in self.sites:
      for end in self._ends_at(site.name):
        goodputs[f"up:{end}"] = site.link.up_bps * site.link.efficiency
        goodputs[f"down:{end}"] = site.link.down_bps * site.link.efficiency
        if len(self._ranks[site.name]) > 1:
          goodputs[f"inside:{end}"] = site.intra_bps
    for pair in self.pairs:
      for left, right in itertools.product(*map(self._ends_at, pair.sites)):
        goodputs[f"pair:{left}>{right}"] = pair.bps
        goodputs[f"pair:{right}>{left}"] = pair.bps
    return goodputs

  @functools.cached_property
  def link_outages(self) -> tuple[Outage, ...]:
    """Outages of links: an outage of a site stops all its access links."""
    return tuple(
      Outage(f"{way}:{end}", outage.start_s, outage.stop_s)
      for outage in self.outages
      for end in self._ends_at(outage.site)
      for way in ("up", "down")
    )

  @functools.cached_property
  def _ranks(self) -> dict[str, list[int]]:
    """Ranks of the replicas at every site, by name of the site."""
    ranks = {site.name: [] for site in self.sites}
    for rank, index in enumerate(self.placement):
      ranks[self.sites[index].name].append(rank)
    return ranks

  @functools.cached_property
  def _ends(self) -> list[str]:
    """Name of the network end (END above) of every replica, by rank."""
    ends = [site.name for site in map(self.site, range(self.num_replicas))]
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
    return {frozenset(pair.sites): pair for pair in self.pairs}


def equal_sites(name: str, site: Site, num_replicas: int) -> Cluster:
  """Returns a cluster of equal sites with one replica each.

  Args:
    name: Name of the cluster.
    site: Site that is repeated. A number from 0 is added to its name.
    num_replicas: Number of sites, which is also the number of replicas.
  """
  names = [f"{site.name}{index}" for index in range(num_replicas)]
  sites = [dataclasses.replace(site, name=name) for name in names]
  return Cluster(name, tuple(sites))
