"""What a cluster is made of: sites, links, measured pairs, noise, outages.

These are what people know of their own places, in the terms in which they
know them. Every number is checked where it enters, so that a wrong one is
found before hours have been computed from it.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable

from dilocox_jax.simulate.quantities import (
  COMPUTE,
  RATE,
  SHARE,
  SIZE,
  TIME,
  require_number,
)

_NAME = re.compile(r"\w[\w .+-]*")


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
  """A message about a name that does not exist, with the nearest that does.

  Args:
    what: What it should have been, e.g. "site".
    name: The name.
    known: Those that exist.
  """
  names = list(known)
  near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
  hint = f"did you mean {near[0]!r}? " if near else ""
  return f"unknown {what} {name!r}: {hint}have {', '.join(names)}"


@dataclasses.dataclass(frozen=True)
class Link:
  """Access to the network, of a site or of each replica there.

  Attributes:
    up_bps: What can leave (bit/s of the line); infinity is no limit.
    down_bps: What can arrive (bit/s of the line).
    rtt_s: Round trip to another site with such a link; each end of a transfer
      adds half of its own.
    loss: Probability that a packet is lost.
    streams: Parallel TCP streams of a transfer.
    window_bytes: TCP window of a stream; None is no limit.
    efficiency: Part of the line rate that carries payload; by default what
      TCP leaves of an Ethernet frame.
    is_shared: Whether all replicas at the site share the one link; otherwise
      each has its own.
  """

  up_bps: float
  down_bps: float
  rtt_s: float = 0.04
  loss: float = 0.0
  streams: int = 8
  window_bytes: float | None = None
  efficiency: float = 1448 / 1514
  is_shared: bool = True

  def __post_init__(self):
    require_number("up_bps", self.up_bps, 0, ends="(]", kind=RATE)
    require_number("down_bps", self.down_bps, 0, ends="(]", kind=RATE)
    require_number("rtt_s", self.rtt_s, 0, ends="[)", kind=TIME)
    require_number("loss", self.loss, 0, 1, "[)", SHARE)
    require_number("streams", self.streams, 1)
    if self.window_bytes is not None:
      require_number("window_bytes", self.window_bytes, 0, ends="(]", kind=SIZE)
    require_number("efficiency", self.efficiency, 0, 1, "(]", SHARE)


@dataclasses.dataclass(frozen=True)
class Site:
  """A place with devices; its replicas divide them evenly.

  Attributes:
    name: Letters, digits, spaces and any of "_.+-".
    link: Its access to the network.
    num_devices: Devices at the site.
    peak_flops: Of each device (FLOP/s).
    achieved_fraction: Part of the peak that training achieves (MFU).
    speed: Steps relative to what the other numbers give; 0.5 is a straggler.
    num_stages: Pipeline stages of a replica, if that is to be checked.
    intra_bps: Rate of a transfer between replicas of this site (bit/s).
    intra_rtt_s: Round trip between them.
  """

  name: str
  link: Link
  num_devices: int = 8
  peak_flops: float = 312e12
  achieved_fraction: float = 0.4
  speed: float = 1.0
  num_stages: int | None = None
  intra_bps: float = 100e9
  intra_rtt_s: float = 10e-6

  def __post_init__(self):
    if not _NAME.fullmatch(self.name):
      raise ValueError(
        f"name={self.name!r} must be made of letters, digits, spaces and _.+-"
      )
    require_number("num_devices", self.num_devices, 1)
    require_number("peak_flops", self.peak_flops, 0, ends="(]", kind=COMPUTE)
    require_number(
      "achieved_fraction", self.achieved_fraction, 0, 1, "(]", SHARE
    )
    require_number("speed", self.speed, 0, ends="()")
    if self.num_stages is not None:
      require_number("num_stages", self.num_stages, 1)
    require_number("intra_bps", self.intra_bps, 0, ends="(]", kind=RATE)
    require_number("intra_rtt_s", self.intra_rtt_s, 0, ends="[)", kind=TIME)


@dataclasses.dataclass(frozen=True)
class Pair:
  """What was measured between two sites, in either direction.

  Attributes:
    sites: Their names.
    bps: Payload that passes from one end to the other (bit/s).
    rtt_s: Round trip between them, instead of what their links say.
  """

  sites: tuple[str, str]
  bps: float
  rtt_s: float

  def __post_init__(self):
    if self.sites[0] == self.sites[1]:
      raise ValueError(f"sites={self.sites} must be two different sites")
    require_number("bps", self.bps, 0, ends="(]", kind=RATE)
    require_number("rtt_s", self.rtt_s, 0, ends="[)", kind=TIME)


@dataclasses.dataclass(frozen=True)
class Jitter:
  """Lognormal noise; 0 is none.

  Attributes:
    step_sigma: Standard deviation of the logarithm of a step's time.
    transfer_sigma: The same for transfers.
    seed: Of the noise.
  """

  step_sigma: float = 0.0
  transfer_sigma: float = 0.0
  seed: int = 0

  def __post_init__(self):
    for field in ("step_sigma", "transfer_sigma"):
      require_number(field, getattr(self, field), 0, ends="[)", kind=SHARE)
    require_number("seed", self.seed, 0)


@dataclasses.dataclass(frozen=True)
class SiteOutage:
  """A time in which nothing leaves or reaches a site.

  Attributes:
    site: Its name.
    start_s: When its link fails.
    stop_s: When it is back.
  """

  site: str
  start_s: float
  stop_s: float

  def __post_init__(self):
    require_number("start_s", self.start_s, 0, ends="[)", kind=TIME)
    require_number("stop_s", self.stop_s, self.start_s, ends="(]", kind=TIME)
