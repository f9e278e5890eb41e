"""Trains every method under one budget, and says which orderings hold.

  python -m experiments.convergence
  --config=experiments/configs/convergence_small.py
  --workdir=runs/convergence_small --processes=2

Every method is tuned with the same number of runs on a seed of its own, then
trained on the seeds of the results, at equal tokens and in equal simulated
time. A finished run is one line of --results, so the same command goes on after
a kill. A sweep whose config is one of experiments/configs begins with the lines
that are committed in docs/results, so a fresh clone has nothing to do for it.
A long sweep can be done in slices with --task, --methods and --max_minutes. The
report is made anew each time, from what there is.
"""

import pathlib
import shlex
import sys

from absl import flags
from ml_collections import config_flags

from experiments.runtime import command_line
from experiments.sweeps import sweep_loop

_ROOT = pathlib.Path(__file__).parent
_CONFIGS = _ROOT / "configs"
_COMMITTED = _ROOT.parent / "docs" / "results"
_TASKS = ("all", "tune_inner", "tune_outer", "results", "equal_time", "report")


def define_flags() -> None:
  """Defines the flags of this binary."""
  sweep_loop.define_flags(_CONFIGS / "convergence_small.py")
  flags.DEFINE_string(
    "results",
    None,
    "CSV of finished runs; by default WORKDIR/CONFIG.csv, which begins as a"
    " copy of docs/results/CONFIG.csv. Give that path to write there.",
  )
  flags.DEFINE_enum(
    "task", "all", _TASKS, "What to do; 'report' trains nothing."
  )
  flags.DEFINE_list(
    "methods",
    [],
    "Which methods to train; all by default. Equal time needs its reference"
    " tuned.",
  )
  flags.DEFINE_float(
    "max_minutes",
    None,
    "Stop then; the same command goes on, each run from its last checkpoint.",
    lower_bound=0.0,
  )


def _check_field(path: str) -> None:
  from experiments.sweeps import sweep_spec

  sweep_spec.check_convergence_field(path)


def main(values: flags.FlagValues) -> None:
  """Makes the runs that are missing and reports on what is there."""
  from dilocox_jax.checks import known
  from experiments.sweeps import required_runs, sweep_spec

  with sweep_loop.config_errors():
    sweep = sweep_spec.sweep(values.config.to_dict())
    for name in values.methods:
      known("method", name, [method.name for method in sweep.methods])
    required = required_runs.RequiredRuns(sweep)
    required.check()  # All that does not fit, before the first run.
    trains = values.task != "report"
    # Only a config without mistakes is worth waiting for JAX.
    from experiments.sweeps import page, run_maker
    from experiments.sweeps.results import Results

    if trains:
      run_maker.check_names(required.tune_inner(m)[0] for m in sweep.methods)
  workdir = command_line.writable(values.workdir)
  config_file = config_flags.get_config_filename(values["config"])
  name, start = _name_and_start(config_file)
  path = workdir / f"{name}.csv"
  if values.results:  # That file and no other.
    path, start = pathlib.Path(values.results), None
  results = Results(path, sweep.base, start)
  if not trains and not results.source.exists():
    raise command_line.UsageError(f"--task=report: there is no {path} yet")
  maker = run_maker.KeptRuns(results, workdir, any_text=not trains)
  required.loss_of = maker.loss
  tasks = (values.task,) if values.task in required_runs.TASKS else None
  chosen = values.methods or [method.name for method in sweep.methods]
  command = ["python", "-m", "experiments.convergence", *sys.argv[1:]]
  sweep_loop.run_sweep(
    maker,
    required.tasks(
      tasks or required_runs.TASKS,
      [method for method in sweep.methods if method.name in chosen],
    ),
    lambda: page.write_page(
      required, maker, workdir, name, shlex.join(command)
    ),
    processes=values.processes,
    max_minutes=values.max_minutes,
    lock=results.held() if trains else None,
    trains=trains,
  )


def _name_and_start(config_file: str) -> tuple[str, pathlib.Path | None]:
  """The config's name, with its argument if it has one, and where it starts.

  Lines in docs/results belong to the configs of this repository, not to a file
  elsewhere that has the same name.
  """
  file, _, argument = config_file.partition(":")
  path = pathlib.Path(file)
  parts = filter(None, [path.stem, *argument.split(",")])
  name = "_".join(parts)
  is_ours = path.resolve().parent == _CONFIGS.resolve()
  return name, _COMMITTED / f"{name}.csv" if is_ours else None


if __name__ == "__main__":
  command_line.main(main, define_flags, _check_field)
