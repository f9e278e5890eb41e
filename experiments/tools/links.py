"""Runs exchanges over real throttled links, beside the simulator's seconds.

  python -m experiments.tools.links --workdir=runs/links
  python -m experiments.tools.links --workdir=runs/links --calibrate

Every process has a network namespace of its own, and the kernel throttles its
link (`experiments.launch --link`). The page has one row a case: predicted and
measured seconds, and the bytes that the kernel counted beside the plan's.
Predictions use what --calibrate measures first: how long gloo's collectives
between two and among four processes take on this machine, at other sizes and
rates than those of the cases. With --calibrate nothing else is run.

--cases=collectives times collectives. --cases=methods trains several methods
over 200 and 50 Mbit/s. --cases=all does both.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from dilocox_jax.metrics.run_record import RECORD
from experiments.runtime import command_line

if TYPE_CHECKING:
  from experiments.tools.link_cases import Row
  from experiments.tools.link_methods import MethodRow

_COLLECTIVES = (
  "Seconds of a collective: the simulator's, and the mean of five runs without"
  " the fastest and the slowest. If few cores are idle, the machine and not the"
  " link may be what is slow."
)
_METHODS = (
  "Seconds of a step of methods, exchanges included, two replicas; medians of"
  " four rounds. The simulator was told those of a step over an open link."
)


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_bool(
    "calibrate", False, "Only measure and print the transport, in a minute."
  )
  flags.DEFINE_enum(
    "cases",
    "all",
    ("all", "quick", "collectives", "methods"),
    "Which cases; quick takes some seconds, all about ten minutes.",
  )


def main(values: flags.FlagValues) -> None:
  """Measures, writes page and JSON, and prints the table."""
  # This loads JAX, which takes seconds.
  from dilocox_jax.metrics.lines import write_json
  from experiments.tools import link_cases, link_methods

  workdir = command_line.writable(values.workdir, "links")
  trains = not values.calibrate and values.cases in ("all", "methods")
  if trains:
    _check_no_runs(workdir)
  is_quick = values.cases == "quick" and not values.calibrate
  repeats = link_cases.REPEATS if is_quick else link_cases.CALIBRATION_REPEATS
  transport = link_cases.calibrated(workdir, repeats)
  print(f"transport: {transport}", flush=True)
  write_json(workdir / "transport.json", dataclasses.asdict(transport))
  if values.calibrate:
    return
  rows, methods = [], []
  if values.cases != "methods":
    cases = link_cases.quick_cases() if is_quick else link_cases.all_cases()
    rows = link_cases.run_cases(cases, transport, workdir)
    # Training may fail, and takes minutes.
    report(rows, methods, workdir)
  if trains:
    methods = link_methods.run_all(transport, workdir)
  print(*report(rows, methods, workdir), sep="\n")
  print(f"report: {workdir / 'report.md'}")


def _check_no_runs(workdir: pathlib.Path) -> None:
  """Raises UsageError if an earlier call has trained in the directory.

  A run that is finished is not trained again, so its old times would be read.
  """
  for record in workdir.glob(f"*/{RECORD}"):
    raise command_line.UsageError(
      f"{record.parent} holds a run of an earlier measurement: choose another"
      " --workdir"
    )


def report(
  rows: "Sequence[Row]", methods: "Sequence[MethodRow]", workdir: pathlib.Path
) -> list[str]:
  """Writes the page and the JSON; returns the page's lines.

  Args:
    rows: All collectives; those that miss are shown as the others are.
    methods: Methods over slow links.
    workdir: Directory to write into.
  """
  from dilocox_jax.metrics.lines import write_json
  from dilocox_jax.report.page import write_page
  from dilocox_jax.report.tables import header_and_cells, markdown_table

  lines = []
  allreduce = {row.rate_bps: row for row in methods if row.name == "allreduce"}
  for intro, shown in (
    (_COLLECTIVES, [*map(_collective, rows)]),
    (_METHODS, [_method(row, allreduce[row.rate_bps]) for row in methods]),
  ):
    if shown:
      lines += ["", intro, "", *markdown_table(*header_and_cells(shown))]
  found = [dataclasses.asdict(row) for row in [*rows, *methods]]
  write_json(workdir / "links.json", found)
  write_page(workdir, "Real links", lines, command_line.own_command())
  return lines


def _collective(row: "Row") -> dict[str, Any]:
  return {
    "links": row.cluster,
    "collective": row.kind,
    "operand (MB)": f"{row.operand_bytes / 1e6:.1f}",
    **_compared(row),
    "counted / planned bytes": f"{row.link_bytes / row.planned_bytes:.3f}",
  }


def _method(row: "MethodRow", base: "MethodRow") -> dict[str, Any]:
  return {
    "link (Mbit/s)": f"{row.rate_bps / 1e6:g}",
    "method": row.name,
    "speed-up over AllReduce": f"{base.measured_s / row.measured_s:.2f}",
    "by the simulator": f"{base.predicted_s / row.predicted_s:.2f}",
    **_compared(row),
    "counted / planned bytes": f"{row.bytes_ratio:.3f}",
  }


def _compared(row: "Row | MethodRow") -> dict[str, str]:
  return {
    "predicted (s)": f"{row.predicted_s:.4f}",
    "measured (s)": f"{row.measured_s:.4f}",
    "predicted / measured": f"{row.predicted_s / row.measured_s:.3f}",
  }


if __name__ == "__main__":
  command_line.main(main, define_flags)
