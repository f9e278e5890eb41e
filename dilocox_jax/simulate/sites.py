"""What a cluster is made of: sites, links, measured pairs, jitter, outages.

People know these numbers of their own sites. Each attribute is described once,
in its type: the key that a cluster file uses for it, what it holds, and its
range. Reading, writing and checking all use that description.

Example: two replicas at a site behind one link of 1 Gbit/s up. If the link is
shared (the default), both send over "up:site" and get 0.5 Gbit/s each while
both send. If `is_shared` is false, they send over "up:site/0" and "up:site/1"
at 1 Gbit/s each.
"""

import dataclasses
import functools
import math
import re
import typing
from typing import Annotated, Any

from dilocox_jax.simulate.quantities import (
  COMPUTE,
  RATE,
  SHARE,
  SIZE,
  TIME,
  Dimension,
  format_quantity,
)

_NAME = re.compile(r"\w[\w .+-]*")


@dataclasses.dataclass(frozen=True)
class FileKey:
  """How a cluster file states an attribute.

  Attributes:
    name: The key.
    holds: Type of the value (str, int, float, bool, tuple), or the dimension
      of a quantity that is written with its unit.
    low: The least value; None: there is no range.
    high: The greatest value.
    ends: "[" or "(" and "]" or ")": whether the ends belong to the range.
  """

  name: str
  holds: type | Dimension
  low: float | int | None = None
  high: float | int = math.inf
  ends: str = "[]"

  def check(self, attribute: str, value: Any) -> None:
    """Raises ValueError unless a value is absent or in its range."""
    if self.low is None or value is None:
      return
    above = value >= self.low if self.ends[0] == "[" else value > self.low
    below = value <= self.high if self.ends[1] == "]" else value < self.high
    if above and below:
      return
    least = "at least" if self.ends[0] == "[" else "more than"
    wanted = f"be {least} {self._shown(self.low)}"
    if math.isfinite(self.high):
      most = "at most" if self.ends[1] == "]" else "less than"
      wanted += f" and {most} {self._shown(self.high)}"
    elif self.ends[1] == ")":
      wanted += " and finite"
    raise ValueError(f"{attribute}={self._shown(value)} must {wanted}")

  def _shown(self, number: float | int) -> str:
    if isinstance(self.holds, Dimension):
      return format_quantity(float(number), self.holds)
    return f"{number:g}"


@functools.cache
def file_keys(section: type) -> dict[str, FileKey]:
  """Returns the keys of a section of a cluster file, by attribute.

  Args:
    section: `Link`, `Site`, `Pair`, `Jitter` or `SiteOutage`.
  """
  hints = typing.get_type_hints(section, include_extras=True)
  return {
    attribute: key
    for attribute, hint in hints.items()
    for key in getattr(hint, "__metadata__", ())
    if isinstance(key, FileKey)
  }


class _Checked:
  """Checks every attribute that has a range."""

  def __post_init__(self):
    for attribute, key in file_keys(type(self)).items():
      key.check(attribute, getattr(self, attribute))


# Types of attributes, with their keys in a file and their ranges.
def _positive(name: str, dimension: Dimension) -> FileKey:
  return FileKey(name, dimension, 0, ends="(]")


def _duration(name: str) -> FileKey:
  return FileKey(name, TIME, 0, ends="[)")


@dataclasses.dataclass(frozen=True)
class Link(_Checked):
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

  up_bps: Annotated[float, _positive("up", RATE)]
  down_bps: Annotated[float, _positive("down", RATE)]
  rtt_s: Annotated[float, _duration("rtt")] = 0.04
  loss: Annotated[float, FileKey("loss", SHARE, 0, 1, "[)")] = 0.0
  streams: Annotated[int, FileKey("streams", int, 1)] = 8
  window_bytes: Annotated[float | None, _positive("window", SIZE)] = None
  efficiency: Annotated[float, FileKey("efficiency", SHARE, 0, 1, "(]")] = (
    1448 / 1514
  )
  is_shared: Annotated[bool, FileKey("shared", bool)] = True


@dataclasses.dataclass(frozen=True)
class Site(_Checked):
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
    num_stages: Pipeline stages of a replica, checked against its devices; None
      is no check.
    intra_bps: Rate of a transfer between replicas of this site (bit/s).
    intra_rtt_s: Round trip between replicas of this site (seconds).
  """

  name: Annotated[str, FileKey("name", str)]
  link: Link
  num_devices: Annotated[int, FileKey("num_devices", int, 1)] = 8
  peak_flops: Annotated[float, _positive("peak", COMPUTE)] = 312e12
  achieved_fraction: Annotated[
    float, FileKey("achieved", SHARE, 0, 1, "(]")
  ] = 0.4
  memory_bytes: Annotated[float | None, _positive("memory", SIZE)] = None
  speed: Annotated[float, FileKey("speed", float, 0, ends="()")] = 1.0
  num_stages: Annotated[int | None, FileKey("num_stages", int, 1)] = None
  intra_bps: Annotated[float, _positive("intra", RATE)] = 100e9
  intra_rtt_s: Annotated[float, _duration("intra_rtt")] = 10e-6

  def __post_init__(self):
    super().__post_init__()
    if not _NAME.fullmatch(self.name):
      raise ValueError(
        f"name={self.name!r} must be made of letters, digits, spaces and _.+-"
      )


@dataclasses.dataclass(frozen=True)
class Pair(_Checked):
  """What was measured between two sites; it holds in either direction.

  Attributes:
    sites: Names of the two sites.
    bps: Payload that passes from one end to the other (bit/s).
    rtt_s: Round trip between them (seconds), instead of what their links say.
  """

  sites: Annotated[tuple[str, str], FileKey("sites", tuple)]
  bps: Annotated[float, _positive("rate", RATE)]
  rtt_s: Annotated[float, _duration("rtt")]

  def __post_init__(self):
    super().__post_init__()
    if self.sites[0] == self.sites[1]:
      raise ValueError(f"sites={self.sites} must be two different sites")


@dataclasses.dataclass(frozen=True)
class Jitter(_Checked):
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
class SiteOutage(_Checked):
  """A time in which nothing leaves or reaches a site.

  Attributes:
    site: Name of the site.
    start_s: When its link fails (seconds).
    stop_s: When its link is back (seconds); infinity is never.
  """

  site: Annotated[str, FileKey("site", str)]
  start_s: Annotated[float, _duration("start")]
  stop_s: Annotated[float, FileKey("stop", TIME)]

  def __post_init__(self):
    super().__post_init__()
    FileKey("stop", TIME, self.start_s, ends="(]").check("stop_s", self.stop_s)
