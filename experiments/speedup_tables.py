"""Compares the speed tables of papers with what the simulator predicts.

  python -m experiments.speedup_tables --workdir=runs/tables

Published figures are data files with source and status (--published). Each
prediction says whether it was derived, fitted on its own row or fitted
elsewhere. No accelerator is used. Everything printed is also in
WORKDIR/report.md, with figures, a CSV for each table, and tables.json.
"""

import importlib
import pathlib

from absl import flags
from rich.console import Console

from experiments.runtime import command_line

PAPERS = (  # Modules of experiments/tables, in order.
  "dilocox",
  "streaming_diloco",
  "open_diloco",
  "intellect_1",
  "covenant_72b",
  "beyond",
  "sweeps",
)
_PUBLISHED = pathlib.Path(__file__).parents[1] / "third_party" / "published"


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_string(
    "published", str(_PUBLISHED), "Directory of the published figures."
  )
  flags.DEFINE_list(
    "papers", list(PAPERS), f"Which tables to make: {', '.join(PAPERS)}."
  )


def main(values: flags.FlagValues) -> None:
  """Makes the tables of every paper that was asked for."""
  unknown = [name for name in values.papers if name not in PAPERS]
  if unknown or not values.papers:
    raise command_line.UsageError(
      f"--papers={','.join(values.papers)} must name some of"
      f" {', '.join(PAPERS)}"
    )
  workdir = command_line.writable(values.workdir, "speedup_tables")
  from experiments.tables.table import print_tables, write_tables

  tables = []
  for name in values.papers:
    module = importlib.import_module(f"experiments.tables.{name}")
    try:
      with command_line.usage_errors("--published: "):
        tables += module.build_tables(pathlib.Path(values.published))
    except KeyError as error:
      raise command_line.UsageError(
        f"--published={values.published}: the tables of {name} need a figure"
        f" {error}, which no file has"
      ) from error
  print_tables(tables, Console())
  print(f"report: {write_tables(tables, workdir, command_line.own_command())}")


if __name__ == "__main__":
  command_line.main(main, define_flags)
