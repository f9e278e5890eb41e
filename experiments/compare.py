r"""Compares runs: what each run sends, and which loss it reaches.

  python -m experiments.compare runs/dilocox runs/allreduce \
    --workdir=runs/compared

The arguments are directories that experiments.train wrote. The runs need not be
finished, but all must be evaluated on the same text. The program prints a
table, and writes WORKDIR/report.md with figures and the data. Bytes and gaps
are relative to a run of AllReduce or, if there is none, to the run that sent
most. If all runs were trained with the same --cluster, their simulated times
are compared, too.
"""

from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line, workdir_flag

flags.adopt_module_key_flags(workdir_flag)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Compares the runs whose directories are the arguments; writes a page."""
  from rich.console import Console

  from dilocox_jax import report

  run_directories = argv[1:]
  with command_line.usage_errors():
    # Bad runs must be found before the work directory is made.
    runs = [report.load_run(path) for path in run_directories]
    page = report.side_by_side(runs)
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "compare")
  page.print(Console())
  print(f"comparison: {page.write(workdir, command_line.typed_command())}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
