"""Writes the page that compares times over throttled links with predictions."""

import dataclasses
import pathlib
from typing import Any

from dilocox_jax.metrics.lines import write_json
from dilocox_jax.report.page import write_page
from dilocox_jax.report.tables import header_and_cells, markdown_table
from experiments.runtime import command_line
from experiments.tools.link_runs import Row

_INTRO = (
  "Seconds of a collective (the simulator's, and the mean of five runs without"
  " the fastest and the slowest), or of a step of a method with its exchanges"
  " (medians of four rounds; the simulator was told those of a step over an"
  " open link). If few cores are idle, the machine and not the link may be what"
  " is slow."
)
PROCESSES_INTRO = (
  "Seconds of a collective: by the simulator, for which nothing was measured"
  " first, and the mean of five runs without the fastest and the slowest. CPU"
  " seconds are those of all processes together. If a collective takes more"
  " than a fifth of its time over open links as well, the cores bound it."
)


def print_report(lines: list[str], workdir: pathlib.Path) -> None:
  """Prints the lines of the page, and the path of the page."""
  print(*lines, f"report: {workdir / 'report.md'}", sep="\n")


def report(
  rows: list[Row], workdir: pathlib.Path, intro: str = _INTRO
) -> list[str]:
  """Writes the page and `links.json`, and returns the lines of the page.

  `intro` is the first paragraph of the page.
  """
  allreduce = {row.links: row for row in rows if row.what == "allreduce"}
  header, cells = header_and_cells(
    [cells_of(row, allreduce.get(row.links)) for row in rows]
  )
  lines = [intro, "", *markdown_table(header, cells)]
  write_json(workdir / "links.json", [dataclasses.asdict(row) for row in rows])
  write_page(workdir, "Real links", lines, command_line.typed_command())
  return lines


def cells_of(row: Row, allreduce: Row | None) -> dict[str, Any]:
  """Returns the cells of the page for a row, by name of the column.

  `allreduce` is the row of AllReduce on the same links, with which methods are
  compared; None if it was not run.
  """
  speed_up = ""
  simulated_speed_up = ""
  if allreduce:
    speed_up = f"{allreduce.measured_s / row.measured_s:.2f}"
    simulated_speed_up = f"{allreduce.predicted_s / row.predicted_s:.2f}"
  cells = {
    "links": row.links,
    "what": row.what,
    "predicted (s)": f"{row.predicted_s:.4f}",
    "measured (s)": f"{row.measured_s:.4f}",
    "predicted / measured": f"{row.predicted_s / row.measured_s:.3f}",
    "counted / planned bytes": f"{row.bytes_ratio:.3f}",
  }
  if row.open_s is not None:
    return cells | {
      "over open links (s)": f"{row.open_s:.4f}",
      "CPU (s)": f"{row.cpu_s:.3f}",
      "bound by": "the cores" if row.is_bound_by_cpu else "the links",
    }
  return cells | {
    "speed-up over AllReduce": speed_up,
    "by the simulator": simulated_speed_up,
  }
