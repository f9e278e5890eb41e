r"""Trains every method with one budget, and reports which method is better.

  python -m experiments.convergence \
    --config=experiments/configs/convergence_small.py \
    --workdir=runs/convergence_small --processes=2

Every method is tuned with the same number of runs on a seed that is used only
for tuning. Then it is trained on the seeds of the results, once with equal
tokens and once in equal simulated time. A finished run is one line of the file
--results, so the same command goes on after an interruption. If the config is
in experiments/configs, the sweep begins with the finished runs that are
committed in docs/results, so a fresh clone has no runs left to train. A long
sweep can be split with --task, --methods and --max_minutes. Every call writes a
new report of the runs that are finished.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from experiments.runtime import command_line
from experiments.sweeps import sweep_loop

_COMMITTED = pathlib.Path(__file__).parents[1] / "docs" / "results"
_TASKS = ("all", "tune_inner", "tune_outer", "results", "equal_time", "report")


def define_flags() -> None:
  """Defines the flags of this binary."""
  sweep_loop.define_flags(command_line.CONFIGS / "convergence_small.py")
  flags.DEFINE_string(
    "results",
    None,
    "CSV file of finished runs. The default is WORKDIR/CONFIG.csv, which begins"
    " as a copy of docs/results/CONFIG.csv. To add runs to docs/results, give"
    " its path.",
  )
  flags.DEFINE_enum(
    "task", "all", _TASKS, "Task to do; 'report' trains nothing."
  )
  flags.DEFINE_list(
    "methods",
    [],
    "Methods to train; all by default. The task 'equal_time' needs a tuned"
    " reference method.",
  )
  flags.DEFINE_float(
    "max_minutes",
    None,
    "Stop after this many minutes. The same command then continues each run"
    " from its last checkpoint.",
    lower_bound=0.0,
  )


def _check_field(path: str) -> None:
  from experiments.sweeps import sweep_spec

  sweep_spec.check_convergence_field(path)


def main(values: flags.FlagValues) -> None:
  """Trains the runs that are missing, and reports on all finished runs."""
  from dilocox_jax.checks import known
  from experiments.sweeps import required_runs, sweep_spec

  with sweep_loop.config_errors():
    sweep = sweep_spec.sweep(values.config.to_dict())
    for name in values.methods:
      known("method", name, [method.name for method in sweep.methods])
    required = required_runs.RequiredRuns(sweep)
    required.check()  # Refuses wrong settings before the first run.
    trains = values.task != "report"
    # JAX takes long to load, so it is loaded after the config is checked.
    from experiments.sweeps import page, run_maker
    from experiments.sweeps.results import Results

    if trains:
      run_maker.check_names(map(required.first_run, sweep.methods))
  workdir = command_line.writable(values.workdir, "convergence")
  config_file = config_flags.get_config_filename(values["config"])
  name, start = _name_and_start(config_file)
  path = workdir / f"{name}.csv"
  if values.results:  # No committed runs are copied to this file.
    path, start = pathlib.Path(values.results), None
  results = Results(path, sweep.base, start)
  if not trains and not results.source.exists():
    raise command_line.UsageError(
      f"--task=report: the file {path} does not exist yet"
    )
  parts_files = [sweep_loop.path_of(config_file)]
  maker = run_maker.KeptRuns(results, workdir, not trains, parts_files)
  required.loss_of = maker.loss
  tasks = (values.task,) if values.task in required_runs.TASKS else None
  chosen = values.methods or [method.name for method in sweep.methods]
  sweep_loop.run_sweep(
    maker,
    required.tasks(
      tasks or required_runs.TASKS,
      [method for method in sweep.methods if method.name in chosen],
    ),
    lambda: page.write_page(
      required, maker, workdir, name, command_line.own_command()
    ),
    processes=values.processes,
    max_minutes=values.max_minutes,
    lock=results.held() if trains else None,
    trains=trains,
  )


def _name_and_start(config_file: str) -> tuple[str, pathlib.Path | None]:
  """Returns the name of the sweep, and the CSV file from which it starts.

  The name is that of the config file, followed by the config's arguments. Only
  configs of this repository start from a file in docs/results. Another config
  file with the same name does not, so its start is None.
  """
  path, _, argument = config_file.partition(":")
  file = pathlib.Path(path)
  name = "_".join(filter(None, [file.stem, *argument.split(",")]))
  is_ours = file.resolve().parent == command_line.CONFIGS.resolve()
  return name, _COMMITTED / f"{name}.csv" if is_ours else None


if __name__ == "__main__":
  command_line.main(main, define_flags, _check_field)
