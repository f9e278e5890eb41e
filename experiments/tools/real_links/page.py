"""Writes the cases as a page and as JSON."""

import dataclasses
import pathlib
from collections.abc import Sequence

from dilocox_jax.metrics.lines import write_json
from dilocox_jax.report.page import write_page
from dilocox_jax.report.text_tables import markdown_table
from dilocox_jax.report.units import human_bytes
from dilocox_jax.simulate.transfer import Transport
from experiments.runtime.command_line import own_command
from experiments.tools.real_links.bandwidths import BandwidthRow
from experiments.tools.real_links.cases import Row

_HEADER = (
  *("links", "collective", "operand", "predicted (s)", "measured (s)"),
  *("predicted / measured", "counted / planned bytes", "cores busy"),
)
_COLLECTIVES = (
  "Seconds of a collective: the simulator's, and the mean of five runs without"
  " the fastest and the slowest. Where few cores are idle, the machine and not"
  " the link may be what is slow."
)
_METHOD_HEADER = (
  *("method", "H", "link (Mbit/s)", "tokens/s", "speed-up over AllReduce"),
  *("by the simulator", "step predicted (s)", "step measured (s)"),
  *("predicted / measured", "utilisation", "counted / planned bytes"),
)
_METHODS = (
  "Methods over one link that becomes slower while they train: tokens a second"
  " of both replicas and seconds of a step, exchanges included, medians"
  " (measured). The simulator was told the seconds of a step over an open link."
)


def report(
  rows: Sequence[Row],
  methods: Sequence[BandwidthRow],
  transport: Transport,
  workdir: pathlib.Path,
) -> list[str]:
  """Writes the page and the JSON; returns the page's lines.

  Args:
    rows: All collectives; those that miss are shown as the others are.
    methods: Methods over a link that became slower.
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
  for intro, header, cells in (
    (_COLLECTIVES, _HEADER, [*map(_cells, rows)]),
    (_METHODS, _METHOD_HEADER, _method_cells(methods)),
  ):
    if cells:
      lines += ["", intro, "", *markdown_table(header, cells)]
  values = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]
  values += map(dataclasses.asdict, methods)
  write_json(workdir / "links.json", values)
  write_page(workdir, "Real links", lines, own_command())
  return lines


def _method_cells(rows: Sequence[BandwidthRow]) -> list[tuple[str, ...]]:
  slowest = {row.rate_bps: row for row in rows if row.name == "allreduce"}
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
