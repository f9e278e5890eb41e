r"""Puts runs side by side: what each one pays, and what loss it gets for it.

  python -m experiments.compare runs/dilocox runs/allreduce \
    --workdir=runs/compared

Takes directories that experiments.train wrote, finished or not, evaluated on
one text. Prints a table, and writes WORKDIR/report.md with a figure and the
data. Bytes and gaps are relative to AllReduce, or without it to the run that
sent most. Simulated time comes first if the runs were trained with --cluster.
"""

from absl import flags

from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_multi_string(
    "runs", [], "Run directories; they may also be given without --runs=."
  )


def main(values: flags.FlagValues) -> None:
  """Compares the runs and prints where the page is."""
  from rich.console import Console

  from dilocox_jax import report

  with command_line.usage_errors():
    # Bad runs must be found before the work directory is made.
    page = report.side_by_side([report.load_run(path) for path in values.runs])
    workdir = command_line.writable(values.workdir, "compare")
  page.print(Console())
  print(f"comparison: {page.write(workdir, command_line.own_command())}")


if __name__ == "__main__":
  command_line.main(main, define_flags, positional="runs")
