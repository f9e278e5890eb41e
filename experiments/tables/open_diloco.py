"""OpenDiLoCo (arXiv 2407.07852): the share of time spent computing.

The inputs that the paper states give its range of utilisations, and nothing is
fitted: a ring moves at the rate of its slowest link, and a round is long.
"""

import pathlib

from dilocox_jax.codecs.quantize import Float
from dilocox_jax.plan.schedule.methods import open_diloco
from dilocox_jax.simulate.cluster_file import cluster_preset
from experiments.tables.published import load_published
from experiments.tables.runs import Rounds, equal_links, flat_traffic, least
from experiments.tables.table import (
  Fit,
  Prediction,
  Table,
  described,
  rows_beside,
)

_BASIS = "H steps in 67.5 min, 1.1 B values in fp16, 127 Mbit/s"


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns the run's utilisation and the published range.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "opendiloco.json")
  count = int(figures["replicas"].value)
  interval = int(figures["sync interval"].value)
  method, size = open_diloco(interval), figures["parameters"].value
  rounds = Rounds(flat_traffic(method, size, count, Float("float16")))
  compute_s = figures["compute of a round"].value * 60
  step_s = compute_s / interval
  pace = rounds.on(cluster_preset("opendiloco", count), step_s)

  def is_enough(mbps: float) -> bool:
    cluster = equal_links(count, mbps * 1e6, rtt_s=0.1)
    return rounds.on(cluster, step_s).utilisation >= 0.9

  mbps = least(is_enough, 1.0, 1000.0)
  rows = rows_beside(
    figures,
    ("utilisation, lowest", 100 * pace.utilisation, Fit.NONE, _BASIS),
    ("utilisation, highest", 100 * pace.utilisation, Fit.NONE, _BASIS),
    ("all-reduce", pace.exchange_s, Fit.NONE, _BASIS),
  )
  slowest = "slowest link for 90 %"
  rows += [Prediction(slowest, mbps, "Mbit/s", Fit.NONE, "as above")]
  slower = compute_s / (compute_s + figures["all-reduce"].value)
  share = pace.utilisation
  name = "open_diloco"
  return [described(name, rows, share=share, slower=slower, mbps=mbps)]
