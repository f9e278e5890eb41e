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
over 1 Gbit/s, 200 and 50 Mbit/s. --cases=all does both.
"""

import dataclasses
import pathlib

from absl import flags

from dilocox_jax.metrics.run_record import RECORD
from experiments.runtime import command_line


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
  from experiments.tools.real_links import bandwidths, cases, page

  workdir = command_line.writable(values.workdir, "links")
  trains = not values.calibrate and values.cases in ("all", "methods")
  if trains:
    _check_no_runs(workdir)
  is_quick = values.cases == "quick" and not values.calibrate
  repeats = cases.REPEATS if is_quick else cases.CALIBRATION_REPEATS
  transport = cases.calibrated(workdir, repeats)
  print(f"transport: {transport}", flush=True)
  write_json(workdir / "transport.json", dataclasses.asdict(transport))
  if values.calibrate:
    return
  rows, methods = [], []
  if values.cases != "methods":
    given = cases.quick_cases() if is_quick else cases.all_cases()
    rows = cases.run_cases(given, transport, workdir)
    # Training may fail, and takes minutes.
    page.report(rows, methods, transport, workdir)
  if trains:
    is_open = cases.calibrated_open(workdir)
    methods = bandwidths.run_all(transport, is_open, workdir)
  print(*page.report(rows, methods, transport, workdir), sep="\n")
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


if __name__ == "__main__":
  command_line.main(main, define_flags)
