r"""Fits the law of the gap: how far replicas end above the loss of AllReduce.

  python -m experiments.fit_gaps --rows=docs/results/gap_law.csv \
    --workdir=runs/gap_law

The program reads the runs that `experiments.train_gaps` trained. It writes a
page with three things:

- The gap of each setting whose runs are finished.
- The *doublings lost* of these settings. They say how many times AllReduce's
  batch may be halved until its loss is that of the replicas.
- A line "doublings lost = a log2 M - b" for settings that differ only in the
  number of replicas M.

The fit leaves out the size and the number of replicas that are held out
(docs/results/predictions.md).

With --write the program also writes the constants with which `dx.expected_gap`
predicts a gap (dilocox_jax/gap/law.json). A test fails if the committed file
does not follow from the committed runs.
"""

import pathlib
from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line, workdir_flag
from experiments.runtime.command_line import UsageError

flags.adopt_module_key_flags(workdir_flag)
_ROWS = flags.DEFINE_string(
  "rows", "docs/results/gap_law.csv", "CSV file of finished runs."
)
_LOSS = flags.DEFINE_enum(
  "loss",
  "judge_average",
  ["judge_average", "judge_newest", "loss_average", "loss_newest"],
  "Which loss is compared: that of the average or of the newest parameters, on"
  " the text that chose nothing (judge) or on the text that chose the rates.",
)
_WRITE = flags.DEFINE_bool(
  "write", False, "Write the constants of the law to dilocox_jax/gap/law.json."
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Fits the law to the runs of --rows, and writes and prints the page."""
  command_line.refuse_arguments(argv)
  from dilocox_jax.report.page import write_page
  from experiments.gaps import constants, law, rows

  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "fit_gaps")
  path = pathlib.Path(_ROWS.value)
  finished = rows.read(path)
  if not finished:
    raise UsageError(
      f"--rows={path} has no finished runs: train some by"
      " `python -m experiments.train_gaps`, or take docs/results/gap_law.csv"
    )
  lines = law.page_lines(finished, _LOSS.value)
  print("\n".join(lines))
  page = write_page(
    workdir,
    "What M replicas cost",
    lines,
    command_line.typed_command(),
  )
  print(f"\nreport: {page}")
  if _WRITE.value:
    constants.write(finished, _LOSS.value)
    print(f"constants: {constants.PATH}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
