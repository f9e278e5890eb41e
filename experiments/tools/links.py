"""Runs exchanges over real throttled links, beside the simulator's seconds.

  python -m experiments.tools.links --workdir=runs/links
  python -m experiments.tools.links --workdir=runs/links --cases=calibrate
  python -m experiments.tools.links --workdir=runs/links --cases=processes

Every process has a network namespace of its own, and the kernel throttles its
link (`experiments.launch --link`). The page has one row a case: predicted and
measured seconds, and the bytes that the kernel counted beside the plan's.
Predictions use what is measured first: how long gloo's collectives between two
and among four processes take on this machine, at other sizes and rates than
those of the cases. With --cases=calibrate nothing else is run.

--cases=collectives times collectives. --cases=methods trains several methods
over 200 and 50 Mbit/s. --cases=all does both.

--cases=processes times collectives over 20 to 200 Mbit/s, among two, four and
eight processes (or as many as each --processes says). The predictions stand on
no calibration there. The page marks the rows that the cores bound and not the
links: a collective that takes more than a fifth of its time over open links.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags

from experiments.runtime import command_line, workdir_flag

if TYPE_CHECKING:
  from experiments.tools.link_runs import Row

_INTRO = (
  "Seconds of a collective (the simulator's, and the mean of five runs without"
  " the fastest and the slowest), or of a step of a method with its exchanges"
  " (medians of four rounds; the simulator was told those of a step over an"
  " open link). If few cores are idle, the machine and not the link may be what"
  " is slow."
)
_PROCESSES_INTRO = (
  "Seconds of a collective: by the simulator, for which nothing was measured"
  " first, and the mean of five runs without the fastest and the slowest. CPU"
  " seconds are those of all processes together. If a collective takes more"
  " than a fifth of its time over open links as well, the cores bound it."
)


flags.adopt_module_key_flags(workdir_flag)
_CASES = flags.DEFINE_enum(
  "cases",
  "all",
  ("all", "calibrate", "quick", "collectives", "methods", "processes"),
  "Which cases; quick takes some seconds, all about ten minutes, calibrate a "
  "minute, for the transport alone, and processes a quarter of an hour.",
)
_PROCESSES = flags.DEFINE_multi_integer(
  "processes",
  [2, 4, 8],
  "Numbers of processes of --cases=processes.",
  lower_bound=2,
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Measures, writes page and JSON, and prints the table."""
  command_line.refuse_arguments(argv)
  cases = _CASES.value
  command_line.refuse_unused(
    _PROCESSES, is_used=cases == "processes", needs="--cases=processes"
  )
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "links")
  if cases == "processes":
    report_processes(_PROCESSES.value, workdir)
  else:
    _report_cases(cases, workdir)


def _report_cases(cases: str, workdir: pathlib.Path) -> None:
  """Calibrates the transport, then runs collectives and methods.

  Args:
    cases: Value of --cases, other than "processes".
    workdir: Directory to write into.
  """
  # This loads JAX, which takes seconds.
  from dilocox_jax.metrics.lines import write_json
  from experiments.tools import link_runs

  repeats = link_runs.CALIBRATION_REPEATS
  if cases == "quick":
    repeats = link_runs.REPEATS
  transport = link_runs.calibrated(workdir, repeats)
  print(f"transport: {transport}", flush=True)
  write_json(workdir / "transport.json", dataclasses.asdict(transport))
  if cases == "calibrate":
    return
  rows = []
  lines = []
  if cases != "methods":
    collectives = link_runs.CASES
    if cases == "quick":
      collectives = link_runs.QUICK_CASES
    rows += link_runs.run_cases(collectives, transport, workdir)
    # Training may fail, and takes minutes.
    lines = report(rows, workdir)
  if cases in ("all", "methods"):
    # A run that is finished is not trained again.
    runs_folder = tempfile.mkdtemp(prefix="runs_", dir=workdir)
    rows += link_runs.run_methods(transport, pathlib.Path(runs_folder))
    lines = report(rows, workdir)
  print_report(lines, workdir)


def report_processes(counts: list[int], workdir: pathlib.Path) -> None:
  """Measures among numbers of processes; writes after each row.

  Args:
    counts: Numbers of processes.
    workdir: Directory to write into.
  """
  from experiments.tools import link_runs

  rows = []
  lines = []
  for row in link_runs.run_processes(counts, workdir):
    rows.append(row)
    lines = report(rows, workdir, _PROCESSES_INTRO)
  print_report(lines, workdir)


def print_report(lines: list[str], workdir: pathlib.Path) -> None:
  """Prints the lines of the page, and where it is."""
  print(*lines, f"report: {workdir / 'report.md'}", sep="\n")


def report(
  rows: "list[Row]", workdir: pathlib.Path, intro: str = _INTRO
) -> list[str]:
  """Writes the page and the JSON; returns the page's lines.

  Args:
    rows: All cases; those that miss are shown as the others are.
    workdir: Directory to write into.
    intro: First paragraph of the page.
  """
  from dilocox_jax.metrics.lines import write_json
  from dilocox_jax.report.page import write_page
  from dilocox_jax.report.tables import header_and_cells, markdown_table

  base = {row.links: row for row in rows if row.what == "allreduce"}
  shown = [_cells(row, base.get(row.links)) for row in rows]
  lines = [intro, "", *markdown_table(*header_and_cells(shown))]
  write_json(workdir / "links.json", [dataclasses.asdict(row) for row in rows])
  write_page(workdir, "Real links", lines, command_line.own_command())
  return lines


def _cells(row: "Row", base: "Row | None") -> dict[str, Any]:
  """Returns the cells of a row; methods are compared with AllReduce."""
  speed_up = simulated = ""
  if base:
    speed_up = f"{base.measured_s / row.measured_s:.2f}"
    simulated = f"{base.predicted_s / row.predicted_s:.2f}"
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
    "by the simulator": simulated,
  }


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
