"""Writes the cases as a page and as JSON."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from dilocox_jax.metrics.lines import write_json
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.text_tables import markdown_table
from dilocox_jax.report.units import human_bytes
from dilocox_jax.simulate.transfer import Transport
from experiments.real_links.bandwidths import BandwidthRow, Curve
from experiments.real_links.bandwidths_figure import utilisation_figure
from experiments.real_links.cases import Row
from experiments.real_links.overlap import OverlapRow
from experiments.real_links.ranking import RankedRow, agreeing_pairs
from experiments.real_links.speedup import SpeedupRow
from experiments.real_links.timed_runs import BASELINE
from experiments.runtime.command_line import own_command

_HEADER = (
  *("links", "collective", "operand", "predicted (s)", "measured (s)"),
  *("predicted / measured", "counted / planned bytes", "cores busy"),
)

_COLLECTIVES = (
  "Seconds of a collective: the simulator's, and the mean of five runs without"
  " the fastest and the slowest. Where few cores are idle, the machine and not"
  " the link may be what is slow."
)
_COLUMNS = (
  *("method", "exchange in the", "slow link", "rounds open and slow"),
  *("exchange / round", "open (s)", "slow (s)", "slow / open"),
  *("predicted exposed (s)", "exposed (s)", "counted / planned bytes"),
)
_OVERLAP = (
  "Rounds of one run while its link opens and closes, medians. An exchange that"
  " its own thread dispatches should leave the rounds as they are; the control"
  " keeps it in the window's program, where CPUs overlap nothing."
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

_BANDWIDTH_COLUMNS = (
  *("method", "H", "link (Mbit/s)", "tokens/s", "speed-up over AllReduce"),
  *("by the simulator", "step predicted (s)", "step measured (s)"),
  *("predicted / measured", "utilisation", "counted / planned bytes"),
)
_BANDWIDTHS = (
  "Methods over one link that becomes slower while they train: tokens a second"
  " of both replicas and seconds of a step, exchanges included, medians"
  " (measured). The simulator was told the seconds of a step over an open link."
)
_FIGURE = (
  "Share of the time that inner steps take: by the simulator (lines) and"
  " measured (markers)."
)

_RANKING_COLUMNS = ("method", "H", "predicted (s)", "measured (s)", "ratio")
_RANKING = (
  "Settings on one slow link: seconds of a step, exchanges included. The"
  " simulator has {} of {} pairs in the measured order."
)


@dataclasses.dataclass(frozen=True)
class Found:
  """What was run; a table that is empty is left out of the page.

  Attributes:
    rows: All collectives; those that miss are shown as the others are.
    overlaps: Runs on a link that opened and closed.
    bandwidths: Methods over a link that became slower.
    curves: Utilisation of these methods by the simulator.
    speedups: Runs over links that make AllReduce slow.
    ranked: Settings on one slow link.
  """

  rows: Sequence[Row] = ()
  overlaps: Sequence[OverlapRow] = ()
  bandwidths: Sequence[BandwidthRow] = ()
  curves: Sequence[Curve] = ()
  speedups: Sequence[SpeedupRow] = ()
  ranked: Sequence[RankedRow] = ()


def report(
  found: Found, transport: Transport, workdir: pathlib.Path
) -> list[str]:
  """Writes the page and the JSON; returns the page's lines.

  Args:
    found: What was run so far.
    transport: Transport of the predictions, as it was measured.
    workdir: Directory to write into.
  """
  factors = "; ".join(
    f"{kind} {pair:.3f} and {more:.3f}"
    for kind, pair, more in transport.factors
  )
  lines = [
    "All links are throttled by the kernel, which also counts the bytes on the"
    " link of a process. Collectives of gloo between two and among four"
    " processes took so many times a link that carries payload alone, both ways"
    f" at once: {factors} (measured before, at other sizes and rates).",
  ]
  ranking = _RANKING.format(*agreeing_pairs(found.ranked))
  of_methods = _bandwidth_cells(found.bandwidths)
  tables = (
    (_COLLECTIVES, _HEADER, [*map(_cells, found.rows)]),
    (_OVERLAP, _COLUMNS, [*map(_row, found.overlaps)]),
    (_BANDWIDTHS, _BANDWIDTH_COLUMNS, of_methods),
    (_SPEEDUP, _SPEEDUP_COLUMNS, [*map(_speedup_cells, found.speedups)]),
    (ranking, _RANKING_COLUMNS, [*map(_ranking_cells, found.ranked)]),
  )
  for intro, columns, cells in tables:
    if cells:
      lines += ["", intro, "", *markdown_table(columns, cells)]
  if found.curves:
    figure = utilisation_figure(found.bandwidths, found.curves)
    lines += ["", *picture(figure, workdir, "utilisation", _FIGURE)]
  values = [
    dataclasses.asdict(row) | {"ratio": row.ratio} for row in found.rows
  ]
  others = (*found.overlaps, *found.bandwidths, *found.speedups, *found.ranked)
  values += [dataclasses.asdict(row) for row in others]
  write_json(workdir / "links.json", values)
  write_page(workdir, "Real links", lines, own_command())
  return lines


def _row(row: OverlapRow) -> tuple[str, ...]:
  return (
    row.name,
    row.dispatch,
    f"{row.rate_bps / 1e6:.2f} Mbit/s",
    " and ".join(map(str, row.num_rounds)),
    f"{row.predicted_exchange_s / row.open_s:.2f}",
    f"{row.open_s:.3f}",
    f"{row.slow_s:.3f}",
    f"{row.ratio:.3f}",
    f"{row.predicted_exposed_s:.3f}",
    "-" if math.isnan(row.exposed_s) else f"{row.exposed_s:.3f}",
    f"{row.bytes_ratio:.3f}",
  )


def _bandwidth_cells(rows: Sequence[BandwidthRow]) -> list[tuple[str, ...]]:
  slowest = {row.rate_bps: row for row in rows if row.name == BASELINE}
  cells = []
  for row in rows:
    baseline = slowest[row.rate_bps]
    cells.append(
      (
        row.name,
        str(row.sync_interval),
        f"{row.rate_bps / 1e6:g}",
        f"{row.tokens_per_step / row.measured_s:.0f}",
        f"{baseline.measured_s / row.measured_s:.2f}",
        f"{baseline.predicted_s / row.predicted_s:.2f}",
        f"{row.predicted_s:.4f}",
        f"{row.measured_s:.4f}",
        f"{row.predicted_s / row.measured_s:.3f}",
        f"{row.utilisation:.1%}",
        f"{row.bytes_ratio:.3f}",
      )
    )
  return cells


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
    f"{row.busy_share:.0%}",
  )
