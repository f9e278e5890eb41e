"""Writes the cases as a page and as JSON."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from rich.console import Console

from dilocox_jax.metrics.lines import write_json
from dilocox_jax.report.page import write_page
from dilocox_jax.report.text_tables import markdown_table
from dilocox_jax.report.units import human_bytes
from dilocox_jax.simulate.transfer import Transport
from experiments.real_links.cases import Row
from experiments.real_links.overlap import OverlapRow
from experiments.real_links.ranking import RankedRow, agreeing_pairs
from experiments.real_links.speedup import SpeedupRow
from experiments.runtime.command_line import own_command

_HEADER = (
  *("links", "collective", "operand", "predicted (s)", "measured (s)"),
  *("predicted / measured", "counted / planned bytes"),
)

_COLLECTIVES = (
  "Seconds of a collective: the simulator's, and the median of five runs."
)
_COLUMNS = (
  *("method", "exchange in the", "slow link", "rounds open and slow"),
  *("exchange / round", "open (s)", "slow (s)", "slow / open"),
  *("predicted exposed (s)", "exposed (s)", "counted / planned bytes"),
)
_OVERLAP = (
  "Rounds of one run while its link opens and closes, medians. An exchange that"
  " its own thread dispatches should leave the rounds as they are; the control"
  " keeps it in the round's program, where CPUs overlap nothing."
)

_SPEEDUP_COLUMNS = (
  *("all-reduce / step (wanted)", "link (Mbit/s)", "H", "step alone (s)"),
  *("AllReduce (s)", "predicted / measured", "overlap_loco (s)"),
  *("predicted / measured", "speed-up", "utilisation"),
  "counted / planned bytes",
)
_SPEEDUP = (
  "Seconds of a step, exchanges included, medians (measured). The link is"
  " slowed down until the all-reduce of the gradients takes so many times as"
  " long as a step alone. The speed-up is AllReduce's seconds over those of"
  " `overlap_loco`; utilisation is the share of its time that its steps take"
  " over an open link."
)

_RANKING_COLUMNS = ("method", "H", "predicted (s)", "measured (s)", "ratio")
_RANKING = (
  "Settings on one slow link: seconds of a step, exchanges included. The"
  " simulator has {} of {} pairs in the measured order."
)


def report(
  rows: Sequence[Row],
  overlaps: Sequence[OverlapRow],
  speedups: Sequence[SpeedupRow],
  ranked: Sequence[RankedRow],
  transport: Transport,
  workdir: pathlib.Path,
) -> None:
  """Writes the page and the JSON, and prints the tables.

  Args:
    rows: All collectives; those that miss are shown as the others are.
    overlaps: Runs on a link that opened and closed.
    speedups: Runs over links that make AllReduce slow.
    ranked: Settings on one slow link.
    transport: Transport of the predictions, as it was measured.
    workdir: Directory to write into.
  """
  factors = "; ".join(
    f"{kind} {pair:.3f} and {more:.3f}" for kind, pair, more in transport.factors
  )
  lines = [
    "All links are throttled by the kernel, which also counts the bytes on the"
    " link of process 0. Collectives of gloo between two and among four"
    " processes took so many times a link that carries payload alone, both ways"
    f" at once: {factors} (measured before, at other sizes and rates).",
  ]
  ranking = _RANKING.format(*agreeing_pairs(ranked))
  tables = (
    (_COLLECTIVES, _HEADER, [*map(_cells, rows)]),
    (_OVERLAP, _COLUMNS, [*map(_row, overlaps)]),
    (_SPEEDUP, _SPEEDUP_COLUMNS, [*map(_speedup_cells, speedups)]),
    (ranking, _RANKING_COLUMNS, [*map(_ranking_cells, ranked)]),
  )
  for intro, columns, cells in tables:
    if cells:
      lines += ["", intro, "", *markdown_table(columns, cells)]
  values = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]
  others = (*overlaps, *speedups, *ranked)
  values += [dataclasses.asdict(row) for row in others]
  write_json(workdir / "links.json", values)
  page = write_page(workdir, "Real links", lines, own_command())
  Console().print(*lines, sep="\n")
  print(f"report: {page}")


def _row(row: OverlapRow) -> tuple[str, ...]:
  return (
    row.name,
    row.dispatch,
    row.rate,
    " and ".join(map(str, row.num_rounds)),
    f"{row.predicted_exchange_s / row.open_s:.2f}",
    f"{row.open_s:.3f}",
    f"{row.slow_s:.3f}",
    f"{row.ratio:.3f}",
    f"{row.predicted_exposed_s:.3f}",
    "-" if math.isnan(row.exposed_s) else f"{row.exposed_s:.3f}",
    f"{row.bytes_ratio:.3f}",
  )


def _ranking_cells(row: RankedRow) -> tuple[str, ...]:
  return (
    row.name,
    str(row.sync_interval),
    f"{row.predicted_s:.4f}",
    f"{row.measured_s:.4f}",
    f"{row.predicted_s / row.measured_s:.3f}",
  )


def _speedup_cells(row: SpeedupRow) -> tuple[str, ...]:
  return (
    f"{row.wanted:g}",
    f"{row.rate_bps / 1e6:.3f}",
    str(row.sync_interval),
    f"{row.step_s:.4f}",
    f"{row.baseline_s:.3f}",
    f"{row.predicted_baseline_s / row.baseline_s:.3f}",
    f"{row.method_s:.4f}",
    f"{row.predicted_method_s / row.method_s:.3f}",
    f"{row.speedup:.1f}",
    f"{row.utilisation:.1%}",
    f"{row.bytes_ratio:.3f}",
  )


def _cells(row: Row) -> tuple[str, ...]:
  return (
    row.cluster,
    row.kind,
    human_bytes(row.operand_bytes),
    f"{row.predicted_s:.4f}",
    f"{row.measured_s:.4f}",
    f"{row.ratio:.3f}",
    f"{row.link_bytes / row.planned_bytes:.3f}",
  )
