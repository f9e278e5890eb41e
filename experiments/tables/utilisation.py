"""Three papers that report how much of the time their runs computed.

OpenDiLoCo (arXiv 2407.07852): the inputs that the paper states give its range
of utilisations, and nothing is fitted. A ring moves at the rate of its slowest
link, and a round is long.

INTELLECT-1 (arXiv 2412.01152): the paper gives times of rounds and of
all-reduces but no bandwidth, so a rate is fitted for each of three settings.
The notes say how little follows from that.

Covenant-72B (arXiv 2603.08163): sparse 2-bit exchanges. Its peers do not form a
ring. Each puts its payload into object storage and takes those of the others
from there, so a slow uplink costs less.
"""

import pathlib
from collections.abc import Mapping

from dilocox_jax.aggregators.collectives import message_bytes
from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.codecs.sparse import TopK
from dilocox_jax.plan.schedule import methods
from dilocox_jax.simulate.cluster import Link, Site, equal_sites
from dilocox_jax.simulate.cluster_file import load_cluster
from experiments.tables.runs import (
  GOODPUT,
  Pace,
  Rounds,
  equal_links,
  flat_traffic,
  least,
)
from experiments.tables.table import (
  Figure,
  Fit,
  Prediction,
  Table,
  described,
  load_published,
  rows_beside,
)

_SETTINGS = ("USA", "USA and Europe", "global")
_RTT_S = 0.1
_BLOCK, _KEPT = 4096, 64


def open_diloco(folder: pathlib.Path) -> list[Table]:
  """Returns the run's utilisation and the published range.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "opendiloco.json")
  basis = "H steps in 67.5 min, 1.1 B values in fp16, 127 Mbit/s"
  count = int(figures["replicas"].value)
  interval = int(figures["sync interval"].value)
  method, size = methods.open_diloco(interval), figures["parameters"].value
  rounds = Rounds(flat_traffic(method, size, count, Float("float16")))
  compute_s = figures["compute of a round"].value * 60
  step_s = compute_s / interval
  pace = rounds.on(load_cluster("opendiloco", count), step_s)

  def is_enough(mbps: float) -> bool:
    cluster = equal_links(count, mbps * 1e6, rtt_s=0.1)
    return rounds.on(cluster, step_s).utilisation >= 0.9

  mbps = least(is_enough, 1.0, 1000.0)
  rows = rows_beside(
    figures,
    ("utilisation, lowest", 100 * pace.utilisation, Fit.NONE, basis),
    ("utilisation, highest", 100 * pace.utilisation, Fit.NONE, basis),
    ("all-reduce", pace.exchange_s, Fit.NONE, basis),
  )
  slowest = "slowest link for 90 %"
  rows += [Prediction(slowest, mbps, "Mbit/s", Fit.NONE, "as above")]
  slower = compute_s / (compute_s + figures["all-reduce"].value)
  share = pace.utilisation
  name = "open_diloco"
  return [described(name, rows, share=share, slower=slower, mbps=mbps)]


class Intellect1:
  """Runs of one ring of the most nodes that participated at a time."""

  def __init__(self, figures: Mapping[str, Figure]):
    self._count = int(figures["most concurrent nodes"].value)
    self._interval = int(figures["sync interval"].value)
    self._num_parameters = figures["parameters"].value
    self._round_s = figures["compute of a round"].value * 60
    bits = int(figures["bits of a parameter in the all-reduce"].value)
    self._rounds = Rounds(
      self._traffic(methods.diloco(self._interval), Int(bits))
    )

  def _traffic(self, method: methods.Method, codec: Codec) -> Traffic:
    return flat_traffic(method, self._num_parameters, self._count, codec)

  def at(self, mbps: float | None) -> Pace:
    """Returns the pace at a rate of all links; None: that of the preset."""
    cluster = load_cluster("intellect_1", self._count)
    if mbps is not None:
      cluster = equal_links(self._count, mbps * 1e6, rtt_s=_RTT_S)
    return self._rounds.on(cluster, self._round_s / self._interval)

  def rate_for(self, exchange_s: float) -> float:
    """Returns the rate (Mbit/s) at which the exchange takes so long."""
    return least(
      lambda mbps: self.at(mbps).exchange_s <= exchange_s, 10.0, 1e5, 1e-4
    )

  def reduction(self) -> float:
    """Returns bytes of H data-parallel steps over those of an exchange."""
    dense = self._traffic(methods.allreduce(), Float()).gradient_bytes()
    return dense * self._interval / self._rounds.traffic.exchange_bytes(0)


def intellect_1(folder: pathlib.Path) -> list[Table]:
  """Returns the run's utilisation, its exchange, and what both imply.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "intellect_1.json")
  runs = Intellect1(figures)
  slow = runs.at(None)
  preset = "14 nodes, int8 ring, 340 Mbit/s fitted on the lowest utilisation"
  quoted, quoted_min = "sync as quoted by Covenant-72B", slow.exchange_s / 60
  rows = [
    ("utilisation, lowest", 100 * slow.utilisation, Fit.HERE, preset),
    ("global, all-reduce", slow.exchange_s, Fit.ELSEWHERE, preset),
    (quoted, quoted_min, Fit.ELSEWHERE, preset),
  ]
  rates = {}
  for name in _SETTINGS:
    exchange_s = figures[f"{name}, all-reduce"].value
    rates[name] = runs.rate_for(exchange_s)
    percent = 100 * runs.at(rates[name]).utilisation
    basis = f"{rates[name]:.0f} Mbit/s, fitted on {exchange_s:.0f} s"
    rows.append((f"{name}, utilisation", percent, Fit.ELSEWHERE, basis))
    if name == "USA":
      rows.append(("utilisation, highest", percent, Fit.ELSEWHERE, basis))
  scales = "H = 100, int8 with a scale for every 128 values"
  # The share of the peak is predicted as if only the waiting differed.
  waiting = figures["utilisation, lowest"].value
  waiting /= figures["utilisation, highest"].value
  mfu = figures["model FLOPS utilisation, highest"].value * waiting
  both = "the highest times the ratio of both utilisations"
  rows += [
    ("bandwidth reduction", runs.reduction(), Fit.NONE, scales),
    ("model FLOPS utilisation, lowest", mfu, Fit.NONE, both),
  ]
  mbps = ", ".join(f"{rate:.0f} ({name})" for name, rate in rates.items())
  return [described("intellect_1", rows_beside(figures, *rows), rates=mbps)]


