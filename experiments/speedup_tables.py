"""Compares published speeds and times with what the simulator predicts.

  python -m experiments.speedup_tables --workdir=runs/tables

The published numbers are in third_party/published.json, each with its source.
Each prediction is marked as derived, or as one whose constants were fitted on
the same row or on other rows. The terminal shows a summary. WORKDIR/report.md
has all tables, and beside it is a CSV file for each table.
"""

from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line, workdir_flag

# By name of a paper, the function that makes its tables (MODULE:FUNCTION).
PAPERS = {
  "dilocox": "experiments.tables.dilocox:build_tables",
  "streaming_diloco": "experiments.tables.streaming_diloco:build_tables",
  "open_diloco": "experiments.tables.utilization:open_diloco",
  "intellect_1": "experiments.tables.utilization:intellect_1",
  "covenant_72b": "experiments.tables.utilization:covenant_72b",
  "tc_cluster_setting": "experiments.tables.all_reduces:build_tables",
}

flags.adopt_module_key_flags(workdir_flag)
_PAPERS = flags.DEFINE_multi_enum(
  "papers", list(PAPERS), list(PAPERS), "Papers to have tables."
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Writes the tables of the papers in --papers, and prints a summary."""
  command_line.refuse_arguments(argv)
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "speedup_tables")
  from dilocox_jax.plan.choices import loaded
  from experiments.tables.table import summary, write_tables

  tables = []
  with command_line.usage_errors():
    for paper in _PAPERS.value:
      make_tables = loaded(PAPERS[paper])
      tables += make_tables()
  print(*summary(tables), sep="\n")
  page = write_tables(tables, workdir, command_line.typed_command())
  print(f"report: {page}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
