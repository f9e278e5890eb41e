"""Compares the speed tables of papers with what the simulator predicts.

  python -m experiments.speedup_tables --workdir=runs/tables

Published figures have a source and a status (third_party/published.json). Each
prediction says whether it was derived, fitted on its own row or fitted
elsewhere. No accelerator is used. The terminal shows a summary, and
WORKDIR/report.md every table, with figures and a CSV for each.
"""

from absl import flags

from experiments.runtime import command_line

PAPERS = (
  *("dilocox", "streaming_diloco", "open_diloco"),
  *("intellect_1", "covenant_72b"),
)


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_multi_enum(
    "papers", PAPERS, PAPERS, "Papers whose tables are made."
  )


def main(values: flags.FlagValues) -> None:
  """Makes the tables of every paper that was asked for."""
  workdir = command_line.writable(values.workdir, "speedup_tables")
  from experiments.tables import dilocox, streaming_diloco, utilisation
  from experiments.tables.table import summary, write_tables

  makers = {
    "dilocox": dilocox.build_tables,
    "streaming_diloco": streaming_diloco.build_tables,
    "open_diloco": utilisation.open_diloco,
    "intellect_1": utilisation.intellect_1,
    "covenant_72b": utilisation.covenant_72b,
  }
  tables = [table for name in values.papers for table in makers[name]()]
  print(*summary(tables), sep="\n")
  print(f"report: {write_tables(tables, workdir, command_line.own_command())}")


if __name__ == "__main__":
  command_line.main(main, define_flags)
