"""Trains every method under one budget, and says which orderings hold.

  python -m experiments.convergence
  --config=experiments/configs/convergence_small.py
  --workdir=runs/convergence_small --processes=2

Every method is tuned with as many runs on a seed of its own, then trained on
the seeds of the results, at equal tokens and in equal simulated time. A
finished run is one line of --results, which belongs in the repository: the
same command goes on from there, after a kill or in a fresh clone. A long
sweep can be done in slices with --task, --methods and --max_minutes. The
report is made anew each time, from what there is.
"""

import dataclasses
import math
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from experiments.runtime import command_line

_ROOT = pathlib.Path(__file__).parent
_DEFAULT_CONFIG = _ROOT / "configs" / "convergence_small.py"
_RESULTS = _ROOT.parent / "docs" / "results"
TASKS = ("all", "tune_inner", "tune_outer", "results", "equal_time", "report")


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config(_DEFAULT_CONFIG)
  command_line.define_workdir()
  flags.DEFINE_string(
    "results", None, "CSV of finished runs; by default docs/results/CONFIG.csv."
  )
  flags.DEFINE_enum(
    "task", "all", TASKS, "What to do; 'report' trains nothing."
  )
  flags.DEFINE_list(
    "methods",
    [],
    "Which methods to train; all by default. Equal time needs its reference"
    " tuned.",
  )
  flags.DEFINE_integer(
    "processes", 1, "How many runs at once, each a process.", lower_bound=1
  )
  flags.DEFINE_float(
    "max_minutes",
    None,
    "Stop then; the same command goes on, each run from its last checkpoint.",
    lower_bound=0.0,
  )


def _check_field(path: str) -> None:
  from experiments.sweeps import sweep_spec

  sweep_spec.check_sweep_field(path)


def main(values: flags.FlagValues) -> None:
  """Runs what is missing and reports on what is there."""
  from dilocox_jax.checks import known
  from experiments.sweeps import required_runs, sweep_spec

  try:
    sweep = sweep_spec.sweep(values.config.to_dict())
    for name in values.methods:
      names = [each.name for each in sweep.methods]
      known("method", name, names)
    plan = required_runs.RequiredRuns(sweep)
    plan.check()  # All that does not fit, before the first run.
  except KeyError as error:
    raise command_line.UsageError(f"--config: no field {error}") from error
  except (ValueError, TypeError, OSError) as error:
    raise command_line.UsageError(f"--config: {error}") from error
  workdir = command_line.writable(values.workdir)
  signal.signal(signal.SIGTERM, _interrupt)
  try:
    _run(values, plan, workdir)
  except KeyboardInterrupt:
    raise command_line.StoppedError(
      "interrupted: the same command goes on from here",
      command_line.INTERRUPTED,
    ) from None


def _run(values: flags.FlagValues, plan, workdir: pathlib.Path) -> None:
  from experiments.sweeps import page
  from experiments.sweeps.results import Results
  from experiments.sweeps.runs import RunMaker

  name = _name(values["config"])
  path = pathlib.Path(values.results or _RESULTS / f"{name}.csv")
  results = Results(path, plan.sweep.base)
  is_report = values.task == "report"
  if is_report and not path.exists():
    raise command_line.UsageError(f"--task=report: there is no {path} yet")
  runs = RunMaker(results, workdir, any_text=is_report)
  outcome = _Outcome()
  if not is_report:
    with results.held():
      outcome = _make_tasks(values, plan, runs)
  command = ["python", "-m", "experiments.convergence", *sys.argv[1:]]
  page.write(plan, runs, results, workdir, name, shlex.join(command))
  if outcome.failed:
    raise command_line.StoppedError(
      f"{len(outcome.failed)} runs failed, first {outcome.failed[0]}"
    )
  if outcome.is_late:
    raise command_line.StoppedError(
      f"--max_minutes={values.max_minutes:g} are over: the same command goes"
      " on",
      command_line.TRY_AGAIN,
    )
  if outcome.lacking:
    raise command_line.StoppedError("; ".join(outcome.lacking))


@dataclasses.dataclass(frozen=True)
class _Outcome:
  """Why runs failed, whether time was over, and what could not be begun."""

  failed: Sequence[str] = ()
  is_late: bool = False
  lacking: Sequence[str] = ()


def _make_tasks(values: flags.FlagValues, plan, runs) -> _Outcome:
  """Makes the runs of the tasks that were asked for, in order."""
  from experiments.sweeps import required_runs

  minutes = values.max_minutes
  limit_s = math.inf if minutes is None else 60 * minutes
  deadline_s = time.monotonic() + limit_s
  all_tasks = required_runs.TASKS
  tasks = all_tasks if values.task == "all" else (values.task,)
  methods = [
    each
    for each in plan.sweep.methods
    if not values.methods or each.name in values.methods
  ]
  lacking: list[str] = []
  for task in tasks:
    planned, without = _planned(plan, task, methods, runs.loss)
    lacking += [why for why in without if why not in lacking]
    line = f"{task}: {len(planned)} runs, {len(runs.missing(planned))} to do"
    if count := runs.elsewhere(planned):
      line += f" ({count} of these have lines, on another text)"
    print(line)
    failed, is_late = runs.make(planned, values.processes, deadline_s)
    if failed or is_late:
      return _Outcome(failed, is_late)
  return _Outcome(lacking=lacking)


def _planned(plan, task: str, methods: Sequence, loss_of) -> tuple[list, list]:
  """Runs of a task, and why methods have none: they stop no others."""
  from experiments.sweeps.required_run import NotTunedError

  planned, lacking = [], []
  for method in methods:
    try:
      planned += plan.of_task(task, [method], loss_of)
    except NotTunedError as error:
      lacking.append(str(error))
  return planned, list(dict.fromkeys(lacking))  # Many wait for one reference.


def _name(flag: flags.Flag) -> str:
  """The config's name, with its argument if it has one."""
  named = config_flags.get_config_filename(flag)
  path, _, argument = named.partition(":")
  return "_".join(filter(None, [pathlib.Path(path).stem, argument])).replace(
    ",", "_"
  )


def _interrupt(*_: object) -> None:
  raise KeyboardInterrupt


if __name__ == "__main__":
  command_line.main(main, define_flags, _check_field)
