"""Trains small runs that compare growing rounds at equal bytes.

  python -m experiments.train_growing --rows=runs/growing/growing_rounds.csv

It trains the settings of experiments/gaps/growing.py: rounds of one length,
rounds that grow, a data-parallel start, a decaying outer rate and schedule-free
outer steps. All of these send equally many bytes. AllReduce is trained as well,
for comparison. The rates of each setting are chosen on --seeds, and the best
rates are then trained on --result_seeds. Each finished run is a line of --rows,
so the same command goes on after an interruption. At the end the program prints
a table of the results.
"""

import math
import pathlib
import time
from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line

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
  with command_line.usage_errors():
    seeds = [int(seed) for seed in _SEEDS.value]
    result_seeds = [int(seed) for seed in _RESULT_SEEDS.value]
  running.set_up_jax()
  from experiments.gaps.growing_runs import GrowingRuns

  runs = GrowingRuns(
    path=pathlib.Path(_ROWS.value),
    seeds=seeds,
    result_seeds=result_seeds,
    deadline=time.monotonic() + 60 * _MINUTES.value,
  )
  for name in names:
    runs.choose_rates(name)
    runs.train_results(name)
  print(runs.table(names))


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
