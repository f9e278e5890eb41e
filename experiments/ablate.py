r"""Runs an ablation: a grid or list of settings, one table, one picture.

  python -m experiments.ablate \
    --config=experiments/configs/ablate_compression.py --workdir=runs/ablation \
    --processes=2 --config.base.total_steps=200

Every setting is a run in its own directory below WORKDIR/runs. The same
command again keeps what is finished, goes on with what was interrupted and
tries again what failed. A changed config keeps the runs that it still has.
"""

import pathlib

from absl import flags
from ml_collections import config_flags
from rich.console import Console

from experiments.runtime import command_line
from experiments.sweeps import sweep_loop


def define_flags() -> None:
  """Defines the flags of this binary."""
  sweep_loop.define_flags(command_line.CONFIGS / "ablate_compression.py")


def _check_field(path: str) -> None:
  from experiments.sweeps import grid  # Only a mistake needs it this early.

  grid.check_ablation_field(path)


def main(values: flags.FlagValues) -> None:
  """Makes the runs that are missing and reports on all."""
  from experiments.sweeps import grid

  with sweep_loop.config_errors():
    trials = grid.trials(values.config.to_dict())
    # Only a config without mistakes is worth waiting for JAX.
    from experiments.sweeps import run_maker

    run_maker.check_names(trials)
  workdir = command_line.writable(values.workdir, "ablate")
  config_file = config_flags.get_config_filename(values["config"])
  maker = run_maker.RunMaker(workdir, [sweep_loop.path_of(config_file)])
  sweep_loop.run_sweep(
    maker,
    [("ablation", trials, ())],
    lambda: _report(trials, maker, workdir),
    processes=values.processes,
  )


def _report(trials, maker, workdir: pathlib.Path) -> None:
  from dilocox_jax import report
  from experiments.sweeps import grid, run_spec

  failures = {job.workdir: reason for job, reason in maker.failures}
  outcomes = [
    report.TrialOutcome(
      name=trial.name,
      seed=trial.seed,
      workdir=job.workdir,
      changed={run_spec.short_name(k): v for k, v in trial.changed.items()},
      settings=settings,
      times_fewer_bytes=grid.times_fewer_bytes(trial.config),
      failure=failures.get(job.workdir, ""),
      log=job.log,
    )
    for trial, settings, job in zip(
      trials, grid.varied(trials), map(maker.job, trials), strict=True
    )
  ]
  page = report.write_ablation(outcomes, workdir, command_line.own_command())
  report.print_ablation(outcomes, Console())
  print(f"report: {page}")


if __name__ == "__main__":
  command_line.main(main, define_flags, _check_field)