class Covenant:
  """Rounds of the run among a number of peers."""

  def __init__(self, figures: Mapping[str, Figure]):
    self._interval = int(figures["sync interval"].value)
    self._step_s = figures["compute of a round"].value * 60 / self._interval
    self.up_bps = figures["uplink"].value * 1e6
    self.down_bps = figures["downlink"].value * 1e6
    self._num_parameters = int(figures["parameters"].value)
    bits = int(figures["bits of a value"].value)
    self._codec = TopK(_KEPT / _BLOCK, _BLOCK, then=Int(bits, "tensor"))
    shapes = {"parameters": (self._num_parameters,)}
    self.payload_bytes = message_bytes(self._codec, shapes)  # Of one peer.
    self.compression = 4 * self._num_parameters / self.payload_bytes

  def among(self, num_replicas: int, share: float = 1.0) -> Pace:
    """Returns the pace of a ring; a ring of two is an upload to storage.

    Args:
      num_replicas: Number of peers.
      share: Share of the bytes that is sent.
    """
    link = Link(self.up_bps / share, self.down_bps / share, rtt_s=_RTT_S)
    cluster = equal_sites("covenant", Site("peer", link), num_replicas)
    method = methods.sparse_loco(self._interval)
    sent = method, self._num_parameters, num_replicas, self._codec
    return Rounds(flat_traffic(*sent)).on(cluster, self._step_s)


def covenant_72b(folder: pathlib.Path) -> list[Table]:
  """Returns the run's utilisation, communication and compression.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "covenant_72b.json")
  runs = Covenant(figures)
  count = int(figures["most contributing peers"].value)
  upload, half = runs.among(2), runs.among(2, share=0.5)
  ring = runs.among(count)
  through = "each peer uploads its payload once; downloads are hidden"
  sparse = "64 of 4096 values, 12 bits of index and 2 of value"
  gathered = f"{count} peers gather all payloads over the same uplinks"
  ring_percent, title = 100 * ring.utilisation, "utilisation of a ring"
  rows = rows_beside(
    figures,
    ("utilisation", 100 * upload.utilisation, Fit.NONE, through),
    ("communication of a round", upload.exchange_s, Fit.NONE, through),
    ("compression", runs.compression, Fit.NONE, sparse),
  )
  rows += [Prediction(title, ring_percent, "percent", Fit.NONE, gathered)]
  size = runs.payload_bytes
  table = described(
    "covenant_72b",
    rows,
    gigabytes=size / 1e9,
    upload_s=upload.exchange_s,
    half_share=half.utilisation,
    half_s=half.exchange_s,
    others=count - 1,
    others_s=(count - 1) * size * 8 / (runs.down_bps * GOODPUT),
    ring_s=ring.exchange_s,
    ring_share=ring.utilisation,
  )
  return [table]
