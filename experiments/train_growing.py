"""Trains small runs that compare growing rounds at equal bytes.

  python -m experiments.train_growing --rows=runs/growing/growing_rounds.csv

It trains the settings of experiments/gaps/growing.py: rounds of one length,
rounds that grow, a data-parallel start, a decaying outer rate and schedule-free
outer steps. All of these send equally many bytes. AllReduce is trained as well,
for comparison. The rates of each setting are chosen on --seeds, and the best
rates are then trained on --result_seeds. Each finished run is a line of --rows,
so the same command goes on after an interruption. At the end the program prints
a table of the results. If runs are left after --minutes, it ends with code 75.
"""

import math
import pathlib
import time
from collections.abc import Sequence

from absl import app, flags

from dilocox_jax.checks import require, within_limits
from experiments.runtime import command_line, samples
from experiments.runtime.command_line import StoppedError

_ROWS = flags.DEFINE_string(
  "rows", None, "CSV file of finished runs.", required=True
)
_SETTINGS = flags.DEFINE_list(
  "settings", [], "Names of settings; by default all of them."
)
_SEEDS = flags.DEFINE_list(
  "seeds", ["1000", "1001", "1002"], "Seeds on which rates are chosen."
)
_RESULT_SEEDS = flags.DEFINE_list(
  "result_seeds", ["0", "1", "2"], "Seeds of the results."
)
_MINUTES = flags.DEFINE_float(
  "minutes",
  math.inf,
  "Begin no program after this many minutes.",
  lower_bound=0.0,
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Trains the runs that are missing, and prints the results."""
  command_line.refuse_arguments(argv)
  from experiments.gaps import growing
  from experiments.runtime import running

  names = _SETTINGS.value or list(growing.SETTINGS)
  for name in names:
    if name not in growing.SETTINGS:
      raise command_line.UsageError(
        f"--settings={name} is not one of {', '.join(growing.SETTINGS)}"
      )
  seeds = _seeds(_SEEDS)
  result_seeds = _seeds(_RESULT_SEEDS)
  running.set_up_jax()
  from experiments.gaps.growing_runs import GrowingRuns

  runs = GrowingRuns(
    path=pathlib.Path(_ROWS.value),
    seeds=seeds,
    result_seeds=result_seeds,
    deadline=time.monotonic() + 60 * _MINUTES.value,
  )
  is_complete = True
  for name in names:
    is_complete &= runs.choose_rates(name)
    is_complete &= runs.train_results(name)
  print(runs.table(names))
  if not is_complete:
    raise StoppedError(
      "runs are left: the same command goes on", command_line.TRY_AGAIN
    )


def _seeds(flag: flags.FlagHolder) -> list[int]:
  """Returns the seeds of a flag, at least one.

  Raises UsageError if one of them is no seed.
  """
  text = ",".join(flag.value)
  try:
    seeds = [int(seed) for seed in flag.value]
  except ValueError:
    raise command_line.UsageError(
      f"--{flag.name}={text} must be whole numbers, such as 0,1,2"
    ) from None
  with command_line.usage_errors(f"--{flag.name}={text}: "):
    require(bool(seeds), "name at least one seed")
    for seed in seeds:
      within_limits("seed", seed, at_least=0, at_most=samples.LARGEST_SEED)
  return seeds


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
