"""Covenant-72B (arXiv 2603.08163): utilisation with sparse 2-bit exchanges.

Its peers do not form a ring. Each puts its payload into object storage and
takes those of the others from there, so a slow uplink costs less.
"""

import pathlib
from collections.abc import Mapping

from dilocox_jax.aggregators.collectives import message_bytes
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.codecs.sparse import TopK
from dilocox_jax.plan.schedule.methods import sparse_loco
from dilocox_jax.simulate.cluster import Link, Site, equal_sites
from experiments.tables.published import Figure, load_published
from experiments.tables.runs import GOODPUT, Pace, Rounds, flat_traffic
from experiments.tables.table import (
  Fit,
  Prediction,
  Table,
  described,
  rows_beside,
)

_BLOCK, _KEPT = 4096, 64
_RTT_S = 0.1


class _Runs:
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
    method = sparse_loco(self._interval)
    sent = method, self._num_parameters, num_replicas, self._codec
    return Rounds(flat_traffic(*sent)).on(cluster, self._step_s)


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns the run's utilisation, communication and compression.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "covenant_72b.json")
  runs = _Runs(figures)
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
