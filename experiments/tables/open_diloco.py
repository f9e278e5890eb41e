"""OpenDiLoCo (arXiv 2407.07852): the share of time spent computing.

The inputs that the paper states give its range of utilisations, and nothing is
fitted: a ring moves at the rate of its slowest link, and a round is long.
"""

import pathlib
from collections.abc import Mapping

from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.methods import open_diloco
from dilocox_jax.plan.wire.payload import Dense
from dilocox_jax.plan.wire.traffic import Traffic
from dilocox_jax.simulate.presets import cluster_preset
from dilocox_jax.simulate.published import Figure, load_published
from experiments.tables.runs import Pace, Rounds, equal_links, least
from experiments.tables.table import DERIVED, Prediction, Table, TableRow

_BASIS = "H steps in 67.5 min, 1.1 B values in fp16, 127 Mbit/s"


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns the run's utilisation and the published range.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "opendiloco.json")
  pace = _pace(figures, None)
  mbps = least(
    lambda mbps: _pace(figures, mbps).utilisation >= 0.9, 1.0, 1000.0
  )
  percent = 100 * pace.utilisation
  rows = [
    TableRow(figures["utilisation, lowest"], percent, DERIVED, _BASIS),
    TableRow(figures["utilisation, highest"], percent, DERIVED, _BASIS),
    TableRow(figures["all-reduce"], pace.exchange_s, DERIVED, _BASIS),
    Prediction("slowest link for 90 %", mbps, "Mbit/s", DERIVED, "as above"),
  ]
  return [
    Table(
      "open_diloco",
      "OpenDiLoCo: compute utilisation over three countries",
      rows,
      _notes(figures, pace, mbps),
    )
  ]


def _pace(figures: Mapping[str, Figure], mbps: float | None) -> Pace:
  """The run, with its own links or with equal ones."""
  count = int(figures["replicas"].value)
  interval = int(figures["sync interval"].value)
  shapes = {"parameters": (int(figures["parameters"].value),)}
  method, fragments = open_diloco(interval), Fragments(1, 1)
  traffic = Traffic(method, fragments, shapes, count, Dense("float16"))
  cluster = cluster_preset("opendiloco", count)
  if mbps is not None:
    cluster = equal_links(count, mbps * 1e6, rtt_s=0.1)
  step_s = figures["compute of a round"].value * 60 / interval
  return Rounds(traffic).on(cluster, step_s)


def _notes(
  figures: Mapping[str, Figure], pace: Pace, mbps: float
) -> tuple[str, ...]:
  compute_s = figures["compute of a round"].value * 60
  slower = compute_s / (compute_s + figures["all-reduce"].value)
  return (
    f"The prediction, {pace.utilisation:.1%}, lies in the published band; it is"
    " shown against both of its ends. Nothing is fitted; the step time is an"
    " input. Four replicas exchange 1.5 times the parameters, and the slowest"
    " link sets the pace (presets: 127 to 935 Mbit/s, 100 ms assumed). The"
    " inputs are recalled, not read in the paper.",
    f"The all-reduce recalled, 300 s, would be {slower:.1%}: TCP got less than"
    f" the line rate of the slowest link. Down to {mbps:.0f} Mbit/s the run"
    " would stay at 90 %.",
  )
