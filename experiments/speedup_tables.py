"""Compares the speed tables of papers with what the simulator predicts.

  python -m experiments.speedup_tables --workdir=runs/tables

Published figures are data files with source and status (--published). Each
prediction says whether it was derived, fitted on its own row or fitted
elsewhere. No accelerator is used. The terminal shows a summary, and
WORKDIR/report.md every table, with figures and a CSV for each.
"""

import importlib
import pathlib

from absl import flags

from dilocox_jax.checks import known, require
from experiments.runtime import command_line

# By paper: its module in experiments/tables, and the function for its tables.
PAPERS = {
  "dilocox": ("dilocox", "build_tables"),
  "streaming_diloco": ("streaming_diloco", "build_tables"),
  "open_diloco": ("utilisation", "open_diloco"),
  "intellect_1": ("utilisation", "intellect_1"),
  "covenant_72b": ("utilisation", "covenant_72b"),
}
_PUBLISHED = pathlib.Path(__file__).parents[1] / "third_party" / "published"


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_string(
    "published", str(_PUBLISHED), "Directory of the published figures."
  )
  flags.DEFINE_list("papers", list(PAPERS), "Papers whose tables are made.")


def main(values: flags.FlagValues) -> None:
  """Makes the tables of every paper that was asked for."""
  with command_line.usage_errors("--papers: "):
    require(bool(values.papers), f"name some of {', '.join(PAPERS)}")
    for name in values.papers:
      known("paper", name, PAPERS)
  workdir = command_line.writable(values.workdir, "speedup_tables")
  from experiments.tables.summary import summary
  from experiments.tables.table import write_tables

  tables = []
  for name in values.papers:
    file, function = PAPERS[name]
    module = importlib.import_module(f"experiments.tables.{file}")
    try:
      with command_line.usage_errors("--published: "):
        tables += getattr(module, function)(pathlib.Path(values.published))
    except KeyError as error:
      raise command_line.UsageError(
        f"--published={values.published}: the tables of {name} need a figure"
        f" {error}, which no file has"
      ) from error
  print(*summary(tables), sep="\n")
  print(f"report: {write_tables(tables, workdir, command_line.own_command())}")


if __name__ == "__main__":
  command_line.main(main, define_flags)
