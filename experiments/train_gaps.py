"""Trains the runs from which the law of the gap is fitted.

  python -m experiments.train_gaps --rows=runs/gaps/gap_law.csv --minutes=60

The law says by how much the loss of replicas is above AllReduce's. The program
goes through a list of settings (experiments/gaps/design.py) and trains the runs
that each setting still needs. It first tries learning rates on three seeds, and
then trains the best rates on three other seeds (experiments/gaps/tuning.py).
Several runs of one setting are trained together, as one JAX program. Each
finished run is a line of --rows. So the same command goes on after any
interruption, and loses one JAX program at most.

Several of these commands may share --rows: no two of them train the same
setting at once. On CPUs start one command for each core:
`taskset -c 0 python -m experiments.train_gaps ...`.

  python -m experiments.train_gaps --rows=runs/gaps/gap_law.csv --list

prints the groups of settings, with the time that each group still needs.
"""

import logging
import pathlib
import time
from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line
from experiments.runtime.command_line import StoppedError

# Number of runs that are trained together on CPUs: the three seeds of one pair
# of rates.
_LARGEST_POPULATION = 3

_ROWS = flags.DEFINE_string(
  "rows", None, "CSV file of finished runs.", required=True
)
_DESIGN = flags.DEFINE_enum(
  "design",
  "cpu",
  ["cpu", "gpu", "texts"],
  "Which list of settings: small models, larger ones, or other texts.",
)
_MINUTES = flags.DEFINE_float(
  "minutes",
  None,
  "Begin no program after this many minutes. Default: train all runs.",
  lower_bound=0.0,
)
_POPULATION = flags.DEFINE_integer(
  "population",
  None,
  "Most runs of one program. Default: 3 on CPUs, else all that a setting"
  " needs next.",
  lower_bound=1,
)
_LIST = flags.DEFINE_bool("list", False, "Print the list and train nothing.")


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Trains the runs that are missing, or prints the list of settings."""
  command_line.refuse_arguments(argv)
  from experiments.gaps import design, plan, rows
  from experiments.runtime import running

  path = pathlib.Path(_ROWS.value)
  groups = design.DESIGNS[_DESIGN.value]()
  if _LIST.value:
    print(plan.table(groups, rows.read(path), _DESIGN.value))
    return
  running.set_up_jax()
  from experiments.gaps.work import Work

  deadline = None
  if _MINUTES.value is not None:
    deadline = time.monotonic() + 60 * _MINUTES.value
  work = Work(
    path=path,
    groups=groups,
    name=_DESIGN.value,
    deadline=deadline,
    largest_population=_POPULATION.value or _default_population(),
  )
  if not work.train_all():
    raise StoppedError(
      "runs are left: the same command goes on", command_line.TRY_AGAIN
    )
  logging.info("all runs are finished")


def _default_population() -> int | None:
  """Returns the most runs of one program: 3 on CPUs, else None (no limit)."""
  from dilocox_jax.training import build

  return _LARGEST_POPULATION if build.platform_name() == "cpu" else None


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
