"""Compares the speed tables of papers with what the simulator predicts.

  python -m experiments.speedup_tables --workdir=runs/tables

Published figures have a source and a status (third_party/published.json). Each
prediction says whether it was derived, fitted on its own row or fitted
elsewhere. No accelerator is used. The terminal shows a summary, and
WORKDIR/report.md every table, with figures and a CSV for each.
"""

from absl import flags

from experiments.runtime import command_line

PAPERS = {
  "dilocox": "experiments.tables.dilocox:build_tables",
  "streaming_diloco": "experiments.tables.streaming_diloco:build_tables",
  "open_diloco": "experiments.tables.utilisation:open_diloco",
  "intellect_1": "experiments.tables.utilisation:intellect_1",
  "covenant_72b": "experiments.tables.utilisation:covenant_72b",
  "tc_cluster_setting": "experiments.tables.all_reduces:build_tables",
}


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  papers = list(PAPERS)
  flags.DEFINE_multi_enum("papers", papers, papers, "Papers to have tables.")


def main(values: flags.FlagValues) -> None:
  """Makes the tables of every paper that was asked for."""
  workdir = command_line.writable(values.workdir, "speedup_tables")
  from dilocox_jax.plan.choices import loaded
  from experiments.tables.table import summary, write_tables

  makers = [loaded(PAPERS[name]) for name in values.papers]
  with command_line.usage_errors():
    tables = [table for make in makers for table in make()]
  print(*summary(tables), sep="\n")
  print(f"report: {write_tables(tables, workdir, command_line.own_command())}")


if __name__ == "__main__":
  command_line.main(main, define_flags)
