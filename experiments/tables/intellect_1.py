"""INTELLECT-1 (arXiv 2412.01152): utilisation in three settings.

The paper gives times of rounds and of all-reduces but no bandwidth, so a rate
is fitted for each setting. The notes say how little follows from that.
"""

import pathlib
from collections.abc import Mapping

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.plan.schedule.methods import Method, allreduce, diloco
from dilocox_jax.simulate.cluster_file import cluster_preset
from experiments.tables.published import Figure, load_published
from experiments.tables.runs import (
  Pace,
  Rounds,
  equal_links,
  flat_traffic,
  least,
)
from experiments.tables.table import Fit, Table, described, rows_beside

_SETTINGS = ("USA", "USA and Europe", "global")
_RTT_S = 0.1


class _Runs:
  """Runs of one ring of the most nodes that participated at a time."""

  def __init__(self, figures: Mapping[str, Figure]):
    self._count = int(figures["most concurrent nodes"].value)
    self._interval = int(figures["sync interval"].value)
    self._num_parameters = figures["parameters"].value
    self._round_s = figures["compute of a round"].value * 60
    bits = int(figures["bits of a parameter in the all-reduce"].value)
    self._rounds = Rounds(self._traffic(diloco(self._interval), Int(bits)))

  def _traffic(self, method: Method, codec: Codec) -> Traffic:
    return flat_traffic(method, self._num_parameters, self._count, codec)

  def at(self, mbps: float | None) -> Pace:
    """Returns the pace at a rate of all links; None: that of the preset."""
    cluster = cluster_preset("intellect_1", self._count)
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
    dense = self._traffic(allreduce(), Float()).gradient_bytes()
    return dense * self._interval / self._rounds.traffic.exchange_bytes(0)


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns the run's utilisation, its exchange, and what both imply.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "intellect_1.json")
  runs = _Runs(figures)
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
